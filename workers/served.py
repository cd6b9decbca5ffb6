"""What a trainer rank does with served traffic: takes it in, mixes it with general samples, and judges what was learned."""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torchspec_lite.acceptance import Counts, Prediction
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
"""Until so many requests have come nothing is predicted, and versions are exported by step count."""
THIN_S = 300.0
"""Longest wait of a step for a whole batch. Shorter where all passes would not fit into a quarter of `traffic.max_age_s`."""
Predict = Callable[[Drafter, list], Prediction | None]


@dataclass(frozen=True)
class Look:
    """Two drafters on the same window: the one that training has to offer, and the version that serves. Without the two
    predictions nothing was looked at, for want of new requests or of a round in them."""

    decision: Literal["export", "go_on", "rest"]
    drafter: Drafter
    candidate: Prediction | None
    serving: Prediction | None
    serving_version: int
    serving_drafter: Drafter


@dataclass(frozen=True)
class Seen:
    """What a look saw: rounds on its requests of what training had to offer then, and of the version that served."""

    requests: int
    candidate: Counts
    serving: Counts

    def __add__(self, other: "Seen") -> "Seen":
        return Seen(self.requests + other.requests, self.candidate + other.candidate, self.serving + other.serving)


class ServedTraffic:
    """`predict` works out a drafter's acceptance on (sample, statistics) pairs; the window is rank 0's."""

    def __init__(self, intake: TrafficIntake, general: ReuseBuffer, run_dir: Path, info: TargetInfo, head: FrozenHead,
                 coordinator, predict: Predict):
        self.intake, self.run_dir, self.info, self.head = intake, run_dir, info, head
        self.coordinator, self.predict = coordinator, predict
        self.mixture = Mixture(general, intake.buffer, intake.options.general_share)
        self.pace = Pace(intake.options)
        self.looked_at, self.looked_when = 0, intake.clock()
        self.thin_s = min(THIN_S, intake.options.max_age_s / 4 / intake.buffer.reuse)
        self.waits_since = math.inf  # never: nothing waits
        self.seen: deque[Seen] = deque()  # the last looks at the version that serves
        self.known: tuple[int, Drafter] | None = None
        self.anchor: Drafter | None = None

    @property
    def tokens(self) -> int:
        return self.intake.buffer.tokens

    def has_a_batch(self, tokens: int) -> bool:
        """Whether a step may be made of what waits: as many tokens as that or, where more have not come for long, what there is.
        With thin traffic samples would else grow too old one by one and none would be trained. Ask at every turn: the wait is
        counted from the first that finds something to train."""
        waiting, now = self.mixture.general.tokens + self.tokens, self.intake.clock()
        self.waits_since = min(self.waits_since, now) if waiting else math.inf
        return waiting >= tokens or now - self.waits_since >= self.thin_s

    def count_pass(self, entries: list[Entry]) -> list[Entry]:
        """Note a step's entries in the buffer each came from; those done."""
        if entries:
            self.waits_since = math.inf
        served = [entry for entry in entries if entry.sample.id in self.intake.came]
        return self.intake.count_pass(served) + self.mixture.count_general_pass(entries)

    def look(self, drafter: Drafter) -> Look | None:
        """Compare what training has to offer with the serving version on the window, which is let go to be trained on; None
        before anything can be compared. On offer are the trained weights and those `traffic.blend` of the way to them, from
        the version that served when training began or woke.

        A request waits for one look only, so that what it teaches is soon in use. Then few are compared at a time, so the
        last looks at the same serving version count too, up to `traffic.window` requests. Where traffic is so thin that
        requests are trained on before half of a window has come, the fewest will do.
        """
        serving, fresh = self._serving(), len(self.intake.newest())
        if serving is None or not self.looked_at and fresh < LEAST_WINDOW:
            return None
        self.anchor = self.anchor or serving
        unseen = Look("go_on", drafter, None, None, self.known[0], serving)
        long_ago = self.intake.clock() - self.looked_when >= self.intake.patience_s
        if fresh < (LEAST_WINDOW if long_ago else max(LEAST_WINDOW, self.intake.options.window // 2)):
            return unseen
        offers = [drafter, *(blend(self.anchor, drafter, share) for share in self.intake.options.blend)]
        predicted, present = [self._on_window(offer) for offer in offers], self._on_window(serving)
        if None in predicted or present is None:
            return unseen
        drafter, candidate = max(zip(offers, predicted), key=lambda pair: pair[1].walked)
        self.looked_at, self.looked_when = self.intake.arrivals, self.intake.clock()
        self.intake.let_train()
        seen = self._with_looks_before(Seen(fresh, candidate.walk, present.walk))
        decision = self.pace.look(seen.candidate.acceptance_length, seen.serving.acceptance_length)
        self._report(seen)
        if decision != "go_on":
            self.seen.clear()
        if decision == "rest":
            self.coordinator.tell("event", "rest", f"training rests: {self.intake.options.rest_after} looks without gain; it "
                                  f"wakes when the predicted acceptance length on present traffic falls under "
                                  f"{seen.serving.acceptance_length - self.intake.options.wake_drop:.2f}")
        return Look(decision, drafter, candidate, present, self.known[0], serving)

    def _with_looks_before(self, seen: Seen) -> Seen:
        """This look and those before it, as many as `traffic.window` has place for. What was on offer then is not better than
        what is now, so a gain is, if anything, underestimated."""
        self.seen.append(seen)
        while len(self.seen) > 1 and sum(look.requests for look in self.seen) > self.intake.options.window:
            self.seen.popleft()
        return sum(self.seen, Seen(0, Counts(0, ()), Counts(0, ())))

    def wakes(self) -> bool:
        """Look at the serving version again once half of the window is new; whether training shall go on."""
        if self.intake.arrivals - self.looked_at < self.intake.options.window // 2:
            return False
        self.looked_at = self.intake.arrivals
        serving = self._serving()
        present = serving and self._on_window(serving)
        if present is None:
            return False
        wakes = self.pace.wakes(present.walked)
        self._report(Seen(len(self.intake.newest()), Counts(0, ()), present.walk))
        if not wakes:
            return False
        self.anchor = serving
        self.coordinator.tell("event", "wake", f"training wakes: predicted acceptance length on present traffic fell to "
                              f"{present.walked:.2f}")
        return True

    def _report(self, seen: Seen) -> None:
        candidate = seen.candidate.acceptance_length if seen.candidate.rounds else None
        self.coordinator.tell("pace", PaceReport(seen.requests, seen.serving.acceptance_length, candidate, self.pace.resting))

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
            self.seen.clear()
        return self.known[1]
