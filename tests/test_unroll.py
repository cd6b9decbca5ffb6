"""The fast K-step loss against the plain definition: loss, every gradient, masks, packing, processes."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from tests.test_drafter import FILES, documents, golden_drafter, read_golden
from torchspec_lite import attention, attention_flex, teacher
from torchspec_lite.attention import OWN
from torchspec_lite.batch import pack, plan_rows, supervised_counts
from torchspec_lite.drafter import Drafter, DrafterConfig, rms_norm, unrolled_logits
from torchspec_lite.layer import norm_backward
from torchspec_lite.sample import Sample
from torchspec_lite.scratch import scratch
from torchspec_lite.target import FrozenHead
from torchspec_lite.teacher import teacher_statistics
from torchspec_lite.unroll import UnrolledDrafter, unroll_loss

HIDDEN, VOCABULARY, DRAFT = 64, 256, 96
DECAY = 0.8
# Prompt and answer, nothing but answer, several turns, gaps shorter than K, answers of one token, nothing supervised.
MASKS = ("0" * 10 + "1" * 14, "1" * 9, "000" + "1" * 5 + "00" + "1" * 7 + "00000" + "1" * 8, "01" * 6, "00001", "11", "1",
         "0" * 7, "0110111011110")
EAGLE31 = DrafterConfig(HIDDEN, 128, 4, 2, 16, 1e-5, {"rope_type": "default", "rope_theta": 1e4}, 2048, VOCABULARY,
                        DRAFT, HIDDEN, (1, 2, 3), True, True)
EAGLE3 = replace(EAGLE31, fc_norm=False, norm_output=False)


def make_drafter(config=EAGLE31):
    generator = torch.Generator().manual_seed(5)
    drafter = Drafter(config, torch.randperm(VOCABULARY, generator=generator)[:DRAFT].sort().values)
    with torch.no_grad():
        for name, value in drafter.named_parameters():
            noise = torch.randn(value.shape, generator=generator)
            value.copy_(1 + 0.2 * noise if name.endswith("norm") else noise * value.shape[1] ** -0.5)
    return drafter


def make_head():
    generator = torch.Generator().manual_seed(6)
    return FrozenHead(torch.randn(VOCABULARY, HIDDEN, generator=generator),
                      1 + 0.1 * torch.randn(HIDDEN, generator=generator), 1e-5,
                      0.3 * torch.randn(VOCABULARY, HIDDEN, generator=generator))


def make_sample(mask, seed):
    generator, length = torch.Generator().manual_seed(seed), len(mask)
    states = torch.randn(length - 1, 4, HIDDEN, generator=generator) * 2
    tokens = torch.randint(0, VOCABULARY, (length,), generator=generator, dtype=torch.int32)
    return Sample(str(seed), 0, seed, "train", "t@0", (1, 2, 3), tokens,
                  torch.tensor([int(value) for value in mask], dtype=torch.uint8), states[:, :3], states[:, 3])


def make_samples(masks=MASKS):
    return [make_sample(mask, seed) for seed, mask in enumerate(masks)]


def make_batch(samples, head):
    return pack(samples, [teacher_statistics(sample.last, sample.mask, head) for sample in samples])


def place_loss(p, logits, loss):
    """Of one place. p [V]: the target's probabilities of the draft vocabulary out of all; logits [D]."""
    if loss == "cross_entropy":
        return -(p * logits.log_softmax(-1)).sum()
    acceptance = torch.minimum(p, logits.softmax(-1)).sum()
    return 1 - acceptance if loss == "total_variation" else -acceptance.log()


def plain(drafter, head, samples, steps, loss="cross_entropy", counts=None):
    """Loss by the definition, document by document and place by place; with it, per step, the counts of places and of
    places where first choices agree, and per round the number of leading agreements."""
    sums, found, agree, rounds = [0.0] * steps, [0] * steps, [0] * steps, []
    for sample in samples:
        mask, length = sample.mask.tolist(), len(sample.mask)
        if length < 3:
            continue  # no room for a supervised place
        target = F.linear(rms_norm(sample.last, head.norm_weight, head.norm_eps), head.lm_head)
        logits = unrolled_logits(drafter, head.embed_tokens, sample.token_ids.long(), sample.aux, steps)
        for t in range(length):
            leading = None
            for k in range(steps):
                j = t + 1 + k
                if not (j + 1 < length and mask[t + 1] and mask[j] and mask[j + 1]):
                    continue
                sums[k] = sums[k] + place_loss(target[j].softmax(-1)[drafter.draft_ids], logits[k][t], loss)
                same = int(drafter.draft_ids[logits[k][t].argmax()]) == int(target[j].argmax())
                found[k], agree[k] = found[k] + 1, agree[k] + same
                if k == 0:
                    leading = []
                if leading is not None and len(leading) == k:
                    leading.append(same)
            if leading is not None:
                rounds.append(leading.index(False) if False in leading else len(leading))
    total = sum(DECAY**k * sums[k] / (counts or found)[k] for k in range(steps) if found[k])
    return total, found, agree, rounds


def gradients(drafter):
    found = {name: value.grad for name, value in drafter.named_parameters()}
    drafter.zero_grad()
    return found


def worst(found, wanted):
    """Largest relative error of any parameter's gradient, in norm."""
    return max(float((found[name] - wanted[name]).norm() / wanted[name].norm()) for name in wanted)


@pytest.mark.parametrize("recompute", (False, True))
@pytest.mark.parametrize("compile", (False, True))
@pytest.mark.parametrize("config", (EAGLE3, EAGLE31), ids=("eagle3", "eagle31"))
@pytest.mark.parametrize("steps", range(1, 8))
def test_loss_and_gradients_are_the_plain_ones(steps, config, compile, recompute):
    drafter, head, samples = make_drafter(config), make_head(), make_samples()
    wanted, found, agree, rounds = plain(drafter, head, samples, steps)
    wanted.backward()
    expected = gradients(drafter)
    result = unroll_loss(drafter, head, make_batch(samples, head), steps, DECAY, dtype=torch.float32, compile=compile,
                         recompute=recompute)
    result.loss.backward()
    assert float(result.loss.detach()) == pytest.approx(float(wanted.detach()), rel=1e-5)
    assert worst(gradients(drafter), expected) < 1e-5
    assert result.supervised.tolist() == found and result.agreements.tolist() == agree
    assert result.accepted.tolist() == [sum(count > k for count in rounds) for k in range(steps)]
    assert int(result.rounds) == len(rounds)


def test_rows_that_fill_up_a_later_step_do_not_count():
    """72, 60 and 48 places: step 1 is filled up to 64 rows with copies, which read an own key's gradient as well."""
    drafter, head, samples = make_drafter(), make_head(), make_samples(("1" * 8,) * 12)
    plain(drafter, head, samples, 3)[0].backward()
    expected = gradients(drafter)
    unroll_loss(drafter, head, make_batch(samples, head), 3, DECAY, dtype=torch.float32, compile=False).loss.backward()
    assert worst(gradients(drafter), expected) < 1e-5


@pytest.mark.parametrize("compile", (False, True))
@pytest.mark.parametrize("loss", ("total_variation", "log_acceptance"))
def test_losses_that_target_acceptance(loss, compile):
    drafter, head, samples = make_drafter(), make_head(), make_samples()
    wanted = plain(drafter, head, samples, 4, loss)[0]
    wanted.backward()
    expected = gradients(drafter)
    result = unroll_loss(drafter, head, make_batch(samples, head), 4, DECAY, loss, dtype=torch.float32, compile=compile)
    result.loss.backward()
    assert float(result.loss.detach()) == pytest.approx(float(wanted.detach()), rel=1e-5)
    assert worst(gradients(drafter), expected) < 1e-5


@pytest.mark.parametrize("compile", (False, True))
def test_bf16_products_stay_near_the_exact_gradients(compile):
    drafter, head, samples = make_drafter(), make_head(), make_samples()
    wanted = plain(drafter, head, samples, 7)[0]
    wanted.backward()
    expected = gradients(drafter)
    result = unroll_loss(drafter, head, make_batch(samples, head), 7, DECAY, dtype=torch.bfloat16, compile=compile)
    result.loss.backward()
    assert all(value.grad.dtype == torch.float32 for value in drafter.parameters())
    assert float(result.loss.detach()) == pytest.approx(float(wanted.detach()), rel=0.01)
    assert worst(gradients(drafter), expected) < 0.05


@pytest.mark.parametrize("name", FILES)
def test_golden_losses(name):
    """Loss per step from the golden drafter logits and the golden target logits, over the golden response masks."""
    tensors, meta = read_golden(name)
    drafter, embed = golden_drafter(tensors, meta)
    head = FrozenHead(embed, tensors["target.norm.weight"], float(meta["rms_norm_eps"]), tensors["target.lm_head.weight"])
    samples, sums = [], torch.zeros(4)
    for number, document in enumerate(documents(tensors)):
        mask = tensors[f"doc{number}.response_mask"].tolist()
        p = tensors[f"doc{number}.target_logits"].softmax(-1)[:, drafter.draft_ids]
        for k in range(4):
            for t in range(len(mask) - 2 - k):
                if mask[t + 1] and mask[t + 1 + k] and mask[t + 2 + k]:
                    sums[k] += place_loss(p[t + 1 + k], document["expected"][k][t], "cross_entropy")
        samples.append(Sample(str(number), 0, number, "train", "t@0", (1, 2, 3), document["token_ids"].int(),
                              torch.tensor(mask, dtype=torch.uint8), document["aux_hidden_states"][:-1],
                              tensors[f"doc{number}.last_hidden_state"][:-1]))
    with torch.no_grad():
        result = unroll_loss(drafter, head, make_batch(samples, head), 4, dtype=torch.float32)
    assert sums.min() > 1 and torch.allclose(result.loss_sums, sums, rtol=1e-5)


def test_packed_documents_equal_separate_ones():
    drafter, head, samples = make_drafter(), make_head(), make_samples()
    normaliser = supervised_counts([sample.mask for sample in samples], 5)
    together = unroll_loss(drafter, head, make_batch(samples, head), 5, DECAY, normaliser=normaliser, dtype=torch.float32)
    together.loss.backward()
    expected, total = gradients(drafter), 0.0
    for sample in samples:
        alone = unroll_loss(drafter, head, make_batch([sample], head), 5, DECAY, normaliser=normaliser, dtype=torch.float32)
        alone.loss.backward()                               # gradients accumulate over micro-batches
        total += float(alone.loss.detach())
    assert total == pytest.approx(float(together.loss.detach()), rel=1e-5)
    assert worst(gradients(drafter), expected) < 1e-5


@pytest.mark.parametrize("compile", (False, True))
def test_batch_with_nothing_supervised_gives_zeros(compile):
    drafter, head = make_drafter(), make_head()
    result = unroll_loss(drafter, head, make_batch(make_samples(("0000", "001", "1")), head), 4, compile=compile)
    result.loss.backward()
    assert float(result.loss.detach()) == 0.0 and int(result.rounds) == 0
    assert all(not value.grad.any() for value in drafter.parameters())


def test_long_document_in_many_blocks():
    drafter, head = make_drafter(), make_head()
    samples = make_samples(("0" * 150 + "1" * 650 + "0" * 30 + "1" * 170, "0" * 40 + "1" * 111))
    wanted = plain(drafter, head, samples, 3)[0]
    wanted.backward()
    expected = gradients(drafter)
    for compile in (False, True):
        result = unroll_loss(drafter, head, make_batch(samples, head), 3, DECAY, dtype=torch.float32, compile=compile)
        result.loss.backward()
        assert float(result.loss.detach()) == pytest.approx(float(wanted.detach()), rel=1e-5)
        assert worst(gradients(drafter), expected) < 2e-5


def test_statistics_of_the_teacher():
    head, sample = make_head(), make_samples()[0]
    logits = F.linear(rms_norm(sample.last, head.norm_weight, head.norm_eps), head.lm_head)
    rows = [j for j in range(len(sample.mask) - 1) if sample.mask[j] and sample.mask[j + 1]]
    for compile in (False, True):
        known = teacher_statistics(sample.last, sample.mask, head, compile)
        assert torch.allclose(known.lse[rows], logits.logsumexp(-1)[rows], rtol=1e-6)
        assert torch.equal(known.argmax[rows], logits.argmax(-1)[rows])
        assert not known.lse[:rows[0]].any()
    half = teacher_statistics(sample.last.half(), sample.mask, replace(head, lm_head=head.lm_head.half()))
    assert torch.allclose(half.lse, known.lse, atol=0.02)


def test_statistics_of_a_document_longer_than_a_chunk(monkeypatch):
    head, (sample,) = make_head(), make_samples(("0" * 5 + "1" * 60,))
    whole = teacher_statistics(sample.last, sample.mask, head)
    monkeypatch.setattr(teacher, "CHUNK_BYTES", 1)  # then 16 rows a chunk, and 59 rows in four of 15, 15, 15 and 14
    asked = []
    monkeypatch.setattr(teacher, "scratch", lambda rows, *rest: asked.append(rows) or scratch(rows, *rest))
    parts = teacher_statistics(sample.last, sample.mask, head)
    assert asked == [15, 15, 15, 14]
    assert torch.allclose(parts.lse, whole.lse, rtol=1e-6) and torch.equal(parts.argmax, whole.argmax)


def test_second_backward_is_refused():
    drafter, head = make_drafter(), make_head()
    loss = unroll_loss(drafter, head, make_batch(make_samples(), head), 2, dtype=torch.float32).loss
    loss.backward()
    with pytest.raises(RuntimeError, match="twice"):
        loss.backward()


def test_norm_backward_is_autograds():
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(7, 32, generator=generator).requires_grad_(), torch.rand(32, generator=generator).requires_grad_()
    slope, around = torch.randn(7, 32, generator=generator), torch.randn(7, 32, generator=generator)
    (rms_norm(x, weight, 1e-5) * slope + x * around).sum().backward()
    by_weight, found = norm_backward(slope, x.detach(), weight.detach(), 1e-5, around)
    assert torch.allclose(found, x.grad, atol=1e-6) and torch.allclose(by_weight, weight.grad, atol=1e-5)


def _rank(rank, store, folder):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    torch.set_num_threads(1)
    drafter, head, samples = make_drafter(), make_head(), make_samples()
    # Uneven on purpose: the second rank holds the one document without supervision and a short one.
    mine = samples[:7] + samples[8:] if rank == 0 else [samples[7]]
    counts = supervised_counts([sample.mask for sample in mine], 4)
    dist.all_reduce(counts)
    module = DistributedDataParallel(UnrolledDrafter(drafter, head, 4, DECAY, "cross_entropy", torch.float32, True, False))
    module(make_batch(mine, head), counts / 2).loss.backward()
    torch.save(gradients(drafter), Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


def test_two_processes_give_the_gradients_of_one(tmp_path):
    mp.start_processes(_rank, (tmp_path / "store", tmp_path), nprocs=2, start_method="spawn")
    drafter, head = make_drafter(), make_head()
    unroll_loss(drafter, head, make_batch(make_samples(), head), 4, DECAY, dtype=torch.float32).loss.backward()
    expected = gradients(drafter)
    for rank in range(2):
        assert worst(torch.load(tmp_path / f"{rank}.pt"), expected) < 1e-5


def dense_flex(query, key, value, block_mask, enable_gqa, return_aux):
    """What torch's flex_attention computes; its own has no backward pass on a CPU."""
    assert enable_gqa and return_aux.lse
    group, rows = query.shape[1] // key.shape[1], torch.arange(query.shape[2])[:, None]
    seen = block_mask.mask_mod(0, 0, rows, torch.arange(key.shape[2]))
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = (query @ key.transpose(2, 3) * query.shape[-1] ** -0.5).masked_fill(~seen, -torch.inf)
    return scores.softmax(-1) @ value, SimpleNamespace(lse=scores.logsumexp(-1))


@pytest.mark.parametrize("steps", (0, 1, 3))
def test_flex_attention_is_the_block_attention(steps, monkeypatch):
    monkeypatch.setattr(attention_flex, "flex_attention", dense_flex)
    generator = torch.Generator().manual_seed(steps)
    plan = plan_rows(torch.tensor([int(value) for value in "0" * 40 + "1" * 90 + "0001111"]), torch.tensor([0, 130, 137]), 1)
    rows, count, keys = plan.steps[0], len(plan.live), len(plan.keys)
    queries, gradient = (torch.randn(2, count, 3, 16, generator=generator) for _ in range(2))
    keys, values = (torch.randn(2, keys, 16, generator=generator) for _ in range(2))
    own = [torch.randn(OWN + steps, 2, count, 16, generator=generator) for _ in range(2)]
    found = []
    for way in (attention, attention_flex):
        out, lse = way.attend(queries, keys, values, *own, rows, False)
        sums = torch.zeros_like(keys), torch.zeros_like(values)
        by_query, *by_own = way.attend_backward(gradient, out, lse, queries, keys, values, *own, rows, *sums, False)
        found.append((out, lse, by_query, *(part[OWN:] for part in by_own), *sums))
    for ours, theirs in zip(*found, strict=True):
        assert torch.allclose(ours, theirs, atol=2e-5)


@pytest.mark.parametrize("compile", (False, True))
def test_state_that_is_not_a_number_reaches_the_gradient(compile):
    """So that the optimizer skips the step instead of learning from a number that hides it."""
    drafter, head, samples = make_drafter(), make_head(), make_samples()
    batch = make_batch(samples, head)
    batch.aux[12] = torch.nan
    unroll_loss(drafter, head, batch, 3, dtype=torch.float32, compile=compile).loss.backward()
    assert not drafter.qkv.grad.isfinite().all()
