"""Every definition of acceptance length (AL), in one place.

AL = 1 + accepted / rounds: tokens per forward of the target, the bonus token included, weighted by draft rounds, as
vLLM counts it. Rates per position are joint (accepted at position k / rounds), so AL = 1 + their sum; papers' n-alpha
are conditional (accepted at k / accepted at k - 1) and are named `conditional` here.

* served: from an engine's counters (`Counts`);
* predicted: mean over all live rows, greedy (`Prediction.acceptance_length`);
* predicted as served: only the rows where serving would start a round (`Prediction.walked`);
* sampled: expected under speculative sampling at temperature 1 (`Prediction.sampled`).
"""

import copy
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import torch
import torch.nn.functional as F

from torchspec_lite.batch import supervised_places
from torchspec_lite.drafter import Drafter, unrolled_steps
from torchspec_lite.sample import Sample
from torchspec_lite.target import FrozenHead
from torchspec_lite.teacher import TeacherStatistics, normed, teacher_statistics

CHUNK_ELEMENTS = 1 << 24  # logits held at once by a head: 64 MiB in fp32


@dataclass(frozen=True)
class Counts:
    """Draft rounds and, for each position, how many rounds accepted it (joint: position k implies those before)."""

    rounds: int
    accepted_per_position: tuple[int, ...]

    @classmethod
    def of_rounds(cls, accepted: Iterable[int], steps: int) -> "Counts":
        """From the number of accepted tokens of each round."""
        accepted = list(accepted)
        return cls(len(accepted), tuple(sum(a > k for a in accepted) for k in range(steps)))

    @classmethod
    def of_list(cls, numbers: Sequence[int]) -> "Counts":
        """From `as_list`."""
        return cls(numbers[0], tuple(numbers[1:]))

    def as_list(self) -> list[int]:
        """Rounds, then those that accepted each position: for messages."""
        return [self.rounds, *self.accepted_per_position]

    @property
    def accepted(self) -> int:
        return sum(self.accepted_per_position)

    @property
    def acceptance_length(self) -> float:
        """1 + accepted / rounds; not a number before the first round."""
        return 1 + self.accepted / self.rounds if self.rounds else math.nan

    @property
    def per_position(self) -> tuple[float, ...]:
        """Joint rates."""
        return tuple(a / self.rounds if self.rounds else math.nan for a in self.accepted_per_position)

    @property
    def conditional(self) -> tuple[float, ...]:
        """Rate of each position among the rounds that accepted all positions before it."""
        before = (self.rounds, *self.accepted_per_position)
        return tuple(a / b if b else math.nan for a, b in zip(self.accepted_per_position, before))

    @property
    def variance(self) -> float:
        """Variance of one round's accepted tokens, exact: the joint counts are the tail of their distribution."""
        if not self.rounds:
            return math.nan
        square = sum((2 * k + 1) * a for k, a in enumerate(self.accepted_per_position)) / self.rounds
        return square - (self.accepted / self.rounds) ** 2

    def __add__(self, other: "Counts") -> "Counts":
        return self._combine(other, 1)

    def __sub__(self, other: "Counts") -> "Counts":
        """What was counted since `other`. Raises ValueError when a counter went backwards (the engine restarted)."""
        since = self._combine(other, -1)
        if since.rounds < 0 or min(since.accepted_per_position, default=0) < 0:
            raise ValueError("acceptance counters went backwards: the engine restarted between the two readings")
        return since

    def _combine(self, other, sign):
        width = max(len(self.accepted_per_position), len(other.accepted_per_position))
        mine, theirs = (c.accepted_per_position + (0,) * (width - len(c.accepted_per_position)) for c in (self, other))
        return Counts(self.rounds + sign * other.rounds, tuple(a + sign * b for a, b in zip(mine, theirs)))


@dataclass(frozen=True)
class Interval:
    """A difference of acceptance lengths, new minus old, and its confidence interval."""

    difference: float
    low: float
    high: float


def compare(new: Counts, old: Counts, confidence: float) -> Interval:
    """Difference in AL with a normal interval (Welch), rounds taken as independent.

    Rounds of one request resemble each other, so with few requests the interval is too narrow: use
    `compare_requests` where counts per request are known. Unbounded until both sides have two rounds.
    """
    difference = new.acceptance_length - old.acceptance_length
    if min(new.rounds, old.rounds) < 2:
        return Interval(difference, -math.inf, math.inf)
    error = sum(c.variance / (c.rounds - 1) for c in (new, old))
    return _interval(difference, error, confidence)


def compare_requests(new: Sequence[Counts], old: Sequence[Counts], confidence: float) -> Interval:
    """Difference in AL between two sets of requests; requests, not rounds, are taken as independent.

    AL is a ratio of sums over requests; its variance is the ratio estimator's (delta method, Cochran, Sampling
    Techniques, 6.4). Unbounded until both sides have two requests with rounds.
    """
    sides = [[c for c in side if c.rounds] for side in (new, old)]
    lengths = [sum(side, Counts(0, ())).acceptance_length for side in sides]
    difference = lengths[0] - lengths[1]
    if min(map(len, sides)) < 2:
        return Interval(difference, -math.inf, math.inf)
    error = 0.0
    for side, length in zip(sides, lengths):
        residuals = [c.accepted - (length - 1) * c.rounds for c in side]
        rounds = sum(c.rounds for c in side)
        error += sum(r * r for r in residuals) * len(side) / (len(side) - 1) / rounds**2
    return _interval(difference, error, confidence)


def compare_pairs(new: Sequence[Counts], old: Sequence[Counts], confidence: float) -> Interval:
    """Difference in AL on the same requests, answered once with each drafter: `new[i]` and `old[i]` are one request.

    As `compare_requests`, but what makes a request easy or hard for both drafters cancels (ratio estimators of paired
    samples, Cochran, Sampling Techniques, 6.4). Raises ValueError for sides of different length.
    """
    pairs = [(n, o) for n, o in zip(new, old, strict=True) if n.rounds and o.rounds]
    sides = [sum(side, Counts(0, ())) for side in zip(*pairs)] if pairs else [Counts(0, ())] * 2
    difference = sides[0].acceptance_length - sides[1].acceptance_length
    if len(pairs) < 2:
        return Interval(difference, -math.inf, math.inf)
    residuals = [sum(sign * (c.accepted - (side.acceptance_length - 1) * c.rounds) / side.rounds
                     for sign, c, side in zip((1, -1), pair, sides)) for pair in pairs]
    return _interval(difference, sum(r * r for r in residuals) * len(pairs) / (len(pairs) - 1), confidence)


def _interval(difference, variance, confidence):
    half = NormalDist().inv_cdf(0.5 + confidence / 2) * math.sqrt(variance)
    return Interval(difference, difference - half, difference + half)


@dataclass(frozen=True)
class Prediction:
    """Acceptance that a drafter should reach, from teacher-forced steps on samples, and drift diagnostics.

    `live` counts every live row as a round, `walk` the rounds serving would make. `sampled` is None unless asked for.
    `coverage`: share of live rows whose first target token is in the draft vocabulary. Per step k over rows live at
    step 0: `feature_norm` (L2 of what the step reads), `sink_mass`, `own_mass` (see drafter.Step).
    """

    live: Counts
    walk: Counts
    sampled: float | None
    coverage: float
    feature_norm: tuple[float, ...]
    sink_mass: tuple[float, ...]
    own_mass: tuple[float, ...]

    @property
    def acceptance_length(self) -> float:
        """1 + mean over live rows of the leading steps whose draft is the target's own choice (greedy)."""
        return self.live.acceptance_length

    @property
    def walked(self) -> float:
        """AL over the rounds that serving would make on the same answers."""
        return self.walk.acceptance_length

    @property
    def per_position(self) -> tuple[float, ...]:
        """Joint rates over live rows."""
        return self.live.per_position

    @property
    def per_position_conditional(self) -> tuple[float, ...]:
        return self.live.conditional

    @property
    def rows(self) -> int:
        return self.live.rounds

    @property
    def rounds(self) -> int:
        return self.walk.rounds


def walk_rounds(accepted: torch.Tensor, live: torch.Tensor, mask: torch.Tensor) -> list[int]:
    """Accepted tokens of each round as serving would make them.

    accepted [n-1] int: leading accepted steps of each row; live [n-1] bool; mask [n]. The first round of an answer is
    at the row that reads its first token; a round that accepted a tokens is followed by one a + 1 rows later. Of an
    answer that began before the sample nobody knows where its rounds fell; it is walked from row 0, the first there is.
    """
    answer = [False, *mask.bool().tolist()[1:]]                            # no row reads token 0
    accepted, live = accepted.tolist(), live.tolist()
    rounds = []
    for token in range(1, len(answer)):
        if not answer[token] or answer[token - 1]:
            continue                                                       # not the first token of an answer
        row = token - 1                                                    # reads token `row + 1`
        while row < len(live) and live[row]:
            rounds.append(accepted[row])
            row += accepted[row] + 1
    return rounds


@torch.no_grad()
def predict(drafter: Drafter, head: FrozenHead, samples: Sequence[Sample], steps: int,
            dtype: torch.dtype = torch.float32, statistics: Sequence[TeacherStatistics] | None = None,
            sampled: bool = False, compile: bool = True) -> Prediction:
    """Predict acceptance on `samples` with K = `steps` drafts a round, and measure drift.

    `dtype`: of the drafter's arithmetic (the serving dtype predicts best). `statistics`: `teacher_statistics` of each
    sample, kept from an earlier call (they depend on the target alone); None computes them. `sampled` adds the sampled
    AL, which needs the target's whole distribution at each row. `compile` as in `teacher_statistics`. A drafted token
    counts only if it is the target's choice over the FULL vocabulary, so what lies outside the draft vocabulary is never
    accepted. The work is done where the head is; drafter and samples may be on the CPU.
    """
    device = head.lm_head.device
    drafter = _placed(drafter, device, dtype)
    live_rounds, walked, sampled_sum, covered = [], [], 0.0, 0
    drift = torch.zeros(3, steps, dtype=torch.float64)
    for i, sample in enumerate(samples):
        n = len(sample.token_ids)
        supervised = supervised_places(sample.mask.cpu(), torch.tensor([0, n]), steps)[:, :n - 1].to(device)
        live = supervised[0]                                               # [n-1]
        if not live.any():
            continue
        last = sample.last.to(device)
        known = teacher_statistics(last, sample.mask, head, compile) if statistics is None else statistics[i]
        choice = known.argmax.to(device)                                   # [n-1]
        covered += int(torch.isin(choice[1:][live[:-1]], drafter.draft_ids).sum())
        accepted = torch.zeros(n - 1, dtype=torch.int64, device=device)
        prefix, joint = live, live.double()
        states = unrolled_steps(drafter, head.embed_tokens, sample.token_ids.to(device).long(), sample.aux.to(device),
                                steps)
        for k, step in enumerate(states):
            drift[:, k] += torch.stack([measure[live].double().sum() for measure in (
                step.feature.float().norm(dim=-1), step.sink_mass, step.own_mass)]).cpu()
            rows = (prefix & supervised[k]).nonzero()[:, 0]
            prefix = torch.zeros_like(live)
            for part in _chunks(rows, len(drafter.lm_head)):
                drafted = drafter.draft_ids[F.linear(step.output[part], drafter.lm_head).argmax(-1)]
                prefix[part] = drafted == choice[part + 1 + k]
            accepted += prefix
            if sampled:
                joint = joint * _overlap(drafter, head, last, step.output, supervised[k], k)
                sampled_sum += float(joint.sum())
        live_rounds += accepted[live].tolist()
        walked += walk_rounds(accepted, live, sample.mask)
    rows = len(live_rounds)
    means = (drift / rows).tolist() if rows else [[math.nan] * steps] * 3
    return Prediction(
        live=Counts.of_rounds(live_rounds, steps), walk=Counts.of_rounds(walked, steps),
        sampled=(1 + sampled_sum / rows if rows else math.nan) if sampled else None,
        coverage=covered / rows if rows else math.nan,
        feature_norm=tuple(means[0]), sink_mass=tuple(means[1]), own_mass=tuple(means[2]))


def _placed(drafter: Drafter, device: torch.device, dtype: torch.dtype) -> Drafter:
    """The drafter itself if its parameters are there and of that dtype, else a copy."""
    if all(p.dtype == dtype and p.device == device for p in drafter.parameters()):
        return drafter
    return copy.deepcopy(drafter).to(device, dtype)


def _overlap(drafter, head, last, output, supervised, k):
    """alpha [n-1] fp64 of step k: sum over tokens of min(p, q) where the row is supervised, else 0."""
    overlap = torch.zeros(len(supervised), dtype=torch.float64, device=supervised.device)
    for rows in _chunks(supervised.nonzero()[:, 0], len(head.lm_head)):
        states = normed(last[rows + 1 + k], head, head.lm_head.dtype)
        p = F.linear(states, head.lm_head).float().softmax(-1)[:, drafter.draft_ids]
        q = F.linear(output[rows], drafter.lm_head).float().softmax(-1)
        overlap[rows] = torch.minimum(p, q).sum(-1).double()
    return overlap


def _chunks(rows: torch.Tensor, width: int) -> Iterator[torch.Tensor]:
    return iter(rows.split(max(1, CHUNK_ELEMENTS // width)))
