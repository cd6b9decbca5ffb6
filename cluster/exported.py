"""Drafter versions as the trainers exported them, from the ledger."""

from torchspec_lite.ledger import Ledger
from torchspec_lite.parity import ParityProbe
from workers.reports import Export


def export_of(ledger: Ledger, version: int | None) -> Export | None:
    """A version whatever became of it. None for one that is not there, or whose event is not: earlier programs wrote the two
    apart, and could be killed between."""
    events = [] if version is None else ledger.history(1, "exported", version)
    if not events:
        return None
    data = events[0]["data"]
    return Export(**data | {"probes": [ParityProbe(**probe) for probe in data["probes"]]})


def untried(ledger: Ledger) -> list[int]:
    """Versions that no rollout has looked at, oldest first."""
    waiting = [row["version"] for row in ledger.versions() if row["state"] == "exported"]
    return [version for version in waiting if export_of(ledger, version) is not None]


def needed_versions(ledger: Ledger) -> list[int]:
    """Versions whose folders must stay: the one that serves, the one before it, the best that was promoted, the next to be
    tried."""
    promoted = [row for row in ledger.versions() if row["state"] == "promoted"]
    best = sorted(promoted, key=lambda row: row["predicted"] or 0)[-1:]
    needed = (*ledger.served(), *(row["version"] for row in best), *untried(ledger)[-1:])
    return [version for version in needed if version is not None]
