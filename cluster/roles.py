"""The Ray actors: each a thin coat over a plain class of workers/ or of this package."""

import asyncio
import logging
import uuid
from dataclasses import dataclass

import ray
import torch

from cluster.coordinator import Coordinator
from cluster.placement import threads
from cluster.reservation import Reservation, beside_driver
from torchspec_lite.config import Config
from torchspec_lite.conversations import resolve_files
from torchspec_lite.keys import ReceiverKeys, SenderKeys, host_of, is_loopback, make_pair
from torchspec_lite.logs import setup_logging
from torchspec_lite.snapshot import Buffer
from torchspec_lite.target import TargetInfo
from torchspec_lite.target_folder import cache_dir
from workers.engine import engine_env
from workers.lease_line import LeaseLine
from workers.reports import TargetReport

log = logging.getLogger(__name__)
REPORT_EVERY_S = 1.0


class CoordinatorProcess(Coordinator):
    """The coordinator with a log of its own."""

    def __init__(self, config: Config, run_dir: str, started: float, attempt: str):
        setup_logging(run_dir, config.name, "coordinator")
        super().__init__(config, run_dir, started, attempt)


def start_coordinator(config: Config, started: float) -> ray.actor.ActorHandle:
    """The coordinator of a new attempt of the run; Ray starts it again when its process dies, with the same arguments, and
    it goes on from the ledger."""
    return ray.remote(CoordinatorProcess).options(
        name=f"coordinator-{config.name}", num_cpus=0, max_restarts=-1, max_task_retries=3, max_concurrency=1000,
        scheduling_strategy=beside_driver(),
        runtime_env={"env_vars": {"OMP_NUM_THREADS": "1"}}).remote(
            config, str(config.run_dir), started, uuid.uuid4().hex)


class TrainerProcess:
    """One trainer rank. Methods run in threads of their own, so that `stop` is heard while `train` works."""

    def __init__(self, config: Config, rank: int, info: TargetInfo, coordinator: ray.actor.ActorHandle):
        self.config, self.rank, self.info, self.coordinator = config, rank, info, coordinator
        self.trainer = self.store = None
        self.stopping = False

    def listen(self, keys: ReceiverKeys | None) -> str:
        """Load what the trainer needs of the target and open its receiver; returns the endpoint."""
        # Here and not in the constructor: Ray tells a method's error to the caller, a constructor's only as a death.
        from workers.link import Link
        from workers.trainer import Trainer
        config, stream = self.config, self.config.stream
        setup_logging(config.run_dir, config.name, "trainer", self.rank)
        torch.set_num_threads(threads(config.trainer.cpus))
        device = "cuda" if config.trainer.gpus else "cpu"
        self.trainer = Trainer(config, self.rank, self.info, Link(self.coordinator, f"trainer {self.rank}"), device)
        if self.stopping:  # told so while it was made
            self.trainer.stop()
        endpoint = self.trainer.listen(stream.host, keys, unencrypted=stream.encrypt == "off")
        log.info("on node %s, receiving at %s, %s", ray.get_runtime_context().get_node_id(), endpoint,
                 "encrypted" if keys else "not encrypted")
        return endpoint

    def listen_to_traffic(self, keys: ReceiverKeys | None) -> str:
        """Open the receiver for served requests, after `listen`; returns its endpoint."""
        stream = self.config.stream
        return self.trainer.listen_to_traffic(stream.host, keys, unencrypted=stream.encrypt == "off")

    def open_store(self) -> tuple[str, int]:
        """Rank 0: the meeting place of all ranks, as (host, port), on the interface that receives the stream."""
        from workers.group import open_store
        host = host_of(self.trainer.receiver.endpoint)
        self.store = open_store(host, self.config.trainer.ranks)
        return host, self.store.port

    def train(self, meeting: tuple[str, int] | None) -> dict:
        from workers.group import Group, join_store, use_interface
        ranks, backend = self.config.trainer.ranks, self.config.trainer.backend
        if backend == "auto":
            backend = "nccl" if self.config.trainer.gpus else "gloo"
        if meeting is not None and self.store is None:
            self.store = join_store(*meeting, ranks)
        if ranks > 1:
            use_interface(host_of(self.trainer.receiver.endpoint))
        group = Group(self.rank, ranks, backend, self.store)
        try:
            return self.trainer.train(group)
        finally:
            group.close()

    def present(self) -> None:
        """For cluster.attendance."""

    def stop(self) -> None:
        self.stopping = True
        if self.trainer is not None:
            self.trainer.stop()

    def close(self) -> None:
        self.trainer.close()


def start_trainer(config: Config, rank: int, info: TargetInfo, coordinator,
                  reservation: Reservation) -> ray.actor.ActorHandle:
    count = str(threads(config.trainer.cpus))
    return ray.remote(TrainerProcess).options(
        **reservation.trainer(rank), max_concurrency=4,
        runtime_env={"env_vars": {"OMP_NUM_THREADS": count, "TOKENIZERS_PARALLELISM": "false"}},
    ).remote(config, rank, info, coordinator)


class TargetProcess:
    """One target worker: its leases come from the coordinator, and its figures go there once a second."""

    def __init__(self, config: Config, name: str, info: TargetInfo, coordinator: ray.actor.ActorHandle, receivers: list):
        self.config, self.name, self.info = config, name, info
        self.coordinator, self.receivers, self.worker = coordinator, receivers, None

    async def start(self) -> None:
        """Load the engine and check its states."""
        from workers.target import TargetWorker
        setup_logging(self.config.run_dir, self.config.name, "target", _number(self.name))
        log.info("on node %s", ray.get_runtime_context().get_node_id())
        data, cache = self.config.data, cache_dir()
        files = resolve_files(data.train, "train", cache) + resolve_files(data.held_out, "held_out", cache)
        self.worker = TargetWorker(self.name, self.config, self.info, files, self.receivers)
        await self.worker.start()

    async def run(self) -> None:
        reporting = asyncio.create_task(self._report())
        try:
            await self.worker.run(LeaseLine(self.coordinator, self.name))
        finally:
            reporting.cancel()

    async def present(self) -> None:
        """For cluster.attendance."""

    async def set_receiver(self, rank: int, receiver) -> None:
        await self.worker.set_receiver(rank, receiver)

    async def close(self) -> None:
        await self.worker.close()

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(REPORT_EVERY_S)
            senders, stats = await self.worker.sender_stats(), self.worker.stats()
            await self.coordinator.target_report.remote(TargetReport(
                self.name, stats["prompt_tokens"] + stats["output_tokens"], sum(s["blocked_s"] for s in senders),
                Buffer(bytes=sum(s["memory_bytes"] for s in senders), budget_bytes=sum(s["budget_bytes"] for s in senders),
                       samples=sum(s["unsent_samples"] for s in senders))))


def start_target(config: Config, name: str, info: TargetInfo, coordinator, receivers: list,
                 reservation: Reservation) -> ray.actor.ActorHandle:
    capture = config.capture
    return ray.remote(TargetProcess).options(
        **reservation.target(_number(name)), max_concurrency=100, runtime_env={"env_vars": engine_env(
            capture.cpus, capture.gpus, config.target.tensor_parallel_size)},
    ).remote(config, name, info, coordinator, receivers)


def _number(name: str) -> int:
    """3 of `target-3`."""
    return int(name.rpartition("-")[2])


@dataclass(frozen=True)
class Keyring:
    """CURVE keys of one attempt of a run, made in the driver's memory: each end gets its own and no other's secret.

    Serving replicas, which come and go, share one pair, and send to receivers (`traffic`) that take no one else.
    """

    receivers: list[ReceiverKeys | None]
    senders: dict[str, list[SenderKeys | None]]
    traffic: list[ReceiverKeys | None]
    replicas: list[SenderKeys | None]


def make_keyring(config: Config, targets: list[str]) -> Keyring:
    """Keys for every trainer rank and target worker; None where the stream is not encrypted."""
    ranks = range(config.trainer.ranks)
    encrypt = config.stream.encrypt
    if encrypt == "off" or encrypt == "auto" and is_loopback(config.stream.host):
        none = [None for _ in ranks]
        return Keyring(none, {name: none for name in targets}, none, none)
    ends, pairs = [make_pair() for _ in ranks], {name: make_pair() for name in targets}
    doors, replica = [make_pair() for _ in ranks], make_pair()
    allowed = frozenset(pair.public for pair in pairs.values())
    return Keyring([ReceiverKeys(end, allowed) for end in ends],
                   {name: [SenderKeys(pair, end.public) for end in ends] for name, pair in pairs.items()},
                   [ReceiverKeys(door, frozenset({replica.public})) for door in doors],
                   [SenderKeys(replica, door.public) for door in doors])
