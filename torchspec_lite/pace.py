"""The pace of an endless run: when a version is worth exporting, when training rests, and when it wakes."""

from dataclasses import dataclass
from typing import Literal

from torchspec_lite.sections import TrafficConfig


@dataclass
class Pace:
    """Judges by predicted acceptance length on the window, recent served requests that are not trained on.

    A look compares the trainer's weights with the serving version's on the same window.
    """

    options: TrafficConfig
    idle: int = 0
    rested_at: float | None = None

    @property
    def resting(self) -> bool:
        return self.rested_at is not None

    def look(self, candidate: float, serving: float) -> Literal["export", "go_on", "rest"]:
        """What follows from the two acceptance lengths. After `rest` the serving one is what must fall to wake it."""
        if candidate - serving >= self.options.export_margin:
            self.idle = 0
            return "export"
        self.idle += 1
        if self.idle < self.options.rest_after:
            return "go_on"
        self.idle, self.rested_at = 0, serving
        return "rest"

    def wakes(self, serving: float) -> bool:
        """Whether the serving version's acceptance length has fallen far enough since the rest began."""
        if serving > self.rested_at:
            self.rested_at = serving
        if serving > self.rested_at - self.options.wake_drop:
            return False
        self.rested_at = None
        return True
