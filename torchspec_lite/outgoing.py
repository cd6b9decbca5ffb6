"""What a sender keeps of each sample until the receiver needs it no more."""

from dataclasses import dataclass

from torchspec_lite.shared_slots import Slot


@dataclass
class OutgoingSample:
    """A sample on its way: new → wanted → sent → gone; in shared memory: new → wanted → handed → gone."""

    seq: int
    id: str
    attempt: int
    ordinal: int
    nbytes: int
    frames: list
    lengths: tuple[int, ...]  # of the frames
    memory: int  # bytes of the sender's budget
    slot: Slot | None
    state: str = "new"
    sends: int = 0
    by_handle: bool = False
