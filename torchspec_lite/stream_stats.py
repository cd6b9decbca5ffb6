"""What the two ends of a stream tell their owners: events, refusals and figures for the dashboard."""

from dataclasses import dataclass

from torchspec_lite.credits import PeerCredit


@dataclass(frozen=True)
class Event:
    """What a receiver's owner should know.

    Kinds: `joined`, `lost`, `rejected` (a sample, with id and attempt), `duplicate` (likewise), `banned`.
    """

    kind: str
    sender: str
    reason: str
    id: str = ""
    attempt: int = 0


@dataclass(frozen=True)
class Refusal:
    """A sample that the receiver does not take, and will not if sent again."""

    id: str
    attempt: int
    reason: str


@dataclass(frozen=True)
class SenderView:
    """One sender as its receiver sees it."""

    name: str
    credit: PeerCredit
    last_heard_s: float
    shared_memory: bool
    samples: int
    bytes: int


@dataclass(frozen=True)
class ReceiverStats:
    """`waiting` is ready for `get`; `held` is everything not yet released, `waiting` included."""

    endpoint: str
    waiting_samples: int
    waiting_bytes: int
    held_samples: int
    held_bytes: int
    granted_bytes: int
    budget_bytes: int
    received_samples: int
    received_bytes: int
    rejected_samples: int
    duplicate_samples: int
    bytes_per_s: float
    senders: list[SenderView]
    waiting_for: str


@dataclass(frozen=True)
class SenderStats:
    """`unsent` counts samples without credit, `held` those whose shared memory the receiver still reads."""

    receiver: str
    connected: bool
    shared_memory: bool
    unsent_samples: int
    unsent_bytes: int
    unacknowledged_samples: int
    held_samples: int
    memory_bytes: int
    budget_bytes: int
    sent_samples: int
    sent_bytes: int
    resent_samples: int
    refused_samples: int
    bytes_per_s: float
    blocked_s: float
    waiting_for: str


def receiver_waits_for(endpoint: str, targets: int, ready: int, wanted: int, held: int) -> str:
    """Who waits for whom at a receiver: samples `ready` for its owner, `wanted` by targets, `held` by its owner."""
    if not targets:
        return f"no target is connected to {endpoint}"
    if ready:
        return f"{ready} samples wait for the trainer"
    if wanted:
        return f"{targets} targets wait with {wanted} samples for the trainer to release some of the {held} it holds"
    return f"the trainer waits for {targets} connected targets, which have nothing ready"
