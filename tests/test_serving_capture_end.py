"""An engine whose trainers are gone: it forgets what waits for them and samples no more, until it is asked again."""

import gc
import threading
import weakref
from types import SimpleNamespace

import pytest
import torch

from torchspec_lite.sample import Expectation
from torchspec_lite.stream import Receiver, StreamError, StreamTimeout
from torchspec_lite.stream_stats import SenderStats
from torchspec_lite.traffic import Piece, TrafficStats
from workers import serving_capture
from workers.capture_settings import CaptureSettings
from workers.serving_capture import Courier

HIDDEN, LAYERS, MAX_AGE_S, WAIT_S = 64, (1, 2, 3), 100.0, 60
SETTINGS = CaptureSettings(
    identity="engine", fingerprint="t@0", layer_ids=LAYERS, longest=512, fraction=1.0, budget_bytes=1 << 20, max_tokens_per_s=None,
    prefer_low=0.0, max_age_s=MAX_AGE_S, heartbeat_s=0.02, wait_s=300.0, shared_memory=False)


class Clock:
    """The courier's clock. It stands still but for `forward`, and knows when the courier looked at it."""

    def __init__(self):
        self.now, self.looks, self.changed = 0.0, 0, threading.Condition()

    def monotonic(self) -> float:
        with self.changed:
            self.looks += 1
            self.changed.notify_all()
            return self.now

    def time(self) -> float:
        return 0.0

    def forward(self, seconds: float) -> None:
        """Returns when the courier has seen the new time and acted upon it, unless it has stopped."""
        with self.changed:
            self.now += seconds
            seen = self.looks + 2
            assert self.changed.wait_for(lambda: self.looks >= seen, WAIT_S)


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(serving_capture, "time", clock)
    return clock


@pytest.fixture
def receiver():
    receiver = Receiver("127.0.0.1", 1 << 22, 8, Expectation("t@0", LAYERS, torch.float32, HIDDEN, 512), heartbeat_s=0.5,
                        shared_memory=False)
    yield receiver
    receiver.close()


class Deaf:
    """A sender that takes samples, or fails at them."""

    def __init__(self, endpoint, error=None):
        self.endpoint, self.error, self.connected, self.closed, self.refusals = endpoint, error, True, False, []

    def send(self, sample):
        if self.error is not None:
            raise self.error("why")

    def stats(self):
        return SenderStats(self.endpoint, self.connected, *[0] * 14)

    def close(self):
        self.closed = True


def capture(receivers) -> Courier:
    return Courier(SETTINGS, receivers, TrafficStats())


def begin(courier, name, tokens=20) -> weakref.ref:
    """A request runs: its prompt is read, and answered with one token so far."""
    courier.started(name, [len(name)] * 8, SimpleNamespace(
        extra_args=None, stop_token_ids=None, eos_token_id=None, max_tokens=None, min_tokens=0))
    piece = Piece(torch.tensor([0]), torch.arange(tokens) + len(name), torch.randn(tokens, 4, HIDDEN), torch.tensor([5]), 0)
    if courier.watches(name):
        courier.add(name, piece)
    return weakref.ref(piece)


def forgotten(kept) -> bool:
    gc.collect()
    return all(one() is None for one in kept)


def test_it_forgets_and_stops_when_its_receiver_is_gone_for_max_age_s_and_not_before(clock, receiver):
    courier = capture([(receiver.endpoint, None)])
    begin(courier, "taken")
    courier.finished("taken")
    receiver.release(receiver.get(WAIT_S))
    clock.forward(10 * MAX_AGE_S)  # nothing to send for long is no reason
    assert not courier.over.is_set() and courier.values()["receivers"] == [receiver.endpoint]
    receiver.close()
    while courier.senders[0].stats().connected:
        clock.forward(0.0)
    kept = [weakref.ref(courier.senders[0]), begin(courier, "running"), begin(courier, "late")]
    courier.finished("late")  # it waits in the sender
    clock.forward(MAX_AGE_S - 1)
    assert not courier.over.is_set() and courier.watches("running")
    with clock.changed:
        clock.now += 1.5
    courier.watch.join(WAIT_S)
    assert courier.over.is_set() and not courier.watches("running")
    courier.add("running", Piece(torch.tensor([20]), torch.tensor([5]), torch.randn(1, 4, HIDDEN), torch.tensor([6]), 0))
    courier.finished("running")
    kept.append(begin(courier, "after"))
    found = courier.values()
    assert (found["sampled"], found["sent"], found["waiting_bytes"], found["receivers"], found["senders"]) == (3, 2, 0, [], [])
    assert forgotten(kept)
    courier.close()


def test_one_rank_of_two_that_stays_away_is_reason_enough(clock, monkeypatch):
    monkeypatch.setattr(Courier, "_sender", lambda self, endpoint, key: Deaf(endpoint))
    courier = capture([("a", None), ("b", None)])
    there, away = courier.senders
    away.connected = False
    clock.forward(MAX_AGE_S / 2)
    away.connected = True
    clock.forward(0.0)
    away.connected = False
    clock.forward(MAX_AGE_S - 1)
    assert not courier.over.is_set()
    with clock.changed:
        clock.now += 1.5
    courier.watch.join(WAIT_S)
    assert courier.over.is_set() and there.closed and away.closed
    courier.close()


def test_a_trainer_that_turns_it_away_ends_it_at_once_and_one_that_is_slow_does_not(clock, monkeypatch):
    made = []

    def sender(self, endpoint, key):
        made.append(Deaf(endpoint, StreamTimeout if endpoint == "slow" else StreamError))
        return made[-1]

    monkeypatch.setattr(Courier, "_sender", sender)
    slow = capture([("slow", None)])
    begin(slow, "one")
    slow.finished("one")
    slow.waiting.put(None)  # the end of its work, to be waited for
    slow.thread.join(WAIT_S)
    assert not slow.over.is_set() and slow.values()["left_out"] == {"stream": 1}
    slow.close()
    gone = capture([("gone", None)])
    kept = [begin(gone, "running"), begin(gone, "ended")]
    gone.finished("ended")
    gone.watch.join(WAIT_S)
    assert gone.over.is_set()
    gone.close()
    assert made[1].closed and gone.values()["left_out"] == {"lost": 1, "stream": 1} and forgotten(kept)


def test_a_sender_that_does_not_close_holds_no_engine_up(clock, monkeypatch):
    ended = threading.Event()
    monkeypatch.setattr(serving_capture, "CLOSE_WAIT_S", 0.1)
    monkeypatch.setattr(Courier, "_sender", lambda self, endpoint, key: Deaf(endpoint))
    courier = capture([("a", None)])
    courier.senders[0].close = ended.wait
    caller = threading.Thread(target=courier.close, daemon=True)
    caller.start()
    caller.join(WAIT_S)
    assert not caller.is_alive() and courier.watch.is_alive()
    ended.set()
    courier.watch.join(WAIT_S)


def test_what_was_let_go_is_counted_once(clock, monkeypatch):
    monkeypatch.setattr(Courier, "_sender", lambda self, endpoint, key: Deaf(endpoint))
    courier = capture([("a", None)])
    kept = [begin(courier, "one"), begin(courier, "two")]
    courier.close()
    courier.close()
    found = courier.values()
    assert (found["left_out"], found["waiting_bytes"], found["sampled"]) == ({"lost": 2}, 0, 2) and forgotten(kept)
