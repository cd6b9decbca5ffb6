"""The coordinator on a real ledger: leases, acknowledgements, stop rules, exports; no Ray and no engine."""

import asyncio
import json

import pytest

from cluster import coordinator as coordinators
from cluster.coordinator import Coordinator
from torchspec_lite.config import build
from torchspec_lite.parity import ParityProbe
from torchspec_lite.sample_order import read_order
from torchspec_lite.snapshot import read_snapshot
from workers.reports import Export, PaceReport, TrainerReport


def write_prompts(path, name, number):
    lines = [json.dumps({"id": f"{name}-{i}", "conversations": [{"role": "user", "content": str(i)}]}) for i in range(number)]
    path.write_text("\n".join(lines) + "\n")
    return str(path)


@pytest.fixture
def make(tmp_path, monkeypatch):
    """Coordinators of one run directory; closed at the end."""
    monkeypatch.setattr(coordinators, "LONG_POLL_S", 0.05)
    opened = []

    def make(train=10, held_out=2, **sections):
        values = {"name": "r", "run_root": str(tmp_path), "target": {"model": "x"}, "data": {
            "train": [write_prompts(tmp_path / "train.jsonl", "t", train)],
            "held_out": [write_prompts(tmp_path / "held.jsonl", "h", held_out)]}}
        values["data"] |= sections.pop("data", {})
        attempt = sections.pop("attempt", "")
        config = build(values | sections, "test")
        read_order(config, tmp_path).queue(config.run_dir / "ledger.sqlite", config.trainer.reuse)
        opened.append(Coordinator(config, str(config.run_dir), started=0.0, attempt=attempt))
        return opened[-1]

    yield make
    for coordinator in opened:
        coordinator.observer.close()
        coordinator.ledger.close()


async def take(coordinator, count):
    return await coordinator.lease("w", count)


async def settle(coordinator, leases, step):
    """Stream, train and make durable."""
    await coordinator.streamed([(lease.id, lease.attempt, 5) for lease in leases])
    await coordinator.trained([(lease.id, lease.attempt) for lease in leases if lease.purpose == "train"], step)
    await coordinator.checkpointed(step)


def test_held_out_samples_come_first_and_go_to_rank_0(make):
    coordinator = make(trainer={"ranks": 2})

    async def story():
        first = await take(coordinator, 5)
        assert [lease.purpose for lease in first] == ["held_out"] * 2 and {lease.rank for lease in first} == {0}
        second, third = await take(coordinator, 4), await take(coordinator, 4)
        assert [lease.ordinal for lease in second + third] == list(range(8))
        assert {lease.rank for lease in second} == {0} and {lease.rank for lease in third} == {1}

    asyncio.run(story())


def test_a_rank_that_does_not_keep_up_gets_fewer_leases(make):
    coordinator = make(train=12, held_out=1, trainer={"ranks": 2})

    async def story():
        await take(coordinator, 1)
        slow, quick = await take(coordinator, 3), await take(coordinator, 3)
        assert {lease.rank for lease in slow} == {0} and {lease.rank for lease in quick} == {1}
        await settle(coordinator, quick, step=1)
        assert {lease.rank for lease in await take(coordinator, 2)} == {1}
        assert {lease.rank for lease in await take(coordinator, 2)} == {1}  # 3 wait for rank 0, 2 for rank 1
        assert {lease.rank for lease in await take(coordinator, 1)} == {0}

    asyncio.run(story())


def test_the_order_is_the_seeds_not_the_files(make):
    coordinator = make(held_out=1)

    async def story():
        await take(coordinator, 1)
        return [lease.id for lease in await take(coordinator, 10)]

    order = asyncio.run(story())
    assert sorted(order) == sorted(f"t-{i}" for i in range(10)) and order != [f"t-{i}" for i in range(10)]


def test_a_run_ends_when_every_sample_is_durable_or_rejected(make):
    coordinator = make(train=3, held_out=1)

    async def story():
        held_out = await take(coordinator, 9)
        leases = await take(coordinator, 9)
        assert await take(coordinator, 9) == []  # all are on their way: ask again
        assert await coordinator.outstanding(None, 0) == 3
        await coordinator.rejected(leases[0].id, leases[0].attempt, "too_long")
        await settle(coordinator, held_out + leases[1:], step=1)
        assert await take(coordinator, 9) is None
        assert await coordinator.outstanding(None, 0) == 0
        account = await coordinator.account()
        assert account["samples"] == {"queued": 0, "leased": 0, "streamed": 0, "trained": 0, "durable": 2, "rejected": 1, "all": 3}
        assert account["reasons"] == {"too_long": 1}

    asyncio.run(story())


def test_a_lost_workers_leases_wake_another_that_waits(make):
    coordinator = make(train=2, held_out=1)
    coordinators.LONG_POLL_S = 20.0

    async def story():
        await settle(coordinator, await take(coordinator, 1), step=1)
        first = await take(coordinator, 2)
        waiting = asyncio.create_task(coordinator.lease("other", 2))
        await asyncio.sleep(0)
        assert (await coordinator.worker_lost("w")).queued == 2
        again = await asyncio.wait_for(waiting, 5)
        assert [(lease.id, lease.attempt, lease.alone) for lease in again] == [(first[0].id, 2, True)]
        assert {lease.attempt for lease in again} == {2}
        # The first worker's delivery, late, is not trained.
        assert await coordinator.streamed([(first[0].id, 1, 5)]) == {}

    asyncio.run(story())


def test_a_lost_workers_own_waiting_call_takes_nothing(make):
    coordinator = make(train=2, held_out=1)
    coordinators.LONG_POLL_S = 20.0

    async def story():
        await settle(coordinator, await take(coordinator, 1), step=1)
        leases = await take(coordinator, 2)
        waiting = asyncio.create_task(take(coordinator, 2))  # of a worker that dies while it waits
        await asyncio.sleep(0)
        await coordinator.worker_lost("w")
        assert await asyncio.wait_for(waiting, 5) == []
        again = await take(coordinator, 2) + await take(coordinator, 2)  # of its successor, by the same name
        assert [(lease.id, lease.attempt) for lease in again] == [(lease.id, 2) for lease in leases]

    asyncio.run(story())


def test_a_rank_waits_for_what_may_come_to_it_alone(make):
    coordinator = make(train=5, held_out=1, trainer={"ranks": 2})

    async def story():
        await take(coordinator, 1)
        mine, theirs = await take(coordinator, 2), await take(coordinator, 2)
        assert ({lease.rank for lease in mine}, {lease.rank for lease in theirs}) == ({0}, {1})
        assert await coordinator.outstanding(None, 0) == 3  # one is queued still
        await take(coordinator, 1)  # for rank 0
        await settle(coordinator, mine, step=1)
        assert (await coordinator.outstanding(None, 0), await coordinator.outstanding(None, 1)) == (1, 2)
        assert await coordinator.coming(None) == 3
        assert await coordinator.outstanding(mine[0].ordinal + 1, 0) == 0

    asyncio.run(story())


def test_too_many_rejects_stop_the_run_loudly(make, monkeypatch):
    monkeypatch.setattr(coordinators, "REJECTS_BEFORE_STOP", 4)
    coordinator = make(data={"max_reject_share": 0.5})

    async def story():
        await take(coordinator, 9)
        leases = await take(coordinator, 9)
        for lease in leases[:3]:
            await coordinator.rejected(lease.id, lease.attempt, "template_refused")
        assert await coordinator.stop_reason() is None
        await coordinator.rejected(leases[3].id, leases[3].attempt, "empty_mask")
        reason = await coordinator.stop_reason()
        assert "4 of 4 samples were rejected" in reason and "template_refused 3" in reason
        assert await take(coordinator, 9) is None

    asyncio.run(story())


def test_stopping_leaves_queued_samples_queued(make):
    coordinator = make(train=5, held_out=1)

    async def story():
        await take(coordinator, 1)
        leases = await take(coordinator, 2)
        await coordinator.stop("stopped by hand")
        assert await take(coordinator, 2) is None
        assert await coordinator.outstanding(None, 0) == 2  # these may still arrive
        await settle(coordinator, leases, step=1)
        assert await coordinator.outstanding(None, 0) == 0
        assert (await coordinator.account())["samples"]["queued"] == 3

    asyncio.run(story())


def test_a_stopped_run_settles_every_sample(make):
    coordinator = make(train=5, held_out=1)

    async def story():
        await take(coordinator, 1)
        leases = await take(coordinator, 4)
        await settle(coordinator, leases[:2], step=3)
        await coordinator.streamed([(leases[2].id, 1, 5)])
        await coordinator.stop("stopped by hand")
        await coordinator.settle()
        samples = (await coordinator.account())["samples"]
        assert (samples["durable"], samples["queued"], samples["all"]) == (2, 3, 5)

    asyncio.run(story())


def export(version, probes=()):
    return Export(version, version * 10, version * 50, version - 1 or None, f"drafters/v{version:06d}", 1.2, 1.3, [0.3], list(probes))


def test_the_newest_export_is_tried_and_comes_back_whole(make):
    coordinator = make()
    probe = ParityProbe(1, [5, 6, 7], [[8, 9]])

    async def story():
        assert await coordinator.next_export(False) is None
        await coordinator.exported(export(1))
        await coordinator.exported(export(2, [probe]))
        assert await coordinator.next_export(True) == export(2, [probe])
        states = {row["version"]: row["state"] for row in await coordinator.versions()}
        assert states == {1: "gated", 2: "exported"}
        assert await coordinator.served_last() == (None, None)
        await coordinator.version_state(2, "promoted", "better")
        assert await coordinator.next_export(False) is None
        assert await coordinator.served_last() == (export(2, [probe]), None)
        assert await coordinator.find_export(1) == export(1) and await coordinator.find_export(3) is None

    asyncio.run(story())


async def promoted(coordinator, *versions):
    for version in versions:
        await coordinator.version_state(version, "promoted", "")


def test_what_a_person_put_in_place_of_the_newest_version_serves_in_a_resumed_run(make):
    first = make()

    async def before():
        for version in (3, 5, 7):
            await first.exported(export(version))
        await promoted(first, 3, 5, 7, 3)
        assert await first.served_last() == (export(3), export(7))

    asyncio.run(before())
    first.observer.close()
    first.ledger.close()
    second = make()
    assert second.observer.serving_version == 3 and second.observer.version == 7
    assert asyncio.run(second.served_last()) == (export(3), export(7))


def test_second_answers_are_wanted_while_training_goes_on(make):
    coordinator = make()

    async def wanted():
        return await coordinator.traffic_report([{"replica": "a", "second_answers": 3}, {"replica": "b"}])

    async def story():
        assert await wanted() and coordinator.observer.traffic.second_answers == 3
        await coordinator.pace(PaceReport(16, 1.5, 1.5, True))
        assert not await wanted()
        await coordinator.pace(PaceReport(16, 1.3, None, False))
        assert await wanted()
        await coordinator.stop("enough")
        assert not await wanted()

    asyncio.run(story())


def test_the_end_of_training_wakes_who_waits_for_a_version(make):
    coordinator = make()
    coordinators.LONG_POLL_S = 20.0

    async def story():
        waiting = asyncio.create_task(coordinator.next_export(True))
        await asyncio.sleep(0)
        await coordinator.no_more_exports()
        assert await asyncio.wait_for(waiting, 5) is None

    asyncio.run(story())


def test_a_coordinator_that_starts_again_goes_on_from_the_ledger(make):
    first = make(train=4, held_out=1)

    async def before():
        await settle(first, await take(first, 1), step=1)
        leases = await take(first, 2)
        await first.exported(export(1))
        await first.version_state(1, "canary", "on 1 of 1 replicas")
        return leases

    leases = asyncio.run(before())
    first.observer.close()
    first.ledger.close()
    second = make(train=4, held_out=1)

    async def after():
        assert (await second.versions())[0]["state"] == "canary"  # its driver may be at it still
        await second.abandon_canaries()
        assert (await second.versions())[0]["state"] == "rolled_back"
        # A delivery of before the restart is taken: its lease stands.
        assert set(await second.streamed([(lease.id, lease.attempt, 5) for lease in leases])) == {lease.id for lease in leases}
        assert len(await take(second, 9)) == 2

    asyncio.run(after())


def test_restoring_queues_what_the_weights_do_not_hold(make):
    coordinator = make(train=4, held_out=1)

    async def story():
        await take(coordinator, 1)
        leases = await take(coordinator, 4)
        await settle(coordinator, leases[:2], step=5)
        await coordinator.streamed([(lease.id, lease.attempt, 5) for lease in leases[2:]])
        await coordinator.trained([(leases[2].id, 1)], 6)
        await coordinator.restored(5)
        samples = (await coordinator.account())["samples"]
        assert samples["durable"] == 2 and samples["queued"] == 2

    asyncio.run(story())


def test_the_live_state_tells_of_the_run(make, tmp_path):
    coordinator = make(train=4, held_out=1)

    async def story():
        assert (await coordinator.observe()).state == "starting"
        leases = await take(coordinator, 1) + await take(coordinator, 2)
        await coordinator.streamed([(lease.id, lease.attempt, 7) for lease in leases])
        await coordinator.trained([(lease.id, 1) for lease in leases[1:]], 1)
        await coordinator.trainer_report(TrainerReport(0, step=1, tokens=14, loss=2.5, learning_rate=1e-3, grad_norm=0.5))
        await coordinator.exported(export(1))
        await coordinator.served(1, 1.25, [0.25], serving=True)
        coordinator.observer.writer._next = 0.0
        live = await coordinator.observe()
        assert live.state == "running" and live.samples["trained"] == 2 and live.samples["queued"] == 2
        assert (live.loss, live.predicted, live.served, live.served_before) == (2.5, 1.3, 1.25, 1.25)
        assert live.tokens_streamed == 21
        await coordinator.finish("finished", None)

    asyncio.run(story())
    last = read_snapshot(tmp_path / "r")
    assert last.state == "finished" and last.prompts_done == 2 and last.prompts_total == 4
