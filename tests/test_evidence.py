"""What decides over a version: intervals on paired prompts, users' requests, the alarm."""

import math

import pytest

from cluster.evidence import Evidence, decide, decide_on_users, upper_share, without
from torchspec_lite.acceptance import Counts
from torchspec_lite.config import RolloutConfig

OPTIONS = RolloutConfig(min_rounds=100, worse_margin=0.03, confidence=0.9)
NONE = Counts(0, ())


def evidence(new, old, live=(NONE, NONE)):
    return Evidence(*live, new, old)


def rounds(*lengths: float) -> list[Counts]:
    """Requests of 40 rounds each with these acceptance lengths at one draft position."""
    return [Counts(40, (round(40 * (length - 1)),)) for length in lengths]


def test_a_clearly_better_version_is_promoted_on_paired_prompts():
    old = rounds(1.2, 1.5, 1.3, 1.6)
    new = rounds(1.3, 1.6, 1.4, 1.7)  # each prompt better by the same 0.1, though prompts differ much
    assert decide(evidence(new, old), OPTIONS, exhausted=False)[0] == "promote"


def test_a_clearly_worse_version_is_rolled_back():
    assert decide(evidence(rounds(1.1, 1.4, 1.2, 1.5), rounds(1.2, 1.5, 1.3, 1.6)), OPTIONS, False)[0] == "roll_back"


def test_noise_waits_while_more_can_come_and_is_decided_by_the_mean_at_the_end():
    new, old = rounds(1.2, 1.6, 1.3, 1.4), rounds(1.5, 1.2, 1.3, 1.4)
    assert decide(evidence(new, old), OPTIONS, exhausted=False)[0] == "wait"
    assert decide(evidence(new, old), OPTIONS, exhausted=True)[0] == "promote"  # 1.375 against 1.35
    assert decide(evidence(old, new), OPTIONS, exhausted=True)[0] == "roll_back"


def test_few_rounds_wait_even_if_they_look_good():
    assert decide(evidence(rounds(1.5, 1.5), rounds(1.2, 1.2)), OPTIONS, exhausted=False)[0] == "wait"


def test_acceptance_of_one_is_an_alarm_at_once():
    decision, reason = decide(evidence([Counts(30, (0,))], rounds(1.3)), OPTIONS, exhausted=False)
    assert decision == "roll_back" and "alarm" in reason


def test_a_first_drafter_that_accepts_nothing_yet_is_no_alarm():
    # Both at 1.0: the serving version is an untrained one.
    decision, _ = decide(evidence([Counts(40, (0,))] * 4, [Counts(40, (0,))] * 4), OPTIONS, exhausted=True)
    assert decision == "promote"


def test_users_requests_decide_once_they_are_enough():
    live = (Counts(1000, (600,)), Counts(1000, (300,)))
    _, reason = decide(evidence(rounds(1.1), rounds(1.5), live), OPTIONS, exhausted=False)
    assert "users' requests" in reason


OLD = Counts(400, (200,))  # predicted for the serving version: 1.5


@pytest.mark.parametrize("live, decision, why", [
    (Counts(99, (50,)), "wait", "99 rounds"),              # fewer than min_rounds
    (Counts(100, (2,)), "roll_back", "alarm"),             # 1.02, the alarm level
    (Counts(200, (60,)), "wait", "worse than before"),     # 1.3: 0.2 under, more than chance and the margin
    (Counts(200, (90,)), "promote", "1.450"),              # 1.45: within what chance makes
    (Counts(200, (120,)), "promote", "1.600")])
def test_users_requests_speak_against_a_version_only_beyond_chance(live, decision, why):
    # Standard error of a difference of two shares: sqrt(.3 * .7 / 199 + .5 * .5 / 399) = 0.041; 1.645 of it and the margin
    # are 0.097.
    found, reason = decide_on_users(live, 1.6, OLD, OPTIONS)
    assert found == decision and why in reason


def test_shadow_rounds_are_taken_out_of_the_live_count():
    assert without(Counts(100, (40, 10)), Counts(30, (20, 4))) == Counts(70, (20, 6))
    assert without(Counts(29, (20, 4)), Counts(30, (20, 4))) == NONE


def test_intervals_without_data_are_unbounded():
    interval, _ = evidence([], []).interval(OPTIONS)
    assert interval.low == -math.inf and interval.high == math.inf


@pytest.mark.parametrize("equal, compared, upper", [(0, 0, 0.0), (144, 149, 0.9888), (90, 100, 0.9520), (10, 10, 1.0)])
def test_the_upper_end_of_a_shares_interval(equal, compared, upper):
    # Wilson's score interval with z = 2.33, from its closed form computed by hand.
    assert upper_share(equal, compared) == pytest.approx(upper, abs=2e-3)


def test_a_version_without_any_rounds_is_not_promoted_and_not_called_worse():
    for pair in (evidence([], []), evidence(rounds(1.4), [NONE]), evidence([NONE], rounds(1.4))):
        assert decide(pair, OPTIONS, exhausted=False)[0] == "wait"
        decision, reason = decide(pair, OPTIONS, exhausted=True)
        assert decision == "roll_back" and reason.startswith("nothing to judge it by") and "nan" not in reason
