"""Suspects: samples that a target worker had in hand when it died. One of them may be the cause, and would be again."""

import sqlite3
from collections.abc import Iterable

from torchspec_lite.ledger_file import LedgerFile

MOST_DEATHS = 3
"""Target workers that may die with one sample in hand; with the last of them it was the only one."""
PARTS = 4
"""After a first death its suspects are leased in about so many parts: most deaths are no sample's fault, and one at a time
is slow. After a second one they are leased one at a time."""


class Suspects(LedgerFile):
    """How many workers died with which samples; a sample that is streamed or rejected is no suspect any more."""

    def blame(self, worker: str, in_hand: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
        """`worker` died with these leases (id, attempt) in hand. Returns those of them that took the most workers there
        may be, which nobody should be given again."""
        with self._transaction() as db:
            db.executemany(
                "INSERT INTO deaths SELECT id, 1 FROM samples WHERE id = ? AND attempt = ? AND state = 'leased' AND worker = ? "
                "ON CONFLICT (id) DO UPDATE SET number = number + 1", [(*lease, worker) for lease in in_hand])
            return db.execute("SELECT id, attempt FROM deaths CROSS JOIN samples USING (id) WHERE number >= ? AND "
                              "state = 'leased' AND worker = ?", (MOST_DEATHS, worker)).fetchall()

    def queued_for(self, idle: bool, purpose: str | None = None) -> bool:
        """Whether a sample (of one purpose, if given) is queued that a worker may have now. One that is not idle may have
        no suspect: whoever is with it when a worker dies becomes one too."""
        with self._lock:
            return self._db.execute(
                "SELECT 1 FROM samples WHERE state = 'queued' AND (?1 IS NULL OR purpose = ?1) AND "
                "(?2 OR id NOT IN (SELECT id FROM deaths)) LIMIT 1", (purpose, idle)).fetchone() is not None

    def _deaths_of_next(self, db: sqlite3.Connection, idle: bool, purpose: str | None) -> int:
        """Deaths of the queued suspect that is next in order; 0: there is none that the worker may have."""
        found = db.execute("SELECT number FROM deaths CROSS JOIN samples USING (id) WHERE state = 'queued' AND "
                           "(?1 IS NULL OR purpose = ?1) ORDER BY ordinal LIMIT 1", (purpose,)).fetchone()
        return found[0] if idle and found else 0

    def _acquit(self, db: sqlite3.Connection, id: str) -> None:
        db.execute("DELETE FROM deaths WHERE id = ?", (id,))


def part_of(count: int, deaths: int) -> int:
    """How many of `count` samples that a worker has room for it gets, of those with so many deaths."""
    return count if not deaths else max(1, count // PARTS) if deaths == 1 else 1
