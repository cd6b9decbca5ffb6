"""What a receiver keeps of each sender and of each sample that its owner holds."""

from dataclasses import dataclass, field

from torchspec_lite.control import Want
from torchspec_lite.shared_slots import Slot


@dataclass
class KnownSender:
    """One sender, by its session; `address` is its present connection."""

    address: bytes
    name: str
    session: str
    epoch: int
    number: int  # file descriptor of the connection, -1 if unknown
    remote: tuple | None  # far end of the connection
    heard: float
    memory: memoryview | None
    wants: dict[int, Want] = field(default_factory=dict)
    samples: int = 0
    bytes: int = 0


@dataclass(frozen=True)
class HeldSample:
    """A sample that was received and not yet released."""

    session: str
    seq: int
    nbytes: int
    slot: Slot | None  # in the receiver's own memory; None: where it was received
    shared: bool  # it lies in the sender's memory
