"""Acceptance lengths against numbers counted by hand."""

import dataclasses
import math
import random

import pytest
import torch

from torchspec_lite import acceptance, compiling
from torchspec_lite.acceptance import Counts, _placed, compare, compare_pairs, compare_requests, predict, walk_rounds
from torchspec_lite.drafter import Drafter, DrafterConfig
from torchspec_lite.sample import Sample
from torchspec_lite.target import FrozenHead
from torchspec_lite.teacher import TeacherStatistics, teacher_statistics

VOCAB = 8


def test_counts_by_hand():
    # Rounds of k = 3: accepted 3, 0, 1, 1.
    counts = Counts.of_rounds([3, 0, 1, 1], 3)
    assert counts == Counts(4, (3, 1, 1))
    assert counts.acceptance_length == 2.25
    assert counts.per_position == (0.75, 0.25, 0.25)
    assert counts.conditional == (0.75, 1 / 3, 1.0)
    assert counts.variance == pytest.approx((3 - 1.25) ** 2 / 4 + 1.25**2 / 4 + 2 * 0.25**2 / 4)
    assert counts + Counts(1, (1,)) == Counts(5, (4, 1, 1))
    assert Counts(9, (8, 2, 1)) - counts == Counts(5, (5, 1, 0))
    with pytest.raises(ValueError, match="backwards"):
        counts - Counts(5, (3, 1, 1))
    assert math.isnan(Counts(0, (0, 0)).acceptance_length)


def test_interval_of_a_difference_by_hand():
    new, old = Counts(101, (60, 0)), Counts(201, (80, 0))
    p, q = 60 / 101, 80 / 201
    half = 1.6448536 * math.sqrt(p * (1 - p) / 100 + q * (1 - q) / 200)
    interval = compare(new, old, 0.9)
    assert interval.difference == pytest.approx(p - q)
    assert (interval.low, interval.high) == pytest.approx((p - q - half, p - q + half))
    assert compare(Counts(1, (1,)), old, 0.9).low == -math.inf


def test_intervals_cover_the_truth_as_often_as_they_say():
    """Requests differ in how easy they are: intervals over requests hold 90 %, over rounds far less."""
    chance = random.Random(0)

    def side():
        requests = []
        for _ in range(40):
            easy = chance.choice([0.2, 0.8])
            requests.append(Counts.of_rounds([int(chance.random() < easy) for _ in range(30)], 1))
        return requests

    hold_requests = hold_rounds = 0
    for _ in range(300):
        new, old = side(), side()
        by_request = compare_requests(new, old, 0.9)
        by_round = compare(sum(new, Counts(0, ())), sum(old, Counts(0, ())), 0.9)
        assert by_request.difference == pytest.approx(by_round.difference)
        hold_requests += by_request.low <= 0 <= by_request.high
        hold_rounds += by_round.low <= 0 <= by_round.high
    assert 0.85 < hold_requests / 300 < 0.95
    assert hold_rounds / 300 < 0.7


def test_pairs_cancel_what_makes_a_request_hard():
    """The new drafter accepts exactly one token more in 10 rounds of each request, easy or hard: no doubt is left."""
    old = [Counts(10, (a,)) for a in (1, 8, 4, 7, 2)]
    new = [Counts(10, (c.accepted + 1,)) for c in old]
    pairs, apart = compare_pairs(new, old, 0.9), compare_requests(new, old, 0.9)
    assert (pairs.difference, pairs.low, pairs.high) == pytest.approx((0.1, 0.1, 0.1))
    assert apart.difference == pytest.approx(0.1) and apart.low < 0 < apart.high
    # Two pairs, differences 0 and 0.2: residuals -0.05 and +0.05 of the mean 0.1, so variance 2 · 2 · 0.05².
    pairs = compare_pairs([Counts(10, (3,)), Counts(10, (5,))], [Counts(10, (3,)), Counts(10, (3,))], 0.9)
    half = 1.6448536 * math.sqrt(2 * (0.05**2 + 0.05**2))
    assert (pairs.low, pairs.high) == pytest.approx((0.1 - half, 0.1 + half))
    assert compare_pairs(new[:1], old[:1], 0.9).high == math.inf


def test_walk_by_hand():
    #        token    0  1  2  3  4  5  6  7  8  9 10
    mask = torch.tensor([0, 0, 1, 1, 1, 1, 1, 0, 0, 1, 1])
    live = torch.tensor([0, 1, 1, 1, 1, 0, 0, 0, 1, 0]).bool()
    accepted = torch.tensor([9, 1, 3, 0, 1, 9, 9, 9, 0, 9])
    # First answer starts at token 2, read by row 1: accepts 1, next round at row 3: accepts 0, next at row 4:
    # accepts 1, next at row 6, not live. Second answer: row 8 accepts 0, row 9 not live.
    assert walk_rounds(accepted, live, mask) == [1, 0, 1, 0]


def test_an_answer_that_began_before_the_sample_is_walked_by_hand():
    #        token    0  1  2  3  4  5  6  7  8
    mask = torch.tensor([1, 1, 1, 1, 1, 0, 1, 1, 1])
    live = torch.tensor([1, 1, 1, 0, 0, 1, 1, 0]).bool()
    accepted = torch.tensor([1, 9, 0, 9, 9, 0, 1, 9])
    # No row reads token 0. Row 0 reads 1 and accepts 2, the target adds 3; row 2 reads 3 and accepts nothing, the target adds
    # 4; row 3 is not live. Second answer: row 5 reads 6 and accepts nothing; row 6 accepts 8, the last.
    assert walk_rounds(accepted, live, mask) == [1, 0, 0, 1]
    # Of the first answer only its last token was kept: it drafts nothing.
    assert walk_rounds(accepted, torch.tensor([0, 0, 0, 0, 0, 1, 1, 0]).bool(), torch.tensor([1, 0, 0, 0, 0, 0, 1, 1, 1])) == [0, 1]


def parrot(draft_ids, follow):
    """A drafter whose guess depends on the token it reads alone: after token i it drafts follow[i].

    With attention, MLP and fc at zero, the residual is 0 at step 0; so the token must come in through attention: one
    value head passes on the embedding (one-hot), and keys are such that a row attends to its own newest key alone.
    """
    hidden, wide = VOCAB, VOCAB
    config = DrafterConfig(
        hidden_size=hidden, intermediate_size=4, num_attention_heads=1, num_key_value_heads=1, head_dim=wide,
        rms_norm_eps=1e-6, rope_parameters={"rope_type": "default", "rope_theta": 1e4}, max_position_embeddings=64,
        vocab_size=VOCAB, draft_vocab_size=len(draft_ids), target_hidden_size=hidden, layer_ids=(1,), fc_norm=True,
        norm_output=True)
    drafter = Drafter(config, draft_ids)
    with torch.no_grad():
        drafter.hidden_norm.zero_()
        drafter.fc.copy_(1e-9 * torch.eye(hidden))
        # Queries and keys: embedding plus a large product only with the same token at the same position.
        drafter.qkv[:wide, :hidden].copy_(40 * torch.eye(wide))
        drafter.qkv[wide:2 * wide, :hidden].copy_(40 * torch.eye(wide))
        drafter.qkv[2 * wide:, :hidden].copy_(torch.eye(wide))
        drafter.o_proj.copy_(1e3 * torch.eye(hidden))
        for d, target in enumerate(draft_ids.tolist()):
            for token, following in follow.items():
                if following == target:
                    drafter.lm_head[d, token] = 1.0
    return drafter


def world(target_says, tokens, mask):
    """A sample whose target says `target_says[j]` after token j, and the head that reads it."""
    head = FrozenHead(torch.eye(VOCAB), torch.ones(VOCAB), 1e-6, torch.eye(VOCAB))
    n = len(tokens)
    last = torch.nn.functional.one_hot(torch.tensor(target_says), VOCAB).float()
    sample = Sample("a", 0, 0, "held_out", "t@0", (1,), torch.tensor(tokens, dtype=torch.int32),
                    torch.tensor(mask, dtype=torch.uint8), torch.ones(n - 1, 1, VOCAB), last)
    return sample, head


def test_prediction_by_hand():
    # Every token is met once, so attention finds exactly the row's own newest key.
    tokens = [0, 1, 2, 3, 4, 5, 6, 7]
    mask = [0, 0, 1, 1, 1, 1, 1, 1]
    says = [1, 2, 3, 4, 5, 6, 7]            # greedy on-policy: the text is the target's own
    follow = {2: 3, 3: 4, 4: 5, 5: 1, 6: 7}  # wrong after 5
    sample, head = world(says, tokens, mask)
    prediction = predict(parrot(torch.arange(8), follow), head, [sample], 3)
    # Live rows t = 1..5 read 2..6. Row 1: drafts 3, 4, 5 right -> 3. Row 2: 4, 5 right, then (reads 5) 1 wrong -> 2.
    # Row 3: 5 right, then wrong -> 1. Row 4: wrong -> 0. Row 5: reads 6, says 7, right; then past the end -> 1.
    assert prediction.live == Counts(5, (4, 2, 1))
    assert prediction.acceptance_length == pytest.approx(1 + 7 / 5)
    assert prediction.rows == 5 and prediction.coverage == 1.0
    # Serving: row 1 accepts 3 -> row 5 accepts 1 -> row 7: over.
    assert prediction.walk == Counts(2, (2, 1, 1))
    assert prediction.walked == 3.0 and prediction.rounds == 2
    assert prediction.per_position == (0.8, 0.4, 0.2)
    assert prediction.per_position_conditional == (0.8, 0.5, 0.5)
    assert prediction.sampled is None
    assert len(prediction.feature_norm) == 3 and prediction.feature_norm[0] < prediction.feature_norm[1]


def test_prediction_of_an_answer_that_fills_the_sample_by_hand():
    sample, head = world([1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 3, 4, 5, 6, 7], [1] * 8)
    prediction = predict(parrot(torch.arange(8), {1: 2, 2: 3, 3: 4, 4: 5, 5: 1, 6: 7}), head, [sample], 3)
    # Row 0 reads 1 and drafts 2, 3, 4, all right, the target adds 5; row 4 reads 5 and drafts 1, wrong, the target adds 6;
    # row 5 reads 6 and drafts 7, right, and that is the end.
    assert prediction.walk == Counts(3, (2, 1, 1)) and prediction.walked == 1 + 4 / 3
    # Every live row as a round, rows 0 to 5: 3, 3, 2, 1, 0, 1.
    assert prediction.live == Counts(6, (5, 3, 2))


def test_what_lies_outside_the_draft_vocabulary_is_never_accepted():
    tokens, mask = [0, 1, 2, 3, 4, 5, 6, 7], [0, 0, 1, 1, 1, 1, 1, 1]
    sample, head = world([1, 2, 3, 4, 5, 6, 7], tokens, mask)
    follow = {i: i + 1 for i in range(2, 7)}
    # Without 5 in the draft vocabulary: rows 1..5 draft for 3, 4, 5, 6, 7 at step 0; the one for 5 must miss.
    prediction = predict(parrot(torch.tensor([0, 1, 2, 3, 4, 6, 7]), follow), head, [sample], 1)
    assert prediction.live == Counts(5, (4,)) and prediction.coverage == 0.8


def test_target_choice_counts_not_the_text():
    """In replay the text may differ from what the target would say: only the target's choice is accepted."""
    tokens, mask = [0, 1, 2, 3, 4, 5], [0, 0, 1, 1, 1, 1]
    sample, head = world([1, 2, 7, 4, 5], tokens, mask)
    prediction = predict(parrot(torch.arange(8), {2: 3, 3: 4, 4: 5}), head, [sample], 1)
    assert prediction.live == Counts(3, (2,))


def test_sampled_overlap_by_hand():
    """One live row, logits known in closed form: alpha is the sum of the smaller probabilities."""
    tokens, mask = [0, 1, 2, 3], [0, 0, 1, 1]
    sample, head = world([1, 2, 3], tokens, mask)
    drafter = parrot(torch.tensor([3, 4, 5]), {2: 3})
    # The state is one-hot of 3 among 8, RMS-normed: sqrt(8) at 3. p(3) = e^s / (e^s + 7), others 1 / (e^s + 7).
    # The drafter's output is one-hot of token 2, normed to sqrt(8), so q(3) = e^s / (e^s + 2), q(4) = q(5) = 1 / (...).
    s = math.exp(math.sqrt(8))
    alpha = min(s / (s + 7), s / (s + 2)) + 2 * min(1 / (s + 7), 1 / (s + 2))
    prediction = predict(drafter, head, [sample], 2, sampled=True)
    assert prediction.rows == 1
    assert prediction.sampled == pytest.approx(1 + alpha, rel=1e-5)  # step 1 falls off the end


def test_kept_statistics_and_bf16_say_the_same():
    sample, head = world([1, 2, 3, 4, 5, 6, 7], list(range(8)), [0, 0, 1, 1, 1, 1, 1, 1])
    drafter = parrot(torch.arange(8), {2: 3, 3: 4, 4: 5, 5: 1, 6: 7})
    kept = [teacher_statistics(sample.last, sample.mask, head)]
    plain = predict(drafter, head, [sample], 3)
    assert predict(drafter, head, [sample], 3, statistics=kept).live == plain.live
    low = dataclasses.replace(head, embed_tokens=head.embed_tokens.bfloat16(), lm_head=head.lm_head.bfloat16())
    half = dataclasses.replace(sample, aux=sample.aux.bfloat16(), last=sample.last.bfloat16())
    assert predict(drafter, low, [half], 3, dtype=torch.bfloat16).live == plain.live
    assert drafter.lm_head.dtype == torch.float32
    wrong = [TeacherStatistics(kept[0].lse, torch.zeros_like(kept[0].argmax))]
    assert predict(drafter, head, [sample], 3, statistics=wrong).live == Counts(5, (0, 0, 0))


def test_a_drafter_is_copied_to_where_the_head_is():
    drafter = parrot(torch.arange(8), {})
    assert _placed(drafter, torch.device("cpu"), torch.float32) is drafter
    there = _placed(drafter, torch.device("meta"), torch.bfloat16)
    assert {(value.device.type, value.dtype) for value in there.parameters()} == {("meta", torch.bfloat16)}
    assert there.draft_ids.device.type == "meta" and there.draft_ids.dtype == torch.int64
    assert {(value.device.type, value.dtype) for value in drafter.parameters()} == {("cpu", torch.float32)}


def test_a_prediction_is_made_where_the_head_is(monkeypatch):
    sample, head = world([1, 2, 3], [0, 1, 2, 3], [0, 0, 1, 1])
    asked = []
    monkeypatch.setattr(acceptance, "_placed", lambda drafter, *place: asked.append(place) or drafter)
    predict(parrot(torch.arange(8), {}), head, [sample], 1, torch.float32)
    there = dataclasses.replace(head, lm_head=head.lm_head.to("meta"))
    with pytest.raises(RuntimeError, match="meta"):  # no number is there to be read
        predict(parrot(torch.arange(8), {}), there, [sample], 1, torch.float32)
    assert asked == [(torch.device(place), torch.float32) for place in ("cpu", "meta")]


def test_a_prediction_without_kernels_uses_none(monkeypatch):
    sample, head = world([1, 2, 3], [0, 1, 2, 3], [0, 0, 1, 1])
    drafter = parrot(torch.arange(8), {2: 3})
    found = predict(drafter, head, [sample], 1)

    def kernels(function):
        raise AssertionError(f"a fast form of {function.__name__} was asked for")

    monkeypatch.setattr(compiling, "_fast", kernels)
    assert predict(drafter, head, [sample], 1, compile=False) == found
    with pytest.raises(AssertionError, match="summary"):
        predict(drafter, head, [sample], 1)


def test_nothing_supervised_is_not_a_number():
    sample, head = world([1, 2], [0, 1, 2], [0, 0, 1])
    prediction = predict(parrot(torch.arange(8), {}), head, [sample], 2)
    assert prediction.rows == 0 and math.isnan(prediction.acceptance_length) and math.isnan(prediction.feature_norm[0])
