"""The ledger: what happened to every sample of a run, and which drafter versions it made (SQLite).

A sample goes queued → leased → streamed → trained → durable, or becomes rejected(reason); a served request's begins at
streamed, and is rejected as `not_kept` where another would be queued again. The ledger is the only
truth: each call is one transaction that is on the disk when it returns (WAL, synchronous=FULL), one process writes.

Exactly-once rests on three rules of the callers:
* `streamed` is the admission: a trainer trains only deliveries that `streamed` accepted, so that a sample leased anew
  after a worker's death is never trained from both attempts;
* `trained` is called for every step up to S before checkpoint S gets its final name, `checkpointed` after;
* after any restart of the trainers, `restore(S)` with the step of the checkpoint they loaded comes first.
"""

import json
import sqlite3
import time
from collections.abc import Iterable
from pathlib import Path

from torchspec_lite.errors import UserError
from torchspec_lite.lease import Lease, LeaseCall
from torchspec_lite.ledger_attempt import Attempt
from torchspec_lite.ledger_reading import STATES as STATES  # for those who ask the ledger
from torchspec_lite.ledger_reading import LedgerReading, SampleRow
from torchspec_lite.ledger_suspects import Suspects, part_of

LEARNED = ("train", "traffic")
"""Purposes of samples that are trained on."""
VERSION_STATES = ("exported", "gated", "canary", "promoted", "rolled_back", "refused")
FOLD_EVERY = 256
"""Served requests, after which those that were rejected long ago are counted together."""
REPEATED_S = 600.0
"""A report that got no answer is repeated for less than this."""


class IllegalTransition(Exception):
    """A caller reported something that cannot follow a sample's state: a fault in the program, nothing is changed."""


class Ledger(LedgerReading, Attempt, Suspects):
    """A run's ledger. `reuse` is the number of passes each training sample gets.

    `read_only` opens it beside the writer, for the reading methods. Safe to use from several threads.
    """

    def __init__(self, path: str | Path, reuse: int = 1, read_only: bool = False):
        super().__init__(path, reuse, read_only)

    # Samples

    def add_samples(self, samples: Iterable[tuple[str, int]], purpose: str) -> int:
        """Queue (id, ordinal) pairs; how many were new. A known id is left as it is, so a resume may add all again.

        Raises UserError when a known id has another place or purpose: the files or the seed are not the run's.
        """
        new = 0
        with self._transaction() as db:
            for id, ordinal in samples:
                known = db.execute("SELECT id, ordinal, purpose FROM samples WHERE id = ? OR ordinal = ?",
                                   (id, ordinal)).fetchall()
                if not known:
                    db.execute("INSERT INTO samples VALUES (?,?,?,'queued',0,0,0,NULL,NULL,NULL,NULL,NULL,NULL,?)",
                               (id, ordinal, purpose, time.time()))
                    new += 1
                elif known != [(id, ordinal, purpose)]:
                    raise UserError(f"ledger {self.path}: sample {id!r} at place {ordinal} ({purpose}) does not fit "
                                    f"the run's order, which has {known[0]}; resume with the same data files and seed")
        return new

    def lease(self, worker: str, count: int, rank: int, purpose: str | None = None,
              call: LeaseCall = LeaseCall()) -> list[Lease]:
        """Up to `count` queued samples (of one purpose, if given), first in order first, to be streamed to `rank`.

        A worker that has nothing in hand gets suspects first, and few of them; one that has gets none.
        """
        with self._transaction() as db:
            deaths = self._deaths_of_next(db, not call.held, purpose)
            rows = db.execute(
                "SELECT id, ordinal, attempt + 1, purpose FROM samples LEFT JOIN deaths USING (id) WHERE state = 'queued' "
                "AND (?1 IS NULL OR purpose = ?1) AND COALESCE(number, 0) = ?2 ORDER BY ordinal LIMIT ?3",
                (purpose, deaths, part_of(count, deaths))).fetchall()
            db.executemany(
                "UPDATE samples SET state = 'leased', attempt = ?, worker = ?, rank = ?, updated = ? WHERE id = ?",
                [(row[2], worker, rank, time.time(), row[0]) for row in rows])
            if call.process and rows:
                self._set_meta(db, f"lease {worker}", json.dumps(
                    [call.process, call.number, deaths > 0, [(row[0], row[2]) for row in rows]]))
        return [Lease(*row, rank, deaths > 0) for row in rows]

    def leased_before(self, worker: str, call: LeaseCall) -> list[Lease] | None:
        """What this very call was given when it came before, without what was taken back since; nothing when its worker has
        called again meanwhile, so that nobody waits for this answer; None for a call that is new."""
        known = self._meta(f"lease {worker}")
        process, number, alone, given = json.loads(known) if known else ("", 0, False, [])
        if not call.process or process != call.process or call.number > number:
            return None
        rows = [(self.get(id), attempt) for id, attempt in given if call.number == number]
        return [Lease(row.id, row.ordinal, row.attempt, row.purpose, row.rank, alone) for row, attempt in rows
                if (row.state, row.worker, row.attempt) == ("leased", worker, attempt)]

    def streamed(self, deliveries: Iterable[tuple[str, int, int]]) -> dict[str, int]:
        """A trainer holds these (id, attempt, tokens). Returns those it may train, with the passes already trained;
        the others it must drop.

        Accepted also when the lease was taken back but not given anew, and again when a report is repeated.
        """
        accepted = {}
        with self._transaction() as db:
            for id, attempt, tokens in deliveries:
                row = self._current(db, id, attempt)
                if row is None:
                    continue
                if row.state in ("leased", "queued"):
                    db.execute("UPDATE samples SET state = 'streamed', tokens = ?, updated = ? WHERE id = ?",
                               (tokens, time.time(), id))
                    self._acquit(db, id)
                    accepted[id] = row.passes
                elif row.state == "streamed":
                    self._count(db, "duplicates")
                    accepted[id] = row.passes
                elif row.state == "rejected":
                    raise IllegalTransition(f"sample {id!r}: streamed after it was rejected ({row.reason})")
                else:
                    self._count(db, "duplicates")
        return accepted

    def arrived(self, ids_and_tokens: Iterable[tuple[str, int]], rank: int) -> dict[str, int]:
        """A trainer holds states of served requests, which nobody queued, to train on. Returns those it may train, with
        the passes already trained; a repeated report changes nothing."""
        accepted = {}
        with self._transaction() as db:
            for id, tokens in ids_and_tokens:
                if db.execute("SELECT 1 FROM samples WHERE id = ?", (id,)).fetchone():
                    row = self._row(db, id)
                    self._count(db, "duplicates")
                    if row.state == "streamed":
                        accepted[id] = row.passes
                    continue
                # Places below zero: the run's fixed order is of the queued ones.
                place = int(self._meta("arrivals", "0")) + 1
                self._set_meta(db, "arrivals", place)
                if place % FOLD_EVERY == 0:  # trainers that rest reject what newer ones push out, and write no checkpoint
                    self._fold(db, "state = 'rejected' AND updated < ?", time.time() - REPEATED_S)
                db.execute("INSERT INTO samples VALUES (?,?,'traffic','streamed',1,0,0,NULL,NULL,?,?,NULL,NULL,?)",
                           (id, -place, rank, tokens, time.time()))
                accepted[id] = 0
        return accepted

    def trained(self, samples: Iterable[tuple[str, int]], step: int) -> list[str]:
        """Optimizer step `step` (from 1) used these (id, attempt) once each. Returns ids that need no more passes."""
        done = []
        with self._transaction() as db:
            for id, attempt in samples:
                row = self._current(db, id, attempt)
                if row is None:
                    continue
                if db.execute("SELECT 1 FROM passes WHERE id = ? AND step = ?", (id, step)).fetchone():
                    self._count(db, "duplicates")
                    continue
                if row.state != "streamed" or row.purpose not in LEARNED:
                    raise IllegalTransition(f"{row.purpose} sample {id!r} trained by step {step} while {row.state}")
                db.execute("INSERT INTO passes VALUES (?, ?)", (id, step))
                finished = row.passes + 1 >= self.reuse
                db.execute("UPDATE samples SET passes = passes + 1, step = ?, state = ?, updated = ? WHERE id = ?",
                           (step, "trained" if finished else "streamed", time.time(), id))
                if finished:
                    done.append(id)
        return done

    def checkpointed(self, step: int) -> int:
        """A whole checkpoint holds every step up to `step`: what it holds is durable. Returns how many became so."""
        with self._transaction() as db:
            db.execute(
                "UPDATE samples SET passes_durable = held.count FROM (SELECT id, COUNT(*) AS count FROM passes WHERE "
                "step <= ?1 AND id IN (SELECT id FROM passes WHERE step > ?2 AND step <= ?1) GROUP BY id) AS held "
                "WHERE samples.id = held.id", (step, self.checkpoint_step()))
            changed = db.execute("UPDATE samples SET state = 'durable', updated = ? WHERE state = 'trained' AND "
                                 "passes_durable = passes", (time.time(),)).rowcount
            self._fold(db, "state = 'rejected' OR state = 'durable' AND step <= ?", self.checkpoint_step())
            self._set_meta(db, "checkpoint_step", max(step, self.checkpoint_step()))
        return changed

    def rejected(self, id: str, attempt: int, reason: str, detail: str = "") -> bool:
        """This sample cannot be used, for a short stable `reason`. Returns False for an attempt that is over."""
        with self._transaction() as db:
            row = self._current(db, id, attempt)
            if row is None:
                return False
            if row.state in ("trained", "durable"):
                raise IllegalTransition(f"sample {id!r}: rejected ({reason}) while {row.state}")
            if row.state == "rejected":
                self._count(db, "duplicates")
            else:
                db.execute("UPDATE samples SET state = 'rejected', reason = ?, detail = ?, updated = ? WHERE id = ?",
                           (reason, detail, time.time(), id))
                self._acquit(db, id)
        return True

    def requeue_worker(self, worker: str) -> int:
        """Take back what `worker` leased and no trainer holds yet; how many."""
        with self._transaction() as db:
            return db.execute("UPDATE samples SET state = 'queued', worker = NULL, rank = NULL, updated = ? "
                              "WHERE state = 'leased' AND worker = ?", (time.time(), worker)).rowcount

    def requeue_ids(self, samples: Iterable[tuple[str, int]]) -> int:
        """Take back these leases (id, attempt) whose delivery failed; how many.

        What a trainer holds all the same stays with it: the worker's report was wrong or late, and to queue the sample
        again would train it twice. Such a report is ignored and counted.
        """
        changed = 0
        with self._transaction() as db:
            for id, attempt in samples:
                row = self._current(db, id, attempt)
                if row is None:
                    continue
                if row.state != "leased":
                    self._count(db, "duplicates")
                    continue
                db.execute("UPDATE samples SET state = 'queued', worker = NULL, rank = NULL, updated = ? "
                           "WHERE id = ?", (time.time(), id))
                changed += 1
        return changed

    def restore(self, checkpoint_step: int) -> int:
        """The trainers restart from the weights of `checkpoint_step` (0: fresh ones): undo what these do not hold.

        Every pass of a later step is undone, exactly; what is then not durable is queued for its remaining passes.
        All attempts so far are over: their late reports are stale. Returns how many samples were queued again.
        """
        with self._transaction() as db:
            db.execute("DELETE FROM passes WHERE step > ?", (checkpoint_step,))
            # What is left is in the weights, whether or not a crash came before its checkpointed().
            db.execute("UPDATE samples SET passes = held.count, passes_durable = held.count, step = held.step FROM "
                       "(SELECT id, COUNT(*) AS count, MAX(step) AS step FROM passes GROUP BY id) AS held "
                       "WHERE samples.id = held.id")
            db.execute("UPDATE samples SET passes = 0, passes_durable = 0, step = NULL "
                       "WHERE passes > 0 AND id NOT IN (SELECT id FROM passes)")
            db.execute("UPDATE samples SET state = 'durable' WHERE state = 'trained' AND passes >= ?", (self.reuse,))
            open_states = "state IN ('leased', 'streamed', 'trained') OR (state = 'durable' AND passes < ?)"
            db.execute(f"UPDATE samples SET attempt = attempt + 1 WHERE (state = 'queued' AND attempt > 0) "
                       f"OR {open_states}", (self.reuse,))
            # Served requests cannot be captured again: their states are kept nowhere.
            db.execute(f"UPDATE samples SET state = 'rejected', reason = 'not_kept', updated = ? "
                       f"WHERE purpose = 'traffic' AND ({open_states})", (time.time(), self.reuse))
            queued = db.execute(f"UPDATE samples SET state = 'queued', worker = NULL, rank = NULL, updated = ? "
                                f"WHERE {open_states}", (time.time(), self.reuse)).rowcount
            self._set_meta(db, "checkpoint_step", checkpoint_step)
        return queued

    def _fold(self, db: sqlite3.Connection, settled: str, before: float) -> None:
        """Count served requests that are settled by the SQL condition, a function of `before`, and forget them one by one:
        an endless run's ledger stays small."""
        settled = f"purpose = 'traffic' AND ({settled})"
        for state, reason, count in db.execute(
                f"SELECT state, reason, COUNT(*) FROM samples WHERE {settled} GROUP BY 1, 2", (before,)).fetchall():
            key = f"folded traffic {state} {reason or ''}".strip()
            self._set_meta(db, key, int(self._meta(key, "0")) + count)
        db.execute(f"DELETE FROM passes WHERE id IN (SELECT id FROM samples WHERE {settled})", (before,))
        db.execute(f"DELETE FROM samples WHERE {settled}", (before,))

    # Versions and events

    def add_version(self, version: int, step: int, samples: int, parent: int | None, predicted: float | None,
                    text: str | None = None, data: dict | None = None) -> None:
        """A drafter was exported; with `text` and `data`, an `exported` event says so. Repeating the report does nothing
        more; IllegalTransition when the number is another's."""
        with self._transaction() as db:
            known = db.execute("SELECT step, samples, parent, predicted FROM versions WHERE version = ?", (version,)).fetchone()
            if known is None:
                db.execute("INSERT INTO versions VALUES (?,?,?,?,?,'exported',NULL,?)",
                           (version, step, samples, parent, predicted, time.time()))
            elif known == (step, samples, parent, predicted):
                self._count(db, "duplicates")
            else:
                raise IllegalTransition(f"drafter version {version} exists already")
            if text is not None and not self.history(1, "exported", version):
                self._tell(db, "exported", text, version, None, data)

    def set_version_state(self, version: int, state: str, reason: str | None = None) -> None:
        if state not in VERSION_STATES:
            raise IllegalTransition(f"drafter version {version}: no state {state!r} among {VERSION_STATES}")
        with self._transaction() as db:
            changed = db.execute("UPDATE versions SET state = ?, reason = ? WHERE version = ?",
                                 (state, reason, version)).rowcount
            if not changed:
                raise IllegalTransition(f"drafter version {version} is not in the ledger")

    def add_event(self, kind: str, text: str, version: int | None = None, replica: str | None = None,
                  data: dict | None = None) -> None:
        with self._transaction() as db:
            self._tell(db, kind, text, version, replica, data)

    def _tell(self, db: sqlite3.Connection, kind: str, text: str, version: int | None, replica: str | None,
              data: dict | None) -> None:
        db.execute("INSERT INTO events VALUES (?,?,?,?,?,?)", (
            time.time(), kind, version, replica, text, None if data is None else json.dumps(data)))

    def _current(self, db: sqlite3.Connection, id: str, attempt: int) -> SampleRow | None:
        """The sample, or None (and counted) when `attempt` is over. Raises for what was never leased."""
        try:
            row = self._row(db, id)
        except KeyError as error:
            raise IllegalTransition(f"sample {id!r} is not in the ledger") from error
        if attempt > row.attempt:
            raise IllegalTransition(f"sample {id!r}: attempt {attempt} was never leased, the last is {row.attempt}")
        if attempt < row.attempt:
            self._count(db, "stale")
            return None
        return row
