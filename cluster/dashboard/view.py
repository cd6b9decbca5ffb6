"""What the live page shows, read from the run directory: one immutable `View` for each change."""

import json
import sqlite3
import time as clock
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa

from torchspec_lite.errors import UserError
from torchspec_lite.history import history_table
from torchspec_lite.ledger import STATES
from torchspec_lite.snapshot import Snapshot, is_silent, read_snapshot

POINTS = 360
"""Most points of one line on the page."""
EVENTS = 60
VERSIONS = 80
REASONS = 12
EXAMPLES = 3


@dataclass(frozen=True)
class Line:
    """One series: `times` in seconds since the epoch and `values`, oldest first, thinned to `POINTS`."""

    times: tuple[float, ...]
    values: tuple[float, ...]

    @property
    def last(self) -> float:
        return self.values[-1]


@dataclass(frozen=True)
class Reject:
    reason: str
    count: int
    examples: tuple[str, ...]


@dataclass(frozen=True)
class Version:
    number: int
    step: int
    samples: int
    parent: int | None
    predicted: float | None
    state: str
    reason: str | None
    created: float
    decided: float | None
    """When it reached its state; None when no event says so."""


@dataclass(frozen=True)
class Event:
    time: float
    kind: str
    version: int | None
    replica: str | None
    text: str


@dataclass(frozen=True)
class View:
    run: str
    now: float
    snapshot: Snapshot | None = None
    """None until the driver has written one."""
    fault: str | None = None
    """Why part of the directory could not be read."""
    silent: bool = False
    samples: dict[str, int] = field(default_factory=dict)
    held_out: int = 0
    rejects: tuple[Reject, ...] = ()
    versions: tuple[Version, ...] = ()
    """Newest last."""
    events: tuple[Event, ...] = ()
    """Newest first."""
    lines: dict[str, dict[str, Line]] = field(default_factory=dict)
    """Metric name → value of its label ("" for none) → line."""

    def line(self, name: str, label: str = "") -> Line | None:
        return self.lines.get(name, {}).get(label)


class Reader:
    """Reads one run directory again and again; keeps what has not changed."""

    def __init__(self, run_dir: Path):
        self.run_dir = run_dir
        self._segments: dict[Path, pa.Table] = {}

    def read(self) -> View:
        """The directory as it is now; a part that is missing or unreadable is left out and named in `fault`."""
        faults: list[str] = []
        now = clock.time()
        snapshot = self._try(faults, "status.json", lambda: read_snapshot(self.run_dir))
        ledger = self._try(faults, "ledger.sqlite", self._ledger) or {}
        lines = self._try(faults, "metrics", lambda: lines_of(history_table(self.run_dir, cache=self._segments)))
        return View(
            run=snapshot.run if snapshot else self.run_dir.name,
            now=now,
            snapshot=snapshot,
            fault="; ".join(faults) or None,
            silent=snapshot is not None and is_silent(snapshot, now),
            lines=lines or {},
            **ledger,
        )

    def _try(self, faults: list[str], name: str, read):
        if not (self.run_dir / name).exists():
            return None
        try:
            return read()
        except (UserError, sqlite3.Error, pa.ArrowException) as error:
            faults.append(f"{name}: {error}")
            return None

    def _ledger(self) -> dict:
        address = f"{(self.run_dir / 'ledger.sqlite').absolute().as_uri()}?mode=ro"
        with closing(sqlite3.connect(address, uri=True, timeout=5)) as ledger:
            counts = ledger.execute("SELECT purpose, state, count(*) FROM samples GROUP BY purpose, state").fetchall()
            train = {state: count for purpose, state, count in counts if purpose == "train"}
            return {
                "samples": {state: train.get(state, 0) for state in STATES},
                "held_out": sum(count for purpose, _, count in counts if purpose == "held_out"),
                "rejects": _rejects(ledger),
                "versions": _versions(ledger),
                "events": tuple(
                    Event(*row)
                    for row in ledger.execute(
                        "SELECT time, kind, version, replica, text FROM events ORDER BY time DESC, rowid DESC LIMIT ?",
                        (EVENTS,),
                    )
                ),
            }


def _rejects(ledger: sqlite3.Connection) -> tuple[Reject, ...]:
    reasons = ledger.execute(
        "SELECT reason, count(*) FROM samples WHERE state = 'rejected' "
        "GROUP BY reason ORDER BY count(*) DESC, reason LIMIT ?",
        (REASONS,),
    ).fetchall()
    examples = "SELECT id FROM samples WHERE state = 'rejected' AND reason IS ? ORDER BY updated DESC, id LIMIT ?"
    return tuple(
        Reject(reason or "no reason given", count, tuple(id for (id,) in ledger.execute(examples, (reason, EXAMPLES))))
        for reason, count in reasons
    )


def _versions(ledger: sqlite3.Connection) -> tuple[Version, ...]:
    rows = ledger.execute(
        "SELECT version, step, samples, parent, predicted, state, reason, created, "
        "(SELECT max(time) FROM events WHERE events.version = versions.version AND events.kind = versions.state) "
        "FROM versions ORDER BY version DESC LIMIT ?",
        (VERSIONS,),
    ).fetchall()
    return tuple(Version(*row) for row in reversed(rows))


def lines_of(table: pa.Table) -> dict[str, dict[str, Line]]:
    """Every series of a history table, thinned to `POINTS` by the mean of equal spans of time."""
    times, values = table["time"].to_numpy(), table["value"].to_numpy()
    name_codes = table["name"].combine_chunks().dictionary_encode()
    label_codes = table["labels"].combine_chunks().dictionary_encode()
    names, labels = name_codes.dictionary.to_pylist(), label_codes.dictionary.to_pylist()
    key = name_codes.indices.to_numpy() * len(labels) + label_codes.indices.to_numpy()
    order = np.argsort(key, kind="stable")
    starts = np.flatnonzero(np.diff(key[order], prepend=-1))
    lines: dict[str, dict[str, Line]] = {}
    for rows in np.split(order, starts[1:]) if len(order) else []:
        name, label = names[key[rows[0]] // len(labels)], json.loads(labels[key[rows[0]] % len(labels)])
        lines.setdefault(name, {})[next(iter(label.values()), "")] = _line(times[rows], values[rows])
    return lines


def _line(times: np.ndarray, values: np.ndarray) -> Line:
    finite = np.isfinite(values)
    times, values = times[finite], values[finite]
    if len(times) > POINTS:
        bucket = np.minimum((times - times[0]) / (times[-1] - times[0] + 1e-9) * POINTS, POINTS - 1).astype(np.int64)
        bucket[-1] = POINTS  # the newest value is shown as it is
        counts = np.bincount(bucket)
        kept = counts > 0
        times = np.bincount(bucket, times)[kept] / counts[kept]
        values = np.bincount(bucket, values)[kept] / counts[kept]
    return Line(tuple(np.round(times, 3).tolist()), tuple(values.tolist()))
