"""Crews when processes die: who is started again, who is told, and when a run ends. Actors are stand-ins without Ray."""

import asyncio
import logging
from types import SimpleNamespace

import pytest
from ray.exceptions import ActorDiedError, OutOfMemoryError, RayTaskError

from cluster import crew as crews
from cluster.crew import MOST_FAILURES, Crew
from torchspec_lite.config import build
from torchspec_lite.errors import UserError
from torchspec_lite.lease import LostLeases
from torchspec_lite.logs import cause_of, one_line

OUT_OF_MEMORY = OutOfMemoryError("1 worker(s) were killed due to the node running low on memory.\nTop 10 memory users: …")


class Stage:
    """Makes the actors of a crew: `trains` and `runs` are what their long calls do, in turn (an error is raised, an event
    waited for); the last one again and again. Keeps who was started, killed and told where receivers are."""

    def __init__(self, trains=(), runs=()):
        self.trains, self.runs = list(trains), list(runs)
        self.trainers, self.targets, self.killed, self.alarms = [], [], [], []
        self.settled, self.checkpoint = False, 0
        self.lost = []
        self.coordinator = actor(account=self._account, raise_alarm=self._alarm, worker_lost=self._worker_lost)

    async def _account(self):
        return {"checkpoint": self.checkpoint}

    async def _alarm(self, text):
        self.alarms.append(text)

    async def _worker_lost(self, name):
        self.lost.append(name)
        return LostLeases(3, (), self.settled)

    def start_trainer(self, *_):
        ours = len(self.trainers)

        async def listen(keys):
            return f"tcp://127.0.0.1:{9000 + ours}"

        async def open_store():
            return "127.0.0.1", 1

        async def train(meeting):
            return await happen(self.trains, ours)

        self.trainers.append(actor(listen=listen, train=train, open_store=open_store, present=nothing, stop=nothing))
        return self.trainers[-1]

    def start_target(self, config, name, info, coordinator, receivers, reservation):
        ours, told = len(self.targets), [receiver.endpoint for receiver in receivers]
        assert ours < 20, "it is started again for ever"

        async def set_receiver(rank, receiver):
            told.append(receiver.endpoint)

        async def run():
            return await happen(self.runs, ours)

        self.targets.append(actor(start=nothing, run=run, set_receiver=set_receiver, present=nothing, told=told))
        return self.targets[-1]


def actor(told=None, **methods):
    return SimpleNamespace(told=told, **{name: SimpleNamespace(remote=method) for name, method in methods.items()})


async def nothing(*_):
    return None


async def happen(all, number):
    what = all[min(number, len(all) - 1)]
    if isinstance(what, asyncio.Event):
        await what.wait()
    elif isinstance(what, BaseException):
        raise what
    return what


def failed(method, error):
    return RayTaskError(method, "traceback", error, pid=1, ip="192.0.2.1")


@pytest.fixture
def make(monkeypatch):
    monkeypatch.setattr(crews, "BACKOFF_S", (0, 0, 0, 0))
    monkeypatch.setattr(crews, "GRACE_S", 0.1)

    def make(ranks=1, **acts):
        stage = Stage(**acts)
        monkeypatch.setattr(crews, "ray", SimpleNamespace(kill=stage.killed.append))
        monkeypatch.setattr(crews, "start_trainer", stage.start_trainer)
        monkeypatch.setattr(crews, "start_target", stage.start_target)
        config = build({"name": "r", "target": {"model": "x"}, "data": {"train": ["x"]}, "trainer": {"ranks": ranks}}, "test")
        crew = Crew(config, None, stage.coordinator, None)
        crew.addresses = ["tcp://127.0.0.1:8999"] * ranks
        return crew, stage

    return make


def test_a_trainer_that_runs_out_of_memory_is_a_lost_one(make, caplog):
    crew, stage = make(trains=[OUT_OF_MEMORY, {"step": 7}])
    caplog.set_level(logging.INFO)
    assert asyncio.run(crew.train()) == {"step": 7}
    assert len(stage.trainers) == 2 and stage.killed == stage.trainers
    assert len(stage.alarms) == 1 and "memory ran out on its node" in stage.alarms[0]
    assert "newest checkpoint" in stage.alarms[0] and "Top 10 memory users" in caplog.text


def test_a_rank_without_memory_is_the_cause_of_the_others_errors(make):
    crew, stage = make(ranks=2, trains=[
        failed("train", RuntimeError("Connection closed by peer")), OUT_OF_MEMORY, {"step": 7}])
    assert asyncio.run(crew.train()) == {"step": 7}
    assert len(stage.trainers) == 4 and "memory ran out" in stage.alarms[0]


def test_trainers_that_run_out_of_memory_without_a_checkpoint_end_the_run(make):
    crew, stage = make(trains=[OUT_OF_MEMORY])
    with pytest.raises(OutOfMemoryError):
        asyncio.run(crew.train())
    assert len(stage.trainers) == MOST_FAILURES


def test_a_target_that_runs_out_of_memory_is_started_again(make, caplog):
    crew, stage = make(runs=[OUT_OF_MEMORY, None])
    crew.listening.set()
    asyncio.run(crew.capture("target-0"))
    assert len(stage.targets) == 2 and stage.killed == stage.targets and stage.lost == ["target-0"]
    assert "target-0 failed with 3 leases: memory ran out on its node" in caplog.text


@pytest.mark.parametrize("error", [failed("run", RuntimeError("EngineCore encountered an issue")), ActorDiedError(), OUT_OF_MEMORY])
def test_a_target_that_gets_nothing_through_ends_the_run_after_four_starts(make, error):
    crew, stage = make(runs=[error])
    crew.listening.set()
    with pytest.raises(type(cause_of(error))):
        asyncio.run(crew.capture("target-0"))
    assert len(stage.targets) == MOST_FAILURES == len(stage.lost)


def test_a_target_that_gets_samples_through_between_its_failures_goes_on(make):
    crew, stage = make(runs=[failed("run", RuntimeError("EngineCore encountered an issue"))] * 10 + [None])
    crew.listening.set()
    stage.settled = True
    asyncio.run(crew.capture("target-0"))
    assert len(stage.targets) == 11


def test_what_a_person_must_mend_ends_the_run_at_once(make):
    crew, stage = make(runs=[failed("run", UserError("stream.host: no such interface"))])
    crew.listening.set()
    with pytest.raises(UserError, match="no such interface"):
        asyncio.run(crew.capture("target-0"))
    assert len(stage.targets) == 1


def test_targets_may_come_and_go_while_they_are_told_of_new_trainers(make):
    crew, stage = make(trains=[{"step": 7}])

    async def story():
        told = []

        async def set_receiver(rank, receiver):
            crew.targets[f"target-{len(crew.targets)}"] = actor(set_receiver=nothing)  # another one came up
            await asyncio.sleep(0)
            told.append(receiver.endpoint)

        crew.targets |= {"target-0": actor(set_receiver=set_receiver)}
        crew.keyring.senders.update({f"target-{number}": [None] for number in range(5)})
        assert await crew.train() == {"step": 7}
        assert told == ["tcp://127.0.0.1:9000"]

    asyncio.run(story())


@pytest.mark.parametrize("error", [failed("set_receiver", RuntimeError("EngineDeadError")), ActorDiedError(), OUT_OF_MEMORY])
def test_a_target_that_dies_while_it_is_told_of_new_trainers_is_replaced_by_one_that_knows_them(make, error):
    """Its engine died: its own long call need not say so at once."""
    async def story():
        trained, at_work, killed = asyncio.Event(), asyncio.Event(), asyncio.Event()
        crew, stage = make(trains=[ActorDiedError(), trained], runs=[killed, trained])

        def kill(actor):
            stage.killed.append(actor)
            if stage.targets[:1] == [actor]:
                killed.set()

        crews.ray.kill = kill

        async def run():
            at_work.set()
            await killed.wait()
            raise ActorDiedError()

        async def set_receiver(rank, receiver):
            if receiver.endpoint != "tcp://127.0.0.1:8999":
                raise error

        start_target = crews.start_target

        def start(*arguments):
            target = start_target(*arguments)
            if len(stage.targets) == 1:
                target.run.remote, target.set_receiver.remote = run, set_receiver
            else:
                tell = target.set_receiver.remote

                async def told(rank, receiver):
                    await tell(rank, receiver)
                    trained.set()

                target.set_receiver.remote = told
            return target

        crews.start_target = start
        crew.listening.set()
        capturing = asyncio.create_task(crew.capture("target-0"))
        await at_work.wait()
        training = asyncio.create_task(crew.train())
        await asyncio.wait_for(asyncio.gather(capturing, training), 10)
        assert len(stage.targets) == 2 and stage.targets[0] in stage.killed
        assert stage.targets[1].told[-1] == "tcp://127.0.0.1:9001"

    asyncio.run(story())


def test_a_target_that_comes_up_while_the_trainers_move_is_told_where_they_are(make):
    async def story():
        trained, ready, loading = asyncio.Event(), asyncio.Event(), asyncio.Event()
        crew, stage = make(trains=[trained], runs=[trained])
        start_target = crews.start_target

        def start(*arguments):
            target = start_target(*arguments)
            target.start.remote = ready.wait
            loading.set()
            return target

        crews.start_target = start
        crew.listening.set()
        capturing = asyncio.create_task(crew.capture("target-0"))
        await loading.wait()
        training = asyncio.create_task(crew.train())
        while not crew.addresses == ["tcp://127.0.0.1:9000"]:
            await asyncio.sleep(0)
        ready.set()
        while not crew.targets:
            await asyncio.sleep(0)
        trained.set()
        await asyncio.wait_for(asyncio.gather(capturing, training), 10)
        assert stage.targets[0].told == ["tcp://127.0.0.1:8999", "tcp://127.0.0.1:9000"]

    asyncio.run(story())


@pytest.mark.parametrize("who", ["target-0", "the trainers"])
def test_who_does_not_come_up_is_named(make, monkeypatch, who):
    monkeypatch.setattr(crews, "START_LIMIT_S", 0.01)
    crew, stage = make(trains=[None], runs=[None])

    async def story():
        forever = actor(start=asyncio.Event().wait, listen=lambda keys: asyncio.Event().wait(), present=nothing)
        monkeypatch.setattr(crews, "start_target", lambda *_: forever)
        monkeypatch.setattr(crews, "start_trainer", lambda *_: forever)
        crew.listening.set()
        await (crew.train() if who == "the trainers" else crew.capture("target-0"))

    with pytest.raises(TimeoutError) as raised:
        asyncio.run(story())
    assert one_line(cause_of(raised.value)).startswith(f"TimeoutError: {who} was waited for 0.01 s and is not up")
