"""A person's hand on the rollout, and which version folders stay; over the fakes of tests/rollout_rig.py."""

import asyncio
import shutil
from functools import partial

import pytest

from cluster import retention
from tests.rollout_rig import LENGTHS, FakePool, export, folders, make_rollout

EQUAL = {f"v{n:06d}": 1.2 for n in range(10)}


@pytest.fixture
def start(tmp_path, monkeypatch):
    return partial(make_rollout, tmp_path, monkeypatch)


def states(coordinator) -> list[tuple[int, str]]:
    return [(version, state) for version, state, _ in coordinator.states]


def refusals(coordinator) -> list[str]:
    """What a person was told cannot be done."""
    return [event[1] for event in coordinator.events if event[0] == "override"]


def test_by_hand(start, tmp_path):
    pool = FakePool(["a", "b"], LENGTHS)
    rollout, coordinator = start(pool)

    async def story():
        coordinator.known[1] = export(tmp_path, 1, 1.5)
        await rollout.introduce(coordinator.known[1])
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
    assert refusals(coordinator) == ["promote 77: no such version in this run"]


def test_a_resumed_run_goes_back_to_what_served_before_and_no_further(start, tmp_path):
    pool = FakePool(["a", "b"], EQUAL, serving=7)
    rollout, coordinator = start(pool, serving=7, parent=5)
    coordinator.known[7] = rollout.serving

    async def story():
        await rollout.overrule("rollback", None)
        assert pool.running == {"a": "v000005", "b": "v000005"} and pool.promoted == "v000005"
        # Promoted first: a run that dies in between goes on with what all replicas have.
        assert states(coordinator) == [(5, "promoted"), (7, "rolled_back")] and refusals(coordinator) == []
        await rollout.overrule("rollback", None)
        assert pool.running == {"a": "v000005", "b": "v000005"} and pool.promoted == "v000005"
        assert len(coordinator.states) == 2 and refusals(coordinator) == ["rollback: nothing to go back to"]
        await rollout.overrule("promote", 7)
        await rollout.overrule("rollback", None)
        assert set(pool.running.values()) == {"v000005"} and states(coordinator)[2:] == [
            (7, "promoted"), (5, "promoted"), (7, "rolled_back")]

    asyncio.run(story())


def test_with_no_earlier_version_a_rollback_only_says_so(start):
    pool = FakePool(["a"], EQUAL)
    rollout, coordinator = start(pool)
    asyncio.run(rollout.overrule("rollback", None))
    assert coordinator.states == [] and pool.promoted is None and pool.running == {"a": "v000000"}
    assert refusals(coordinator) == ["rollback: nothing to go back to"]


def test_any_version_of_the_run_is_promoted_whose_files_are_whole(start, tmp_path):
    pool = FakePool(["a"], EQUAL, serving=7)
    rollout, coordinator = start(pool, serving=7, bad={"v000002"})
    coordinator.known = {n: export(tmp_path, n, 1.2) for n in (1, 2, 3)} | {7: rollout.serving}
    shutil.rmtree(coordinator.known[1].directory)

    async def story():
        for version in (1, 2, 7):
            await rollout.overrule("promote", version)
        assert coordinator.states == [] and pool.promoted is None and pool.running == {"a": "v000007"}
        await rollout.overrule("promote", 3)
        assert pool.running == {"a": "v000003"} and states(coordinator) == [(3, "promoted")]
        await rollout.overrule("rollback", None)
        assert pool.running == {"a": "v000007"}

    asyncio.run(story())
    gone, broken, same = refusals(coordinator)
    assert gone.startswith("promote 1: ") and "its folder is gone" in gone
    assert broken.startswith("promote 2: ") and "another hash" in broken
    assert same == "promote 7: it serves already"


def test_a_replica_that_refuses_what_a_person_wants_leaves_all_as_it_was(start, tmp_path):
    pool = FakePool(["a", "b"], EQUAL, serving=7, refuse={("b", "v000003"), ("b", "v000005")})
    rollout, coordinator = start(pool, serving=7, parent=5)
    coordinator.known[3] = export(tmp_path, 3, 1.2)

    async def story():
        await rollout.overrule("promote", 3)
        await rollout.overrule("rollback", None)

    asyncio.run(story())
    assert pool.running == {"a": "v000007", "b": "v000007"} and pool.promoted == "v000007"
    assert coordinator.states == [] and (rollout.serving.version, rollout.parent.version) == (7, 5)
    assert refusals(coordinator) == [f"{word}: swap refused at load: wrong shape" for word in ("promote 3", "rollback")]


def test_a_rollback_that_waited_for_a_trial_does_not_undo_what_that_promoted(start, tmp_path):
    pool = FakePool(["a"], LENGTHS, serving=0)
    rollout, coordinator = start(pool)
    shadow, told = pool.shadow, []

    async def story():
        async def with_a_word(*what):
            if not told:
                told.append(asyncio.create_task(rollout.overrule("rollback", None)))
                await asyncio.sleep(0)  # it waits for the trial's end now
            return await shadow(*what)

        pool.shadow = with_a_word
        assert await rollout.introduce(export(tmp_path, 1, 1.5)) == "promoted"
        await told[0]

    asyncio.run(story())
    assert pool.running == {"a": "v000001"} and states(coordinator) == [(1, "canary"), (1, "promoted")]
    assert refusals(coordinator) == ["rollback: version 1 was promoted meanwhile"]


def test_what_a_person_decided_on_while_it_waited_is_not_tried(start, tmp_path):
    pool = FakePool(["a"], LENGTHS)
    rollout, coordinator = start(pool)
    coordinator.known[1] = export(tmp_path, 1, 1.5)

    async def story():
        await rollout.overrule("pause", None)
        waiting = asyncio.create_task(rollout.introduce(coordinator.known[1]))
        await asyncio.sleep(0)
        await rollout.overrule("promote", 1)
        await rollout.overrule("rollback", None)
        await rollout.overrule("resume", None)
        assert await waiting == "rolled_back"

    asyncio.run(story())
    assert pool.running == {"a": "v000000"} and "canary" not in [state for _, state in states(coordinator)]


# Which folders stay

def test_old_versions_are_deleted_but_not_those_in_use(start, tmp_path):
    lengths = {f"v{n:06d}": 1.2 + 0.1 * n for n in range(8)}
    rollout, _ = start(FakePool(["a"], lengths), keep=2)

    async def story():
        for version in range(1, 7):
            assert await rollout.introduce(export(tmp_path, version, 1.2 + 0.1 * version)) == "promoted"
        await rollout.overrule("rollback", None)

    asyncio.run(story())
    assert folders(tmp_path) == [5, 6]


@pytest.mark.parametrize("predicted, outcome", [(1.0, "refused"), (1.5, "rolled_back")])
def test_old_versions_are_deleted_where_none_is_promoted(start, tmp_path, predicted, outcome):
    worse = {f"v{n:06d}": 1.1 for n in range(4, 10)} | {"v000003": 1.5}
    rollout, coordinator = start(FakePool(["a"], worse, serving=3), serving=3, parent=1, keep=2)
    coordinator.needed = [2]  # the best, say

    async def story():
        for version in (2, 4, 5, 6, 7, 8):
            last = export(tmp_path, version, predicted)
        assert await rollout.introduce(last) == outcome

    asyncio.run(story())
    assert folders(tmp_path) == [1, 2, 3, 7, 8]


def test_while_a_person_pauses_versions_are_deleted_but_not_the_one_that_waits(start, tmp_path):
    rollout, coordinator = start(FakePool(["a"], LENGTHS), keep=1)

    async def story():
        await rollout.overrule("pause", None)
        waiting = asyncio.create_task(rollout.introduce(export(tmp_path, 2, 1.5)))
        await asyncio.sleep(0)
        for version in (3, 4, 5, 6):
            export(tmp_path, version, 1.5)
        coordinator.needed = [5]  # next to be tried: of the sixth the ledger does not know yet
        half = tmp_path / "r" / "drafters" / ".v000007.partial"
        half.mkdir()
        await rollout.retain()
        assert folders(tmp_path) == [0, 2, 5, 6] and half.is_dir()
        coordinator.needed = []
        await rollout.overrule("resume", None)
        assert await waiting == "rolled_back"  # LENGTHS: worse
        assert folders(tmp_path) == [0, 6]

    asyncio.run(story())


def test_a_folder_that_cannot_be_deleted_does_not_end_the_run(start, tmp_path, monkeypatch):
    rollout, _ = start(FakePool(["a"], EQUAL), keep=1)
    for version in (1, 2, 3):
        export(tmp_path, version, 1.2)
    rmtree = shutil.rmtree

    def busy(path):
        if path.name == "v000001":
            raise OSError("device or resource busy")
        rmtree(path)

    said = []
    monkeypatch.setattr(shutil, "rmtree", busy)
    monkeypatch.setattr(retention.log, "warning", lambda text, *values: said.append(text % values))
    asyncio.run(rollout.retain())
    assert folders(tmp_path) == [0, 1, 3]
    assert said == ["version 1 is old, but its folder could not be deleted: device or resource busy"]
