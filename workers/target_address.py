"""Where a trainer's receiver is, as a target worker needs to know it."""

import uuid
from dataclasses import dataclass
from pathlib import Path

from torchspec_lite.keys import SenderKeys, save_keys


@dataclass(frozen=True)
class ReceiverAddress:
    """`endpoint` of a trainer rank's receiver, and the keys to talk to it (None: not encrypted)."""

    endpoint: str
    keys: SenderKeys | None = None


def written_down(receivers: list[ReceiverAddress], folder: Path | str) -> list[tuple[str, str | None]]:
    """(endpoint, key file) of each, for an engine: keys go as files of mode 0600, so that no call that may be logged holds
    one. None: not encrypted."""
    found = []
    for receiver in receivers:
        path = None if receiver.keys is None else Path(folder) / f"{uuid.uuid4().hex}.json"
        if path is not None:
            save_keys(path, receiver.keys)
        found.append((receiver.endpoint, path and str(path)))
    return found
