"""The learner: an optimizer step is the same whoever computes it, and a checkpoint gives back all of it."""

import pytest
import torch

from tests.tiny import make_tiny_target
from torchspec_lite import checkpoint
from torchspec_lite.batch import supervised_counts
from torchspec_lite.config import DrafterConfigSection, TrainerConfig
from torchspec_lite.drafter import init_drafter
from torchspec_lite.learner import Learner
from torchspec_lite.sample import Sample, supervised
from torchspec_lite.target import describe, load_head
from torchspec_lite.teacher import teacher_statistics
from workers.group import Group

LAYERS = (1, 2, 3)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return describe(make_tiny_target(tmp_path_factory.mktemp("target")))


def options(**values):
    return TrainerConfig(**{"dtype": "float32", "compile": False, "ttt_steps": 3, "warmup_steps": 0,
                            "micro_batch_tokens": 64, "batch_tokens": 4096, "learning_rate": 1e-2, **values})


def make_samples(info, head, number=6, seed=0):
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for i in range(number):
        n = 12 + 7 * i
        states = torch.randn(n - 1, 4, info.hidden_size, generator=generator)
        mask = torch.ones(n, dtype=torch.uint8)
        mask[:3 + i] = 0
        sample = Sample(id=f"s{i}", attempt=1, ordinal=i, purpose="train", fingerprint=info.fingerprint, layer_ids=LAYERS,
                        token_ids=torch.randint(info.vocab_size, (n,), generator=generator).int(), mask=mask,
                        aux=states[:, :3].contiguous(), last=states[:, 3].contiguous())
        samples.append((sample, teacher_statistics(sample.last, sample.mask, head)))
    return samples


def make_learner(info, group=None, **values):
    head = load_head(info, torch.float32)
    drafter = init_drafter(info, head, DrafterConfigSection(), torch.arange(0, info.vocab_size, 2),
                           torch.Generator().manual_seed(1), LAYERS)
    return Learner(drafter, head, options(**values), group or Group(0, 1, "gloo", None))


def weights(learner):
    return {name: value.detach().clone() for name, value in learner.drafter.named_parameters()}


def furthest(ours, theirs):
    return max(float((ours[name] - theirs[name]).abs().max()) for name in ours)


def test_supervising_all_tokens_is_training_on_a_sample_whose_prompt_is_answer_too(target):
    """A document of n tokens whose every token is an answer's has n - 2 - k places at step k: row t reads token t + 1 + k
    and is taught token t + 2 + k."""
    head = load_head(target, torch.float32)
    ((sample, _),) = make_samples(target, head, number=1)
    wide = supervised(sample, "all")
    assert supervised(sample, "answers") is sample and sample.mask.tolist()[:4] == [0, 0, 0, 1]
    assert supervised_counts([wide.mask], 3).tolist() == [10.0, 9.0, 8.0]
    learner = make_learner(target)
    before = weights(learner)
    learner.train([(wide, teacher_statistics(wide.last, wide.mask, head))], 0.0)
    assert learner.tokens == 12 and furthest(before, weights(learner)) > 0


def test_training_lowers_the_loss_and_moves_every_weight(target):
    learner = make_learner(target)
    samples = make_samples(target, learner.head)
    before = weights(learner)
    losses = [learner.train(samples, 0.0).loss for _ in range(8)]
    assert losses[-1] < 0.8 * losses[0]
    assert all(not torch.equal(value, before[name]) for name, value in weights(learner).items())
    assert learner.tokens == 8 * sum(sample.tokens for sample, _ in samples)


def test_gradient_accumulation_changes_nothing(target):
    whole, parts = make_learner(target, micro_batch_tokens=4096), make_learner(target, micro_batch_tokens=16)
    samples = make_samples(target, whole.head)
    for _ in range(3):
        one, many = whole.train(samples, 0.0), parts.train(samples, 0.0)
    # Sums in another order: fp32 rounding, made larger by AdamW's division by small second moments.
    assert one.loss == pytest.approx(many.loss, rel=1e-5)
    assert furthest(weights(whole), weights(parts)) < 2e-4


def test_the_loss_is_the_mean_over_places_not_a_mean_of_means(target):
    learner = make_learner(target, learning_rate=1e-12)
    samples = make_samples(target, learner.head)
    together = learner.train(samples, 0.0)
    sums, places = torch.zeros(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    for sample, statistics in samples:
        answer = int(sample.mask.sum())
        # One answer of m tokens at the end: row t is supervised at step k for m - 1 - k rows (EAGLE31.md's example).
        count = torch.tensor([max(0, answer - 1 - k) for k in range(3)], dtype=torch.float64)
        alone = learner.train([(sample, statistics)], 0.0)
        sums += torch.tensor(alone.loss_per_step, dtype=torch.float64) * count
        places += count
    assert together.loss_per_step == pytest.approx((sums / places).tolist(), rel=1e-5)
    assert together.loss == pytest.approx(sum(0.8 ** k * float(sums[k] / places[k]) for k in range(3)), rel=1e-5)


def test_a_gradient_that_is_not_finite_skips_the_step_and_is_counted(target):
    learner = make_learner(target)
    samples = make_samples(target, learner.head, number=2)
    before = weights(learner)
    samples[0][0].aux[4] = float("inf")
    result = learner.train(samples, 0.0)
    assert result.skipped and learner.skipped == 1 and learner.step == 1
    assert furthest(weights(learner), before) == 0.0
    assert not learner.train(make_samples(target, learner.head, number=2), 0.0).skipped


def test_a_step_without_samples_changes_no_weights(target):
    learner = make_learner(target)
    before = weights(learner)
    assert learner.train([], 0.0).acceptance_length is None
    assert furthest(weights(learner), before) == 0.0


@pytest.mark.parametrize("optimizer, ema", [("adamw", 0.0), ("muon", 0.9)])
def test_a_resumed_learner_is_the_undisturbed_one_bit_for_bit(target, tmp_path, optimizer, ema):
    undisturbed = make_learner(target, optimizer=optimizer, ema=ema)
    samples = make_samples(target, undisturbed.head)
    for _ in range(2):
        undisturbed.train(samples, 0.1)
    path = undisturbed.save(tmp_path, {"version": 3}, keep=2)
    undisturbed.train(samples, 0.2)

    state = checkpoint.read(path)
    assert state.extra == {"version": 3}
    drafter = Learner.empty_drafter(state.config, state.vocabulary())
    resumed = Learner(drafter, undisturbed.head, options(optimizer=optimizer, ema=ema), Group(0, 1, "gloo", None))
    resumed.load(path)
    assert (resumed.step, resumed.tokens) == (2, 2 * sum(sample.tokens for sample, _ in samples))
    resumed.train(samples, 0.2)
    assert furthest(weights(resumed), weights(undisturbed)) == 0.0
    ours, theirs = resumed.exportable(), undisturbed.exportable()
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters()))
    if ema:
        assert not torch.equal(ours.lm_head, resumed.drafter.lm_head)  # the average, not the weights


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("restarted", [False, True])
def test_a_save_before_the_first_step_changes_no_step(target, tmp_path, optimizer, restarted):
    """Version 0 is saved before any step, and a version whenever training rests, after which the optimizer is a new one."""
    saved, unsaved = (make_learner(target, optimizer=optimizer) for _ in range(2))
    samples = make_samples(target, saved.head)
    if restarted:
        for learner in (saved, unsaved):
            learner.train(samples, 0.0)
            learner.restart(make_learner(target).exportable())
    before = weights(saved)
    saved.save(tmp_path, {}, keep=1)
    for learner in (saved, unsaved):
        learner.train(samples, 0.0)
    assert furthest(weights(saved), weights(unsaved)) == 0.0
    # AdamW's first step, corrected for both moments' start, is the learning rate (1e-2) wherever there is a gradient.
    assert float((weights(saved)["lm_head"] - before["lm_head"]).abs().median()) == pytest.approx(1e-2, rel=1e-3)


def test_a_learner_that_restarts_takes_the_steps_of_a_fresh_one_with_those_weights(target):
    head = load_head(target, torch.float32)
    samples = make_samples(target, head)
    strayed, fresh = make_learner(target, ema=0.5), make_learner(target, ema=0.5)
    strayed.train(samples, 0.0)
    strayed.restart(make_learner(target).exportable())
    for learner in (strayed, fresh):
        learner.train(samples[:3], 0.0)
        learner.train(samples[3:], 0.0)
    assert furthest(weights(strayed), weights(fresh)) == 0 and strayed.step == 3
    assert furthest(dict(strayed.exportable().named_parameters()), dict(fresh.exportable().named_parameters())) == 0
    with torch.no_grad():
        assert furthest(weights(strayed), dict(strayed.exportable().named_parameters())) > 0
