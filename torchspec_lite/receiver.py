"""A trainer's end of the stream: gives credit, checks what comes, and never holds more than its budget."""

import time

from torchspec_lite.peer import StreamError, StreamTimeout, joined
from torchspec_lite.receiver_loop import ReceiverLoop
from torchspec_lite.sample import Sample
from torchspec_lite.stream_stats import Event, ReceiverStats, SenderView, receiver_waits_for


class Receiver(ReceiverLoop):
    """Takes samples from any number of senders. `get` and `release` are for one thread or several.

    Samples share memory with the stream: after `release` theirs may be overwritten, so `clone` what is to stay.
    `budget_bytes` bounds its memory for samples, a sixteenth at most being kept for what is on its way; `max_samples`
    bounds the samples granted and not released. A host that is not loopback needs `keys`
    unless `unencrypted` says that the network is trusted. Raises UserError for a host it must not or cannot bind.
    """

    def get(self, timeout: float) -> Sample:
        """The next sample, in order of arrival. Raises StreamTimeout saying who waits for whom; StreamError."""
        with self._lock:
            arrived = self._lock.wait_for(lambda: self._ready or self._error or self._closing, timeout)
            if self._ready:
                return self._ready.popleft()
            if self._error:
                raise self._error
            if not arrived:
                raise StreamTimeout(f"trainer at {self.endpoint} waited {timeout:g} s for a sample: "
                                    f"{self._waiting_for()}")
            raise StreamError(f"receiver {self.endpoint} is closed")

    def release(self, sample: Sample) -> None:
        """Give a sample's credit back. Its tensors must not be used afterwards. Raises KeyError on a second time."""
        with self._lock:
            held = self._held.pop(sample)
            self._credits.release(held.nbytes)
            if held.slot:
                self._pool.free(held.slot)
            elif held.shared:
                self._freed.append((held.session, held.seq))
            else:
                self._left_bytes -= held.nbytes
        self._wakeup.set()

    def events(self) -> list[Event]:
        """What happened since the last call. Left unread, 4,096 of them stop all credit."""
        with self._lock:
            events = list(self._events)
            self._events.clear()
        self._wakeup.set()
        return events

    def stats(self) -> ReceiverStats:
        now = time.monotonic()
        with self._lock:
            senders = [SenderView(peer.name, self._credits.account(peer.session), now - peer.heard,
                                  peer.memory is not None, peer.samples, peer.bytes)
                       for peer in self._peers.values()]
            return ReceiverStats(
                self.endpoint, len(self._ready), sum(self._held[sample].nbytes for sample in self._ready),
                self._credits.held_samples, self._credits.held_bytes, self._credits.granted_bytes,
                self._credits.budget_bytes, self._counts["received"], self._counts["bytes"], self._counts["rejected"],
                self._counts["duplicate"], self._rate.per_second(), senders, self._waiting_for())

    def close(self) -> None:
        """Stop and tell the senders. Samples already given out stay readable."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
            self._lock.notify_all()
        self._wakeup.set()
        if joined(self._thread):
            self._wakeup.close()

    def _waiting_for(self) -> str:
        wanted = sum(self._credits.account(peer.session).wanted_samples for peer in self._peers.values())
        return receiver_waits_for(self.endpoint, len(self._peers), len(self._ready), wanted,
                                  self._credits.held_samples)
