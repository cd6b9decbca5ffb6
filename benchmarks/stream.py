"""How fast samples move from a target to a trainer on one host, beside other ways of doing it, in one run.

`python -m benchmarks.stream --json` prints one JSON object. Every way moves the same samples between two processes;
the receiving one touches every page. Rounds of all ways are interleaved and the median is given, so that a busy
machine slows all of them alike. `stream_frames` and `stream_shared` are the product with its checks on (checksum,
NaN, credits, acknowledgements); the others check nothing. A ratio without a size in its name is that of the size
where it is lowest.

Mooncake's store over TCP is beside them where its package is installed: `pip install mooncake-transfer-engine-non-cuda`
and the system's `libibverbs1`. (The package without `-non-cuda` asks for libcuda and does not load without it.)
"""

import argparse
import json
import multiprocessing
import pickle
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
import zmq
from safetensors.torch import load_file, save_file

from benchmarks import mooncake_store
from benchmarks.machine import machine
from torchspec_lite.sample import Expectation, Sample
from torchspec_lite.stream import Receiver, Sender

SIZES = {"2.4MB": (512, 576), "67MB": (2048, 4096)}  # tokens, hidden size; 3 layers and the last, bf16
LAYERS = (2, 15, 27)
BUDGET = 256 * 2**20
LIMIT_S = 120.0
ENDS: list = []  # of this process, to close at its end


def make_sample(tokens: int, hidden: int) -> Sample:
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(tokens - 1, len(LAYERS) + 1, hidden, generator=generator).to(torch.bfloat16)
    return Sample("sample", 0, 0, "train", "benchmark@0", LAYERS, torch.zeros(tokens, dtype=torch.int32),
                  torch.ones(tokens, dtype=torch.uint8), states[:, :-1].contiguous(), states[:, -1].contiguous())


def touch(*buffers) -> int:
    """Read one byte of every page."""
    return sum(int(np.frombuffer(buffer, np.uint8)[::4096].sum()) for buffer in buffers)


def raw(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.view(torch.uint8).view(-1).numpy())


# One function for each way and end. A consumer gives (address, receive one sample); a producer gives send one sample.


def consume_raw_tcp(sample: Sample):
    server = socket.create_server(("127.0.0.1", 0))
    target = [memoryview(bytearray(sample.aux.nbytes)), memoryview(bytearray(sample.last.nbytes))]
    connections = []

    def receive():
        if not connections:
            connections.append(server.accept()[0])
        for buffer in target:
            done = 0
            while done < len(buffer):
                done += connections[0].recv_into(buffer[done:])
        touch(*target)

    return server.getsockname(), receive


def produce_raw_tcp(sample: Sample, address):
    connection = socket.create_connection(tuple(address))
    return lambda i: [connection.sendall(raw(tensor)) for tensor in (sample.aux, sample.last)]


def _pull():
    pull = zmq.Context.instance().socket(zmq.PULL)
    pull.rcvhwm = 4
    pull.bind("tcp://127.0.0.1:0")
    return pull, pull.last_endpoint.decode()


def _push(address: str):
    push = zmq.Context.instance().socket(zmq.PUSH)
    push.sndhwm = 4
    push.connect(address)
    return push


def consume_bare_zmq(sample: Sample):
    pull, address = _pull()
    return address, lambda: touch(*[frame.buffer for frame in pull.recv_multipart(copy=False)])


def produce_bare_zmq(sample: Sample, address):
    push = _push(address)
    return lambda i: push.send_multipart([raw(sample.aux), raw(sample.last)], copy=False)


def consume_pickle(sample: Sample):
    pull, address = _pull()

    def receive():
        aux, last = pickle.loads(pull.recv(copy=False).buffer)
        touch(raw(aux), raw(last))

    return address, receive


def produce_pickle(sample: Sample, address):
    push = _push(address)
    return lambda i: push.send(pickle.dumps((sample.aux, sample.last)), copy=False)


def consume_safetensors_file(sample: Sample):
    pull, address = _pull()

    def receive():
        path = Path(pull.recv_string())
        tensors = load_file(path)
        touch(*[raw(tensor) for tensor in tensors.values()])
        path.unlink()

    return address, receive


def produce_safetensors_file(sample: Sample, address):
    push = _push(address)
    folder = tempfile.TemporaryDirectory()

    def send(i):
        path = Path(folder.name) / f"{i}.safetensors"
        save_file({"aux": sample.aux, "last": sample.last}, path)
        push.send_string(str(path))

    return send


def _consume_stream(sample: Sample, shared_memory: bool):
    expect = Expectation(sample.fingerprint, LAYERS, torch.bfloat16, sample.last.shape[1], sample.tokens)
    receiver = Receiver("127.0.0.1", BUDGET, 256, expect, shared_memory=shared_memory)

    ENDS.append(receiver)

    def receive():
        got = receiver.get(LIMIT_S)
        touch(raw(got.aux), raw(got.last))
        receiver.release(got)

    return receiver.endpoint, receive


def _produce_stream(sample: Sample, address, shared_memory: bool):
    sender = Sender(address, "benchmark", BUDGET, shared_memory=shared_memory)
    ENDS.append(sender)
    return lambda i: sender.send(replace(sample, id=f"sample-{i}", ordinal=i))


def consume_stream_frames(sample: Sample):
    return _consume_stream(sample, False)


def produce_stream_frames(sample: Sample, address):
    return _produce_stream(sample, address, False)


def consume_stream_shared(sample: Sample):
    return _consume_stream(sample, True)


def produce_stream_shared(sample: Sample, address):
    return _produce_stream(sample, address, True)


def consume_mooncake(sample: Sample):
    consumer = mooncake_store.Consumer(sample.aux.nbytes + sample.last.nbytes, BUDGET)
    ENDS.append(consumer)
    return consumer.address, lambda: touch(consumer.receive())


def produce_mooncake(sample: Sample, address):
    producer = mooncake_store.Producer([raw(sample.aux), raw(sample.last)], BUDGET, address)
    ENDS.append(producer)
    return producer.send


WAYS: dict[str, tuple[Callable, Callable]] = {
    "raw_tcp": (consume_raw_tcp, produce_raw_tcp),
    "bare_zmq": (consume_bare_zmq, produce_bare_zmq),
    "stream_frames": (consume_stream_frames, produce_stream_frames),
    "stream_shared": (consume_stream_shared, produce_stream_shared),
    "safetensors_file": (consume_safetensors_file, produce_safetensors_file),
    "pickle": (consume_pickle, produce_pickle),
}
if find_spec("mooncake"):
    WAYS["mooncake"] = consume_mooncake, produce_mooncake


def _consumer(way: str, shape, pipe) -> None:
    torch.set_num_threads(1)
    address, receive = WAYS[way][0](make_sample(*shape))
    pipe.send(address)
    while count := pipe.recv():
        cpu = time.process_time()
        for _ in range(count):
            receive()
        pipe.send(time.process_time() - cpu)
    for end in ENDS:
        end.close()


def _producer(way: str, shape, address, pipe) -> None:
    torch.set_num_threads(1)
    send = WAYS[way][1](make_sample(*shape), address)
    pipe.send("ready")
    sent = 0
    while count := pipe.recv():
        cpu = time.process_time()
        for i in range(sent, sent + count):
            send(i)
        sent += count
        pipe.send(time.process_time() - cpu)
    for end in ENDS:
        end.close()


class Pair:
    """Two processes that move samples one way, when told."""

    def __init__(self, way: str, shape):
        context = multiprocessing.get_context("spawn")
        (self.into, theirs), (self.out, their_out) = context.Pipe(), context.Pipe()
        self.processes = [context.Process(target=_consumer, args=(way, shape, theirs), daemon=True)]
        self.processes[0].start()
        address = self._recv(self.into)
        self.processes.append(context.Process(target=_producer, args=(way, shape, address, their_out), daemon=True))
        self.processes[1].start()
        self._recv(self.out)

    def move(self, count: int) -> tuple[float, float]:
        """Seconds, and CPU seconds of both processes."""
        self.into.send(count)
        started = time.perf_counter()
        self.out.send(count)
        cpu = self._recv(self.into)
        return time.perf_counter() - started, cpu + self._recv(self.out)

    def close(self) -> None:
        self.into.send(0)
        self.out.send(0)
        for process in self.processes:
            process.join(LIMIT_S)

    @staticmethod
    def _recv(pipe):
        if not pipe.poll(LIMIT_S):
            raise TimeoutError("a benchmark process did not answer")
        return pipe.recv()


def memcpy(sample: Sample, count: int) -> tuple[float, float]:
    target = torch.empty_like(sample.aux).copy_(sample.aux)
    cpu, started = time.process_time(), time.perf_counter()
    for _ in range(count):
        target.copy_(sample.aux)
    scale = (sample.aux.nbytes + sample.last.nbytes) / sample.aux.nbytes
    return (time.perf_counter() - started) * scale, (time.process_time() - cpu) * scale


def ray_object_store(sample: Sample, count: int) -> tuple[float, float]:
    """A driver puts, an actor gets and touches; the object store's own processes are not counted as CPU."""
    import ray

    @ray.remote(num_cpus=0)
    class Consumer:
        def take(self, arrays):
            cpu = time.process_time()
            touch(*[array.view(np.uint8).reshape(-1) for array in arrays])
            return time.process_time() - cpu

    if not ray.is_initialized():
        ray.init(num_cpus=2, object_store_memory=2 * BUDGET, include_dashboard=False, log_to_driver=False)
    consumer = Consumer.remote()
    ray.get(consumer.take.remote([]))
    arrays = [tensor.view(torch.uint16).numpy() for tensor in (sample.aux, sample.last)]
    cpu, started = time.process_time(), time.perf_counter()
    waiting, used = [], 0.0
    for _ in range(count):
        waiting.append(consumer.take.remote(ray.put(arrays)))
        if len(waiting) == 4:
            used += ray.get(waiting.pop(0), timeout=LIMIT_S)
    used += sum(ray.get(waiting, timeout=LIMIT_S))
    seconds = time.perf_counter() - started
    ray.kill(consumer)
    return seconds, time.process_time() - cpu + used


def measure(name: str, total_bytes: int, rounds: int, with_ray: bool) -> dict:
    torch.set_num_threads(1)
    sample = make_sample(*SIZES[name])
    nbytes = sample.aux.nbytes + sample.last.nbytes
    count = max(4, total_bytes // nbytes)
    pairs = {way: Pair(way, SIZES[name]) for way in WAYS}
    moves = {"memcpy": lambda n: memcpy(sample, n)} | {way: pair.move for way, pair in pairs.items()}
    if with_ray:
        moves["ray_object_store"] = lambda n: ray_object_store(sample, n)
    for move in moves.values():
        move(4)
    results = {way: [] for way in moves}
    for _ in range(rounds):
        for way, move in moves.items():
            results[way].append(move(count))
    for pair in pairs.values():
        pair.close()
    if with_ray:
        import ray
        ray.shutdown()
    gigabytes = count * nbytes / 1e9
    return {way: {"gb_per_s": round(gigabytes / statistics.median(s for s, _ in runs), 2),
                  "cpu_s_per_gb": round(statistics.median(cpu for _, cpu in runs) / gigabytes, 2)}
            for way, runs in results.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--mib", type=int, default=512, help="moved by each way in one round")
    parser.add_argument("--no-ray", action="store_true", help="leave the Ray object store out")
    options = parser.parse_args()
    ways = {name: measure(name, options.mib * 2**20, options.rounds, not options.no_ray) for name in SIZES}

    def ratio(title: str, way: str, other: str) -> dict[str, float]:
        found = {name: round(result[way]["gb_per_s"] / result[other]["gb_per_s"], 2) for name, result in ways.items()}
        return {title: min(found.values())} | {f"{title}_{name}": value for name, value in found.items()}

    result = {
        "machine": machine(),
        "ways": ways,
        "mooncake": "measured" if "mooncake" in WAYS else "package not installed",
        "ratios": (ratio("arrow_vs_bare_zmq", "stream_frames", "bare_zmq")
                   | ratio("shm_vs_bare_zmq", "stream_shared", "bare_zmq")
                   | ratio("vs_safetensors_file", "stream_shared", "safetensors_file")),
    }
    if options.json:
        print(json.dumps(result))
        return
    for name, table in ways.items():
        print(f"{name:20} GB/s   CPU s/GB")
        for way, row in table.items():
            print(f"  {way:18} {row['gb_per_s']:5.2f} {row['cpu_s_per_gb']:8.2f}")
    print(result["ratios"])


if __name__ == "__main__":
    main()
