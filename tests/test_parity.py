"""Parity: which drafted tokens are compared, and what counts as equal."""

from torchspec_lite.parity import ParityProbe, compare_drafts

# Prompt of 2 tokens and an answer of 3; drafts are known once 3, 4 and 5 tokens are.
PROBE = ParityProbe(prompt_tokens=2, token_ids=[1, 2, 7, 8, 9], drafted=[[8, 9], [9, 4], [5, 6]])


def test_equal_drafts():
    assert compare_drafts(PROBE, [1, 2, 7, 8, 9], [(3, [8, 9]), (4, [9, 4]), (5, [5, 6])]) == (6, 6)


def test_a_round_counts_up_to_its_first_difference():
    # Round at 3: first token differs, the second is a draft of another text. Round at 4: second differs.
    assert compare_drafts(PROBE, [1, 2, 7, 8, 9], [(3, [0, 9]), (4, [9, 0])]) == (1, 3)


def test_nothing_is_compared_after_the_texts_part():
    assert compare_drafts(PROBE, [1, 2, 7, 3, 9], [(3, [8, 9]), (4, [9, 4]), (5, [5, 6])]) == (2, 2)


def test_rounds_outside_the_answer_are_passed_over():
    assert compare_drafts(PROBE, [1, 2, 7, 8, 9, 10], [(2, [7, 8]), (6, [1, 1]), (5, [5, 6])]) == (2, 2)
