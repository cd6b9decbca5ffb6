"""A request's pieces become a sample: by hand, step by step; and which finished requests are sent."""

import math

import pytest
import torch

from torchspec_lite.traffic import Allowance, Piece, Sieve, Taken, Trail

LAYERS, HIDDEN, VERSION = 2, 3, 1000
STOP = 9


def state(position: int, token: int) -> torch.Tensor:
    """States [L + 1, H] that say which token at which position they belong to."""
    return torch.tensor([[token * VERSION + position + layer / 10] * HIDDEN for layer in range(LAYERS + 1)])


def piece(first: int, tokens: list[int], sampled: list[int], drafted: int = 0, known: list[int] | None = None) -> Piece:
    return Piece(torch.tensor([first]), torch.tensor(tokens),
                 torch.stack([state(first + place, token) for place, token in enumerate(tokens)]),
                 torch.tensor(sampled), drafted)


def finish(pieces: list[Piece], prompt: int = 3, longest: int = 100, **limits) -> Taken | None:
    trail = Trail(prompt, longest, **limits)
    for one in pieces:
        trail.add(one)
    return trail.finish()


def check(taken: Taken, first: int, tokens: list[int], mask: list[int]) -> None:
    assert taken.token_ids.tolist() == tokens and taken.token_ids.dtype == torch.int32
    assert taken.mask.tolist() == mask
    expected = torch.stack([state(first + place, token) for place, token in enumerate(tokens[:-1])])
    assert torch.equal(taken.aux, expected[:, :-1]) and torch.equal(taken.last, expected[:, -1])


# The prompt is 1 2 3, the answer 4 5 6 7.
PREFILL = piece(0, [1, 2, 3], [4, -1, -1])


def test_plain_decoding():
    taken = finish([PREFILL, piece(3, [4], [5]), piece(4, [5], [6]), piece(5, [6], [7])])
    check(taken, 0, [1, 2, 3, 4, 5, 6, 7], [0, 0, 0, 1, 1, 1, 1])
    assert taken.acceptance_length is None


def test_rejected_drafts_leave_no_trace():
    # 5 is accepted, 8 is not (6 came instead); then 7 and nothing of the drafts 8 8.
    taken = finish([PREFILL, piece(3, [4, 5, 8], [5, 6, -1], 2), piece(5, [6, 8, 8], [7, -1, -1], 2)])
    check(taken, 0, [1, 2, 3, 4, 5, 6, 7], [0, 0, 0, 1, 1, 1, 1])
    assert taken.acceptance_length == 1 + (1 + 0) / 2


def test_chunked_prefill_and_its_meaningless_tokens():
    taken = finish([piece(0, [1, 2], [77, -1, -1]), piece(2, [3], [4, -1, -1]), piece(3, [4, 5, 6], [5, 6, 7], 2)])
    check(taken, 0, [1, 2, 3, 4, 5, 6, 7], [0, 0, 0, 1, 1, 1, 1])
    assert finish([piece(0, [1, 2], [77, -1, -1])]) is None


def test_a_preempted_request_computes_its_rows_again():
    again = piece(0, [1, 2, 3, 4, 5], [6, -1, -1])
    taken = finish([PREFILL, piece(3, [4, 8, 8], [5, -1, -1], 2), again, piece(5, [6, 7, 8], [7, STOP, -1], 2)], stops=frozenset({STOP}))
    check(taken, 0, [1, 2, 3, 4, 5, 6, 7, STOP], [0, 0, 0, 1, 1, 1, 1, 1])


def test_a_cached_prefix_is_left_out():
    taken = finish([piece(2, [3], [4, -1, -1]), piece(3, [4, 5, 6], [5, 6, 7], 2)])
    check(taken, 2, [3, 4, 5, 6, 7], [0, 1, 1, 1, 1])


def test_rows_before_a_gap_are_left_out():
    # Preempted after 5; the prefix cache held positions 0 to 4 when it came back, and the first three are still here.
    taken = finish([PREFILL, piece(3, [4], [5]), piece(4, [5], [6])])
    resumed = finish([piece(0, [1, 2], [77]), piece(4, [5], [6]), piece(5, [6, 7], [7, 8], 1)])
    check(taken, 0, [1, 2, 3, 4, 5, 6], [0, 0, 0, 1, 1, 1])
    check(resumed, 4, [5, 6, 7, 8], [1, 1, 1, 1])


@pytest.mark.parametrize("limits, tokens", [
    (dict(max_tokens=2), [4, 5]), (dict(max_tokens=9), [4, 5, 6, STOP, 7, 8]),
    (dict(stops=frozenset({STOP})), [4, 5, 6, STOP]), (dict(stops=frozenset({STOP}), min_tokens=5), [4, 5, 6, STOP, 7, 8]),
    (dict(stops=frozenset({STOP, 8}), min_tokens=5), [4, 5, 6, STOP, 7, 8]),
    (dict(stops=frozenset({STOP, 1}), min_tokens=4), [4, 5, 6, STOP])])
def test_what_lies_past_the_end_was_never_said(limits, tokens):
    taken = finish([PREFILL, piece(3, [4, 5, 6, STOP, 7], [5, 6, STOP, 7, 8], 4)], **limits)
    assert taken.token_ids.tolist() == [1, 2, 3, *tokens] and len(taken.aux) == len(tokens) + 2


def test_a_stop_token_in_the_prompt_stops_nothing():
    taken = finish([piece(0, [1, STOP, 3], [4]), piece(3, [4], [5])], stops=frozenset({STOP}))
    assert taken.token_ids.tolist() == [1, STOP, 3, 4, 5]


def test_nothing_to_learn():
    assert finish([]) is None
    assert finish([PREFILL]) is None                       # one token answered
    assert finish([PREFILL, piece(3, [4], [5])], max_tokens=1) is None
    assert finish([PREFILL, piece(3, [4], [5])]) is not None


@pytest.mark.parametrize("longest", [4, 7, 20])
def test_a_long_request_keeps_its_end_in_bounded_memory(longest):
    trail, most = Trail(3, longest), 0
    trail.add(PREFILL)
    for position in range(3, 60):  # one accepted and one rejected draft a step
        if position % 2:
            trail.add(piece(position, [position + 1, position + 2, 0], [position + 2, position + 3, -1], 2))
            most = max(most, trail.rows)
            assert trail.nbytes == sum(one.states.nbytes for one in trail.pieces)
    taken = trail.finish()
    tokens = [1, 2, 3, *range(4, 63)]
    first = max(0, len(tokens) - longest)
    check(taken, first, tokens[first:], [int(place >= 3) for place in range(first, len(tokens))])
    assert most < 2 * longest + 3 and taken.acceptance_length == 2.0


def sample(tokens: list[int], length: float | None) -> Taken:
    n = len(tokens)
    return Taken(torch.tensor(tokens, dtype=torch.int32), torch.ones(n), torch.zeros(n - 1, 1, 1), torch.zeros(n - 1, 1), length)


def test_the_sieve_knows_duplicates_and_prefers_what_is_drafted_badly():
    sieve = Sieve(0.5, seed=1)
    assert sieve.refuse(sample([1, 2, 3], None)) is None
    assert sieve.refuse(sample([1, 2, 3], None)) == "duplicate"
    low = [sieve.refuse(sample([place, 5], 1.0)) for place in range(100)]
    assert low == [None] * 100
    high = [sieve.refuse(sample([place, 6], 3.0)) for place in range(400)]
    refused = high.count("drafted_well")
    assert abs(refused - 200) < 4 * math.sqrt(100) and set(high) == {None, "drafted_well"}
    assert [Sieve(0.0, 1).refuse(sample([place], length)) for place, length in enumerate((1.0, 3.0, 5.0))] == [None] * 3


def test_a_prompt_always_goes_to_the_same_rank_and_ranks_get_alike_many():
    sieve = Sieve(0.0, seed=1)

    def answer(prompt, *tokens):
        n = 2 + len(tokens)
        return Taken(torch.tensor([prompt, 7, *tokens], dtype=torch.int32), torch.tensor([0, 0] + [1] * len(tokens)),
                     torch.zeros(n - 1, 1, 1), torch.zeros(n - 1, 1), None)

    ranks = [sieve.share(answer(prompt, 1, 2), 4) for prompt in range(400)]
    assert ranks == [sieve.share(answer(prompt, 3), 4) for prompt in range(400)]
    assert all(abs(ranks.count(rank) - 100) < 4 * math.sqrt(75) for rank in range(4))
    long = [Taken(torch.tensor([token, 1]), torch.ones(2), torch.zeros(1, 1, 1), torch.zeros(1, 1), None) for token in range(400)]
    assert len({sieve.share(taken, 4) for taken in long}) == 4  # nothing is left of their prompts


def test_the_acceptance_of_a_second_answer_is_nobodys():
    for second, expected in ((False, 2.0), (True, None)):
        trail = Trail(2, 100, second=second)
        trail.add(piece(0, [1, 2], [3]))
        trail.add(piece(2, [3, 4], [4, 5], drafted=1))
        assert trail.finish().acceptance_length == expected


def test_the_allowance_is_a_rate():
    now = [0.0]
    allowance = Allowance(100, clock=lambda: now[0])
    assert allowance.open()
    allowance.spend(1500)  # ten seconds' worth were there
    assert not allowance.open()
    now[0] = 4.9
    assert not allowance.open()
    now[0] = 5.1
    assert allowance.open()
    now[0] = 1000.0
    allowance.open()
    assert allowance.left == 1000
    assert Allowance(None).open()
