"""vLLM worker extension: states of served requests go to the trainers, as the engine computes them anyway.

`workers.tap` hands over what each engine step computes for sampled requests. When one ends, a thread of its own makes a
sample of it and sends it; the engine never waits for that: while more than `budget_bytes` wait, further requests are not
captured, and counted.
"""

import queue
import random
import threading
import time
import uuid
from dataclasses import asdict
from pathlib import Path

from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

from torchspec_lite.errors import UserError
from torchspec_lite.keys import load_keys
from torchspec_lite.sample import Sample, SampleError
from torchspec_lite.stream import Sender, StreamError
from torchspec_lite.target import describe
from torchspec_lite.traffic import FIRST_ANSWER, SECOND_ANSWER, Allowance, Sieve, Taken, TrafficStats, Trail
from workers.capture_settings import CaptureSettings
from workers.tap import SETTING, prepared

MARK = "torchspec_lite_capture"
"""In a request's `extra_args`: true asks for it to be captured, false forbids it; without it `fraction` decides."""
SECOND = "second"
"""The mark of a second answer (`workers.second_answers`), which is captured too."""
NO = frozenset({"false", "0", "no", "off"})
CLOSE_WAIT_S = 10.0


class ServingCapture:
    """Methods for `collective_rpc`; all ranks take the tap, the first one has the senders."""

    capture_courier: "Courier | None" = None

    def capture_on(self, settings: dict, receivers: list[tuple[str, str | None]]) -> str | None:
        """Capture for these receivers, (endpoint, key file) of each trainer rank, from the next request on.

        Called again it goes on with the new ones; samples that waited for the old ones are lost, and counted. Returns the
        fingerprint that samples bear; None on other ranks than the first.
        """
        if not prepared(self.vllm_config):
            raise RuntimeError(f"this engine was not started for capture: its additional_config lacks {SETTING}")
        stats = self.capture_off()
        if get_tensor_model_parallel_rank() != 0:
            return None
        fingerprint = describe(self.model_config.model).fingerprint
        settings = CaptureSettings(**settings | {"layer_ids": tuple(settings["layer_ids"])})
        self.capture_courier = Courier(settings, fingerprint, receivers, stats or TrafficStats())
        self.model_runner.capture_tap.watcher = self.capture_courier
        return fingerprint

    def capture_off(self) -> TrafficStats | None:
        """Stop capturing, let go of all that waits; the counts so far."""
        if self.capture_courier is None:
            return None
        courier, self.capture_courier, self.model_runner.capture_tap.watcher = self.capture_courier, None, None
        courier.close()
        return courier.stats

    def capture_stats(self) -> dict | None:
        """`TrafficStats.values()` with {waiting_bytes, receivers}; None while nothing is captured, and on other ranks."""
        courier = self.capture_courier
        return None if courier is None else courier.values()


class Courier:
    """Watches sampled requests, makes samples of those that end and sends them, shared out among the trainer ranks."""

    def __init__(self, settings: CaptureSettings, fingerprint: str, receivers: list[tuple[str, str | None]],
                 stats: TrafficStats):
        self.settings, self.fingerprint, self.stats = settings, fingerprint, stats
        self.receivers = receivers
        seed = random.SystemRandom().getrandbits(64)
        self.random, self.sieve = random.Random(seed), Sieve(settings.prefer_low, seed)
        self.allowance = Allowance(settings.max_tokens_per_s)
        self.trails: dict[str, Trail] = {}
        self.waiting: queue.SimpleQueue[Trail | None] = queue.SimpleQueue()  # bounded in bytes by `started`
        self.waiting_bytes = 0
        self.lock = threading.Lock()
        self.closing = False
        self.senders = [self._sender(*receiver) for receiver in receivers]
        self.thread = threading.Thread(target=self._work, name="capture courier", daemon=True)
        self.thread.start()

    # The engine's side: quick, and never waits

    def started(self, request: str, prompt: list[int] | None, sampling) -> None:
        if request in self.trails or prompt is None or sampling is None:
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
        self.trails[request] = Trail(len(prompt), self.settings.longest, sampling.max_tokens, sampling.min_tokens,
                                     frozenset(stops), second)

    def watches(self, request: str) -> bool:
        return request in self.trails

    def add(self, request: str, piece) -> None:
        trail = self.trails[request]
        before = trail.nbytes
        trail.add(piece)
        with self.lock:
            self.waiting_bytes += trail.nbytes - before

    def finished(self, request: str) -> None:
        trail = self.trails.pop(request, None)
        if trail is not None:
            self.waiting.put(trail)

    # The thread's side

    def _work(self) -> None:
        while (trail := self.waiting.get()) is not None:
            held = trail.nbytes
            try:
                if self.closing:
                    self._leave_out("lost")
                else:
                    self._deliver(trail)
            finally:
                with self.lock:
                    self.waiting_bytes -= held

    def _deliver(self, trail: Trail) -> None:
        taken = trail.finish()
        reason = "no_answer" if taken is None else self.sieve.refuse(taken)
        if reason is None:
            try:
                sample = self._sample(taken, trail.second)
                self.senders[self.sieve.share(taken, len(self.senders))].send(sample)
                with self.lock:
                    self.stats.sent += 1
                    self.stats.sent_tokens += sample.tokens
                    self.stats.sent_bytes += sample.nbytes
                    self.allowance.spend(sample.tokens)
                return
            except SampleError as error:
                reason = error.kind
            except (StreamError, UserError):
                reason = "stream"
        self._leave_out(reason)

    def _leave_out(self, reason: str, count: int = 1) -> None:
        with self.lock:
            self.stats.left_out[reason] += count

    def _sample(self, taken: Taken, second: bool) -> Sample:
        kind = SECOND_ANSWER if second else FIRST_ANSWER
        return Sample(id=f"{kind}{uuid.uuid4().hex}", attempt=1, ordinal=int(time.time() * 1000), purpose="traffic",
                      fingerprint=self.fingerprint, layer_ids=self.settings.layer_ids, token_ids=taken.token_ids,
                      mask=taken.mask, aux=taken.aux, last=taken.last)

    def _sender(self, endpoint: str, key_file: str | None) -> Sender:
        settings = self.settings
        keys = None if key_file is None else load_keys(Path(key_file))
        return Sender(endpoint, settings.identity, settings.budget_bytes, keys, settings.heartbeat_s, settings.wait_s,
                      settings.shared_memory)

    def values(self) -> dict:
        with self.lock:
            refused = {refusal.reason.partition(":")[0] for sender in self.senders for refusal in list(sender.refusals)}
            return self.stats.values() | {
                "waiting_bytes": self.waiting_bytes, "receivers": [endpoint for endpoint, _ in self.receivers],
                "refused": sorted(refused), "senders": [asdict(sender.stats()) for sender in self.senders]}

    def close(self) -> None:
        """Stop; what has not been sent is let go and counted."""
        self.closing = True
        for sender in self.senders:
            sender.close()
        self.waiting.put(None)
        self.thread.join(CLOSE_WAIT_S)
        self._leave_out("lost", len(self.trails))
        self.trails.clear()
