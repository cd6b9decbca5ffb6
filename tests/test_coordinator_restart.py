"""A coordinator that Ray starts again, that was stopped for a while, or whose disk is full: the run goes on, or ends, all the
same."""

import asyncio
import sqlite3

import pytest

from cluster import coordinator as coordinators
from tests.test_coordinator import export, make, settle, take  # noqa: F401  make is a fixture
from torchspec_lite.lease import LeaseCall
from torchspec_lite.snapshot import read_snapshot


def die(coordinator):
    """What the kernel does to a killed process: locks are freed, nothing more is written."""
    coordinator.observer.close()
    coordinator.ledger.close()


async def everybody_waits():
    """Every call made so far comes to where it waits for news."""
    for _ in range(10):
        await asyncio.sleep(0)


def test_a_stop_holds_for_the_attempt_that_was_stopped(make):
    first = make(train=5, held_out=1)

    async def before():
        await settle(first, await take(first, 1), step=1)
        leases = await take(first, 2)
        await first.stop("trainer.max_minutes (7) are over")
        assert await take(first, 2) is None  # so that the target worker ends
        return leases

    leases = asyncio.run(before())
    die(first)
    second = make(train=5, held_out=1)

    async def after():
        assert await second.stop_reason() == "trainer.max_minutes (7) are over"
        assert await take(second, 2) is None
        await second.streamed([(lease.id, lease.attempt, 5) for lease in leases])
        assert await second.outstanding(None, 0) == 0 and await second.coming(None) == 0  # nobody leases the other three

    asyncio.run(after())
    die(second)
    resumed = make(train=5, held_out=1, attempt="--resume")

    async def again():
        assert await resumed.stop_reason() is None
        assert len(await take(resumed, 9)) == 3

    asyncio.run(again())


def test_addresses_and_words_that_nobody_heard_outlive_a_coordinator_but_not_the_run(make):
    first = make()

    async def before():
        await first.link("endpoint", "http://127.0.0.1:8000")
        await first.link("ray", "a:1")
        await first.link("ray", "a:2")
        await first.override("promote", 7)
        await first.override("rollback", None)
        assert await first.next_override() == ("promote", 7)

    asyncio.run(before())
    die(first)
    second = make()
    assert second.observer.links == {"endpoint": "http://127.0.0.1:8000", "ray": "a:2"}
    assert asyncio.run(second.next_override()) == ("rollback", None)
    assert asyncio.run(second.next_override()) is None
    asyncio.run(second.override("pause", None))
    die(second)
    resumed = make(attempt="--resume")
    assert resumed.observer.links == {}
    assert asyncio.run(resumed.next_override()) is None


def test_a_word_is_heard_at_once_by_who_waits_for_it(make):
    coordinator = make()
    coordinators.LONG_POLL_S = 20.0

    async def story():
        waiting = asyncio.create_task(coordinator.next_override())
        await everybody_waits()
        await coordinator.override("pause", None)
        assert await asyncio.wait_for(waiting, 5) == ("pause", None)

    asyncio.run(story())


def test_leases_whose_answer_was_lost_are_given_again(make):
    """Killed after `lease` is in the ledger and before the worker is told: Ray makes the same call of the new one."""
    first = make(train=6, held_out=1)
    asyncio.run(settle(first, asyncio.run(take(first, 1)), step=1))
    lost = asyncio.run(first.lease("target-0", 2, LeaseCall("process", 1)))
    die(first)
    second = make(train=6, held_out=1)

    async def story():
        again = await second.lease("target-0", 2, LeaseCall("process", 1))
        assert again == lost
        rest = await second.lease("target-0", 9, LeaseCall("process", 2, tuple((lease.id, lease.attempt) for lease in again)))
        assert len(rest) == 4
        await settle(second, again + rest, step=2)
        assert await second.outstanding(None, 0) == 0
        assert await second.lease("target-0", 9, LeaseCall("process", 3)) is None

    asyncio.run(story())


def test_a_repeated_call_gets_its_leases_though_leasing_has_stopped(make):
    coordinator = make(train=6, held_out=1)

    async def story():
        given = await coordinator.lease("target-0", 1, LeaseCall("process", 1))
        await coordinator.stop("stopped by hand")
        assert await coordinator.lease("target-0", 1, LeaseCall("process", 1)) == given

    asyncio.run(story())


def test_a_call_that_came_twice_and_waited_twice_leases_once(make):
    coordinator = make(train=3, held_out=1)
    coordinators.LONG_POLL_S = 20.0

    async def story():
        await settle(coordinator, await take(coordinator, 1), step=1)
        others = await take(coordinator, 3)
        calls = [asyncio.create_task(coordinator.lease("target-0", 1, LeaseCall("process", 1))) for _ in range(2)]
        await everybody_waits()
        for lease in others:
            await coordinator.failed(lease.id, lease.attempt, "its trainer came back elsewhere")
        first, second = await asyncio.wait_for(asyncio.gather(*calls), 5)
        assert first == second and len(first) == 1
        assert await coordinator.lease("target-0", 1, LeaseCall("process", 2)) != first
        assert await coordinator.lease("target-0", 1, LeaseCall("process", 1)) == []  # late: nobody hears the answer
        assert (await coordinator.account())["samples"]["leased"] == 2

    asyncio.run(story())


def test_what_a_dead_workers_late_call_took_comes_back_with_its_successor(make):
    coordinator = make(train=4, held_out=1)

    async def story():
        await settle(coordinator, await take(coordinator, 1), step=1)
        await coordinator.worker_lost("target-0")
        await coordinator.lease("target-0", 3, LeaseCall("the dead one", 5))
        given = await coordinator.lease("target-0", 9, LeaseCall("its successor", 1))
        assert len(given) == 4

    asyncio.run(story())


def test_a_coordinator_that_was_stopped_for_minutes_answers_who_waited(make):
    coordinator = make(train=2, held_out=1)
    coordinators.LONG_POLL_S = 20.0

    async def story():
        await settle(coordinator, await take(coordinator, 1), step=1)
        await take(coordinator, 2)
        waiting = [asyncio.create_task(call) for call in (
            coordinator.outstanding(None, 0), coordinator.lease("w", 1), coordinator.next_export(True))]
        await everybody_waits()
        loop = asyncio.get_running_loop()
        clock = loop.time
        loop.time = lambda: clock() + 600  # every timer has run out when the process goes on
        assert await asyncio.gather(*waiting) == [2, [], None]

    asyncio.run(story())


def test_a_version_and_its_event_are_written_together(make):
    coordinator = make()
    coordinator.ledger._db.execute("CREATE TEMP TRIGGER killed BEFORE INSERT ON events WHEN NEW.kind = 'exported' "
                                   "BEGIN SELECT RAISE(ABORT, 'killed'); END")
    with pytest.raises(sqlite3.IntegrityError, match="killed"):
        asyncio.run(coordinator.exported(export(3)))
    assert coordinator.ledger.versions() == []
    coordinator.ledger._db.execute("DROP TRIGGER killed")

    async def story():
        await coordinator.exported(export(3))
        await coordinator.exported(export(3))  # the answer to the first was lost
        assert await coordinator.next_export(False) == export(3)
        assert len(coordinator.ledger.history(kind="exported")) == 1

    asyncio.run(story())


def test_a_ledger_that_lost_an_event_by_an_earlier_program_is_read(make):
    coordinator = make()
    coordinator.ledger.add_version(3, 30, 150, 2, 1.3)  # and killed

    async def story():
        assert await coordinator.next_export(False) is None and await coordinator.find_export(3) is None
        assert await coordinator.served_last() == (None, None)
        await coordinator.exported(export(3))
        assert await coordinator.next_export(False) == export(3)

    asyncio.run(story())


def test_the_end_on_a_full_disk_is_told_and_does_not_raise(make, tmp_path, caplog):
    coordinator = make()

    async def story():
        await coordinator.observe()
        coordinator.observer.metrics._history._tail.close()
        coordinator.observer.metrics._history._tail = open("/dev/full", "a")
        coordinator.ledger._db.execute("CREATE TEMP TRIGGER full BEFORE INSERT ON events "
                                       "BEGIN SELECT RAISE(ABORT, 'disk full'); END")
        await coordinator.finish("failed", "ledger: database or disk is full; free some disk space and resume")

    asyncio.run(story())
    last = read_snapshot(tmp_path / "r")  # it fits: it takes the place of an earlier one
    assert (last.state, last.reason) == ("failed", "ledger: database or disk is full; free some disk space and resume")
    told = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert ["the end in the ledger was not written" in told[0], "the newest part of the metrics was not written" in told[1]] == [True] * 2
    assert coordinator.ledger._db is None  # closed, so that a resumed run may write


def test_a_last_snapshot_that_cannot_be_written_is_told(make, monkeypatch, caplog):
    coordinator = make()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(coordinators, "write_snapshot", full)
    asyncio.run(coordinator.finish("stopped", None))
    assert "status.json was not written: OSError: [Errno 28] No space left on device" in caplog.text
