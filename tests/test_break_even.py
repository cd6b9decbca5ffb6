"""Where drafting stops paying: small cases worked out by hand."""

import pytest

from torchspec_lite.break_even import LOOK_EVERY, WINDOW, Paying, break_even, needed, pays_up_to
from torchspec_lite.config import ServeConfig, build
from torchspec_lite.errors import UserError

TABLE = {1: 1.2, 4: 1.8, 16: 2.4}


def test_a_round_that_costs_one_and_a_half_steps_needs_one_and_a_half_tokens():
    # 3 tokens a round at twice the speed: a round takes 1.5 plain steps.
    assert break_even(3.0, 2.0) == 1.5
    assert break_even(1.2, 0.8) == pytest.approx(1.5)  # a poorer drafter finds the same


@pytest.mark.parametrize("running, acceptance", [(0, 1.2), (1, 1.2), (2, 1.4), (4, 1.8), (10, 2.1), (16, 2.4), (40, 2.4)])
def test_between_measured_concurrencies_it_is_a_straight_line(running, acceptance):
    assert needed(TABLE, running) == pytest.approx(acceptance)


@pytest.mark.parametrize("acceptance, most", [(1.19, 0), (1.2, 1), (1.59, 2), (1.61, 3), (2.12, 10), (2.4, 16), (4.0, 16)])
def test_drafting_pays_up_to_a_concurrency(acceptance, most):
    assert pays_up_to(TABLE, acceptance) == most


def test_one_that_costs_less_at_more_requests_is_not_counted_past_a_gap():
    assert pays_up_to({1: 1.5, 4: 1.2}, 1.4) == 0
    assert pays_up_to({1: 1.2, 2: 1.5, 4: 1.2}, 1.4) == 1


def test_the_limit_follows_the_latest_rounds():
    paying = Paying(TABLE)
    assert paying.step() is None  # nothing is known yet
    for _ in range(WINDOW):
        paying.verified(0)
    steps = [paying.step() for _ in range(2 * LOOK_EVERY - 2)]
    # Acceptance length 1.0 pays nowhere; one step in 32 drafts, to look.
    assert steps.count(None) == 1 and set(steps) == {None, 0}
    for _ in range(12 * WINDOW):
        paying.verified(1)
    assert paying.step() is None  # the 64th
    assert paying.step() == 7  # a little less than acceptance length 2, which 8 at once would need


@pytest.mark.parametrize("limit, running, most", [
    (None, 9, 4), (9, 9, 4), (8, 9, None), ("auto", 9, None)])
def test_a_replica_says_up_to_where_drafting_pays_while_it_drafts(limit, running, most):
    from cluster.judge import replica_state
    options = ServeConfig(break_even=TABLE, max_concurrency_for_speculation=limit)
    stats = {"replica": "r0", "version": "v000003", "running": running, "waiting": 0, "requests": 5, "generated": 90,
             "versions": [{"version": "v000003", "drafts": 10, "per_position": [6, 2, 0]}]}  # acceptance length 1.8
    assert replica_state(stats, "serving", options).drafting_pays_up_to == most
    assert replica_state(stats, "serving", ServeConfig()).drafting_pays_up_to is None


def test_auto_without_a_measurement_is_an_error():
    with pytest.raises(UserError, match="serve: .*auto needs break_even; `python -m benchmarks.serving` prints it"):
        build({"target": {"model": "x"}, "serve": {"max_concurrency_for_speculation": "auto"}}, "test")
