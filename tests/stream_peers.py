"""Samples, peers here and in processes of their own, and a proxy that breaks connections: for the stream's tests."""

import multiprocessing
import socket
import threading
from dataclasses import replace

import torch

from torchspec_lite.sample import Expectation, Sample
from torchspec_lite.stream import Receiver, Sender
from torchspec_lite.wire import encode

LAYERS = (2, 5, 7)
HIDDEN = 64
EXPECT = Expectation("tiny@0", LAYERS, torch.bfloat16, HIDDEN, 4096)
LIMIT_S = 60  # of any single wait, on a busy machine
SPAWN = multiprocessing.get_context("spawn")


def make_sample(i: int = 0, tokens: int = 40, dtype: torch.dtype = torch.bfloat16) -> Sample:
    """A sample whose values follow from its number."""
    generator = torch.Generator().manual_seed(i)
    mask = torch.zeros(tokens, dtype=torch.uint8)
    mask[tokens // 2 :] = 1
    return Sample(
        f"s{i}", 0, i, "train", "tiny@0", LAYERS, torch.randint(0, 500, (tokens,), generator=generator).int(), mask,
        torch.randn(tokens - 1, len(LAYERS), HIDDEN, generator=generator).to(dtype),
        torch.randn(tokens - 1, HIDDEN, generator=generator).to(dtype))


def same(one: Sample, other: Sample) -> bool:
    labels = all(vars(one)[name] == vars(other)[name] for name in
                 ("id", "attempt", "ordinal", "purpose", "fingerprint", "layer_ids"))
    return labels and all(torch.equal(vars(one)[name], vars(other)[name]) and
                          vars(one)[name].dtype == vars(other)[name].dtype
                          for name in ("token_ids", "mask", "aux", "last"))


def receiver_of(closing, shared=False, budget=2**23, samples=256, heartbeat_s=1.0, **options) -> Receiver:
    return closing(Receiver("127.0.0.1", budget, samples, EXPECT, heartbeat_s=heartbeat_s, shared_memory=shared,
                            **options))


def sender_of(closing, endpoint, shared=False, budget=2**23, heartbeat_s=1.0, wait_s=LIMIT_S) -> Sender:
    return closing(Sender(endpoint, "target-0", budget, heartbeat_s=heartbeat_s, wait_s=wait_s, shared_memory=shared))


def room_for(samples: int) -> int:
    """A receiver's budget that takes so many samples and no more, beside its sixteenth for what is on its way."""
    return (samples * encode(make_sample(0)).nbytes + 100) * 16 // 15 + 1


def take(receiver: Receiver, count: int) -> list[int]:
    """Receive, compare with what was sent, release; the samples' numbers."""
    numbers = []
    for _ in range(count):
        sample = receiver.get(LIMIT_S)
        assert same(sample, replace(make_sample(sample.ordinal), attempt=sample.attempt))
        numbers.append(sample.ordinal)
        receiver.release(sample)
    return numbers


def until_empty(sender: Sender) -> None:
    with sender._lock:
        assert sender._lock.wait_for(lambda: sender._memory_bytes == 0 and not sender._items, LIMIT_S)
    assert sender._slots is None or sender._slots.free_bytes() == sender._slots.size - 64


class Notices:
    """Events of a receiver, awaited by kind."""

    def __init__(self):
        self._changed = threading.Condition()
        self.all = []

    def __call__(self, event):
        with self._changed:
            self.all.append(event)
            self._changed.notify_all()

    def wait(self, kind: str, count: int = 1):
        def found():
            return [event for event in self.all if event.kind == kind]

        with self._changed:
            assert self._changed.wait_for(lambda: len(found()) >= count, LIMIT_S), f"no {kind} in {self.all}"
            return found()[count - 1]


def sending_process(endpoint: str, numbers: range, attempt: int, shared: bool, heartbeat_s: float, pipe) -> None:
    """Send samples, tell how many were handed to the sender, and stay until told to leave."""
    torch.set_num_threads(1)
    sender = Sender(endpoint, f"attempt-{attempt}", 2**22, heartbeat_s=heartbeat_s, wait_s=60, shared_memory=shared)
    for i in numbers:
        sender.send(replace(make_sample(i), attempt=attempt))
        pipe.send(i)
    sender.flush(60)
    pipe.send("flushed")
    pipe.recv()
    sender.close()


def receiving_process(port: int, shared: bool, pipe) -> None:
    """Receive for ever; tells its endpoint, then every sample's number after checking its values."""
    torch.set_num_threads(1)
    receiver = Receiver("127.0.0.1", 2**20, 16, EXPECT, heartbeat_s=0.2, shared_memory=shared, port=port)
    pipe.send(receiver.endpoint)
    while True:
        sample = receiver.get(60)
        if not same(sample, make_sample(sample.ordinal)):
            raise AssertionError(f"{sample.id} holds other values than were sent")
        receiver.release(sample)
        pipe.send(sample.ordinal)


def start(function, *arguments):
    """A process and the pipe to it."""
    ours, theirs = SPAWN.Pipe()
    process = SPAWN.Process(target=function, args=(*arguments, theirs), daemon=True)
    process.start()
    theirs.close()
    return process, ours


class Proxy:
    """Passes TCP connections on to `endpoint`, and breaks them: `cut()` now, or each after some bytes."""

    def __init__(self, endpoint: str, cut_after: list[int] = ()):
        host, port = endpoint.removeprefix("tcp://").split(":")
        self._target = (host, int(port))
        self._cut_after = list(cut_after)  # bytes until connection 1, 2, … is cut; then none is
        self._server = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self._server.getsockname()[1]}"
        self.connections = 0
        self.frozen = threading.Event()  # set: pass nothing on, keep connections open
        self._open: list[socket.socket] = []
        self._closed = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                client, _ = self._server.accept()
                server = socket.create_connection(self._target)
            except OSError:
                continue
            self.connections += 1
            limit = self._cut_after.pop(0) if self._cut_after else None
            self._open += [client, server]
            threading.Thread(target=self._pass, args=(client, server, limit), daemon=True).start()
            threading.Thread(target=self._pass, args=(server, client, None), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket, limit: int | None) -> None:
        passed = 0
        try:
            while data := source.recv(16384):
                if limit is not None and passed + len(data) > limit:
                    sink.sendall(data[: limit - passed])
                    break
                if not self.frozen.is_set():
                    sink.sendall(data)
                passed += len(data)
        except OSError:
            pass
        for end in (source, sink):
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    def cut(self) -> None:
        for connection in self._open:
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    def close(self) -> None:
        self._closed.set()
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self.cut()
