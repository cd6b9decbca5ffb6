"""A lease: leave to capture one sample. It crosses the control plane, so it holds ids and numbers only."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Lease:
    """`ordinal` is the sample's place in the run's fixed order, `attempt` counts its leases from 1, `rank` is the
    trainer that gets it. A worker takes nothing else in hand beside leases that are `alone` (torchspec_lite.ledger_suspects)."""

    id: str
    ordinal: int
    attempt: int
    purpose: Literal["train", "held_out"]
    rank: int
    alone: bool = False


@dataclass(frozen=True)
class LeaseCall:
    """Which of a worker's calls for leases it is: one that comes again, because its answer was lost with a coordinator, gets
    the same leases. `process` is new at each start of the worker, `number` counts its calls from 1; a caller without
    `process` never calls twice. `held`: leases (id, attempt) that its engine has in hand."""

    process: str = ""
    number: int = 0
    held: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class LostLeases:
    """What became of a dead worker's leases: how many are queued again, and the ids of those rejected because workers die of
    them. `settled`: whether any sample of this worker was streamed or rejected since it was lost before."""

    queued: int
    rejected: tuple[str, ...]
    settled: bool
