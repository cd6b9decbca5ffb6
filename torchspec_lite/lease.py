"""A lease: leave to capture one sample. It crosses the control plane, so it holds ids and numbers only."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Lease:
    """`ordinal` is the sample's place in the run's fixed order, `attempt` counts its leases from 1, `rank` is the
    trainer that gets it."""

    id: str
    ordinal: int
    attempt: int
    purpose: Literal["train", "held_out"]
    rank: int
