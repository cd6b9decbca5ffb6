"""What a trainer rank does with served traffic: takes it in, mixes it with general samples, and judges what was learned."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torchspec_lite.acceptance import Prediction
from torchspec_lite.blend import blend
from torchspec_lite.drafter import Drafter
from torchspec_lite.export import load_drafter, version_path
from torchspec_lite.mixture import Mixture
from torchspec_lite.pace import Pace
from torchspec_lite.reuse import Entry, ReuseBuffer
from torchspec_lite.target import FrozenHead, TargetInfo
from workers.reports import PaceReport
from workers.traffic_intake import TrafficIntake

LEAST_WINDOW = 4
"""With fewer samples in the window nothing is predicted, and versions are exported by step count."""
Predict = Callable[[Drafter, list], Prediction | None]


@dataclass(frozen=True)
class Look:
    """Two drafters on the same window: the one that training has to offer, and the version that serves."""

    decision: Literal["export", "go_on", "rest"]
    drafter: Drafter
    candidate: Prediction
    serving: Prediction
    serving_version: int
    serving_drafter: Drafter


class ServedTraffic:
    """`predict` works out a drafter's acceptance on (sample, statistics) pairs; the window is rank 0's."""

    def __init__(self, intake: TrafficIntake, general: ReuseBuffer, run_dir: Path, info: TargetInfo, head: FrozenHead,
                 coordinator, predict: Predict):
        self.intake, self.run_dir, self.info, self.head = intake, run_dir, info, head
        self.coordinator, self.predict = coordinator, predict
        self.mixture = Mixture(general, intake.buffer, intake.options.general_share)
        self.pace = Pace(intake.options)
        self.looked_at = 0
        self.known: tuple[int, Drafter] | None = None
        self.anchor: Drafter | None = None

    @property
    def tokens(self) -> int:
        return self.intake.buffer.tokens

    def count_pass(self, entries: list[Entry]) -> list[Entry]:
        """Note a step's entries in the buffer each came from; those done."""
        served = [entry for entry in entries if entry.sample.id in self.intake.came]
        return self.intake.count_pass(served) + self.mixture.count_general_pass(entries)

    def look(self, drafter: Drafter) -> Look | None:
        """Compare what training has to offer with the serving version on the window; None when there is nothing to
        compare on. On offer are the trained weights and those `traffic.blend` of the way to them, from the version that
        served when training began or woke."""
        serving = self._serving()
        if serving is None or len(self.intake.newest()) < LEAST_WINDOW:
            return None
        self.anchor = self.anchor or serving
        offers = [drafter, *(blend(self.anchor, drafter, share) for share in self.intake.options.blend)]
        predicted, present = [self._on_window(offer) for offer in offers], self._on_window(serving)
        if None in predicted or present is None:
            return None
        drafter, candidate = max(zip(offers, predicted), key=lambda pair: pair[1].walked)
        self.looked_at = self.intake.arrivals
        decision = self.pace.look(candidate.walked, present.walked)
        self._report(present.walked, candidate.walked)
        if decision == "rest":
            self.coordinator.tell("event", "rest", f"training rests: {self.intake.options.rest_after} looks without gain; it "
                                  f"wakes when the predicted acceptance length on present traffic falls under "
                                  f"{present.walked - self.intake.options.wake_drop:.2f}")
        return Look(decision, drafter, candidate, present, self.known[0], serving)

    def wakes(self) -> bool:
        """Look at the serving version again once half of the window is new; whether training shall go on."""
        if self.intake.arrivals - self.looked_at < self.intake.options.window // 2:
            return False
        self.looked_at = self.intake.arrivals
        serving = self._serving()
        present = serving and self._on_window(serving)
        if present is None or not self.pace.wakes(present.walked):
            if present is not None:
                self._report(present.walked, None)
            return False
        self.anchor = serving
        self._report(present.walked, None)
        self.coordinator.tell("event", "wake", f"training wakes: predicted acceptance length on present traffic fell to "
                              f"{present.walked:.2f}")
        return True

    def _report(self, serving: float, candidate: float | None) -> None:
        self.coordinator.tell("pace", PaceReport(len(self.intake.newest()), serving, candidate, self.pace.resting))

    def _on_window(self, drafter: Drafter) -> Prediction | None:
        return self.predict(drafter, [(entry.sample, entry.statistics) for entry in self.intake.newest()])

    def _serving(self) -> Drafter | None:
        version = self.coordinator.call("serving_version")
        if version is None:
            return None
        if self.known is None or self.known[0] != version:
            folder = version_path(self.run_dir / "drafters", version)
            if not folder.is_dir():
                return None
            self.known = version, load_drafter(folder, self.info, self.head)
        return self.known[1]
