"""The SQLite file under the ledger: its tables, its one writer, its transactions."""

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torchspec_lite.errors import UserError
from torchspec_lite.file_lock import hold

SCHEMA_VERSION = 1
WAIT_S = 10.0
LOCK_S = 10.0
"""Longest wait for another writer to end: one whose driver was killed lives a moment longer."""
TABLES = """
CREATE TABLE meta(key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE samples(
    id TEXT PRIMARY KEY, ordinal INTEGER NOT NULL UNIQUE, purpose TEXT NOT NULL, state TEXT NOT NULL,
    attempt INTEGER NOT NULL, passes INTEGER NOT NULL, passes_durable INTEGER NOT NULL, step INTEGER, worker TEXT,
    rank INTEGER, tokens INTEGER, reason TEXT, detail TEXT, updated REAL NOT NULL) WITHOUT ROWID;
CREATE INDEX samples_by_state ON samples(state, ordinal, purpose);
CREATE TABLE passes(id TEXT NOT NULL, step INTEGER NOT NULL, PRIMARY KEY(id, step)) WITHOUT ROWID;
CREATE INDEX passes_by_step ON passes(step);
CREATE TABLE versions(
    version INTEGER PRIMARY KEY, step INTEGER NOT NULL, samples INTEGER NOT NULL, parent INTEGER, predicted REAL,
    state TEXT NOT NULL, reason TEXT, created REAL NOT NULL);
CREATE TABLE events(
    time REAL NOT NULL, kind TEXT NOT NULL, version INTEGER, replica TEXT, text TEXT NOT NULL, data TEXT);
CREATE INDEX events_by_kind ON events(kind);
"""
LATER_TABLE = "CREATE TABLE IF NOT EXISTS deaths(id TEXT PRIMARY KEY, number INTEGER NOT NULL) WITHOUT ROWID"
"""Not in every ledger of this schema: it came later, and programs that do not know it can do without."""


class LedgerFile:
    """An open ledger file. What a transaction wrote is on the disk when it ends (WAL, synchronous=FULL).

    One process may write; a lock that the kernel frees with the process says so. Threads take turns.
    Raises UserError: another writer, not a ledger, another schema version, another `reuse`, disk full.
    """

    def __init__(self, path: str | Path, reuse: int, read_only: bool):
        self.path = Path(path)
        self.reuse = reuse
        self._lock = threading.RLock()
        self._db: sqlite3.Connection | None = None
        self._writer = None
        try:
            if read_only:
                self._db = self._connect(f"{self.path.absolute().as_uri()}?mode=ro")
                self._check_schema()
                self.reuse = int(self._meta("reuse"))
            else:
                self._writer = self._become_writer()
                self._db = self._connect(f"{self.path.absolute().as_uri()}?mode=rwc")
                self._prepare(reuse)
        except sqlite3.Error as error:
            self.close()
            raise self._fault(error) from error
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the file; another process may write then."""
        with self._lock:
            if self._db is not None:
                self._db.close()
            if self._writer is not None:
                self._writer.close()
            self._db = self._writer = None

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """All or nothing: an exception in the block undoes what the block wrote."""
        with self._lock:
            try:
                self._db.execute("BEGIN IMMEDIATE")
                try:
                    yield self._db
                    self._db.execute("COMMIT")
                except BaseException:
                    # A full disk may have undone the transaction already.
                    if self._db.in_transaction:
                        self._db.execute("ROLLBACK")
                    raise
            except sqlite3.Error as error:
                raise self._fault(error) from error

    def _connect(self, uri: str) -> sqlite3.Connection:
        return sqlite3.connect(uri, uri=True, timeout=WAIT_S, isolation_level=None, check_same_thread=False)

    def _become_writer(self):
        self.path.parent.mkdir(parents=True, exist_ok=True)
        return hold(self.path.with_name(self.path.name + ".lock"), LOCK_S, f"ledger {self.path}: another process of this run "
                    "is writing it; stop that run first, or give this one another name")

    def _prepare(self, reuse: int) -> None:
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = FULL")
        tables = {name for name, in self._db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if not tables:
            with self._transaction() as db:
                for statement in TABLES.split(";")[:-1]:
                    db.execute(statement)
                db.execute(LATER_TABLE)
                db.execute("INSERT INTO meta VALUES ('schema', ?), ('reuse', ?)", (str(SCHEMA_VERSION), str(reuse)))
            return
        self._check_schema()
        recorded = int(self._meta("reuse"))
        if recorded != reuse:
            raise UserError(f"ledger {self.path}: the run was started with trainer.reuse={recorded}, now it is {reuse}"
                            "; resume with the first value or start a run with another name")
        with self._transaction() as db:
            db.execute(LATER_TABLE)

    def _check_schema(self) -> None:
        try:
            found = int(self._meta("schema", "0"))
        except (sqlite3.OperationalError, ValueError) as error:
            raise UserError(f"ledger {self.path}: no ledger of torchspec-lite ({error}); "
                            "start a run with another name") from error
        if found != SCHEMA_VERSION:
            age = "an older" if found < SCHEMA_VERSION else "a newer"
            raise UserError(f"ledger {self.path}: schema version {found} of {age} torchspec-lite, this one reads "
                            f"{SCHEMA_VERSION}; use that program for this run, or start a run with another name")

    def _meta(self, key: str, missing: str | None = None) -> str | None:
        with self._lock:
            row = self._db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return missing if row is None else row[0]

    def _set_meta(self, db: sqlite3.Connection, key: str, value: int | str) -> None:
        db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, str(value)))

    def _count(self, db: sqlite3.Connection, key: str) -> None:
        self._set_meta(db, key, int(self._meta(key, "0")) + 1)

    def _dicts(self, query: str, values: tuple = ()) -> list[dict]:
        with self._lock:
            cursor = self._db.execute(query, values)
            names = [column[0] for column in cursor.description]
            return [dict(zip(names, row)) for row in cursor]

    def _fault(self, error: sqlite3.Error) -> Exception:
        # Faults that Python itself finds, such as a wrong number of values, carry no code.
        code = error.sqlite_errorcode if hasattr(error, "sqlite_errorcode") else 0
        remedies = {
            sqlite3.SQLITE_FULL: "free some disk space and resume",
            sqlite3.SQLITE_IOERR: "check the disk and resume",
            sqlite3.SQLITE_CANTOPEN: "give a run directory that exists and may be written",
            sqlite3.SQLITE_READONLY: "give a run directory that may be written",
            sqlite3.SQLITE_BUSY: f"another process kept it locked for {WAIT_S:g} s; stop that process",
            sqlite3.SQLITE_NOTADB: "the file is no SQLite database; move it away",
            sqlite3.SQLITE_CORRUPT: "the file is damaged; restore it from a copy or start a run with another name",
        }
        remedy = remedies.get(code & 0xFF)
        return UserError(f"ledger {self.path}: {error}; {remedy}") if remedy else error
