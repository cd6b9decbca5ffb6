"""The metric history of a run on disk: a crash-safe tail that rolls into Parquet, thinned so that it stays bounded.

    run_dir/metrics/
        000001-000009.parquet   segments 1 to 9, merged and thinned
        000010-000010.parquet   a segment as it was recorded
        000011.tail             the newest rows, one JSON object for each record, written through at once

One process writes (a lock says so), any number read, also while it writes. A killed writer loses at most the line it
was writing. A week of a run stays bounded: beyond `POINTS` rows a metric's older rows are merged in time buckets whose
width doubles as the run grows; a gauge keeps its mean, lowest and highest value, a counter its last.
"""

import json
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from torchspec_lite.errors import UserError
from torchspec_lite.file_lock import hold

SCHEMA = pa.schema(
    [
        ("time", pa.float64()),  # seconds since the epoch; of a merged row, its newest
        ("step", pa.int64()),  # optimizer step, null where none belongs
        ("name", pa.string()),
        ("labels", pa.string()),  # JSON object with sorted keys
        ("value", pa.float64()),  # of a merged row: the mean, of a counter the newest
        ("low", pa.float64()),
        ("high", pa.float64()),
        ("count", pa.int64()),  # recorded rows that this row stands for
    ]
)
POINTS = 4096
"""Most merged rows kept of one metric, all labels together."""
RECENT = 1024
"""Newest rows of one metric that are kept as they were recorded."""
ROLL_ROWS = 8192
"""Rows in the tail before it becomes a Parquet segment."""
SEGMENTS = 8
"""Segments before they are merged into one and thinned."""


class History:
    """The one writer of `run_dir/metrics`. Raises UserError when another process writes there."""

    def __init__(self, run_dir: Path | str, roll_rows: int = ROLL_ROWS, points: int = POINTS, recent: int = RECENT):
        self.folder = Path(run_dir) / "metrics"
        self.folder.mkdir(parents=True, exist_ok=True)
        self._roll_rows, self._points, self._recent = roll_rows, points, recent
        self._lock = hold(self.folder / "writer.lock", 0.0, f"{self.folder}: another process records this run's metrics; stop "
                          "it or give the new run another name")
        self._clean()
        self._number = max([last for _, last, _ in _segments(self.folder)], default=0) + 1
        self._open_tail()

    def append(self, time: float, step: int | None, labels: str, values: dict[str, float]) -> None:
        """Write one record through to the tail; `labels` is a JSON object with sorted keys."""
        self._tail.write(json.dumps([time, step, labels, values]) + "\n")
        self._tail.flush()
        self._rows += len(values)
        if self._rows >= self._roll_rows:
            self.roll()

    def roll(self) -> None:
        """Turn the tail into a Parquet segment, and merge segments when there are many."""
        self._tail.close()
        tail = _tail_path(self.folder, self._number)
        table = _read_tail(tail)
        if table.num_rows:
            _write(self.folder, self._number, self._number, table)
            tail.unlink()
            self._number += 1
        segments = _segments(self.folder)
        if len(segments) > SEGMENTS:
            merged = pa.concat_tables([pq.read_table(path, schema=SCHEMA) for _, _, path in segments])
            _write(self.folder, segments[0][0], segments[-1][1], thin(merged, self._points, self._recent))
            for _, _, path in segments:
                path.unlink()
        self._open_tail()

    def close(self) -> None:
        self.roll()
        self._tail.close()
        self._lock.close()

    def _clean(self) -> None:
        """Remove what a killed writer left behind: half-written files and what a segment already covers."""
        for path in self.folder.glob("*.partial"):
            path.unlink()
        current = {path for _, _, path in _segments(self.folder)}
        for path in self.folder.glob("*.parquet"):
            if path not in current:
                path.unlink()
        covered = max([last for _, last, _ in _segments(self.folder)], default=0)
        for path in self.folder.glob("*.tail"):
            if int(path.stem) <= covered:
                path.unlink()

    def _open_tail(self) -> None:
        path = _tail_path(self.folder, self._number)
        if path.exists():  # cut the line that a killed writer did not finish
            content = path.read_bytes()
            os.truncate(path, content.rfind(b"\n") + 1)
        self._tail = open(path, "a")
        self._rows = _read_tail(path).num_rows


def read_history(run_dir: Path | str, names: list[str] | None = None):
    """The recorded metrics as a pandas frame: `frame = read_history("runs/demo")`.

    One row for each value, oldest first. Columns: `time` (UTC timestamps), `step`, `name`, one column for each label
    (`k`, `replica`, …, strings, null where the metric has none), `value`, and for rows merged by thinning `low`, `high`
    and `count`. `names` picks some metrics; `torchspec_lite.metrics.METRICS` lists them all. Needs pandas;
    `history_table` gives the same as a pyarrow table. Raises UserError when the run has no history.
    """
    frame = history_table(run_dir, names).to_pandas()
    labels = [json.loads(text) for text in frame.pop("labels")]
    for position, key in enumerate(sorted({key for row in labels for key in row}), start=3):
        frame.insert(position, key, [row.get(key) for row in labels])
    frame["step"] = frame["step"].astype("Int64")
    frame["time"] = (frame["time"] * 1e9).astype("int64").astype("datetime64[ns]").dt.tz_localize("UTC")
    return frame


def history_table(
    run_dir: Path | str, names: list[str] | None = None, cache: dict[Path, pa.Table] | None = None
) -> pa.Table:
    """The recorded metrics as a table with the columns of `SCHEMA`, sorted by time.

    `cache` keeps the segments of this run between calls of a caller that follows it. Raises UserError when the run
    has no history.
    """
    folder = Path(run_dir) / "metrics"
    if not folder.is_dir():
        raise UserError(f"{folder}: no metrics there; give the directory of a run that has started")
    for _ in range(10):  # a merge by the writer takes files away between listing and reading
        try:
            table = _read(folder, {} if cache is None else cache)
            break
        except FileNotFoundError:
            continue
    else:
        raise UserError(f"{folder}: files vanish while they are read; is something else deleting them?")
    if names is not None:
        table = table.filter(pc.is_in(table["name"], pa.array(names, pa.string())))
    return table.sort_by("time")


def thin(table: pa.Table, points: int, recent: int) -> pa.Table:
    """Merge each metric's rows older than its `recent` newest in time buckets, until at most `points` rows remain.

    A bucket is a power of two seconds wide and starts at a multiple of its width, so that merging twice gives the same.
    """
    parts = []
    for name in pc.unique(table["name"]).to_pylist():
        rows = table.filter(pc.equal(table["name"], name)).sort_by("time")
        old = max(rows.num_rows - recent, 0)
        parts += [_merge(rows.slice(0, old), points), rows.slice(old)]
    return pa.concat_tables(parts) if parts else table


def _merge(rows: pa.Table, points: int) -> pa.Table:
    """Rows of one metric, oldest first, merged into at most `points` rows (one for each label set at the least)."""
    if rows.num_rows <= points:
        return rows
    labels = pc.dictionary_encode(rows["labels"].combine_chunks()).indices.to_numpy().astype(np.int64)
    times = rows["time"].to_numpy()
    width = 1.0
    while True:
        bucket = np.floor(times / width).astype(np.int64)
        spread = bucket - bucket[0]
        groups = len(np.unique(labels * (spread[-1] + 1) + spread))
        if groups <= points or width > times[-1]:
            break
        width *= 2
    weighted = pc.multiply(rows["value"], rows["count"].cast(pa.float64()))
    grouped = rows.append_column("bucket", pa.array(bucket)).append_column("weighted", weighted)
    merged = grouped.group_by(["name", "labels", "bucket"], use_threads=False).aggregate(
        [("time", "max"), ("step", "max"), ("value", "last"), ("weighted", "sum")]
        + [("low", "min"), ("high", "max"), ("count", "sum")]
    )
    is_counter = rows["name"][0].as_py().endswith("_total")
    mean = pc.divide(merged["weighted_sum"], merged["count_sum"].cast(pa.float64()))
    columns = {
        "time": merged["time_max"],
        "step": merged["step_max"],
        "name": merged["name"],
        "labels": merged["labels"],
        "value": merged["value_last"] if is_counter else mean,
        "low": merged["low_min"],
        "high": merged["high_max"],
        "count": merged["count_sum"],
    }
    return pa.table(columns, schema=SCHEMA)


def _read(folder: Path, cache: dict[Path, pa.Table]) -> pa.Table:
    tails = sorted(folder.glob("*.tail"))  # before the segments: a tail that rolls meanwhile is then seen as either
    segments = _segments(folder)
    for path in set(cache) - {path for _, _, path in segments}:
        del cache[path]
    for _, _, path in segments:
        if path not in cache:
            cache[path] = pq.read_table(path, schema=SCHEMA)
    covered = max([last for _, last, _ in segments], default=0)
    newest = [_read_tail(path) for path in tails if int(path.stem) > covered]
    return pa.concat_tables([SCHEMA.empty_table(), *(cache[path] for _, _, path in segments), *newest])


def _segments(folder: Path) -> list[tuple[int, int, Path]]:
    """(first, last, file) of the segments that count, in order: none that another one covers."""
    spans = []
    for path in folder.glob("*.parquet"):
        first, last = path.stem.split("-")
        spans.append((int(first), int(last), path))
    spans.sort(key=lambda span: (span[0], -span[1]))
    current: list[tuple[int, int, Path]] = []
    for span in spans:
        if not current or span[1] > current[-1][1]:
            current.append(span)
    return current


def _tail_path(folder: Path, number: int) -> Path:
    return folder / f"{number:06d}.tail"


def _read_tail(path: Path) -> pa.Table:
    columns: dict[str, list] = {name: [] for name in ("time", "step", "name", "labels", "value", "count")}
    for line in path.read_bytes().split(b"\n")[:-1]:  # what follows the last newline is not finished yet
        time, step, labels, values = json.loads(line)
        for name, value in values.items():
            row = {"time": time, "step": step, "name": name, "labels": labels, "value": value, "count": 1}
            for column, cell in row.items():
                columns[column].append(cell)
    return pa.table({**columns, "low": columns["value"], "high": columns["value"]}, schema=SCHEMA)


def _write(folder: Path, first: int, last: int, table: pa.Table) -> None:
    path = folder / f"{first:06d}-{last:06d}.parquet"
    partial = path.with_suffix(".partial")
    pq.write_table(table, partial, compression="zstd")
    with open(partial, "rb") as file:
        os.fsync(file.fileno())
    os.replace(partial, path)
