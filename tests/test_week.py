"""A run of a week: what it keeps on disk, in memory and on the page stays bounded, and is still true."""

import random
import time as real_time
from types import SimpleNamespace

import psutil
import pyarrow as pa
import pytest

from cluster.dashboard.view import POINTS as POINTS_SHOWN
from cluster.dashboard.view import Reader
from cluster.observer import RATE_WINDOW_S, Observer
from torchspec_lite import config as configs
from torchspec_lite.history import POINTS, RECENT, ROLL_ROWS, SEGMENTS, history_table
from torchspec_lite.metrics import METRICS, VERSIONS_SERVED
from torchspec_lite.snapshot import Buffer, Replica, read_snapshot
from workers.reports import TargetReport, TrainerReport

START, WEEK_S, TICK_S, EXPORT_S = 1_800_000_000.0, 7 * 86_400, 60, 1_800
MIB = 2**20


class Clock:
    """The time of the observer, its metrics and its snapshot."""

    def __init__(self, monkeypatch):
        self.now = START
        fake = SimpleNamespace(time=lambda: self.now, monotonic=lambda: self.now - START)
        for place in ("cluster.observer.time", "torchspec_lite.metrics.clock", "torchspec_lite.snapshot.clock"):
            monkeypatch.setattr(place, fake)


def tick(observer, number: int, generator: random.Random) -> float:
    """What the roles report in one tick; the acceptance length served then."""
    step, buffer = number * 3, Buffer(bytes=MIB, budget_bytes=64 * MIB, samples=4, budget_samples=64)
    version = number * TICK_S // EXPORT_S
    served = 3.0 - 2.0 / (1 + version / 50) + generator.gauss(0, 0.02)
    if number * TICK_S % EXPORT_S == 0:
        observer.exported(version, step, served + 0.05, served + 0.01, [0.6, 0.3, 0.1])
        observer.drift(step, "feature_norm", [24.0, 25.0, 26.0, 27.0])
        observer.swap(f"replica-{version // 48}", version, 2.5)  # a replica is replaced once a day
        observer.judged("promoted")
    observer.trainer(TrainerReport(rank=0, step=step, tokens=step * 2048, loss=served, loss_per_step=[1.0, 2.0, 3.0, 4.0],
                                   learning_rate=1e-4, grad_norm=1.0, phases={"wait": 1.0 * number, "forward": 2.0 * number},
                                   receiver=buffer, reuse=buffer))
    observer.target(TargetReport("target-0", tokens=number * 9000, waited_s=0.2 * number, sender=buffer))
    observer.streamed(9000)
    observer.pool((Replica(name=f"replica-{version // 48}", version=version, state="ready", acceptance_length=served,
                           running=3, requests=number),), rounds=number * 50, accepted=number * 30, tokens=number * 99)
    observer.served_by_version(version, served, [0.6, 0.3, 0.1], serving=True)
    observer.tick({"queued": 50, "leased": 1, "streamed": 2, "trained": 3, "durable": number, "rejected": 1}, {"too_long": 1})
    return served


def resident() -> int:
    pa.default_memory_pool().release_unused()
    return psutil.Process().memory_info().rss


def test_a_week_of_ticks_stays_bounded_and_readable(tmp_path, monkeypatch):
    clock, generator = Clock(monkeypatch), random.Random(0)
    observer = Observer(configs.build({"target": {"model": "x"}, "run_root": str(tmp_path)}, "test"), tmp_path, START)
    served, sizes, memory = [], [], []
    ticks = WEEK_S // TICK_S
    for number in range(ticks):
        clock.now = START + number * TICK_S
        served.append(tick(observer, number, generator))
        if (number + 1) % (ticks // 7) == 0:
            sizes.append(sum(path.stat().st_size for path in tmp_path.glob("metrics/*")))
            memory.append(resident())

    # On disk: at most so many rows of a metric, and what waits for the next merge; the week is no bigger than its middle.
    table = history_table(tmp_path)
    assert table.num_rows <= len(METRICS) * (POINTS + RECENT) + (SEGMENTS + 2) * ROLL_ROWS
    assert max(sizes) < 8 * MIB and sizes[-1] < 1.5 * max(sizes[2:4])
    # In memory: windows and newest values only.
    assert all(len(rate.points) <= RATE_WINDOW_S + 2 for rate in observer.rates.values())
    assert max(len(series) for series in observer.metrics._latest.values()) <= VERSIONS_SERVED
    assert memory[-1] - memory[1] < 64 * MIB

    # Still true: each recorded value is in one row, the extremes and the newest as they were.
    rows = [row for row in table.to_pylist() if row["name"] == "served_acceptance_length"]
    assert sum(row["count"] for row in rows) == ticks
    assert sum(row["value"] * row["count"] for row in rows) / ticks == pytest.approx(sum(served) / ticks, rel=1e-9)
    assert (min(row["low"] for row in rows), max(row["high"] for row in rows)) == (min(served), max(served))
    assert [row["value"] for row in rows[-100:]] == served[-100:]

    reader = Reader(tmp_path)
    reader.read()
    started = real_time.perf_counter()
    view = reader.read()  # as the page does at each change
    took = real_time.perf_counter() - started
    lines = [line for metric in view.lines.values() for line in metric.values()]
    assert max(len(line.times) for line in lines) <= POINTS_SHOWN + 1
    line = view.line("served_acceptance_length")
    assert line.last == served[-1] and line.times[0] < START + WEEK_S / 300 and line.times[-1] == clock.now
    assert sum(len(line.times) for line in lines) < 40_000 and took < 2.0, took
    assert view.snapshot == read_snapshot(tmp_path) and view.snapshot.elapsed_s == clock.now - START
    observer.close()
    print(f"{table.num_rows} rows, {sizes[-1] / MIB:.1f} MiB on disk, {took:.2f} s to read, memory "
          f"{(memory[-1] - memory[0]) / MIB:+.0f} MiB, {len(lines)} lines of {sum(len(line.times) for line in lines)} points")
