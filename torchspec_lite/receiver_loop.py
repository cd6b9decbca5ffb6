"""The thread of a trainer's end of the stream: gives credit, checks what comes, and says what it took."""

import secrets
import threading
import time
from collections import deque
from collections.abc import Callable

import zmq

from torchspec_lite import control
from torchspec_lite.admission import Recent, announced_sample, length_problem, version_problem
from torchspec_lite.connections import WATCH_S, Connections, descriptor, remote_of, shut_down, throw_away
from torchspec_lite.credits import Credits
from torchspec_lite.errors import UserError
from torchspec_lite.freed_memory import FreedMemory
from torchspec_lite.keys import ReceiverKeys, zap_reply
from torchspec_lite.known_sender import HeldSample, KnownSender
from torchspec_lite.peer import SILENT_HEARTBEATS, Rate, StreamError, Wakeup, drain, send_now
from torchspec_lite.router import bound_endpoint, open_router
from torchspec_lite.sample import Expectation, Sample, SampleError
from torchspec_lite.shared_slots import attach, host_identity, layout, private_slots, slot_bytes
from torchspec_lite.stream_stats import Event
from torchspec_lite.wire import WireError

MAX_SENDERS = 1024
MAX_SAMPLES = control.MAX_LIST
REMEMBERED = 65536  # (id, attempt) of samples taken, to know one that comes again
MAX_EVENTS = 4096  # unread events beyond which no credit is given
ROUND_BYTES = 8 * 2**20  # of samples, after which those that came are acknowledged and the socket is looked at again


class ReceiverLoop:
    """The thread that talks to senders. `Receiver` adds what its owner calls; `_lock` guards what both touch."""

    def __init__(self, bind_host: str, budget_bytes: int, max_samples: int, expect: Expectation,
                 keys: ReceiverKeys | None = None, heartbeat_s: float = 2.0, shared_memory: bool = True, port: int = 0,
                 unencrypted: bool = False, on_event: Callable[[Event], None] | None = None):
        if not 0 < max_samples <= MAX_SAMPLES:
            raise UserError(f"stream.max_samples must be from 1 to {MAX_SAMPLES}, found {max_samples}")
        self._expect = expect
        self._keys = keys
        self._heartbeat_s = heartbeat_s
        self._shared_memory = shared_memory
        self._on_event = on_event
        self._session = secrets.token_hex(8)
        on_its_way = min(budget_bytes // 16, 4 * expect.max_sample_bytes())  # read by ZeroMQ, not yet by us
        self._credits = Credits(budget_bytes - on_its_way, max_samples)
        self._may_leave = on_its_way // 2  # bytes of held samples that may stay in ZeroMQ's memory
        self._left_bytes = 0
        self._lock = threading.Condition()
        self._freed_memory = FreedMemory(budget_bytes // 64)
        self._pool = private_slots(self._credits.budget_bytes)
        self._ready: deque[Sample] = deque()
        self._held: dict[Sample, HeldSample] = {}
        self._readable: deque[tuple[KnownSender, int]] = deque()  # (sender, seq) with credit, in shared memory
        self._arrived: dict[bytes, list[int]] = {}  # by address: seqs to acknowledge after this round
        self._round_bytes = 0
        self._freed: deque[tuple[str, int]] = deque()  # (session, seq) to tell; bounded by max_samples
        self._events: deque[Event] = deque()
        self._taken = Recent(REMEMBERED)  # (id, attempt): (session, seq)
        self._peers: dict[bytes, KnownSender] = {}  # by address
        self._sessions: dict[str, KnownSender] = {}
        self._banned = Recent(MAX_SENDERS)  # session: reason
        self._counts = {"received": 0, "bytes": 0, "rejected": 0, "duplicate": 0}
        self._rate = Rate()
        self._error: StreamError | None = None
        self._closing = False
        self._wakeup = Wakeup()
        self._context = zmq.Context()
        try:
            self._socket, self._zap = open_router(
                self._context, bind_host, port, keys, unencrypted,
                max(expect.max_sample_bytes(), control.MAX_CONTROL), heartbeat_s)
        except UserError:
            self._context.destroy(linger=0)
            raise
        self.endpoint = bound_endpoint(self._socket)
        self._connections = Connections(self._socket)
        self._thread = threading.Thread(target=self._run, name=f"receiver {self.endpoint}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        poller = zmq.Poller()
        for source in filter(None, (self._socket, self._zap, self._connections.monitor, self._wakeup.fd)):
            poller.register(source, zmq.POLLIN)
        try:
            self._ping_at = self._watch_at = time.monotonic()
            while not self._closing:
                self._step(poller)
            for peer in list(self._peers.values()):
                self._say(peer.address, control.Bye("closed"))
        except Exception as error:
            with self._lock:
                self._error = StreamError(f"receiver {self.endpoint}: its thread failed: {error!r}")
                self._lock.notify_all()
            raise
        finally:
            self._context.destroy(linger=200)

    def _step(self, poller: zmq.Poller) -> None:
        due = min(self._ping_at, self._watch_at) if self._connections else self._ping_at
        timeout = int(max(0.0, due - time.monotonic()) * 1000) + 1
        ready = {source for source, _ in poller.poll(0 if self._readable else timeout)}
        self._round_bytes = 0
        if self._wakeup.fd in ready:
            self._wakeup.clear()
        if self._zap and self._zap in ready:
            for request in drain(self._zap, limit=1):
                self._zap.send_multipart(zap_reply([frame.bytes for frame in request], self._keys.allowed))
        if self._socket in ready:
            for message in drain(self._socket):
                self._on_message(message)
                if self._round_bytes > ROUND_BYTES:
                    break
        now = time.monotonic()
        if now >= self._ping_at:
            self._beat(now)
        if now >= self._watch_at or self._connections.monitor in ready:
            self._watch(now)
        self._give_credit()
        while self._readable and self._round_bytes <= ROUND_BYTES:
            self._read(*self._readable.popleft())
        self._acknowledge()
        self._tell_freed()
        self._freed_memory.give_back()

    def _watch(self, now: float) -> None:
        """Cut off whoever sends a message that does not end."""
        self._watch_at = now + WATCH_S
        with self._lock:
            credit = {peer.number: self._credits.account(peer.session).granted_bytes for peer in self._peers.values()}
        for number in self._connections.endless(credit):
            throw_away(number)
            peer = next((peer for peer in self._peers.values() if peer.number == number), None)
            self._ban(peer, peer.address if peer else b"", "flood: a message without an end", number)

    def _beat(self, now: float) -> None:
        for peer in list(self._peers.values()):
            if now - peer.heard > SILENT_HEARTBEATS * self._heartbeat_s:
                self._lose(peer, f"silent for {now - peer.heard:.1f} s")
                self._cut(peer.number)  # else a connection to a host that is gone would stay
            else:
                self._say(peer.address, control.Ping())
        self._ping_at = now + self._heartbeat_s

    def _acknowledge(self) -> None:
        """Goes before `_tell_freed`: a sender must hear of a sample that it was taken before it hears that it left.

        The owner, too, is woken once a round: each time costs as much as taking a sample.
        """
        arrived, self._arrived = self._arrived, {}
        if arrived:
            with self._lock:
                self._lock.notify_all()
        for address, seqs in arrived.items():
            self._say(address, control.Ack(tuple(seqs)))

    def _tell_freed(self) -> None:
        with self._lock:
            by_address: dict[bytes, list[int]] = {}
            while self._freed:
                session, seq = self._freed.popleft()
                if session in self._sessions:  # a sender that reconnects learns it from Welcome
                    by_address.setdefault(self._sessions[session].address, []).append(seq)
        for address, seqs in by_address.items():
            self._say(address, control.Free(tuple(seqs)))

    def _give_credit(self) -> None:
        with self._lock:
            given = self._credits.grant() if len(self._events) < MAX_EVENTS else {}
            grants = [(self._sessions[session], seqs) for session, seqs in given.items()]
        for peer, seqs in grants:
            self._readable.extend((peer, seq) for seq in seqs if peer.wants[seq].lengths)
            if to_send := tuple(seq for seq in seqs if not peer.wants[seq].lengths):
                self._say(peer.address, control.Grant(to_send))

    def _read(self, peer: KnownSender, seq: int) -> None:
        """Take a sample out of its sender's memory, if that sender still is there and has not sent it meanwhile."""
        if self._peers.get(peer.address) is not peer or seq not in peer.wants:
            return
        try:
            self._on_sample(peer, seq, peer.wants[seq].lengths)
        except WireError as error:
            self._ban(peer, peer.address, str(error), peer.number)

    def _on_message(self, message: list[zmq.Frame]) -> None:
        address = message[0].bytes
        peer = self._peers.get(address)
        self._connections.spoke(descriptor(message[-1]))
        try:
            request = control.unpack(message[1].buffer) if len(message) > 1 else None
            if isinstance(request, control.Hello) and len(message) == 2:
                self._on_hello(address, request, descriptor(message[1]))
            elif peer is None:
                self._on_stranger(address, request, message)
            else:
                peer.heard = time.monotonic()
                self._on_request(peer, request, [frame.buffer for frame in message[2:]])
        except WireError as error:
            self._freed_memory.add(sum(len(frame) for frame in message))
            self._ban(peer, address, str(error), descriptor(message[-1]))

    def _on_request(self, peer: KnownSender, request, frames: list[memoryview]) -> None:
        match request:
            case control.Data():
                self._on_sample(peer, request.seq, [frame.nbytes for frame in frames], frames)
                return
            case control.Want() if peer.memory is not None or not request.lengths:
                self._on_want(peer, request)
            case control.Bye():
                self._lose(peer, request.reason)
            case control.Ping():
                pass
            case _:
                raise WireError("control", "not what a sender says")
        if frames:
            raise WireError("control", "frames after a message that has none")

    def _on_stranger(self, address: bytes, request, message: list[zmq.Frame]) -> None:
        """A sender that was silent for too long and comes back starts anew; whoever sends samples is cut off."""
        self._say(address, control.Resync())
        if len(message) > 2:
            self._freed_memory.add(sum(len(frame) for frame in message))
            self._cut(descriptor(message[-1]))

    def _on_hello(self, address: bytes, hello: control.Hello, number: int) -> None:
        peer = self._peers.get(address)
        if peer and peer.session != hello.session:  # only the newer would be found when the connection ends
            raise WireError("control", f"{peer.name} began a second session on its connection")
        refusal = version_problem(hello) or self._banned.get(hello.session, "")
        if not refusal and len(self._peers) >= MAX_SENDERS and hello.session not in self._sessions:
            refusal = f"full: {MAX_SENDERS} senders are connected"
        if refusal:
            self._note(Event("banned", hello.name, refusal))
            self._say(address, control.Banned(refusal))
            return
        known = self._sessions.get(hello.session)
        if known and known.epoch >= hello.epoch:
            return
        memory = None
        if self._shared_memory and hello.size and hello.host == host_identity():
            memory = attach(hello.pid, hello.fd, hello.size, hello.nonce)
        with self._lock:
            if known:
                self._credits.forget(known.session)
                del self._peers[known.address]
            peer = KnownSender(address, hello.name, hello.session, hello.epoch, number, remote_of(number),
                               time.monotonic(), memory)
            self._peers[address] = self._sessions[hello.session] = peer
            held = tuple(held.seq for held in self._held.values()
                         if held.shared and held.session == hello.session)
        self._say(address, control.Welcome(self._session, memory is not None, held))
        self._note(Event("joined", hello.name, "reconnected" if known else "connected"))

    def _on_want(self, peer: KnownSender, want: control.Want) -> None:
        if want.seq in peer.wants:
            raise WireError("control", f"credit for {want.seq} was asked for twice")
        owner = self._taken.get((want.id, want.attempt))
        if owner == (peer.session, want.seq):  # its acknowledgement was lost
            self._say(peer.address, control.Ack((want.seq,)))
            with self._lock:
                still_held = any(owner == (held.session, held.seq) for held in self._held.values())
            if not still_held:
                self._say(peer.address, control.Free((want.seq,)))
        elif owner:
            self._refuse(peer, want, "duplicate: this attempt was received already")
        elif problem := length_problem(want, self._expect):
            self._refuse(peer, want, problem)
        else:
            with self._lock:
                problem = self._credits.want(peer.session, want.seq, want.ordinal, want.nbytes)
                peer.wants[want.seq] = want
            if problem:
                self._refuse(peer, want, problem)

    def _on_sample(self, peer: KnownSender, seq: int, lengths, frames: list[memoryview] | None = None) -> None:
        """Frames that came over the socket, or (None) that lie in the sender's memory."""
        nbytes, slot, shared = sum(lengths), None, frames is None
        with self._lock:
            granted = self._credits.take(peer.session, seq)
            # Out of ZeroMQ's allocations, which would fragment and outgrow the budget; but for the few samples that a
            # trainer takes as they come
            if not shared and granted == nbytes and self._left_bytes + nbytes > self._may_leave:
                slot = self._pool.allocate(slot_bytes(lengths))
        if granted is None:
            raise WireError("flood", f"{peer.name} sent a sample without credit")
        self._round_bytes += granted
        want = peer.wants[seq]
        try:
            if granted != nbytes:
                raise WireError("length", f"{nbytes} bytes, credit was asked for {granted}")
            if (want.id, want.attempt) in self._taken:
                raise WireError("duplicate", "this attempt was received already")
            into = self._pool.views(slot, lengths) if slot else None
            if shared:
                frames = layout(peer.memory, want.offset, lengths)
            sample = announced_sample(want, frames, into, self._expect)
        except (SampleError, ValueError) as error:
            with self._lock:
                self._credits.release(granted)
                if slot:
                    self._pool.free(slot)
            self._refuse(peer, want, str(error))
            return
        del peer.wants[seq]
        with self._lock:
            self._held[sample] = HeldSample(peer.session, seq, granted, slot, shared)
            self._left_bytes += 0 if slot or shared else nbytes
            self._ready.append(sample)
            self._counts["received"] += 1
            self._counts["bytes"] += nbytes
            self._rate.add(nbytes)
        peer.samples += 1
        peer.bytes += nbytes
        self._taken[want.id, want.attempt] = (peer.session, seq)
        self._arrived.setdefault(peer.address, []).append(seq)

    def _refuse(self, peer: KnownSender, want: control.Want, reason: str) -> None:
        if len(self._events) >= 2 * MAX_EVENTS:
            raise WireError("flood", f"{MAX_EVENTS} refusals that nobody read")
        kind = "duplicate" if reason.startswith("duplicate") else "rejected"
        self._counts[kind] += 1
        peer.wants.pop(want.seq, None)
        self._say(peer.address, control.Refuse(want.seq, reason))
        self._note(Event(kind, peer.name, reason, want.id, want.attempt))

    def _lose(self, peer: KnownSender, reason: str) -> None:
        if self._peers.pop(peer.address, None) is None:
            return
        with self._lock:
            self._sessions.pop(peer.session, None)
            self._credits.forget(peer.session)
        self._note(Event("lost", peer.name, reason))

    def _ban(self, peer: KnownSender | None, address: bytes, reason: str, number: int) -> None:
        self._say(address, control.Banned(reason))
        if peer:
            self._banned[peer.session] = reason
            self._lose(peer, reason)
        self._note(Event("banned", peer.name if peer else "a stranger", reason))
        self._cut(number)

    def _cut(self, number: int) -> None:
        """Shut a connection down, unless its number belongs to a sender's by now."""
        if all(peer.remote != remote_of(number) for peer in self._peers.values()):
            shut_down(number)

    def _note(self, event: Event) -> None:
        with self._lock:
            if len(self._events) < MAX_EVENTS or event.id:
                self._events.append(event)
        if self._on_event:
            self._on_event(event)

    def _say(self, address: bytes, message) -> None:
        try:
            send_now(self._socket, [address, control.pack(message)])
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            peer = self._peers.get(address)
            if peer:
                self._lose(peer, "its connection is gone" if error.errno == zmq.EHOSTUNREACH else "it does not read")
