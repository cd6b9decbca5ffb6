"""The suite's one table: what was done to a run, how often, how long it took to recover, and what it cost."""

import os
import statistics
from collections import defaultdict

import pytest


class Table:
    """Rows by fault."""

    def __init__(self):
        self.recovered: dict[str, list[float]] = defaultdict(list)
        self.lost: dict[str, int] = defaultdict(int)
        self.twice: dict[str, int] = defaultdict(int)

    def add(self, fault: str, seconds: float) -> None:
        """It happened once, and samples were trained again after so many seconds."""
        self.recovered[fault].append(seconds)

    def end(self, faults, lost: int, twice: int) -> None:
        """A run with these faults is over: how many samples were lost or trained too often."""
        for fault in set(faults):
            self.lost[fault] += lost
            self.twice[fault] += twice

    def lines(self) -> list[str]:
        rows = [f"{'fault':<38} {'times':>5} {'recovered in s: median':>22} {'max':>6} {'lost':>5} {'trained twice':>13}"]
        for fault, seconds in self.recovered.items():
            rows.append(f"{fault:<38} {len(seconds):5} {statistics.median(seconds):22.2f} {max(seconds):6.2f} "
                        f"{self.lost[fault]:5} {self.twice[fault]:13}")
        return rows


TABLE = Table()


@pytest.fixture
def table() -> Table:
    return TABLE


def pytest_terminal_summary(terminalreporter):
    if TABLE.recovered:
        terminalreporter.section(f"chaos, seed {os.environ.get('CHAOS_SEED', '1')}")
        for line in TABLE.lines():
            terminalreporter.write_line(line)
