"""A trainer rank's intake of served requests: a receiver and a buffer of their own, and the window to predict on."""

import time
from collections import deque
from collections.abc import Callable

from torchspec_lite.config import Config
from torchspec_lite.keys import ReceiverKeys
from torchspec_lite.reuse import Entry, ReuseBuffer
from torchspec_lite.sample import Expectation, Sample
from torchspec_lite.stream import Receiver, StreamTimeout
from torchspec_lite.teacher import TeacherStatistics
from torchspec_lite.traffic import SECOND_ANSWER

Teach = Callable[[Sample], TeacherStatistics]


class TrafficIntake:
    """Memory only: nothing of a served request is written anywhere. `teach` works out a sample's teacher statistics.

    On rank 0 requests wait in the window to be predicted on, then in the buffer for their passes: until the next look
    (`let_train`), until as many newer ones have come as the window has place for, or for `patience_s`, which leaves as long
    for the passes. A second answer is not predicted on, but waits as long as the first one, which came before it. What is
    older than `traffic.max_age_s` leaves both. In a full buffer the newest take the place of what was trained most: a
    trainer that has no time for all passes of all requests gives each fewer, and does not go blind to new traffic meanwhile.
    """

    def __init__(self, config: Config, rank: int, expect: Expectation, coordinator, teach: Teach,
                 clock: Callable[[], float] = time.monotonic):
        self.config, self.options, self.rank = config, config.traffic, rank
        self.expect, self.coordinator, self.teach, self.clock = expect, coordinator, teach, clock
        self.patience_s = config.traffic.max_age_s / 2
        trainer = config.trainer
        self.buffer = ReuseBuffer(trainer.reuse, trainer.reuse_buffer_mib << 20, trainer.seed + rank)
        self.window: deque[Entry] = deque()
        self.arrivals = 0
        self.came: dict[str, float] = {}
        self.refused: set[str] = set()
        self.receiver: Receiver | None = None

    def listen(self, host: str, keys: ReceiverKeys | None, unencrypted: bool) -> str:
        """Open the receiver; returns its endpoint for the replicas."""
        stream = self.config.stream
        self.receiver = Receiver(host, stream.budget_mib << 20, stream.max_samples, self.expect, keys,
                                 stream.heartbeat_s, stream.shared_memory, unencrypted=unencrypted)
        return self.receiver.endpoint

    def newest(self) -> list[Entry]:
        """What is predicted on: the window without second answers."""
        return [entry for entry in self.window if not _is_second(entry)]

    def let_train(self) -> None:
        """The window was predicted on: all of it may be trained now."""
        while self.window:
            self._add(self.window.popleft(), resting=False)

    def fill(self, wait_s: float, resting: bool = False) -> bool:
        """Take what has come, waiting up to `wait_s` for the first; True if any came. While `resting` no more than another
        window's worth is kept, and new requests take the place of the oldest: training wakes to the newest traffic.

        However fast they come, the caller's turn comes too: after a window's worth while `resting`, else after as many as
        the receiver holds.
        """
        self._let_go_of_the_old()
        if not resting:
            self._let_train_what_waited()
        self._tell_refusals()
        most, came = self.options.window if resting else self.config.stream.max_samples, 0
        while came < most and self._take(0.0 if came else wait_s, resting):
            came += 1
        return came > 0

    def _take(self, wait_s: float, resting: bool) -> bool:
        if not (resting or self.buffer.has_room() or any(entry.passes for entry in self.buffer.entries.values())):
            return False
        try:
            sample = self.receiver.get(wait_s)
        except StreamTimeout:
            return False
        try:
            passes = self.coordinator.call("arrived", [(sample.id, sample.tokens)], self.rank)
            if sample.id in passes:
                kept = sample.clone()
                self._keep(Entry(kept, self.teach(kept), passes[sample.id]), resting)
        finally:
            self.receiver.release(sample)
        return True

    def _keep(self, entry: Entry, resting: bool) -> None:
        self.arrivals += not _is_second(entry)
        self.came[entry.sample.id] = self.clock()
        leaving = [entry]
        if self.rank == 0:
            self.window.append(entry)
            leaving = self._pushed_out()
        for entry in leaving:
            self._add(entry, resting)

    def _add(self, entry: Entry, resting: bool) -> None:
        held = self.buffer.entries
        while held and (not self.buffer.has_room() or resting and len(held) >= self.options.window):
            leaves = next(iter(held)) if resting else max(held, key=lambda id: held[id].passes)
            if not resting and not held[leaves].passes:
                break
            self._drop(leaves, "newer_came")
        self.buffer.add(entry)

    def _pushed_out(self) -> list[Entry]:
        """What leaves the window, oldest first: more requests than it has place for, and second answers to those that left."""
        left, over = [], len(self.newest()) - self.options.window
        while self.window and (over > 0 or _is_second(self.window[0])):
            left.append(self.window.popleft())
            over -= not _is_second(left[-1])
        return left

    def count_pass(self, entries: list[Entry]) -> list[Entry]:
        """As `ReuseBuffer.count_pass`: those done leave the memory."""
        done = self.buffer.count_pass(entries)
        for entry in done:
            del self.came[entry.sample.id]
        return done

    def _tell_refusals(self) -> None:
        """A replica whose states do not fit (of another target, say) is an alarm, once for each kind of reason."""
        for event in self.receiver.events():
            if event.kind == "rejected":
                reason = event.reason.partition(":")[0]
                self.coordinator.tell("traffic_refused", reason)
                if reason not in self.refused:
                    self.coordinator.tell("raise_alarm", f"states of served requests are refused: {event.reason}; serve the "
                                          f"target that this run trains for, or start a run of another name for the other")
                self.refused.add(reason)

    def _let_go_of_the_old(self) -> None:
        oldest = self.clock() - self.options.max_age_s
        while self.came and next(iter(self.came.values())) < oldest:
            self._drop(next(iter(self.came)), "too_old")

    def _let_train_what_waited(self) -> None:
        long_ago = self.clock() - self.patience_s
        while self.window and self.came[self.window[0].sample.id] < long_ago:
            self._add(self.window.popleft(), resting=False)

    def _drop(self, id: str, reason: str) -> None:
        del self.came[id]
        if id in self.buffer.entries:
            entry = self.buffer.remove(id)
        else:  # only the oldest of the window is ever let go
            entry = self.window.popleft()
        self.coordinator.tell("rejected", id, entry.sample.attempt, reason)

    def close(self) -> None:
        if self.receiver is not None:
            self.receiver.close()


def _is_second(entry: Entry) -> bool:
    return entry.sample.id.startswith(SECOND_ANSWER)
