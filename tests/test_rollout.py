"""The rollout: what it does with a version, and what each failure leaves behind. The pool and the coordinator are played
by fakes that keep what they were told; tests with real engines are in test_rollout_live.py."""

import asyncio
import shutil
from functools import partial

import pytest

from cluster import rollout as rollouts
from cluster.pool import ReplicaGone
from tests.rollout_rig import LENGTHS, FakePool, export, make_rollout
from torchspec_lite.acceptance import Counts


@pytest.fixture
def start(tmp_path, monkeypatch):
    return partial(make_rollout, tmp_path, monkeypatch)


def test_a_good_version_goes_canary_first_then_everywhere(start, tmp_path):
    pool = FakePool(["a", "b", "c", "d"], LENGTHS)
    rollout, coordinator = start(pool)
    assert asyncio.run(rollout.introduce(export(tmp_path, 1, 1.5))) == "promoted"
    assert set(pool.running.values()) == {"v000001"} and pool.promoted == "v000001"
    assert [state for _, state, _ in coordinator.states] == ["canary", "promoted"]
    assert "on 1 of 4 replicas" in coordinator.states[0][2]


def test_probes_that_drafted_nothing_say_nothing_of_parity(start, tmp_path):
    rollout, coordinator = start(FakePool(["a"], LENGTHS, drafted={"v000001": []}))
    assert asyncio.run(rollout.introduce(export(tmp_path, 1, 1.5))) == "promoted" and not coordinator.alarms
    assert any("0 of 0 drafted tokens" in str(event) for event in coordinator.events)


class MortalPool(FakePool):
    """The canary dies when it has answered its shadow prompts; another replica comes with the version that serves."""

    async def shadow(self, name, prompts, max_tokens):
        answers = await super().shadow(name, prompts, max_tokens)
        if self.running[name] == "v000001":
            del self.running[name]
            self.running["successor"] = "v000000"
        return answers


def test_a_canary_that_dies_takes_its_version_back(start, tmp_path, monkeypatch):
    monkeypatch.setattr(rollouts, "RETRY_S", 0.0)
    pool = MortalPool(["a", "b"], LENGTHS)
    rollout, coordinator = start(pool, shadow_prompts=8, wait_s=0.1)
    assert asyncio.run(rollout.introduce(export(tmp_path, 1, 1.5))) == "rolled_back"
    assert "a ended while version 1 was tried on it" in coordinator.states[-1][2]
    assert set(pool.running.values()) == {"v000000"} and pool.promoted is None


class DeafPool(FakePool):
    """A canary that does not answer one question about its counters, being busy."""
    deaf = 1

    async def stats(self):
        found = await super().stats()
        tried = [stats for stats in found if stats["version"] == "v000001"]
        if tried and self.deaf:
            self.deaf -= 1
            return [stats for stats in found if stats not in tried]
        return found


def test_a_canary_that_is_slow_to_answer_once_is_asked_again(start, tmp_path, monkeypatch):
    monkeypatch.setattr(rollouts, "RETRY_S", 0.0)
    pool = DeafPool(["a", "b"], LENGTHS)
    rollout, _ = start(pool, shadow_prompts=8, wait_s=0.1)
    assert asyncio.run(rollout.introduce(export(tmp_path, 1, 1.5))) == "promoted" and not pool.deaf


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


def test_a_replica_that_came_while_a_version_was_tried_gets_it_too(start, tmp_path):
    pool = FakePool(["a", "b", "c", "d"], LENGTHS)
    rollout, _ = start(pool)
    shadow, swap, swapped = pool.shadow, pool.swap, []

    async def meanwhile(name, *rest):
        if pool.running.get("a") == "v000001":
            pool.running.pop("b", None)
            pool.running["b again"] = "v000000"  # it has read what was promoted before
        return await shadow(name, *rest)

    async def counted(name, directory):
        if name == "d":
            pool.running["e"] = "v000000"
        swapped.append(name)
        return await swap(name, directory)

    pool.shadow, pool.swap = meanwhile, counted
    assert asyncio.run(rollout.introduce(export(tmp_path, 1, 1.5))) == "promoted"
    assert pool.running == dict.fromkeys(["a", "c", "d", "b again", "e"], "v000001")
    assert sorted(swapped) == ["a", "b again", "c", "d", "e"] and swapped[0] == "a"  # the canary once


def test_a_replica_that_came_with_the_new_version_is_brought_back_when_another_refuses_it(start, tmp_path):
    pool = FakePool(["a", "b", "c"], LENGTHS, refuse={("c", "v000001")})
    rollout, _ = start(pool)
    promote = pool.promote

    def with_newcomer(directory):
        promote(directory)
        pool.running.setdefault("d", pool.promoted)

    pool.promote = with_newcomer
    assert asyncio.run(rollout.introduce(export(tmp_path, 1, 1.5))) == "refused"
    assert pool.running == dict.fromkeys(["a", "b", "c", "d"], "v000000") and pool.promoted == "v000000"


def test_a_version_whose_folder_is_gone_is_refused_by_name(start, tmp_path):
    rollout, coordinator = start(FakePool(["a"], LENGTHS))
    version = export(tmp_path, 1, 1.5)
    shutil.rmtree(version.directory)
    assert asyncio.run(rollout.introduce(version)) == "refused"
    assert coordinator.states == [(1, "refused", f"drafter {version.directory}: its folder is gone")]


def test_users_prompts_are_asked_in_a_trial_and_kept_no_longer(start, tmp_path):
    pool, asked = FakePool(["a"], LENGTHS), []
    rollout, _ = start(pool)
    rollout.config = rollout.config.model_copy(update={"traffic": rollout.config.traffic.model_copy(update={"fraction": 1.0})})
    shadow = pool.shadow

    async def recent_prompts(count):
        return [[7], [8]][:found]

    async def noted(name, prompts, max_tokens):
        asked.extend(prompts)
        return await shadow(name, prompts, max_tokens)

    pool.recent_prompts, pool.shadow = recent_prompts, noted
    for version, found, expected in ((1, 2, {7, 8}), (2, 1, {1})):  # one alone is too few: held-out ones are asked
        asyncio.run(rollout.introduce(export(tmp_path, version, 1.5)))
        assert {token for prompt in asked for token in prompt} == expected
        assert rollout.shadow_prompts == [[1]] * 8
        asked.clear()
