"""A run without Ray and without an engine: the real coordinator, trainers and stream, each in a process of its own, and
a target that makes its states up, each sample's from its place in the order. Whatever dies is started again, as
`cluster.crew` does it, so that many faults fit into a test of seconds."""

import asyncio
import json
import multiprocessing
import os
import pickle
import random
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import closing
from multiprocessing.connection import wait
from pathlib import Path

import torch

from cluster import coordinator as coordinators
from tests.chaos.harms import unharmed
from torchspec_lite.config import Config, build
from torchspec_lite.lease import Lease
from torchspec_lite.ledger import Ledger
from torchspec_lite.sample import Sample
from torchspec_lite.sample_order import read_order
from torchspec_lite.stream import Sender, StreamError
from torchspec_lite.target import TargetInfo, describe
from workers import trainer as trainers
from workers.group import Group, join_store, open_store

LIMIT_S = 120.0  # of any single wait, on a busy machine
HEARTBEAT_S = 0.2
CONTEXT = multiprocessing.get_context("forkserver")  # imports once what every process here needs
CONTEXT.set_forkserver_preload(["tests.chaos.small_run"])


def small_config(folder: Path, name: str, prompts: int, **trainer) -> Config:
    """A run of so many prompts on the tiny target in `folder / "target"`."""
    for kind, number in (("train", prompts), ("held", 2)):
        (folder / f"{kind}-{number}.jsonl").write_text("".join(json.dumps(
            {"id": f"{kind}-{i}", "conversations": [{"role": "user", "content": str(i)}]}) + "\n" for i in range(number)))
    config = build({
        "name": name, "run_root": str(folder / "runs"), "target": {"model": str(folder / "target"), "dtype": "float32"},
        "data": {"train": [str(folder / f"train-{prompts}.jsonl")], "held_out": [str(folder / "held-2.jsonl")],
                 "max_length": 64, "held_out_prompts": 2},
        "stream": {"heartbeat_s": HEARTBEAT_S, "budget_mib": 1, "max_samples": 16, "sender_budget_mib": 1, "wait_s": 60},
        "drafter": {"draft_vocab_size": 256, "vocab_samples": 8},
        "trainer": {"batch_tokens": 128, "export_every": 8, "dtype": "float32", "compile": False, "ttt_steps": 2,
                    "warmup_steps": 2, **trainer}}, "the chaos suite")
    config.run_dir.mkdir(parents=True)
    return config


def made_up(lease: Lease, info: TargetInfo) -> Sample:
    """The sample of a lease: all of it follows from its place in the order."""
    generator = torch.Generator().manual_seed(lease.ordinal)
    tokens = 12 + lease.ordinal * 7 % 20
    mask = torch.ones(tokens, dtype=torch.uint8)
    mask[:4] = 0
    layers = info.default_layer_ids()
    return Sample(
        lease.id, lease.attempt, lease.ordinal, lease.purpose, info.fingerprint, layers,
        torch.randint(info.vocab_size, (tokens,), generator=generator).int(), mask,
        torch.randn(tokens - 1, len(layers), info.hidden_size, generator=generator),
        torch.randn(tokens - 1, info.hidden_size, generator=generator))


# Calls to the coordinator: a local socket that outlives it, so that callers simply wait for the next one


class Line:
    """As workers.link.Link: a call whose answer was lost is asked again."""

    def __init__(self, path: str):
        self.path, self.connection = path, None

    def call(self, method: str, *args):
        for _ in range(20):
            try:
                if self.connection is None:
                    self.connection = socket.socket(socket.AF_UNIX)
                    self.connection.settimeout(LIMIT_S)
                    self.connection.connect(self.path)
                message = pickle.dumps((method, args))
                self.connection.sendall(struct.pack("=Q", len(message)) + message)
                good, answer = pickle.loads(self._take(*struct.unpack("=Q", self._take(8))))
            except (ConnectionError, EOFError):
                self.connection.close()
                self.connection = None
                continue
            if not good:
                raise answer
            return answer
        raise ConnectionError(f"no coordinator answers {method}")

    tell = call

    def settle(self) -> None:
        """Nothing told is ever left unanswered."""

    def _take(self, length: int) -> bytes:
        data = b""
        while len(data) < length:
            piece = self.connection.recv(length - len(data))
            if not piece:
                raise EOFError
            data += piece
        return data


def coordinator_process(config: Config, listener: socket.socket, harm: Callable) -> None:
    harm(config)
    coordinators.LONG_POLL_S = 0.2
    asyncio.run(_coordinate(config, listener))


async def _coordinate(config: Config, listener: socket.socket) -> None:
    coordinator = coordinators.Coordinator(config, str(config.run_dir), time.time())

    async def serve(reader, writer):
        try:
            while True:
                length, = struct.unpack("=Q", await reader.readexactly(8))
                method, args = pickle.loads(await reader.readexactly(length))
                try:
                    answer = True, await getattr(coordinator, method)(*args)
                except Exception as error:
                    answer = False, error
                message = pickle.dumps(answer)
                writer.write(struct.pack("=Q", len(message)) + message)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the caller is gone
        finally:
            writer.close()

    async with await asyncio.start_unix_server(serve, sock=listener) as server:
        await server.serve_forever()


def trainer_process(config: Config, rank: int, path: str, harm: Callable, pipe) -> None:
    harm(config)
    torch.set_num_threads(1)
    trainers.FILL_WAIT_S = 0.2
    trainer = trainers.Trainer(config, rank, describe(Path(config.target.model)), Line(path))
    try:
        ranks = config.trainer.ranks
        store = open_store("127.0.0.1", ranks) if rank == 0 and ranks > 1 else None
        pipe.send(("listening", (trainer.listen("127.0.0.1", None, False), store and store.port)))
        port = pipe.recv()
        if ranks > 1 and store is None:
            store = join_store("127.0.0.1", port, ranks)
        group = Group(rank, ranks, "gloo", store)
        pipe.send(("done", trainer.train(group)))
        trainer.close()
        group.close()
    except Exception as error:
        pipe.send(("failed", f"{type(error).__name__}: {error}"))


def target_process(config: Config, name: str, path: str, endpoints: list[str], harm: Callable, pipe) -> None:
    """Leases samples and sends them. What `pipe` says are the trainers' new addresses."""
    harm(config)
    torch.set_num_threads(1)
    info, line = describe(Path(config.target.model)), Line(path)
    senders: dict[int, Sender] = {}

    def open_all(endpoints: list[str]) -> None:
        for rank, endpoint in enumerate(endpoints):
            old, senders[rank] = senders.get(rank), Sender(
                endpoint, name, config.stream.sender_budget_mib << 20, heartbeat_s=HEARTBEAT_S, wait_s=LIMIT_S)
            if old is not None:
                old.close()

    def hear() -> None:
        while (told := pipe.recv()) is not None:
            open_all(told)
        os._exit(0)

    open_all(endpoints)
    threading.Thread(target=hear, daemon=True).start()
    while (leases := line.call("lease", name, 4)) is not None:
        for lease in leases:
            try:
                senders[lease.rank].send(made_up(lease, info))
            except StreamError as error:
                line.call("failed", lease.id, lease.attempt, str(error))
    pipe.send(("done", None))
    threading.Event().wait(LIMIT_S)  # until told to leave, so that what was sent stays readable


class Failed(Exception):
    """A trainer ended with an error of its own."""


class SmallRun:
    """Processes of one run, started again when they die; `faults` happen on the way.

    `kinds` are "coordinator", "trainer" and "target". The listening socket is this process's, so that a coordinator's
    death only delays its callers. Use as a context manager: whatever happens, no process is left.
    """

    def __init__(self, config: Config, harm: Callable = unharmed):
        self.config, self.harm = config, harm
        self.path = str(config.run_dir / "line")
        self.listener = socket.socket(socket.AF_UNIX)
        self.processes: dict[str, multiprocessing.Process] = {}
        self.pipes: dict[str, object] = {}
        self.addresses: dict[int, tuple] = {}
        self.summary: dict | None = None
        self.over: set[str] = set()  # processes that did all there was
        self.started: list[int] = []  # every process id there ever was
        self.line = Line(self.path)

    def __enter__(self) -> "SmallRun":
        Path(self.path).unlink(missing_ok=True)
        self.listener.bind(self.path)
        self.listener.listen(64)
        read_order(self.config, self.config.run_dir).queue(self.config.run_dir / "ledger.sqlite", self.config.trainer.reuse)
        self._start("coordinator")
        self._start_trainers()
        return self

    def __exit__(self, *_) -> None:
        for name in list(self.processes):
            self._end(name)
        self.listener.close()

    def finish(self) -> dict:
        """Go on until all is trained; the ledger's account, closed as the driver closes it."""
        self.until(lambda: self.summary is not None, "the run to end")
        self.line.call("settle")
        account = self.line.call("account")
        self.line.call("finish", "finished", None)
        return account["samples"]

    def until(self, condition: Callable, what: str) -> float:
        """Seconds until a condition holds, starting again what dies meanwhile."""
        begin = time.monotonic()
        while not condition():
            assert time.monotonic() - begin < LIMIT_S, f"waited {LIMIT_S:g} s for {what}"
            self._look()
        return time.monotonic() - begin

    def settled(self) -> int:
        """Samples that are trained, durable or rejected, by the ledger."""
        try:
            with closing(Ledger(self.config.run_dir / "ledger.sqlite", read_only=True)) as ledger:
                account = ledger.account()
        except Exception:  # it is not there yet
            return 0
        return account["trained"] + account["durable"] + account["rejected"]

    def harm_one(self, kind: str, number: int, chance: random.Random) -> float | None:
        """Kill or stop one process of a kind; seconds until another is there, or it goes on, and samples are trained.
        None: the run is over, or nothing of the kind is there."""
        names = [name for name in self.processes if name.startswith(kind) and self.processes[name].is_alive()]
        if not names or self.summary is not None:
            return None
        name = chance.choice(names)
        victim = self.processes[name].pid
        os.kill(victim, number)
        if number == signal.SIGSTOP:
            over = time.monotonic() + chance.uniform(0.1, 6 * HEARTBEAT_S)  # some before, some after it counts as dead
            self.until(lambda: time.monotonic() > over, "the end of a pause")
            os.kill(victim, signal.SIGCONT)
            return self.until_trained(name)
        took = self.until(lambda: self.summary is not None or name in self.processes and self.processes[name].pid != victim,
                          f"another {name}")
        return took + self.until_trained(name)

    def until_trained(self, name: str) -> float:
        lowest = self.settled()

        def trained() -> bool:
            """More than before; after a trainer's death samples are taken back first."""
            nonlocal lowest
            now = self.settled()
            lowest = min(lowest, now)
            return now > lowest or self.summary is not None

        return self.until(trained, f"samples to be trained after {name} came back")

    # Within

    def _look(self) -> None:
        """Hear what the processes say and start again what died; at most a moment's wait."""
        sentinels = {process.sentinel: (name, process) for name, process in self.processes.items()}
        pipes = {pipe: name for name, pipe in self.pipes.items()}
        for ready in wait([*sentinels, *pipes], timeout=0.02):
            # What went before in this very loop may have started others of these names: the old ones have no say.
            if ready in pipes:
                if self.pipes.get(pipes[ready]) is ready:
                    self._hear(pipes[ready], ready)
                continue
            name, process = sentinels[ready]
            if self.processes.get(name) is process and not (name in self.pipes and self.pipes[name].poll(0)):
                self._died(name)

    def _hear(self, name: str, pipe) -> None:
        try:
            kind, value = pipe.recv()
        except (EOFError, ConnectionError):
            del self.pipes[name]  # its death is seen by its sentinel
            return
        rank = int(name[-1]) if name.startswith("trainer") else None
        if kind == "failed":
            others = [process.sentinel for name, process in self.processes.items() if name.startswith("trainer")]
            others.remove(self.processes[name].sentinel)
            if not others or not wait(others, timeout=5):  # else a rank's death took this one's collectives down
                raise Failed(value)
            self._start_trainers()
            return
        if kind == "listening":
            self.addresses[rank] = value
            if len(self.addresses) == self.config.trainer.ranks:
                endpoints = [self.addresses[rank][0] for rank in sorted(self.addresses)]
                if "target" in self.processes:
                    self._tell("target", endpoints)
                else:
                    self._start("target")
                for rank in self.addresses:
                    self._tell(f"trainer {rank}", self.addresses[0][1])
        elif kind == "done":
            self.over.add(name)
            if rank == 0:
                self.summary = value

    def _died(self, name: str) -> None:
        if name in self.over:
            self._end(name)
            return
        if name == "coordinator" or not self.processes["coordinator"].is_alive():
            self._start("coordinator")
        if name == "target":
            self.line.call("worker_lost", "target")
            if len(self.addresses) == self.config.trainer.ranks:
                self._start(name)
            else:
                self._end(name)  # the trainers' addresses start the next one
        elif name != "coordinator":
            self._start_trainers()

    def _start_trainers(self) -> None:
        self.addresses = {}
        for rank in range(self.config.trainer.ranks):
            self._start(f"trainer {rank}")

    def _start(self, name: str) -> None:
        self._end(name)
        ours, theirs = CONTEXT.Pipe()
        if name == "coordinator":
            function, arguments = coordinator_process, (self.config, self.listener, self.harm)
        elif name == "target":
            endpoints = [self.addresses[rank][0] for rank in sorted(self.addresses)]
            function, arguments = target_process, (self.config, name, self.path, endpoints, self.harm, theirs)
        else:
            function, arguments = trainer_process, (self.config, int(name[-1]), self.path, self.harm, theirs)
        process = self.processes[name] = CONTEXT.Process(target=function, args=arguments, daemon=True)
        process.start()
        self.started.append(process.pid)
        theirs.close()
        if name != "coordinator":
            self.pipes[name] = ours

    def _end(self, name: str) -> None:
        process = self.processes.pop(name, None)
        if process is not None:
            process.kill()
            process.join(LIMIT_S)
        self.pipes.pop(name, None)

    def _tell(self, name: str, what) -> None:
        try:
            self.pipes[name].send(what)
        except (KeyError, ConnectionError):
            pass  # it died a moment ago: it is started again with what is true then
