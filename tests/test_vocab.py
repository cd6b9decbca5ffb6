"""The draft vocabulary against counts small enough to sort by hand."""

import pytest
import torch

from torchspec_lite.errors import UserError
from torchspec_lite.vocab import choose_draft_vocab, coverage, membership, offsets, target_ids

#                        id: 0  1  2  3  4  5  6  7
WRITTEN = torch.tensor([0, 5, 2, 2, 9, 2, 0, 0])
PROMPT = torch.tensor([7, 0, 1, 3, 0, 1, 7, 9])


@pytest.mark.parametrize("size, expected", [
    (1, [4]), (2, [1, 4]),
    (3, [1, 3, 4]),           # 2, 3 and 5 are written twice; 3 is more common in prompts
    (4, [1, 2, 3, 4]),        # 2 and 5 tie in both: the lower id
    (5, [1, 2, 3, 4, 5]),
    (6, [1, 2, 3, 4, 5, 7]),  # never written: by prompts
    (7, [0, 1, 2, 3, 4, 5, 7]),
])
def test_most_written_first(size, expected):
    assert choose_draft_vocab(WRITTEN, PROMPT, size).tolist() == expected


def test_special_tokens_are_always_in():
    assert choose_draft_vocab(WRITTEN, PROMPT, 3, always=[6, 0]).tolist() == [0, 4, 6]
    assert choose_draft_vocab(WRITTEN, PROMPT, 2, always=[0, 6, 6]).tolist() == [0, 6]
    with pytest.raises(UserError, match="draft_vocab_size 2 cannot hold the 3"):
        choose_draft_vocab(WRITTEN, PROMPT, 2, always=[0, 6, 7])
    with pytest.raises(UserError, match="outside the target's vocabulary"):
        choose_draft_vocab(WRITTEN, PROMPT, 2, always=[8])


@pytest.mark.parametrize("size", [None, 8, 9])
def test_whole_vocabulary(size):
    assert choose_draft_vocab(WRITTEN, PROMPT, size).tolist() == list(range(8))


def test_nothing_seen_takes_the_lowest_ids():
    assert choose_draft_vocab(torch.zeros(8).long(), torch.zeros(8).long(), 3).tolist() == [0, 1, 2]


def test_maps_both_ways():
    ids = torch.tensor([1, 3, 4])
    assert offsets(ids).tolist() == [1, 2, 2] and offsets(ids).dtype == torch.int64
    assert membership(ids, 8).nonzero()[:, 0].tolist() == [1, 3, 4]
    assert target_ids(offsets(ids), 8, membership(ids, 8), "f").tolist() == [1, 3, 4]
    assert target_ids(offsets(ids), 8, None, "f").tolist() == [1, 3, 4]
    assert coverage(WRITTEN, ids) == 16 / 20 and coverage(torch.zeros(8).long(), ids) == 0.0


@pytest.mark.parametrize("d2t, t2d, message", [
    ([1, 3, 4], membership(torch.tensor([1, 3, 4]), 8), "absolute"),  # 1, 4, 6 as offsets: fits, but t2d says otherwise
    ([1, 4, 7], None, "absolute"),                                    # as offsets 1, 5, 9: outside
    ([1, 0, 0], None, "does not map"),                                # 1, 1, 2
    ([1, 2, 9], None, "does not map"),
    ([1, 2, 2], membership(torch.tensor([1, 3, 5]), 8), "as t2d says"),
])
def test_wrong_maps_are_refused(d2t, t2d, message):
    with pytest.raises(UserError, match=message):
        target_ids(torch.tensor(d2t), 8, t2d, "file")


def test_wrong_type_of_map():
    with pytest.raises(UserError, match="int64"):
        target_ids(torch.tensor([1, 2, 2], dtype=torch.int32), 8, None, "file")
