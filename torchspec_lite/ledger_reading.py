"""What a ledger tells: samples, accounts, versions and events."""

import json
import sqlite3
from collections import Counter
from dataclasses import dataclass

from torchspec_lite.ledger_file import LedgerFile

STATES = ("queued", "leased", "streamed", "trained", "durable", "rejected")


@dataclass(frozen=True)
class SampleRow:
    id: str
    ordinal: int
    purpose: str
    state: str
    attempt: int
    passes: int
    passes_durable: int
    step: int | None
    worker: str | None
    rank: int | None
    tokens: int | None
    reason: str | None
    detail: str | None
    updated: float


class LedgerReading(LedgerFile):
    """The methods that change nothing, for whoever has the ledger open."""

    def get(self, id: str) -> SampleRow:
        """Raises KeyError for an unknown id."""
        with self._lock:
            return self._row(self._db, id)

    def rows(self, state: str, limit: int = 1_000_000) -> list[SampleRow]:
        """Samples in a state, in order."""
        with self._lock:
            rows = self._db.execute("SELECT * FROM samples WHERE state = ? ORDER BY ordinal LIMIT ?", (state, limit))
            return [SampleRow(*row) for row in rows]

    def account(self, purpose: str = "train") -> dict[str, int]:
        """Samples of a purpose by state, and `all` of them; the states always sum to `all`."""
        with self._lock:
            found = dict(self._db.execute("SELECT state, COUNT(*) FROM samples WHERE purpose = ? GROUP BY state",
                                          (purpose,)))
            total = self._db.execute("SELECT COUNT(*) FROM samples WHERE purpose = ?", (purpose,)).fetchone()[0]
            for key, count in self._folded(purpose).items():
                state = key.partition(" ")[0]
                found[state] = found.get(state, 0) + count
                total += count
        return {state: found.get(state, 0) for state in STATES} | {"all": total}

    def backlog(self) -> dict[int, int]:
        """Training samples on their way to, or held by, each trainer rank and not yet trained; ranks with none left out."""
        with self._lock:
            return dict(self._db.execute("SELECT rank, COUNT(*) FROM samples WHERE state IN ('leased', 'streamed') "
                                         "AND purpose = 'train' GROUP BY rank"))

    def reasons(self) -> dict[str, int]:
        """Rejected samples by reason, most frequent first."""
        with self._lock:
            found = Counter(dict(self._db.execute(
                "SELECT reason, COUNT(*) FROM samples WHERE state = 'rejected' GROUP BY reason ORDER BY reason")))
            found.update(self._folded("traffic rejected"))
        return dict(found.most_common())

    def ignored(self) -> dict[str, int]:
        """Reports that changed nothing: `stale` (of an attempt that is over) and `duplicates` (repeated)."""
        return {name: int(self._meta(name, "0")) for name in ("stale", "duplicates")}

    def checkpoint_step(self) -> int:
        """Step of the newest checkpoint that samples count as durable by; 0 before the first."""
        return int(self._meta("checkpoint_step", "0"))

    def versions(self) -> list[dict]:
        """Every drafter version, oldest first, as dicts with the table's columns."""
        return self._dicts("SELECT * FROM versions ORDER BY version")

    def history(self, limit: int = 1000, kind: str | None = None, version: int | None = None) -> list[dict]:
        """The newest events (of one kind, about one version, if given), oldest first; `data` is a dict or None."""
        events = self._dicts("SELECT * FROM (SELECT rowid AS number, * FROM events WHERE (?1 IS NULL OR kind = ?1) "
                             "AND (?2 IS NULL OR version = ?2) ORDER BY rowid DESC LIMIT ?3) ORDER BY number",
                             (kind, version, limit))
        return [event | {"data": event["data"] and json.loads(event["data"])} for event in events]

    def served(self) -> tuple[int | None, int | None]:
        """The version that serves by the order of events, and the one before it that a rollback goes back to: after a rollback
        there is none until another version is promoted."""
        serving = before = None
        for row in self._dicts("SELECT kind, version FROM events WHERE kind IN ('promoted', 'rolled_back') ORDER BY rowid"):
            promoted, version = row["kind"] == "promoted", row["version"]
            if promoted and version != serving:
                serving, before = version, serving
            elif not promoted and version == serving:
                serving, before = before, None
            elif not promoted and version == before:
                before = None
        return serving, before

    def _folded(self, kind: str) -> dict[str, int]:
        """Counts of forgotten samples by what follows `kind` in their key."""
        prefix = f"folded {kind} "
        rows = self._db.execute("SELECT key, value FROM meta WHERE key GLOB ?", (prefix + "*",)).fetchall()
        return {key.removeprefix(prefix): int(value) for key, value in rows}

    def _row(self, db: sqlite3.Connection, id: str) -> SampleRow:
        row = db.execute("SELECT * FROM samples WHERE id = ?", (id,)).fetchone()
        if row is None:
            raise KeyError(id)
        return SampleRow(*row)
