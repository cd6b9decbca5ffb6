"""vLLM worker extension: states of served requests go to the trainers, as the engine computes them anyway.

`workers.tap` hands over what each engine step computes for sampled requests. When one ends, a thread of its own makes a
sample of it and sends it; the engine never waits for that: while more than `budget_bytes` wait, further requests are not
captured, and counted. An engine outlives the run that asked for this (`serve.external`), so it stops by itself when the
trainers are gone.
"""

import logging
import queue
import random
import threading
import time
import uuid
from dataclasses import asdict
from pathlib import Path

from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

from torchspec_lite.errors import UserError
from torchspec_lite.keys import SenderKeys, load_keys
from torchspec_lite.sample import Sample, SampleError
from torchspec_lite.stream import Sender, StreamError, StreamTimeout
from torchspec_lite.target import describe
from torchspec_lite.traffic import FIRST_ANSWER, SECOND_ANSWER, Allowance, Sieve, Taken, TrafficStats, Trail
from workers.answer import answered
from workers.capture_settings import CaptureSettings
from workers.tap import SETTING, prepared

MARK = "torchspec_lite_capture"
"""In a request's `extra_args`: true asks for it to be captured, false forbids it; without it `fraction` decides."""
SECOND = "second"
"""The mark of a second answer (`workers.second_answers`), which is captured too."""
NO = frozenset({"false", "0", "no", "off"})
CLOSE_WAIT_S = 10.0
log = logging.getLogger(__name__)


class ServingCapture:
    """Methods for `collective_rpc`; all ranks take the tap, the first one has the senders. Each answers as
    `workers.answer.answered` says."""

    capture_courier: "Courier | None" = None

    @answered
    def capture_on(self, settings: dict, receivers: list[tuple[str, str | None]]) -> None:
        """Capture for these receivers, (endpoint, key file) of each trainer rank, from the next request on. `settings`:
        those of `CaptureSettings`.

        Called again it goes on with the new ones; samples that waited for the old ones are lost, and counted. Refused
        where the engine was not started for it, or serves another target than the settings name.
        """
        if not prepared(self.vllm_config):
            raise RuntimeError(f"this engine was not started for capture: its additional_config lacks {SETTING}")
        settings = CaptureSettings(**settings | {"layer_ids": tuple(settings["layer_ids"])})
        self._check_target(settings.fingerprint)
        stats = self._capture_off()
        if get_tensor_model_parallel_rank() == 0:
            self.capture_courier = Courier(settings, receivers, stats or TrafficStats())
            self.model_runner.capture_tap.watcher = self.capture_courier

    @answered
    def capture_off(self) -> dict | None:
        """Stop capturing, let go of all that waits; `TrafficStats.values()` so far, None where nothing was captured."""
        stats = self._capture_off()
        return None if stats is None else stats.values()

    @answered
    def capture_stats(self) -> dict | None:
        """As `Courier.values`; None while nothing is captured, and on other ranks than the first."""
        courier = self.capture_courier
        return None if courier is None else courier.values()

    def _capture_off(self) -> TrafficStats | None:
        if self.capture_courier is None:
            return None
        courier, self.capture_courier, self.model_runner.capture_tap.watcher = self.capture_courier, None, None
        courier.close()
        return courier.stats

    def _check_target(self, fingerprint: str) -> None:
        """Refuse to name states after a target that this engine does not serve. A hub's name is taken at its word; a folder
        may bear another name here, so only the digests count."""
        served = Path(self.model_config.model)
        if served.is_dir():
            found = describe(served).fingerprint
            if found.rpartition("@")[2] != fingerprint.rpartition("@")[2]:
                raise RuntimeError(f"this engine serves {found}, the run trains for {fingerprint}")


class Courier:
    """Watches sampled requests, makes samples of those that end and sends them, shared out among the trainer ranks.

    It stops by itself, and lets go of all that waits, when a trainer rank turns it away or has not been there for
    `max_age_s`: whoever would start it again may be gone too. Then `values` names no receivers, so that a driver that lives
    asks for capture anew.
    """

    def __init__(self, settings: CaptureSettings, receivers: list[tuple[str, str | None]], stats: TrafficStats):
        self.settings, self.stats = settings, stats
        self.receivers = receivers
        seed = random.SystemRandom().getrandbits(64)
        self.random, self.sieve = random.Random(seed), Sieve(settings.prefer_low, seed)
        self.allowance = Allowance(settings.max_tokens_per_s)
        self.trails: dict[str, Trail] = {}
        self.waiting: queue.SimpleQueue[Trail | None] = queue.SimpleQueue()  # bounded in bytes by `started`
        self.waiting_bytes = 0
        self.lock = threading.Lock()
        self.over = threading.Event()
        keys = [path and load_keys(Path(path)) for _, path in receivers]  # all of them first: a sender runs once it is made
        self.senders = [self._sender(endpoint, key) for (endpoint, _), key in zip(receivers, keys)]
        self.thread = threading.Thread(target=self._work, name="capture courier", daemon=True)
        self.watch = threading.Thread(target=self._watch, args=(self.senders,), name="capture watch", daemon=True)
        self.thread.start()
        self.watch.start()

    # The engine's side: quick, and never waits

    def started(self, request: str, prompt: list[int] | None, sampling) -> None:
        if self.over.is_set() or request in self.trails or prompt is None or sampling is None:
            return
        mark = (sampling.extra_args or {}).get(MARK)
        if mark is not None and str(mark).lower() in NO or mark is None and not self.random.random() < self.settings.fraction:
            return
        second = mark == SECOND
        with self.lock:
            self.stats.sampled += not second
            self.stats.second_answers += second
            if self.waiting_bytes > self.settings.budget_bytes:
                self.stats.left_out["trainers_behind"] += 1
                return
            if not self.allowance.open():
                self.stats.left_out["over_rate"] += 1
                return
        stops = {*(sampling.stop_token_ids or ()), *([] if sampling.eos_token_id is None else [sampling.eos_token_id])}
        trail = Trail(len(prompt), self.settings.longest, sampling.max_tokens, sampling.min_tokens, frozenset(stops), second)
        with self.lock:
            if not self.over.is_set():
                self.trails[request] = trail

    def watches(self, request: str) -> bool:
        return request in self.trails

    def add(self, request: str, piece) -> None:
        with self.lock:
            trail = self.trails.get(request)
            if trail is None:  # it was let go while this step ran
                return
            before = trail.nbytes
            trail.add(piece)
            self.waiting_bytes += trail.nbytes - before

    def finished(self, request: str) -> None:
        with self.lock:
            trail = self.trails.pop(request, None)
        if trail is not None:
            self.waiting.put(trail)

    # The threads' side

    def _work(self) -> None:
        while (trail := self.waiting.get()) is not None:
            held = trail.nbytes
            try:
                if self.over.is_set():
                    self._leave_out("lost")
                else:
                    self._deliver(trail)
            finally:
                with self.lock:
                    self.waiting_bytes -= held
            del trail  # else the text of the last request would stay until the next one ends

    def _deliver(self, trail: Trail) -> None:
        taken, senders = trail.finish(), self.senders
        reason = "lost" if not senders else "no_answer" if taken is None else self.sieve.refuse(taken)
        if reason is None:
            try:
                sample = self._sample(taken, trail.second)
                senders[self.sieve.share(taken, len(senders))].send(sample)
                with self.lock:
                    self.stats.sent += 1
                    self.stats.sent_tokens += sample.tokens
                    self.stats.sent_bytes += sample.nbytes
                    self.allowance.spend(sample.tokens)
                return
            except SampleError as error:
                reason = error.kind
            except (StreamTimeout, UserError):
                reason = "stream"
            except StreamError as error:  # for good
                reason = "stream"
                self._stop(str(error))
        self._leave_out(reason)

    def _watch(self, senders: list[Sender]) -> None:
        """Stop when a trainer rank has been away for too long, whether or not there is anything to send to it. The senders are
        closed here, where it keeps no engine waiting."""
        heard = [time.monotonic()] * len(senders)
        while not self.over.wait(min(self.settings.heartbeat_s, self.settings.max_age_s / 4)):
            now = time.monotonic()
            heard = [now if sender.stats().connected else at for sender, at in zip(senders, heard)]
            away = [sender.endpoint for sender, at in zip(senders, heard) if now - at >= self.settings.max_age_s]
            if away:
                self._stop(f"no trainer has been at {', '.join(away)} for {self.settings.max_age_s:g} s")
        for sender in senders:
            sender.close()

    def _stop(self, reason: str | None = None) -> None:
        """Capture nothing more and keep nothing. What waits is counted as lost. `reason`: to be logged."""
        with self.lock:
            if self.over.is_set():
                return
            self.over.set()
            self.waiting_bytes -= sum(trail.nbytes for trail in self.trails.values())
            self.stats.left_out["lost"] += len(self.trails)
            self.trails.clear()
            self.senders, self.receivers = [], []
        if reason is not None:
            log.warning("served requests are captured no more: %s", reason)

    def _leave_out(self, reason: str) -> None:
        with self.lock:
            self.stats.left_out[reason] += 1

    def _sample(self, taken: Taken, second: bool) -> Sample:
        kind = SECOND_ANSWER if second else FIRST_ANSWER
        return Sample(id=f"{kind}{uuid.uuid4().hex}", attempt=1, ordinal=int(time.time() * 1000), purpose="traffic",
                      fingerprint=self.settings.fingerprint, layer_ids=self.settings.layer_ids, token_ids=taken.token_ids,
                      mask=taken.mask, aux=taken.aux, last=taken.last)

    def _sender(self, endpoint: str, keys: SenderKeys | None) -> Sender:
        settings = self.settings
        return Sender(endpoint, settings.identity, settings.budget_bytes, keys, settings.heartbeat_s, settings.wait_s,
                      settings.shared_memory)

    def values(self) -> dict:
        """`TrafficStats.values()` with {waiting_bytes, receivers: endpoints, refused: kinds of reasons, senders}."""
        with self.lock:
            refused = {refusal.reason.partition(":")[0] for sender in self.senders for refusal in list(sender.refusals)}
            return self.stats.values() | {
                "waiting_bytes": self.waiting_bytes, "receivers": [endpoint for endpoint, _ in self.receivers],
                "refused": sorted(refused), "senders": [asdict(sender.stats()) for sender in self.senders]}

    def close(self) -> None:
        """Stop; what has not been sent is let go and counted. Waits for its threads, but not for ever: an engine calls it."""
        self._stop()
        self.waiting.put(None)
        for thread in (self.thread, self.watch):
            thread.join(CLOSE_WAIT_S)
