"""What holds for one attempt of a run: from its driver's start to its end, however often the coordinator starts again."""

from torchspec_lite.ledger_file import LedgerFile


class Attempt(LedgerFile):
    """That leasing has stopped, the run's addresses, and which of a person's words were heard."""

    def begin(self, attempt: str) -> None:
        """The attempt of this name goes on, or begins: then nothing holds that was said to an earlier one."""
        if self._meta("attempt") == attempt:
            return
        with self._transaction() as db:
            db.execute("DELETE FROM meta WHERE key = 'stopping' OR key GLOB 'link *' OR key GLOB 'lease *'")
            db.execute("DELETE FROM deaths")
            self._set_meta(db, "attempt", attempt)
            self._set_meta(db, "heard", db.execute("SELECT COALESCE(MAX(rowid), 0) FROM events").fetchone()[0])

    def stop(self, reason: str) -> None:
        """Nothing more is to be leased."""
        with self._transaction() as db:
            self._set_meta(db, "stopping", reason)

    def stopping(self) -> str | None:
        """Why nothing more is to be leased; None while leasing goes on."""
        return self._meta("stopping")

    def link(self, name: str, url: str) -> None:
        with self._transaction() as db:
            self._set_meta(db, f"link {name}", url)

    def links(self) -> dict[str, str]:
        """Addresses of the run by name."""
        rows = self._dicts("SELECT key, value FROM meta WHERE key GLOB 'link *'")
        return {row["key"].removeprefix("link "): row["value"] for row in rows}

    def unheard(self) -> dict | None:
        """The oldest `override` event that nobody heard, with its `number`; None when all were heard."""
        rows = self._dicts("SELECT rowid AS number, text, version FROM events WHERE kind = 'override' AND rowid > ? "
                           "ORDER BY rowid LIMIT 1", (int(self._meta("heard", "0")),))
        return rows[0] if rows else None

    def hear(self, number: int) -> None:
        """The events up to this number were heard."""
        with self._transaction() as db:
            self._set_meta(db, "heard", number)
