"""The judge with a real coordinator and ledger, but without Ray and engines: how a run starts again, which folders stay."""

import asyncio
import json
import shutil
from types import SimpleNamespace

import pytest

from cluster import coordinator as coordinators
from cluster import judge as judges
from cluster.coordinator import Coordinator
from cluster.judge import Judge
from tests.rollout_rig import FakePool, export, folders
from tests.tiny import make_tiny_target
from torchspec_lite.config import build
from torchspec_lite.sample_order import read_order

HELD_OUT = Judge._held_out_prompts
EQUAL = {f"v{n:06d}": 1.2 for n in range(10)}


class Line:
    """A coordinator as an actor's handle."""

    def __init__(self, coordinator):
        self.coordinator = coordinator

    def __getattr__(self, name):
        return SimpleNamespace(remote=getattr(self.coordinator, name))


@pytest.fixture
def make(tmp_path, monkeypatch):
    """A judge and its coordinator, again and again for the same run."""
    monkeypatch.setattr(coordinators, "LONG_POLL_S", 0.05)
    monkeypatch.setattr("cluster.rollout.verify", lambda directory, fingerprint: None)
    monkeypatch.setattr(Judge, "_held_out_prompts", lambda self: [[1]] * 2)
    for name in ("train", "held"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"id": name, "conversations": [{"role": "user", "content": name}]}))
    opened = []

    def close():
        while opened:
            last = opened.pop()
            last.observer.close()
            last.ledger.close()

    def make(pool=None, **rollout):
        close()
        config = build({"name": "r", "run_root": str(tmp_path), "target": {"model": "x"}, "rollout": rollout,
                        "serve": {"replicas": 1 if pool else 0},
                        "data": {"train": [str(tmp_path / "train.jsonl")], "held_out": [str(tmp_path / "held.jsonl")]}}, "test")
        read_order(config, tmp_path).queue(config.run_dir / "ledger.sqlite", config.trainer.reuse)
        coordinator = Coordinator(config, str(config.run_dir), started=0.0)
        opened.append(coordinator)
        judge = Judge(config, SimpleNamespace(fingerprint="t@0"), Line(coordinator), SimpleNamespace(say=lambda text: None), list)

        async def open_pool(directory):
            pool.running, pool.url = {"a": directory.rpartition("/")[2]}, "http://pool"
            return pool

        judge._open_pool = open_pool
        return judge, coordinator

    yield make
    close()


def test_a_held_out_prompt_longer_than_the_engine_takes_is_left_out(tmp_path):
    make_tiny_target(tmp_path / "target")
    prompts = {"short": "hi", "long": "word " * 60}
    (tmp_path / "held.jsonl").write_text("".join(json.dumps(
        {"id": id, "conversations": [{"role": "user", "content": text}]}) + "\n" for id, text in prompts.items()))

    def held_out(**target_section):
        config = build({"target": {"model": str(tmp_path / "target")} | target_section, "data": {
            "max_length": 512, "held_out": [str(tmp_path / "held.jsonl")]}}, "test")
        return HELD_OUT(SimpleNamespace(config=config, info=SimpleNamespace(path=tmp_path / "target")))

    lengths = sorted(map(len, held_out()))
    assert len(lengths) == 2 and lengths[0] < 40 < lengths[1] < 512
    assert [len(ids) for ids in held_out(max_model_len=40)] == lengths[:1]


def state(coordinator, version) -> tuple[str, str]:
    return next((row["state"], row["reason"]) for row in coordinator.ledger.versions() if row["version"] == version)


def test_a_run_that_serves_nothing_keeps_few_versions(make, tmp_path, monkeypatch):
    judge, coordinator = make(keep=2)
    tidied, retain = asyncio.Queue(), judges.retain

    async def seen(*what):
        await retain(*what)
        tidied.put_nowait(folders(tmp_path))

    monkeypatch.setattr(judges, "retain", seen)

    async def story():
        judging = asyncio.create_task(judge.judge_versions())
        for version in range(1, 6):
            await coordinator.exported(export(tmp_path, version, 1.2))
        while await asyncio.wait_for(tidied.get(), 10) != [4, 5]:
            pass
        await coordinator.exported(export(tmp_path, 6, 1.3))
        judge.no_more()
        assert await asyncio.wait_for(judging, 10) == (None, None, 1.3)

    asyncio.run(story())
    assert folders(tmp_path) == [5, 6]
    assert state(coordinator, 6)[0] == "exported"  # for a resumed run that serves


def test_a_resumed_run_that_serves_nothing_keeps_what_served(make, tmp_path):
    judge, coordinator = make(keep=1)

    async def story():
        for version in range(1, 6):
            await coordinator.exported(export(tmp_path, version, 1.2 if version < 4 else 1.1))
        for version in (1, 3, 2):
            await coordinator.version_state(version, "promoted", "")
        judge.no_more()
        await judge.judge_versions()

    asyncio.run(story())
    assert folders(tmp_path) == [2, 3, 5]  # serves, served before and best, newest


def test_a_resumed_run_serves_what_a_person_chose_and_can_go_back(make, tmp_path):
    pool = FakePool(["a"], EQUAL)
    _, first = make(pool)

    async def before():
        for version in (3, 5, 7):
            await first.exported(export(tmp_path, version, 1.2))
            await first.version_state(version, "promoted", "")
        await first.version_state(3, "promoted", "by hand (promote)")

    asyncio.run(before())
    judge, coordinator = make(pool)
    told, done = coordinator.version_state, []

    async def story():
        over = asyncio.Event()

        async def seen(version, state, reason):
            await told(version, state, reason)
            done.append((version, state))
            if state == "rolled_back":
                over.set()

        coordinator.version_state = seen
        judging = asyncio.create_task(judge.judge_versions())
        await coordinator.override("rollback", None)
        await asyncio.wait_for(over.wait(), 10)
        judge.no_more()
        served_first, served_last, _ = await asyncio.wait_for(judging, 10)
        assert (served_first.version, served_last.version) == (3, 7)

    asyncio.run(story())
    assert done == [(3, "promoted"), (7, "promoted"), (3, "rolled_back")]
    assert pool.running == {"a": "v000007"} and coordinator.ledger.served() == (7, None)


def test_versions_are_deleted_while_a_person_pauses(make, tmp_path, monkeypatch):
    pool = FakePool(["a"], EQUAL)
    judge, coordinator = make(pool, keep=2)

    async def story():
        for version in (1, 2):
            await coordinator.exported(export(tmp_path, version, 1.2))
        await coordinator.version_state(2, "promoted", "")
        judging = asyncio.create_task(judge.judge_versions())
        waits, introduce = asyncio.Event(), judges.Rollout.introduce

        async def paused(rollout, export):
            rollout.allowed.clear()
            waits.set()
            return await introduce(rollout, export)

        monkeypatch.setattr(judges.Rollout, "introduce", paused)
        await coordinator.exported(export(tmp_path, 3, 1.2))
        await asyncio.wait_for(waits.wait(), 10)
        tidied, retain = asyncio.Queue(), judge.rollout._retain

        async def seen():
            await retain()
            tidied.put_nowait(folders(tmp_path))

        judge.rollout._retain = seen
        for version in (4, 5, 6):
            await coordinator.exported(export(tmp_path, version, 1.2))
        while await asyncio.wait_for(tidied.get(), 10) != [2, 3, 5, 6]:  # serving, waiting, the newest two
            pass
        judging.cancel()

    asyncio.run(story())


def test_a_run_begins_with_a_version_whose_folder_is_there(make, tmp_path):
    judge, coordinator = make()
    gone = export(tmp_path, 1, 1.2)
    shutil.rmtree(gone.directory)

    async def story():
        judge.no_more()
        await coordinator.exported(gone)
        assert await judge._first() == (None, None)
        await coordinator.exported(export(tmp_path, 2, 1.2))
        first, parent = await judge._first()
        assert (first.version, parent) == (2, None)

    asyncio.run(story())
    assert state(coordinator, 1) == ("refused", f"drafter {gone.directory}: its folder is gone")


# What the coordinator knows of versions

def test_a_version_is_found_after_a_thousand_later_ones(make, tmp_path):
    _, coordinator = make()

    async def story():
        await coordinator.exported(export(tmp_path, 1, 1.2))
        await coordinator.version_state(1, "promoted", "")
        with coordinator.ledger._transaction() as db:
            db.executemany("INSERT INTO events VALUES (0.0, 'exported', ?, NULL, '', '{}')", [(n,) for n in range(2, 1100)])
        assert await coordinator.served_last() == (export(tmp_path, 1, 1.2), None)

    asyncio.run(story())


def test_a_run_that_dies_while_a_promotion_is_written_down_goes_on_with_that_version(make, tmp_path, monkeypatch):
    _, coordinator = make()

    def dies(*what):
        raise KeyboardInterrupt

    async def story():
        for version in (1, 2):
            await coordinator.exported(export(tmp_path, version, 1.2))
        await coordinator.version_state(1, "promoted", "")
        await coordinator.version_state(2, "canary", "")
        monkeypatch.setattr(coordinator.ledger, "set_version_state", dies)
        await coordinator.version_state(2, "promoted", "")  # all replicas run it already

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(story())
    judge, again = make()
    first, parent = asyncio.run(judge._first())
    assert (first.version, parent.version) == (2, 1) and state(again, 2)[0] == "rolled_back"  # until the pool begins with it


def test_the_folders_of_four_versions_are_needed(make, tmp_path):
    _, coordinator = make()
    predicted = {0: 1.9, 1: 1.1, 2: 1.6, 3: 1.2, 4: 1.3, 5: 1.4, 6: 1.8, 7: 1.0, 8: 1.0}

    async def story():
        assert await coordinator.needed_versions() == []
        for version, walked in predicted.items():
            await coordinator.exported(export(tmp_path, version, walked))
        for version in (1, 2, 3, 4):
            await coordinator.version_state(version, "promoted", "")
        await coordinator.version_state(6, "rolled_back", "worse")
        await coordinator.version_state(0, "refused", "broken")
        # Serving, before it, the best that was promoted, the newest untried; 5 and 7 will be passed over.
        assert await coordinator.needed_versions() == [4, 3, 2, 8]

    asyncio.run(story())


def test_who_waits_for_a_new_version_hears_of_it(make, tmp_path):
    _, coordinator = make()

    async def story():
        assert await coordinator.newest_version(None) is None  # after a while
        coordinators.LONG_POLL_S = 20.0
        waiting = asyncio.create_task(coordinator.newest_version(None))
        await asyncio.sleep(0)
        await coordinator.exported(export(tmp_path, 0, 1.2))
        assert await asyncio.wait_for(waiting, 5) == 0
        assert await asyncio.wait_for(coordinator.newest_version(None), 5) == 0

    asyncio.run(story())
