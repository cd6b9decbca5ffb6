"""The pace of an endless run: when a version is worth exporting, when training rests, and when it wakes."""

import math
from dataclasses import dataclass
from typing import Literal

from torchspec_lite.sections import TrafficConfig


@dataclass
class Pace:
    """Judges by predicted acceptance length on the window, recent served requests that are not trained on.

    A look compares the trainer's weights with the serving version's on the same window. Looks without gain lead to a
    rest, but not while the serving version's acceptance falls: then traffic is changing, and what there is to learn has only
    begun to come.
    """

    options: TrafficConfig
    idle: int = 0
    highest: float | None = None  # of the serving version, at the looks that `idle` counts
    rested_at: float | None = None

    @property
    def resting(self) -> bool:
        return self.rested_at is not None

    def look(self, candidate: float, serving: float) -> Literal["export", "go_on", "rest"]:
        """What follows from the two acceptance lengths. After `rest` the serving one is what must fall to wake it. From one
        that is not a number, of no round at all, nothing follows."""
        if math.isnan(candidate) or math.isnan(serving):
            return "go_on"
        if candidate - serving >= self.options.export_margin:
            self.idle, self.highest = 0, None
            return "export"
        if self.highest is not None and serving <= self.highest - self.options.wake_drop:
            self.idle, self.highest = 0, serving
            return "go_on"
        self.idle, self.highest = self.idle + 1, max(serving, self.highest or serving)
        if self.idle < self.options.rest_after:
            return "go_on"
        self.idle, self.highest, self.rested_at = 0, None, serving
        return "rest"

    def wakes(self, serving: float) -> bool:
        """Whether the serving version's acceptance length has fallen far enough since the rest began."""
        if serving > self.rested_at:
            self.rested_at = serving
        if not serving <= self.rested_at - self.options.wake_drop:  # also where it is not a number
            return False
        self.rested_at = None
        return True
