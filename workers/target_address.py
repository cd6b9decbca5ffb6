"""Where a trainer's receiver is, as a target worker needs to know it."""

from dataclasses import dataclass

from torchspec_lite.keys import SenderKeys


@dataclass(frozen=True)
class ReceiverAddress:
    """`endpoint` of a trainer rank's receiver, and the keys to talk to it (None: not encrypted)."""

    endpoint: str
    keys: SenderKeys | None = None
