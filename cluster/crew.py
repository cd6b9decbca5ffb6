"""Crews: the trainers and the target workers of a run, kept at work until it is done."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import ray
from ray.exceptions import RayTaskError

from cluster.attendance import attended
from cluster.placement import target_workers
from cluster.reservation import Reservation
from cluster.roles import Keyring, make_keyring, start_target, start_trainer
from torchspec_lite.config import Config
from torchspec_lite.errors import UserError
from torchspec_lite.logs import cause_of
from torchspec_lite.target import TargetInfo
from workers.death import DEATHS, death_in_words
from workers.link import ask
from workers.target_address import ReceiverAddress

log = logging.getLogger(__name__)
START_LIMIT_S = 900
GRACE_S = 10
"""After one trainer rank fails, the others have this long to fail too, which tells a lost process from an error."""
MOST_FAILURES = 4
"""Starts in a row that may fail before the run gives up. Trainers that came to another checkpoint did not fail, nor did a
target worker of which a sample was settled."""
BACKOFF_S = (1, 5, 30, 60)


@dataclass
class Crew:
    """What both crews need. `addresses` are the receivers of the present trainers, one a rank; `traffic` those for served
    requests, none while there are no trainers."""

    config: Config
    info: TargetInfo
    coordinator: ray.actor.ActorHandle
    reservation: Reservation
    keyring: Keyring = field(init=False)
    addresses: list[str] = field(default_factory=list)
    traffic: list[ReceiverAddress] = field(default_factory=list)
    listening: asyncio.Event = field(default_factory=asyncio.Event)
    trained: asyncio.Event = field(default_factory=asyncio.Event)
    trainers: list = field(default_factory=list)
    targets: dict = field(default_factory=dict)

    def __post_init__(self):
        self.names = [f"target-{number}" for number in range(target_workers(self.config))]
        self.keyring = make_keyring(self.config, self.names)

    async def train(self) -> dict:
        """Run the trainers to the end, from the newest checkpoint each time one of them is lost; their summary.

        Raises UserError for what a person must mend, and the trainers' own error.
        """
        failures = step = 0
        while True:
            try:
                summary = await self._train_once()
                self.trained.set()
                return summary
            except DEATHS as error:
                await self._alarm(f"a trainer was lost ({death_in_words(error)}); all ranks start again from the newest "
                                  "checkpoint")
                before, step = step, (await self._ask("account"))["checkpoint"]
                failures = 1 if step > before else failures + 1
                if failures == MOST_FAILURES:
                    raise
                await asyncio.sleep(BACKOFF_S[failures - 1])

    async def _train_once(self) -> dict:
        ranks = range(self.config.trainer.ranks)
        self.trainers = [start_trainer(self.config, rank, self.info, self.coordinator, self.reservation)
                         for rank in ranks]
        try:
            async with _starting("the trainers"):
                self.addresses = await _all(trainer.listen.remote(keys) for trainer, keys in zip(
                    self.trainers, self.keyring.receivers))
                if self.config.traffic.fraction:
                    doors = await _all(trainer.listen_to_traffic.remote(keys) for trainer, keys in zip(
                        self.trainers, self.keyring.traffic))
                    self.traffic = [ReceiverAddress(door, keys) for door, keys in zip(doors, self.keyring.replicas)]
                meeting = await self.trainers[0].open_store.remote() if len(self.trainers) > 1 else None
                await asyncio.gather(*(self._repoint(*target) for target in self.targets.items()))
            self.listening.set()
            return await self._watch([trainer.train.remote(meeting) for trainer in self.trainers])
        finally:
            for trainer in self.trainers:
                ray.kill(trainer)
            self.trainers, self.traffic = [], []

    async def _watch(self, training: list) -> dict:
        tasks = [asyncio.ensure_future(_result(reference)) for reference in training]
        async with attended({f"trainer {rank}": trainer for rank, trainer in enumerate(self.trainers)}, self._alarm):
            done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        errors = [task.exception() for task in done if task.exception()]
        if errors and pending:
            more, late = await asyncio.wait(pending, timeout=GRACE_S)
            errors += [task.exception() for task in more if task.exception()]
            for task in late:
                task.cancel()
        # A rank that died takes the others' collectives down with it: its death is the cause.
        lost = [error for error in errors if isinstance(error, DEATHS)]
        if errors:
            raise cause_of((lost or errors)[0])
        return tasks[0].result()

    async def capture(self, name: str) -> None:
        """Keep one target worker at its leases until there are no more, or the trainers are done; one that fails is
        started again, later each time. Raises its error after MOST_FAILURES failures in a row, between which no sample of
        it was settled: that it started well says little, since it may die of what it is given."""
        failures = 0
        await self.listening.wait()
        while not self.trained.is_set():
            actor = start_target(self.config, name, self.info, self.coordinator, [
                self._address(name, rank) for rank in range(self.config.trainer.ranks)], self.reservation)
            try:
                async with _starting(name):
                    await self._until_trained(actor.start.remote())
                    self.targets[name] = actor
                    await self._point(name, actor)  # the trainers may have come back elsewhere meanwhile
                async with attended({name: actor}, self._alarm):
                    await self._until_trained(actor.run.remote())
                return
            except (*DEATHS, RayTaskError, TimeoutError) as error:
                found = cause_of(error)
                lost = await self._ask("worker_lost", name)
                log.warning("%s failed with %s leases: %s", name, lost.queued + len(lost.rejected), death_in_words(found))
                failures = 1 if lost.settled else failures + 1
                if isinstance(found, UserError) or failures == MOST_FAILURES:
                    raise found from error
                await asyncio.sleep(BACKOFF_S[failures - 1])
            finally:
                self.targets.pop(name, None)
                ray.kill(actor)

    async def _until_trained(self, reference) -> None:
        """Wait for a target worker's call, but not longer than the trainers work: what it still holds then (a run that
        was stopped) nobody will take."""
        call, over = asyncio.ensure_future(_result(reference)), asyncio.ensure_future(self.trained.wait())
        try:
            await asyncio.wait({call, over}, return_when=asyncio.FIRST_COMPLETED)
            if call.done():
                call.result()
        finally:
            call.cancel()
            over.cancel()

    async def stop(self) -> None:
        """Ask the trainers to finish the step in hand, write a checkpoint and return."""
        await _all(trainer.stop.remote() for trainer in self.trainers)

    async def _point(self, name: str, target) -> None:
        """Tell a target worker where the trainers' receivers are now."""
        await _all(target.set_receiver.remote(rank, self._address(name, rank)) for rank in range(len(self.addresses)))

    async def _repoint(self, name: str, target) -> None:
        """Tell one that works. Where that fails `capture` starts another, which is given the present addresses."""
        try:
            await self._point(name, target)
        except (*DEATHS, RayTaskError) as error:
            log.warning("%s could not be told where the trainers are, and is ended: %s", name, death_in_words(cause_of(error)))
            ray.kill(target)

    def _address(self, name: str, rank: int) -> ReceiverAddress:
        return ReceiverAddress(self.addresses[rank], self.keyring.senders[name][rank])

    async def _alarm(self, text: str) -> None:
        log.warning(text)
        await self._ask("raise_alarm", text)

    async def _ask(self, method: str, *args):
        return await ask(self.coordinator, "the driver", method, *args)


@asynccontextmanager
async def _starting(who: str) -> AsyncIterator[None]:
    """Give what is started in the body START_LIMIT_S. Raises TimeoutError with the name of whom was waited for."""
    limit = asyncio.timeout(START_LIMIT_S)
    try:
        async with limit:
            yield
    except TimeoutError:
        if not limit.expired():
            raise  # another's
        # Not `from` it: behind it is the cancelled wait, which would pass for the cause.
        raise TimeoutError(f"{who} was waited for {START_LIMIT_S} s and is not up") from None


async def _all(references) -> list:
    return await asyncio.gather(*(_result(reference) for reference in references))


async def _result(reference):
    return await reference
