"""A target worker's line to a real coordinator: what the engine has in hand, leases that are alone, a sample that kills."""

import asyncio
from types import SimpleNamespace

import pytest

from cluster import coordinator as coordinators
from tests.test_coordinator import make  # noqa: F401  a fixture
from torchspec_lite.lease import Lease
from workers import link
from workers.lease_line import LeaseLine
from workers.link import CoordinatorLost


class Actor:
    """A plain object as its callers see an actor."""

    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, method):
        return SimpleNamespace(remote=getattr(self.inner, method))


class Noting:
    """A coordinator that gives the leases it was made with, and keeps the calls."""

    def __init__(self, *answers):
        self.answers, self.calls = list(answers), []

    async def lease(self, worker, count, call):
        self.calls.append(call)
        return self.answers.pop(0)

    async def rejected(self, *_):
        pass

    failed = rejected


def lease(id, alone=False):
    return Lease(id, 0, 1, "train", 0, alone)


def test_each_call_says_what_the_engine_has_in_hand():
    coordinator = Noting([lease("a"), lease("b"), lease("c"), lease("d")], [], [], None)

    async def story():
        line = LeaseLine(Actor(coordinator), "target-0")
        await line.lease("target-0", 4)
        await line.captured("a", 1, 10)
        await line.lease("target-0", 1)
        await line.rejected("b", 1, "too_long", "")
        await line.failed("c", 1, "")
        await line.lease("target-0", 3)
        assert await line.lease("target-0", 3) is None

    asyncio.run(story())
    assert [set(call.held) for call in coordinator.calls] == [
        set(), {("b", 1), ("c", 1), ("d", 1)}, {("d", 1)}, {("d", 1)}]
    assert [call.number for call in coordinator.calls] == [1, 2, 3, 4]
    assert len({call.process for call in coordinator.calls}) == 1
    assert LeaseLine(None, "target-0").process != coordinator.calls[0].process


def test_nothing_is_asked_for_beside_leases_that_are_alone():
    coordinator = Noting([lease("a", True), lease("b", True)], [lease("c")], [])

    async def story():
        line = LeaseLine(Actor(coordinator), "target-0")
        await line.lease("target-0", 4)
        asking = asyncio.create_task(line.lease("target-0", 2))
        await line.captured("a", 1, 10)
        await asyncio.sleep(0)
        assert len(coordinator.calls) == 1
        await line.rejected("b", 1, "too_long", "")
        assert await asking == [lease("c")]
        assert await line.lease("target-0", 2) == []  # beside one that is not

    asyncio.run(story())


def test_a_coordinator_that_never_answers_is_named(monkeypatch):
    monkeypatch.setattr(link, "CALL_S", 0.01)

    class Silent:
        async def lease(self, *_):
            await asyncio.Event().wait()

    with pytest.raises(CoordinatorLost, match="target-3 waited 0 s for the coordinator to answer lease") as raised:
        asyncio.run(asyncio.wait_for(LeaseLine(Actor(Silent()), "target-3").lease("target-3", 1), 5))
    assert raised.value.__cause__ is None  # else logs.cause_of would find a cancelled wait


@pytest.mark.parametrize("deadly, deaths", [({"t-3"}, 3), ({"t-3", "t-17", "h-1"}, 9)])
def test_a_sample_that_kills_engines_is_rejected_alone_and_the_rest_gets_through(make, deadly, deaths):
    coordinator = make(train=60, held_out=3)
    coordinators.LONG_POLL_S = 0.0
    lost = []

    steps = iter(range(1, 1000))

    async def work(line, room):
        """What workers.target.run does until the engine dies; returns whether it came to the end."""
        while (await line.lease("target-0", room - len(line.held))) is not None:
            if any(id in deadly for id, _ in line.held):
                return False
            for id, attempt in list(line.held)[:None if line.alone else 4]:  # some are done, which makes room
                await coordinator.streamed([(id, attempt, 5)])
                if id.startswith("t"):
                    await coordinator.trained([(id, attempt)], step := next(steps))
                    await coordinator.checkpointed(step)
                await line.captured(id, attempt, 5)
        return True

    async def story():
        while not await work(LeaseLine(Actor(coordinator), "target-0"), 20):
            lost.append(await coordinator.worker_lost("target-0"))
            assert len(lost) <= 20
        rejected = {row.id: row.reason for row in coordinator.ledger.rows("rejected")}
        assert rejected == dict.fromkeys(deadly, "lost_with_worker")
        samples = (await coordinator.account())["samples"]
        assert samples["durable"] + samples["rejected"] == samples["all"] == 60

    asyncio.run(story())
    assert len(lost) <= deaths and {id for loss in lost for id in loss.rejected} == deadly


@pytest.mark.parametrize("settle", ["streamed", "rejected", "refused"])
def test_whether_a_lost_worker_got_anything_through_since_the_last_time(make, settle):
    coordinator = make(train=6, held_out=1)

    async def story():
        line = LeaseLine(Actor(coordinator), "target-0")
        given = await line.lease("target-0", 1) + await line.lease("target-0", 2)
        assert not (await coordinator.worker_lost("other")).settled
        lease = given[1]
        if settle == "streamed":
            await coordinator.streamed([(lease.id, lease.attempt, 5)])
        else:
            await getattr(coordinator, settle)(lease.id, lease.attempt, "too_long")
        assert not (await coordinator.worker_lost("other")).settled
        lost = await coordinator.worker_lost("target-0")
        assert (lost.queued, lost.rejected, lost.settled) == (2, (), True)
        await LeaseLine(Actor(coordinator), "target-0").lease("target-0", 2)
        assert not (await coordinator.worker_lost("target-0")).settled

    asyncio.run(story())


def test_what_the_engine_had_sent_on_is_not_blamed_for_its_death(make):
    coordinator = make(train=6, held_out=1)

    async def story():
        line = LeaseLine(Actor(coordinator), "target-0")
        sent, = await line.lease("target-0", 1)
        await line.captured(sent.id, sent.attempt, 5)  # its trainer has not taken it yet
        at_work = await line.lease("target-0", 2)
        await line.captured(at_work[0].id, at_work[0].attempt, 5)
        newest = await line.lease("target-0", 1)
        assert (await coordinator.worker_lost("target-0")).queued == 4
        suspects = {id for id, in coordinator.ledger._db.execute("SELECT id FROM deaths")}
        assert suspects == {at_work[1].id, newest[0].id}

    asyncio.run(story())


def test_too_many_samples_that_kill_engines_stop_the_run(make, monkeypatch):
    monkeypatch.setattr(coordinators, "REJECTS_BEFORE_STOP", 2)
    coordinator = make(train=6, held_out=1, data={"max_reject_share": 0.4})

    async def story():
        held_out, = await coordinator.lease("target-0", 1)
        await coordinator.streamed([(held_out.id, held_out.attempt, 5)])
        while await coordinator.stop_reason() is None:
            assert await LeaseLine(Actor(coordinator), "target-0").lease("target-0", 1)
            await coordinator.worker_lost("target-0")
        assert (await coordinator.account())["reasons"] == {"lost_with_worker": 2}
        assert "2 of 2 samples were rejected (lost_with_worker 2)" in await coordinator.stop_reason()

    asyncio.run(story())
