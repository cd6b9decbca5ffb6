"""Trainer ranks without Ray and without an engine, all in one process: a coordinator's answers, made-up samples, and a group
of threads."""

import asyncio
import threading
import uuid
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace

import torch

from cluster.coordinator import Coordinator
from tests.chaos.small_run import made_up
from torchspec_lite.config import Config
from torchspec_lite.lease import Lease
from torchspec_lite.stream import StreamTimeout
from torchspec_lite.target import TargetInfo
from workers.group import Group
from workers.trainer import Trainer

LIMIT_S = 30.0
MOST_LOOKS = 50
ALONE = Group(0, 1, "gloo", None)


class Told:
    """As workers.link.Link: answers by method, a value or a function; remembers all that was told."""

    def __init__(self, **answers):
        self.answers = {"outstanding": 0, "coming": 0, "stop_reason": None, "restored": 0, "serving_version": None,
                        "account": {"samples": {"all": 100, "rejected": 0}}} | answers
        self.told: list[tuple] = []

    def call(self, method, *args):
        self.told.append((method, *args))
        if method == "streamed":
            return {id: 0 for id, _, _ in args[0]}
        answer = self.answers.get(method)
        return answer(*args) if callable(answer) else answer

    def tell(self, method, *args):
        self.told.append((method, *args))

    def settle(self):
        pass

    def of(self, method):
        return [args for name, *args in self.told if name == method]


class RealLine:
    """The same over a real coordinator, on an event loop of its own."""

    def __init__(self, config: Config):
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.coordinator = Coordinator(config, str(config.run_dir), 0.0, uuid.uuid4().hex)  # a new attempt, as --resume makes

    def call(self, method, *args):
        answer = getattr(self.coordinator, method)(*args)
        return asyncio.run_coroutine_threadsafe(answer, self.loop).result(LIMIT_S) if asyncio.iscoroutine(answer) else answer

    tell = call

    def settle(self):
        pass

    def close(self):
        if self.coordinator is not None:
            self.coordinator.observer.close()
            self.coordinator.ledger.close()
            self.loop.call_soon_threadsafe(self.loop.stop)
            self.coordinator = None


class Source:
    """A receiver whose samples are there or not, never on their way. `next` gives one or None. Who gets none MOST_LOOKS times
    without a sum over the ranks in between would wait for ever."""

    def __init__(self, next: Callable[[], object], group):
        self.next, self.group, self.looks, self.met = next, group, 0, 0

    def get(self, wait_s):
        sample, met = self.next(), getattr(self.group, "sums", 0)
        self.looks = self.looks + 1 if sample is None and met == self.met else 0
        self.met = met
        assert self.looks < MOST_LOOKS, "a rank waits for samples and meets nobody"
        if sample is None:
            raise StreamTimeout("none")
        return sample

    def release(self, sample):
        pass

    def events(self):
        return []

    def stats(self):
        return SimpleNamespace(held_bytes=0, budget_bytes=1, held_samples=0)


def samples(info: TargetInfo, ordinals, purpose="train") -> deque:
    """Made-up samples of these places in the order, to be taken one by one."""
    return deque(made_up(Lease(f"{purpose}-{ordinal}", ordinal, 1, purpose, 0), info) for ordinal in ordinals)


def taking(waiting: deque) -> Callable[[], object]:
    return lambda: waiting.popleft() if waiting else None


def make_trainer(config: Config, info: TargetInfo, line, next=lambda: None, rank=0, group=ALONE) -> Trainer:
    trainer = Trainer(config, rank, info, line)
    trainer.receiver, trainer.group = Source(next, group), group
    return trainer


class Meeting:
    """Ranks as threads: `rank(n)` is its `workers.group.Group`. `met` counts the sums so far."""

    def __init__(self, ranks: int):
        self.ranks, self.met, self.slots = ranks, 0, [None] * ranks
        self.barrier = threading.Barrier(ranks, timeout=LIMIT_S)

    def rank(self, rank: int) -> "Rank":
        return Rank(self, rank)

    def run(self, *works: Callable) -> list:
        """Each rank's work in a thread; what they return. Raises the first one's error."""
        results, errors = [None] * len(works), []

        def work(rank):
            try:
                results[rank] = works[rank]()
            except BaseException as error:
                errors.append(error)
                self.barrier.abort()

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(len(works))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return results


class Rank:
    def __init__(self, meeting: Meeting, rank: int):
        self.meeting, self.rank, self.ranks, self.sums = meeting, rank, meeting.ranks, 0

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        meeting, self.sums = self.meeting, self.sums + 1
        meeting.slots[self.rank] = values
        if meeting.barrier.wait() == 0:
            meeting.met += 1
        meeting.barrier.wait()
        total = torch.stack(meeting.slots).sum(0)
        meeting.barrier.wait()  # nobody's next values before all have read these
        return total

    def sum_gradients(self, parameters):
        for parameter in parameters:
            parameter.grad = self.sum(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)

    def same_weights(self, module):
        pass
