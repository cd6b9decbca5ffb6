"""What is known of a drafter version in the pool, and what follows from it: promote, roll back, or wait."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torchspec_lite.acceptance import Counts, Interval, compare, compare_pairs
from torchspec_lite.config import RolloutConfig

Decision = Literal["promote", "roll_back", "wait"]


@dataclass(frozen=True)
class Evidence:
    """What is known of a new version against the one that serves.

    `live_new`, `live_old`: draft rounds of users' requests in the same period. `shadow_new`, `shadow_old`: rounds of the
    same held-out prompts, prompt by prompt.
    """

    live_new: Counts
    live_old: Counts
    shadow_new: Sequence[Counts]
    shadow_old: Sequence[Counts]

    @property
    def new(self) -> Counts:
        return sum(self.shadow_new, self.live_new)

    @property
    def old(self) -> Counts:
        return sum(self.shadow_old, self.live_old)

    def interval(self, options: RolloutConfig) -> tuple[Interval, str]:
        """Difference in acceptance length and where it comes from: users' traffic once it is thick enough on both
        sides, else the shadow prompts, paired."""
        if min(self.live_new.rounds, self.live_old.rounds) >= options.min_rounds:
            return compare(self.live_new, self.live_old, options.confidence), "users' requests"
        return compare_pairs(self.shadow_new, self.shadow_old, options.confidence), "shadow prompts"


def decide(evidence: Evidence, options: RolloutConfig, exhausted: bool) -> tuple[Decision, str]:
    """Promote, roll back, or wait for more rounds, and why in words.

    Acceptance at or under the alarm level rolls back at once. A version is promoted when it is, with confidence, not
    worse than the serving one by more than the margin, and rolled back when it is worse by more. The margin keeps two
    equal versions from replacing each other for ever on noise. `exhausted`: no more rounds will come, so the mean decides.
    """
    new, old = evidence.new, evidence.old
    if problem := _alarm(new, old, options):
        return "roll_back", problem
    interval, source = evidence.interval(options)
    found = (f"acceptance length {new.acceptance_length:.3f} against {old.acceptance_length:.3f}, difference "
             f"{interval.difference:+.3f} [{interval.low:+.3f}, {interval.high:+.3f}] on {source}, "
             f"{new.rounds} and {old.rounds} rounds")
    if interval.high < -options.worse_margin:
        return "roll_back", f"worse: {found}"
    if min(new.rounds, old.rounds) >= options.min_rounds and interval.low >= -options.worse_margin:
        return "promote", found
    if exhausted and not min(new.rounds, old.rounds):
        return "roll_back", (f"nothing to judge it by: {new.rounds} and {old.rounds} draft rounds of users' requests and "
                             "shadow prompts")
    if exhausted:
        better = interval.difference > 0
        return ("promote" if better else "roll_back"), f"{'better' if better else 'not better'} in the mean: {found}"
    return "wait", found


def decide_on_users(live: Counts, predicted_new: float, predicted_old: Counts, options: RolloutConfig) -> tuple[Decision, str]:
    """Promote, roll back, or wait (users' requests do not tell), for a version that the trainers predict to be better on
    users' newest requests, pair by pair.

    `live`: users' rounds since the swap. `predicted_new`, `predicted_old`: acceptance length of the new version and rounds of
    the serving one on those newest requests. As other requests are compared here, a difference must be beyond what chance
    makes of it to speak against the version.
    """
    if live.rounds < options.min_rounds:
        return "wait", f"{live.rounds} rounds of users' requests"
    if problem := _alarm(live, predicted_old, options):
        return "roll_back", problem
    interval = compare(live, predicted_old, options.confidence)
    found = (f"acceptance length {live.acceptance_length:.3f} on users' requests in {live.rounds} rounds; on those before, the "
             f"trainers predict {predicted_new:.3f} against the serving version's {predicted_old.acceptance_length:.3f}")
    if interval.high < -options.worse_margin:
        return "wait", f"worse than before: {found}"
    return "promote", found


def _alarm(new: Counts, old: Counts, options: RolloutConfig) -> str | None:
    if new.rounds and new.acceptance_length <= options.alarm_acceptance < old.acceptance_length:
        return (f"acceptance length {new.acceptance_length:.3f} after the swap: the drafter's weights are not what was trained "
                "(alarm)")
    return None


def upper_share(equal: int, compared: int) -> float:
    """Upper end of the share's 98 % interval (Wilson, 1927): a few hundred tokens cannot tell 97 % from 98 %, and a
    drafter with wrong weights is far below either. 0 when nothing was compared."""
    if not compared:
        return 0.0
    z, share = 2.33, equal / compared
    middle, spread = share + z * z / 2 / compared, z * math.sqrt(share * (1 - share) / compared + (z / 2 / compared) ** 2)
    return (middle + spread) / (1 + z * z / compared)


def version_counts(stats: dict) -> Counts:
    """Draft rounds of a replica's present version since the replica started, from `Replica.stats()`."""
    for version in stats["versions"]:
        if version["version"] == stats["version"]:
            return Counts(version["drafts"], tuple(version["per_position"]))
    return Counts(0, ())


def without(counts: Counts, shadow: Counts) -> Counts:
    """`counts` less the shadow prompts' own rounds; nothing when these are all there is (vLLM's two ways of counting
    differ by the rounds around a swap)."""
    if counts.rounds <= shadow.rounds or any(
            mine < theirs for mine, theirs in zip(counts.accepted_per_position, shadow.accepted_per_position)):
        return Counts(0, ())
    return counts - shadow
