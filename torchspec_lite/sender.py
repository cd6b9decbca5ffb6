"""A target's end of the stream: keeps every sample until the receiver has it, and holds its caller back."""

import os
import secrets
import threading
import time
from collections import deque
from itertools import count

import zmq

from torchspec_lite import control
from torchspec_lite.dealer import open_dealer
from torchspec_lite.errors import UserError
from torchspec_lite.freed_memory import FreedMemory
from torchspec_lite.keys import SenderKeys
from torchspec_lite.outgoing import OutgoingSample
from torchspec_lite.peer import (SILENT_HEARTBEATS, Rate, StreamError, StreamTimeout, Wakeup, connection_events, drain,
                                 joined, send_now)
from torchspec_lite.sample import Sample
from torchspec_lite.shared_slots import SharedSlots, Slot, host_identity, slot_bytes
from torchspec_lite.stream_stats import Refusal, SenderStats
from torchspec_lite.wire import VERSION, Encoded, WireError, encode

MAX_OPEN_WANTS = 1024
BUSY_SAMPLES = 4  # asked for or on their way, beyond which a new one is told with the next answer
BUSY_S = 0.005  # after a word of the receiver, in which its next one is waited for before a new sample is told
BACKOFF_S = (0.02, 1.0)  # first and longest pause before a new connection


class Sender:
    """Streams samples to one receiver. One thread of the caller may send; a thread of its own does the talking.

    `budget_bytes` bounds the samples that wait here, shared memory included. Samples are resent after a reconnection
    until the receiver acknowledges them; a receiver drops what it has by (id, attempt). Without shared memory the
    sample's tensors are sent from where they are: do not change them after `send`.
    """

    def __init__(self, endpoint: str, identity: str, budget_bytes: int, keys: SenderKeys | None = None,
                 heartbeat_s: float = 2.0, wait_s: float = 300.0, shared_memory: bool = True):
        self.endpoint = endpoint
        self.identity = identity
        self.budget_bytes = budget_bytes
        self.refusals: deque[Refusal] = deque(maxlen=4096)  # popleft to take them
        self._keys = keys
        self._heartbeat_s = heartbeat_s
        self._wait_s = wait_s
        self._session = secrets.token_hex(8)
        self._slots = SharedSlots(budget_bytes) if shared_memory else None
        self._lock = threading.Condition()
        self._items: dict[int, OutgoingSample] = {}
        self._new: deque[OutgoingSample] = deque()
        self._open_wants = 0
        self._underway = 0  # asked for or sent, and not acknowledged
        self._heard = 0.0
        self._seqs = count(1)
        self._memory_bytes = 0
        self._receiver_session: str | None = None
        self._connected = False
        self._shared = False
        self._problem = "no answer yet"
        self._error: StreamError | None = None
        self._closing = False
        self._counts = {"sent": 0, "sent_bytes": 0, "resent": 0, "refused": 0}
        self._blocked_s = 0.0
        self._rate = Rate()
        self._freed = FreedMemory(budget_bytes // 16)
        self._wakeup = Wakeup()
        self._context = zmq.Context()
        self._socket: zmq.Socket | None = None
        self._monitor: zmq.Socket | None = None
        self._epoch = 0
        self._backoff = BACKOFF_S[0]
        self._thread = threading.Thread(target=self._run, name=f"sender {identity}", daemon=True)
        self._thread.start()

    def send(self, sample: Sample) -> None:
        """Queue a sample; returns when it lies within the budget.

        Raises SampleError when the sample is not sound, StreamTimeout after `wait_s` without room, StreamError when
        the receiver turned this sender away, UserError when the sample is larger than the whole budget.
        """
        encoded = encode(sample)
        lengths = tuple(len(frame) for frame in encoded.frames)
        if slot_bytes(lengths) > self.budget_bytes:
            raise UserError(f"stream.sender_budget_mib: sample {sample.id} takes {encoded.nbytes} bytes, the sender's "
                            f"budget is {self.budget_bytes}; raise it or lower data.max_length")
        slot = self._reserve(encoded, lengths)
        if slot is None:
            encoded.seal()
            frames = encoded.frames
        else:
            frames = self._slots.views(slot, lengths)
            encoded.copy_into(frames)
        with self._lock:
            seq = next(self._seqs)
            self._items[seq] = item = OutgoingSample(seq, sample.id, sample.attempt, sample.ordinal, encoded.nbytes,
                                                     frames, lengths, slot_bytes(lengths), slot)
            self._new.append(item)
            at_rest = self._underway < BUSY_SAMPLES or time.monotonic() > self._heard + BUSY_S
        if at_rest:  # else the thread wakes by itself: to wake it costs about as much as to encode a sample
            self._wakeup.set()

    def flush(self, timeout: float) -> None:
        """Wait until the receiver has acknowledged or refused everything. Raises StreamTimeout."""
        with self._lock:
            if not self._lock.wait_for(lambda: self._error or not self._unacknowledged(), timeout):
                raise StreamTimeout(f"{self.identity} waited {timeout:g} s for {self.endpoint} to acknowledge "
                                    f"{self._unacknowledged()} samples: {self._waiting_for()}")
            self._raise_error()

    def close(self) -> None:
        """Stop. What was not acknowledged is dropped; samples in shared memory stay readable for the receiver."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
            self._lock.notify_all()
        self._wakeup.set()
        if joined(self._thread):
            self._wakeup.close()
        if self._slots:
            self._slots.close()

    def stats(self) -> SenderStats:
        with self._lock:
            items = list(self._items.values())
            unsent = [item for item in items if item.state in ("new", "wanted")]
            return SenderStats(
                self.endpoint, self._connected, self._shared, len(unsent), sum(item.nbytes for item in unsent),
                self._unacknowledged(), sum(item.state == "handed" for item in items), self._memory_bytes,
                self.budget_bytes, self._counts["sent"], self._counts["sent_bytes"], self._counts["resent"],
                self._counts["refused"], self._rate.per_second(), self._blocked_s, self._waiting_for())

    # The caller's side

    def _reserve(self, encoded: Encoded, lengths: tuple[int, ...]) -> Slot | None:
        """Wait for the receiver's first answer and for room. A slot, or None when frames go over the socket."""
        started, need = time.monotonic(), slot_bytes(lengths)
        slot: list[Slot] = []

        def ready() -> bool:
            if self._error or self._closing:
                return True
            if self._receiver_session is None or self._memory_bytes + need > self.budget_bytes:
                return False
            found = self._slots.allocate(need) if self._shared else None
            if found:
                slot.append(found)
            return found is not None or not self._shared

        with self._lock:
            had_room = self._lock.wait_for(ready, self._wait_s)
            self._blocked_s += time.monotonic() - started
            self._raise_error()
            if self._closing:
                raise StreamError(f"{self.identity} is closed")
            if not had_room:
                raise StreamTimeout(f"{self.identity} waited {self._wait_s:g} s for room to send {encoded.nbytes} "
                                    f"bytes to {self.endpoint}: {self._waiting_for()}")
            self._memory_bytes += need
        return slot[0] if slot else None

    def _unacknowledged(self) -> int:
        return sum(item.state != "handed" for item in self._items.values())

    def _waiting_for(self) -> str:
        if not self._connected:
            return f"{self.identity} waits for {self.endpoint} to answer ({self._problem})"
        states = [item.state for item in self._items.values()]
        if "wanted" in states or "new" in states:
            return f"{self.identity} waits for credit from {self.endpoint}: its trainer holds its whole budget"
        if "sent" in states:
            return f"{self.identity} waits for {self.endpoint} to acknowledge {states.count('sent')} samples"
        if states:
            return f"{self.identity} waits for the trainer at {self.endpoint} to release {len(states)} samples"
        return f"{self.endpoint} waits for {self.identity}: nothing to send"

    def _raise_error(self) -> None:
        if self._error:
            raise self._error

    # The thread's side

    def _run(self) -> None:
        try:
            self._connect("")
            while not self._closing:
                self._step()
            if self._connected:
                self._say(control.Bye("closed"))
        except WireError as error:
            self._fail(f"{self.identity} and {self.endpoint} do not understand each other: {error}")
        except Exception as error:
            self._fail(f"{self.identity}: the sender's thread failed: {error!r}")
            raise
        finally:
            self._disconnect(linger=200)
            self._context.term()

    def _fail(self, message: str) -> None:
        with self._lock:
            self._error = StreamError(message)
            self._connected = False
            self._lock.notify_all()

    def _connect(self, problem: str) -> None:
        """Start anew with a fresh socket, so that nothing queued for an old connection can arrive later."""
        self._disconnect(linger=0)
        with self._lock:
            self._connected = False
            self._problem = problem or self._problem
        self._epoch += 1
        socket = open_dealer(self._context, self._keys, self._heartbeat_s)
        self._monitor = socket.get_monitor_socket()
        self._poller = zmq.Poller()
        for source in (socket, self._monitor, self._wakeup.fd):
            self._poller.register(source, zmq.POLLIN)
        self._socket = socket
        self._handshaken = False
        self._reconnect_at: float | None = None
        self._heard = self._ping_at = time.monotonic()
        socket.connect(self.endpoint)

    def _disconnect(self, linger: int) -> None:
        if self._socket:
            self._socket.disable_monitor()
            self._monitor.close(linger=0)
            self._socket.close(linger=linger)
            self._socket = None

    def _reconnect(self, problem: str) -> None:
        """Make a new connection, after a pause that grows while none succeeds."""
        with self._lock:
            self._connected = False
            self._problem = problem
        self._handshaken = False
        self._reconnect_at = time.monotonic() + self._backoff
        self._backoff = min(2 * self._backoff, BACKOFF_S[1])

    def _step(self) -> None:
        now = time.monotonic()
        silent_at = self._heard + SILENT_HEARTBEATS * self._heartbeat_s
        if self._reconnect_at is not None and now >= self._reconnect_at:
            self._connect("")
            return
        if self._handshaken and now >= silent_at:
            self._reconnect(f"silent for {now - self._heard:.1f} s")
            return
        if self._connected and now >= self._ping_at:
            self._say(control.Ping())
            self._ping_at = now + self._heartbeat_s
        due = [self._reconnect_at] if self._reconnect_at is not None else [silent_at] * self._handshaken
        due += [self._ping_at] * self._connected
        due += [self._heard + BUSY_S] * (now < self._heard + BUSY_S)
        timeout = max(0.0, min(due, default=now + self._heartbeat_s) - now)
        ready = {source for source, _ in self._poller.poll(int(timeout * 1000) + 1)}
        if self._wakeup.fd in ready:
            self._wakeup.clear()
        if self._monitor in ready:
            for event in connection_events(self._monitor):
                self._on_connection(event["event"])
        if self._socket in ready and self._reconnect_at is None:
            for message in drain(self._socket):
                self._heard = time.monotonic()
                self._on_message(control.unpack(message[0].bytes) if len(message) == 1 else None)
        if self._connected:
            self._send_wants()
        self._freed.give_back()

    def _on_connection(self, event: int) -> None:
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._handshaken = True
            self._heard = time.monotonic()
            slots = self._slots
            self._say(control.Hello(
                VERSION, self.identity, self._session, self._epoch, host_identity() if slots else "", os.getpid(),
                slots.fd if slots else 0, slots.size if slots else 0, slots.nonce.hex() if slots else ""))
        elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            self._fail(f"{self.endpoint} refused {self.identity}: its key is not one of this run's")
        elif event in (zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL):
            self._problem = "the handshake fails: is encryption on at one end only, or its key another run's?"
        elif event == zmq.EVENT_DISCONNECTED and self._handshaken:
            self._reconnect("the connection broke")

    def _on_message(self, message) -> None:
        with self._lock:
            match message:
                case control.Welcome():
                    self._on_welcome(message)
                case control.Grant():
                    for seq in message.seqs:
                        self._transfer(self._items.get(seq))
                case control.Ack():
                    for seq in message.seqs:
                        self._on_ack(self._items.get(seq))
                case control.Free():
                    for seq in message.seqs:
                        self._drop(self._items.get(seq))
                case control.Refuse():
                    self._on_refuse(self._items.get(message.seq), message.reason)
                case control.Resync():
                    self._reconnect("the receiver asked to start anew")
                case control.Bye():
                    self._reconnect(f"the receiver left: {message.reason}")
                case control.Banned():
                    self._error = StreamError(f"{self.endpoint} turned {self.identity} away: {message.reason}")
                case control.Ping():
                    pass
                case _:
                    raise WireError("control", f"{self.endpoint} sent what only a sender says")
            if not isinstance(message, control.Grant | control.Ping):  # they make no room
                self._lock.notify_all()

    def _on_welcome(self, message: control.Welcome) -> None:
        held = set(message.held) if message.session == self._receiver_session else set()
        for item in list(self._items.values()):
            if item.state == "handed" and item.seq not in held:
                self._drop(item)
            elif item.state != "handed":
                item.state = "new"
        self._new = deque(item for item in self._items.values() if item.state == "new")
        self._open_wants = self._underway = 0
        self._receiver_session = message.session
        self._shared = message.shared
        self._connected = True
        self._backoff = BACKOFF_S[0]

    def _transfer(self, item: OutgoingSample | None) -> None:
        if item is None or item.state != "wanted":
            return
        self._open_wants -= 1
        item.by_handle = False
        item.state = "sent"  # if there is no connection just now, the next Welcome makes it new again
        if self._say(control.Data(item.seq), item.frames):
            self._counts["resent"] += item.sends > 0
            item.sends += 1

    def _on_ack(self, item: OutgoingSample | None) -> None:
        if item is None or item.state == "handed":
            return
        self._open_wants -= item.state == "wanted"  # the receiver had it before this connection
        self._underway -= item.state in ("wanted", "sent")
        item.state = "acknowledged"
        self._counts["sent"] += 1
        self._counts["sent_bytes"] += item.nbytes
        self._rate.add(item.nbytes)
        if item.by_handle:
            item.state = "handed"
        else:
            self._drop(item)

    def _on_refuse(self, item: OutgoingSample | None, reason: str) -> None:
        if item is not None:
            self._counts["refused"] += 1
            self.refusals.append(Refusal(item.id, item.attempt, reason))
            self._drop(item)

    def _drop(self, item: OutgoingSample | None) -> None:
        if item is None:
            return
        self._open_wants -= item.state == "wanted"
        self._underway -= item.state in ("wanted", "sent")
        del self._items[item.seq]
        self._memory_bytes -= item.memory
        if item.slot:
            self._slots.free(item.slot)
        else:
            self._freed.add(item.memory)

    def _send_wants(self) -> None:
        with self._lock:
            while self._new and self._open_wants < MAX_OPEN_WANTS:
                item = self._new[0]
                item.by_handle = self._shared and item.slot is not None
                place = (item.slot.offset, item.lengths) if item.by_handle else ()
                if not self._say(control.Want(item.seq, item.id, item.attempt, item.ordinal, item.nbytes, *place)):
                    return
                if item.by_handle:
                    self._counts["resent"] += item.sends > 0
                    item.sends += 1
                self._new.popleft()
                item.state = "wanted"
                self._open_wants += 1
                self._underway += 1

    def _say(self, message, frames: list = ()) -> bool:
        """Send without waiting; False when there is no connection just now."""
        try:
            send_now(self._socket, [control.pack(message), *frames[:2]], frames[2:])
        except zmq.Again:
            return False
        return True
