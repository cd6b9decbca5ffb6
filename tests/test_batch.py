"""Which places are supervised, which rows take part, and what packing keeps."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchspec_lite.batch import ROUND, pack, plan_rows, round_up, supervised_counts, supervised_places
from torchspec_lite.sample import Sample
from torchspec_lite.teacher import TeacherStatistics

DOCUMENTS = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=40), min_size=1, max_size=5)


def wanted_places(masks, steps):
    """Straight from EAGLE31.md: row t, step k, j = t+1+k; tokens t+1, j and j+1 are answers of the row's document."""
    found, start = set(), 0
    for mask in masks:
        for t in range(len(mask)):
            for k in range(steps):
                j = t + 1 + k
                if j + 1 < len(mask) and mask[t + 1] and mask[j] and mask[j + 1]:
                    found.add((k, start + t))
        start += len(mask)
    return found


def joined(masks):
    starts = torch.tensor([0] + [len(mask) for mask in masks]).cumsum(0)
    return torch.tensor([value for mask in masks for value in mask]), starts


def test_worked_example_of_the_specification():
    places = supervised_places(torch.tensor([0, 0, 0, 1, 1, 1]), torch.tensor([0, 6]), 2)
    assert places.nonzero().tolist() == [[0, 2], [0, 3], [1, 2]]


@settings(max_examples=150, deadline=None)
@given(DOCUMENTS, st.integers(1, 8))
def test_places_follow_the_definition(masks, steps):
    mask, starts = joined(masks)
    places = supervised_places(mask, starts, steps)
    assert {tuple(place) for place in places.nonzero().tolist()} == wanted_places(masks, steps)
    counts = supervised_counts([torch.tensor(mask) for mask in masks], steps)
    assert counts.tolist() == places.sum(1).tolist()


@settings(max_examples=150, deadline=None)
@given(DOCUMENTS, st.integers(1, 8))
def test_plan_computes_what_is_supervised_and_reads_the_right_tokens(masks, steps):
    mask, starts = joined(masks)
    wanted = wanted_places(masks, steps)
    plan = plan_rows(mask, starts, steps)
    first_row = {t: int(start) for start, end in zip(starts, starts[1:], strict=False) for t in range(start, end)}
    assert {(k, int(plan.live[i])) for k, i in plan.supervised.nonzero().tolist()} == wanted
    assert plan.supervised.sum() == len(wanted)
    for count in (len(plan.keys), len(plan.tokens), len(plan.live)):
        assert count % ROUND == 0
    for k, rows in enumerate(plan.steps):
        computed = plan.live[rows.index].tolist()
        assert {t for later, t in wanted if later >= k} <= set(computed)
        if rows.from_previous is not None:
            assert torch.equal(plan.steps[k - 1].index[rows.from_previous], rows.index)
        assert rows.blocks[0][0] == 0 and rows.blocks[-1][1] == len(computed)
        for place, t in enumerate(computed):
            assert rows.positions[place] == t - first_row[t] + k
            assert plan.keys[rows.firsts[place]] == first_row[t] and plan.keys[rows.limits[place]] == t
            a, b, c, d = next(block for block in rows.blocks if block[0] <= place < block[1])
            assert 0 <= c <= rows.firsts[place] and rows.limits[place] < d <= len(plan.keys)
            if any((later, t) in wanted for later in range(k, steps)):
                assert plan.tokens[rows.tokens[place]] == t + 1 + k
    assert torch.equal(plan.tokens[plan.key_tokens], plan.keys + 1) or not wanted


def test_batch_without_answers_has_an_empty_plan():
    plan = plan_rows(torch.zeros(9, dtype=torch.bool), torch.tensor([0, 4, 9]), 3)
    assert plan.steps == [] and plan.counts.tolist() == [0, 0, 0] and len(plan.keys) == 0


def test_attention_blocks_of_a_long_document_stay_small():
    plan = plan_rows(torch.ones(20000, dtype=torch.bool), torch.tensor([0, 20000]), 1)
    assert max((b - a) * (d - c) for a, b, c, d in plan.steps[0].blocks) <= 1 << 21
    assert len({(b - a, d - c) for a, b, c, d in plan.steps[0].blocks}) < 400


def test_round_up_repeats_the_last():
    assert round_up(torch.tensor([3, 5])).tolist() == [3] + [5] * (ROUND - 1)
    assert len(round_up(torch.arange(0))) == 0 and len(round_up(torch.arange(ROUND))) == ROUND


def test_pack_keeps_every_document_in_its_place():
    random.seed(0)
    samples, statistics = [], []
    for number, length in enumerate((5, 1, 7)):
        states = torch.full((length - 1, 4, 8), float(number + 1))
        samples.append(Sample(f"s{number}", 0, number, "train", "t@0", (1, 2, 3), torch.arange(length, dtype=torch.int32),
                              torch.ones(length, dtype=torch.uint8), states[:, :3], states[:, 3]))
        statistics.append(TeacherStatistics(torch.full((length - 1,), number + 0.5), torch.arange(length - 1)))
    batch = pack(samples, statistics)
    assert batch.document_starts.tolist() == [0, 5, 6, 13] and batch.tokens == 13
    assert batch.token_ids.tolist() == [0, 1, 2, 3, 4, 0, 0, 1, 2, 3, 4, 5, 6]
    assert batch.aux[:, 0, 0].tolist() == [1, 1, 1, 1, 0, 0, 3, 3, 3, 3, 3, 3, 0]
    assert batch.last[:, 0].tolist() == batch.aux[:, 0, 0].tolist()
    assert batch.target_lse.tolist() == [0.5] * 4 + [0, 0] + [2.5] * 6 + [0]
    assert batch.target_argmax.tolist() == [0, 1, 2, 3, 0, 0, 0, 1, 2, 3, 4, 5, 0]


def test_pack_refuses_nothing():
    with pytest.raises(ValueError, match="at least one"):
        pack([], [])
