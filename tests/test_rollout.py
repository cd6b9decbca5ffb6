"""The rollout: what it does with a version, and what each failure leaves behind. The pool and the coordinator are played
by fakes that keep what they were told; tests with real engines are in test_rollout_live.py."""

import asyncio
from pathlib import Path

import pytest

from cluster import rollout as rollouts
from cluster.pool import ReplicaGone
from cluster.rollout import Rollout
from torchspec_lite.acceptance import Counts
from torchspec_lite.config import build
from torchspec_lite.errors import UserError
from torchspec_lite.parity import ParityProbe
from workers.refusal import SwapRefused
from workers.reports import Export


class FakePool:
    """Replicas whose shadow acceptance depends on the version they run: `length[version]`."""

    def __init__(self, names, length, refuse=(), gone=(), drafted=None):
        self.running = dict.fromkeys(names, "v000000")
        self.replica_count, self.length, self.refuse, self.gone = len(names), length, set(refuse), set(gone)
        self.drafted = drafted or {}
        self.promoted = None

    async def replicas(self):
        return list(self.running)

    async def stats(self):
        return [{"replica": name, "version": version, "running": 0, "waiting": 0, "versions": []}
                for name, version in self.running.items()]

    async def swap(self, name, directory):
        version = Path(directory).name
        if version in self.refuse or (name, version) in self.refuse:
            raise SwapRefused("load", "wrong shape")
        if (name, version) in self.gone:
            raise ReplicaGone(f"replica {name} is gone")
        self.running[name] = version
        return {"load_ms": 10.0}

    async def probe(self, name, prompts, max_tokens):
        drafts = self.drafted.get(self.running[name], [8, 9])
        return [{"token_ids": [1, 2, 7, 8, 9], "rounds": [(3, drafts)]} for _ in prompts]

    async def shadow(self, name, prompts, max_tokens):
        return [{"drafts": 40, "per_position": [round(40 * (self.length[self.running[name]] - 1))]} for _ in prompts]

    def promote(self, directory):
        self.promoted = Path(directory).name


class FakeCoordinator:
    def __init__(self):
        self.states, self.alarms, self.events, self.exports = [], [], [], []

    async def next_export(self, wait):
        assert not wait
        return self.exports.pop() if self.exports else None

    async def version_state(self, version, state, reason):
        self.states.append((version, state, reason))

    async def raise_alarm(self, text):
        self.alarms.append(text)

    async def event(self, *what):
        self.events.append(what)

    async def served(self, *what):
        self.events.append(("served", *what))

    async def swapped(self, *what):
        pass


@pytest.fixture
def start(tmp_path, monkeypatch):
    """A rollout over fakes; `bad` names versions that the offline check refuses."""
    def make(pool, bad=(), **options):
        def verify(directory, fingerprint):
            if directory.name in bad:
                raise UserError(f"drafter {directory}: model.safetensors has another hash than its manifest")
        monkeypatch.setattr(rollouts, "verify", verify)
        config = build({"name": "r", "run_root": str(tmp_path), "target": {"model": "x"},
                        "rollout": {"min_rounds": 100, "shadow_prompts": 2, **options}}, "test")
        coordinator = FakeCoordinator()
        rollout = Rollout(config, pool, coordinator, [[1]] * 8, "t@0", export(tmp_path, 0, 1.2))
        return rollout, coordinator
    return make


PROBE = ParityProbe(2, [1, 2, 7, 8, 9], [[8, 9], [9, 4], [5, 6]])


def export(root, version, predicted, probes=(PROBE,), serving=None, against=0):
    directory = root / "r" / "drafters" / f"v{version:06d}"
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "manifest.json").write_text("{}")
    return Export(version, version * 10, version * 100, version - 1 if version else None, str(directory), predicted,
                  predicted, [], list(probes), serving and serving.acceptance_length, serving and serving.as_list(),
                  against if serving else None)


LENGTHS = {"v000000": 1.2, "v000001": 1.5, "v000002": 1.1, "v000003": 1.0}


def test_a_good_version_goes_canary_first_then_everywhere(start, tmp_path):
    pool = FakePool(["a", "b", "c", "d"], LENGTHS)
    rollout, coordinator = start(pool)
    assert asyncio.run(rollout.introduce(export(tmp_path, 1, 1.5))) == "promoted"
    assert set(pool.running.values()) == {"v000001"} and pool.promoted == "v000001"
    assert [state for _, state, _ in coordinator.states] == ["canary", "promoted"]
    assert "on 1 of 4 replicas" in coordinator.states[0][2]


class BusyPool(FakePool):
    """Users ask all the time: between two looks at the counters each replica makes 60 rounds."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.counts, self.asked = {}, []

    async def stats(self):
        found = await super().stats()
        for stats in found:
            version = stats["version"]
            old = self.counts.get((stats["replica"], version), Counts(0, (0,)))
            new = self.counts[stats["replica"], version] = old + Counts(60, (round(60 * (self.length[version] - 1)),))
            stats |= {"running": 3, "versions": [{"version": version, "drafts": new.rounds,
                                                  "per_position": list(new.accepted_per_position)}]}
        return found

    async def shadow(self, name, prompts, max_tokens):
        self.asked.append(self.running[name])
        return await super().shadow(name, prompts, max_tokens)


@pytest.fixture
def hasty(monkeypatch):
    monkeypatch.setattr(rollouts, "LOOK_S", 0.0)


def test_users_requests_alone_promote_what_trainers_compared_on_them(start, tmp_path, hasty):
    pool = BusyPool(["a"], LENGTHS)
    rollout, coordinator = start(pool)
    version = export(tmp_path, 1, 1.5, serving=Counts(400, (80,)))
    assert asyncio.run(rollout.introduce(version)) == "promoted"
    assert pool.asked == [] and pool.promoted == "v000001" and pool.running == {"a": "v000001"}
    # Two looks after the swap have 120 of the 100 rounds needed; 1.5 is their acceptance length.
    assert "1.500 on users' requests in 120 rounds" in coordinator.states[-1][2]
    assert ("served", 1, 1.5, [0.5], True) in coordinator.events


def test_where_users_requests_do_not_tell_shadow_prompts_decide(start, tmp_path, hasty):
    pool = BusyPool(["a"], LENGTHS)
    rollout, coordinator = start(pool)
    version = export(tmp_path, 2, 1.7, serving=Counts(400, (240,)))  # 1.6 predicted for the serving one, 1.1 found
    assert asyncio.run(rollout.introduce(version)) == "rolled_back"
    assert pool.asked[0] == "v000000" and set(pool.asked) == {"v000000", "v000002"}  # the serving one first
    assert "worse" in coordinator.states[-1][2] and "shadow prompts" in coordinator.states[-1][2]
    assert [event[0] for event in coordinator.events if event[0] == "trial"] == ["trial"]
    assert pool.running == {"a": "v000000"} and pool.promoted is None


def test_hard_requests_do_not_speak_against_a_version_when_easier_ones_follow(start, tmp_path, hasty):
    pool = BusyPool(["a"], {"v000000": 1.5, "v000001": 1.0})
    rollout, coordinator = start(pool, alarm_acceptance=1.0)
    stats, looks = pool.stats, []

    async def easier_later():
        looks.append(pool.running["a"])
        pool.length["v000001"] = 1.1 if looks.count("v000001") < 5 else 1.9
        return await stats()

    pool.stats = easier_later
    assert asyncio.run(rollout.introduce(export(tmp_path, 1, 1.6, serving=Counts(400, (200,))))) == "promoted"
    # 60 rounds a look after the one it begins with: 1.1 three times, then 1.9. With 240 rounds that is 1.30 and still worse
    # (1.645 standard errors are 0.064), with 300 it is 1.42, and -0.08 + 0.06 is not under -0.03.
    assert pool.asked == [] and "1.420 on users' requests in 300 rounds" in coordinator.states[-1][2]


def test_a_version_that_users_requests_left_open_ends_when_a_newer_one_is_tried(start, tmp_path, hasty):
    pool = BusyPool(["a"], {"v000000": 1.2, "v000001": 1.1, "v000002": 1.5})
    rollout, coordinator = start(pool)
    coordinator.exports.append(export(tmp_path, 2, 1.5))
    assert asyncio.run(rollout.introduce(export(tmp_path, 1, 1.7, serving=Counts(400, (240,))))) == "promoted"
    assert [(version, state) for version, state, _ in coordinator.states] == [
        (1, "canary"), (1, "rolled_back"), (2, "canary"), (2, "promoted")]
    assert "version 2 came meanwhile" in coordinator.states[1][2]


@pytest.mark.parametrize("version, options", [(3, {}), (1, {"drafted": {"v000001": [3, 3]}})])
def test_users_are_spared_a_version_that_drafts_nothing_or_otherwise(start, tmp_path, hasty, version, options):
    pool = BusyPool(["a"], LENGTHS, **options)
    rollout, coordinator = start(pool)
    assert asyncio.run(rollout.introduce(export(tmp_path, version, 1.7, serving=Counts(400, (240,))))) == "rolled_back"
    assert coordinator.alarms and pool.asked == [] and pool.running == {"a": "v000000"}


@pytest.mark.parametrize("names, counts, against", [
    (["a", "b"], Counts(400, (80,)), 0), (["a"], Counts(99, (20,)), 0), (["a"], None, 0), (["a"], Counts(400, (80,)), 7)])
def test_shadow_prompts_are_asked_where_a_replica_keeps_the_old_version_or_another_or_little_was_compared(
        start, tmp_path, hasty, names, counts, against):
    pool = BusyPool(names, LENGTHS)
    rollout, _ = start(pool)
    assert asyncio.run(rollout.introduce(export(tmp_path, 1, 1.5, serving=counts, against=against))) == "promoted"
    assert "v000000" in pool.asked


def test_the_newest_version_is_tried_that_came_while_the_serving_one_was_measured(start, tmp_path):
    pool = FakePool(["a"], {"v000000": 1.2, "v000001": 1.3, "v000002": 1.4})
    rollout, coordinator = start(pool)
    shadow = pool.shadow

    async def slowly(name, *rest):
        if pool.running[name] == "v000000" and not coordinator.exports:
            coordinator.exports.append(export(tmp_path, 2, 1.4))
        return await shadow(name, *rest)

    pool.shadow = slowly
    assert asyncio.run(rollout.introduce(export(tmp_path, 1, 1.3))) == "promoted"
    assert pool.promoted == "v000002" and rollout.tried.version == 2
    assert {version for version, _, _ in coordinator.states} == {2}


@pytest.mark.parametrize("names", [["a"], ["a", "b"]])
def test_no_more_shadow_prompts_are_asked_than_decide(start, tmp_path, names):
    pool = FakePool(names, LENGTHS)
    rollout, _ = start(pool, min_rounds=80)
    shadow, prompts = pool.shadow, []

    async def counted(name, asked, most):
        prompts.append((pool.running[name], len(asked)))
        return await shadow(name, asked, most)

    pool.shadow = counted
    assert asyncio.run(rollout.introduce(export(tmp_path, 1, 1.5))) == "promoted"
    assert prompts == [("v000000", 8), ("v000001", 2)]  # two prompts have 80 rounds


@pytest.mark.parametrize("version, predicted, where", [(2, 1.2, "worse"), (3, 1.2, "alarm")])
def test_a_bad_version_is_rolled_back_and_never_leaves_the_canary(start, tmp_path, version, predicted, where):
    pool = FakePool(["a", "b"], LENGTHS)
    rollout, coordinator = start(pool)
    assert asyncio.run(rollout.introduce(export(tmp_path, version, predicted))) == "rolled_back"
    assert set(pool.running.values()) == {"v000000"} and pool.promoted is None
    assert where in coordinator.states[-1][2]
    assert bool(coordinator.alarms) == (where == "alarm")


def test_a_lost_replica_is_waited_for_before_a_measurement(start, tmp_path, monkeypatch):
    monkeypatch.setattr(rollouts, "RETRY_S", 0.0)
    pool = FakePool(["a"], LENGTHS)
    rollout, _ = start(pool)
    pool.running.clear()
    looks, shadow = [], pool.shadow

    async def stats():
        looks.append(1)
        if len(looks) == 3:
            pool.running["b"] = "v000000"
        return [{"replica": name, "version": version} for name, version in pool.running.items()]

    async def dies_once(name, *rest):
        if len(looks) == 3:
            raise ReplicaGone("replica b is gone")
        return await shadow(name, *rest)

    pool.stats, pool.shadow = stats, dies_once
    # 8 prompts of 40 rounds, of which 8 each held.
    assert asyncio.run(rollout.measure(rollout.serving)) == Counts(320, (64,)) and len(looks) == 4
    pool.running.clear()
    monkeypatch.setattr(rollouts, "REPLICA_WAIT_S", 0.01)
    with pytest.raises(ReplicaGone, match="waited 0.01 s for a replica that runs version 0"):
        asyncio.run(rollout.measure(rollout.serving))


def test_a_version_predicted_worse_is_not_tried(start, tmp_path):
    pool = FakePool(["a"], LENGTHS)
    rollout, coordinator = start(pool)
    assert asyncio.run(rollout.introduce(export(tmp_path, 1, 1.1))) == "refused"
    assert [state for _, state, _ in coordinator.states] == ["refused"]


def test_a_broken_file_is_refused_at_the_gate(start, tmp_path):
    rollout, coordinator = start(FakePool(["a"], LENGTHS), bad={"v000001"})
    assert asyncio.run(rollout.introduce(export(tmp_path, 1, 1.5))) == "refused"
    assert "another hash" in coordinator.states[-1][2]


def test_a_swap_the_engine_refuses_leaves_the_old_version(start, tmp_path):
    pool = FakePool(["a", "b"], LENGTHS, refuse={"v000001"})
    rollout, coordinator = start(pool)
    assert asyncio.run(rollout.introduce(export(tmp_path, 1, 1.5))) == "refused"
    assert set(pool.running.values()) == {"v000000"}
    assert "load: wrong shape" in coordinator.states[-1][2] and coordinator.alarms


def test_drafts_that_differ_from_the_trainers_roll_back(start, tmp_path):
    pool = FakePool(["a"], LENGTHS, drafted={"v000001": [3, 3]})
    rollout, coordinator = start(pool)
    assert asyncio.run(rollout.introduce(export(tmp_path, 1, 1.5))) == "rolled_back"
    assert "parity: 0 of 1 drafted" in coordinator.states[-1][2] and coordinator.alarms
    assert pool.running == {"a": "v000000"}


def test_a_replica_lost_while_promoting_does_not_stop_the_rest(start, tmp_path):
    pool = FakePool(["a", "b", "c", "d"], LENGTHS, gone={("c", "v000001")})
    rollout, _ = start(pool)
    assert asyncio.run(rollout.introduce(export(tmp_path, 1, 1.5))) == "promoted"
    assert pool.running == {"a": "v000001", "b": "v000001", "c": "v000000", "d": "v000001"}
    assert pool.promoted == "v000001"  # what c's successor starts with


def test_a_replica_that_refuses_while_promoting_brings_all_back(start, tmp_path):
    pool = FakePool(["a", "b", "c"], LENGTHS, refuse={("c", "v000001")})
    rollout, coordinator = start(pool)
    assert asyncio.run(rollout.introduce(export(tmp_path, 1, 1.5))) == "refused"
    assert set(pool.running.values()) == {"v000000"} and pool.promoted == "v000000"
    assert rollout.serving.version == 0


def test_a_canary_lost_rolls_back(start, tmp_path):
    pool = FakePool(["a", "b"], LENGTHS, gone={("a", "v000001")})
    rollout, coordinator = start(pool)
    assert asyncio.run(rollout.introduce(export(tmp_path, 1, 1.5))) == "rolled_back"
    assert "lost" in coordinator.states[-1][2]


def test_capacity_is_kept(start, tmp_path):
    pool = FakePool(["a"], LENGTHS)
    pool.replica_count = 4  # three are down
    rollout, coordinator = start(pool)
    assert asyncio.run(rollout.introduce(export(tmp_path, 1, 1.5))) == "refused"
    assert "min_capacity" in coordinator.states[-1][2]


def test_by_hand(start, tmp_path):
    pool = FakePool(["a", "b"], LENGTHS)
    rollout, coordinator = start(pool)

    async def story():
        await rollout.introduce(export(tmp_path, 1, 1.5))
        await rollout.overrule("rollback", None)
        assert set(pool.running.values()) == {"v000000"} and pool.promoted == "v000000"
        await rollout.overrule("promote", 1)
        assert set(pool.running.values()) == {"v000001"}
        await rollout.overrule("promote", 77)
        assert set(pool.running.values()) == {"v000001"}
        await rollout.overrule("pause", None)
        waiting = asyncio.create_task(rollout.introduce(export(tmp_path, 2, 1.5)))
        await asyncio.sleep(0)
        assert not waiting.done() and all(version != 2 for version, _, _ in coordinator.states)
        await rollout.overrule("resume", None)
        assert await waiting == "rolled_back"

    asyncio.run(story())


def test_old_versions_are_deleted_but_not_those_in_use(start, tmp_path):
    lengths = {f"v{n:06d}": 1.2 + 0.1 * n for n in range(8)}
    rollout, _ = start(FakePool(["a"], lengths), keep=2)

    async def story():
        for version in range(1, 7):
            assert await rollout.introduce(export(tmp_path, version, 1.2 + 0.1 * version)) == "promoted"
        await rollout.overrule("rollback", None)

    asyncio.run(story())
    left = sorted(path.name for path in (tmp_path / "r" / "drafters").iterdir())
    assert left == ["v000005", "v000006"]
