"""The terminal: one bar and one sentence while a run goes on."""

import sys
import time

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from torchspec_lite.snapshot import Snapshot, progress_line, sentences

PLAIN_EVERY_S = 15.0


class Screen:
    """Shows snapshots: in a terminal as a live bar, elsewhere as a line every quarter of a minute.

    `quiet` shows nothing: the caller wants only the closing object.
    """

    def __init__(self, quiet: bool):
        self.console = Console(file=sys.stderr, highlight=False)
        self.quiet, self.next_line = quiet, 0.0
        self.live = Live(console=self.console, refresh_per_second=2) if self.console.is_terminal and not quiet else None

    def __enter__(self) -> "Screen":
        if self.live is not None:
            self.live.start()
        return self

    def __exit__(self, *_) -> None:
        if self.live is not None:
            self.live.stop()

    def say(self, text: str) -> None:
        """One sentence that stays."""
        if not self.quiet:
            self.console.print(text, soft_wrap=True)

    def show(self, snapshot: Snapshot) -> None:
        if self.live is not None:
            self.live.update(_panel(snapshot))
        elif not self.quiet and time.monotonic() >= self.next_line:
            self.next_line = time.monotonic() + PLAIN_EVERY_S
            self.console.print(f"{progress_line(snapshot)} · {sentences(snapshot)}", soft_wrap=True)


def _panel(snapshot: Snapshot) -> Table:
    rows = Table.grid(expand=True)
    rows.add_row(ProgressBar(total=max(1, snapshot.prompts_total or 1), completed=snapshot.prompts_done))
    rows.add_row(Text(progress_line(snapshot)))
    rows.add_row(Text(sentences(snapshot), style="dim"))
    return rows
