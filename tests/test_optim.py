"""Learning rates, skipped steps, clipping, Muon's share and the moving average."""

import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from torchspec_lite.config import TrainerConfig
from torchspec_lite.optim import Ema, learning_rate, make_optimizers, update


def make_module():
    torch.manual_seed(0)
    module = nn.Module()
    module.qkv, module.lm_head = nn.Parameter(torch.randn(8, 4)), nn.Parameter(torch.randn(6, 4))
    module.fc_norm, module.norm = nn.Parameter(torch.ones(3, 4)), nn.Parameter(torch.ones(4))
    return module


def set_gradients(module, value):
    for parameter in module.parameters():
        parameter.grad = torch.full_like(parameter, value)


def weights(module):
    return {name: value.detach().clone() for name, value in module.named_parameters()}


@pytest.mark.parametrize("schedule, shape", (
    ("constant", {0.0: 1, 0.5: 1, 1.0: 1}), ("cosine", {0.0: 1, 0.5: 0.55, 1.0: 0.1, 1.5: 0.1}),
    ("wsd", {0.0: 1, 0.8: 1, 0.9: 0.55, 1.0: 0.1})))
def test_learning_rate_over_a_run(schedule, shape):
    options = TrainerConfig(schedule=schedule, learning_rate=2.0, warmup_steps=0)
    for progress, share in shape.items():
        assert learning_rate(options, 1, progress) == pytest.approx(2.0 * share)


def test_warm_up_rises_from_the_first_step_and_never_ends_an_endless_run():
    options = TrainerConfig(schedule="cosine", learning_rate=1.0, warmup_steps=4)
    assert [learning_rate(options, step, 0.0) for step in (1, 2, 4, 5, 10**6)] == pytest.approx([0.2, 0.4, 0.8, 1.0, 1.0])


def test_adamw_takes_the_textbook_step():
    module = make_module()
    options = TrainerConfig(learning_rate=0.1, betas=(0.9, 0.95), weight_decay=0.01)
    optimizers, before = make_optimizers(module, options), weights(module)
    set_gradients(module, 0.001)
    assert update(optimizers, 0.05, 1.0).applied
    for name, value in module.named_parameters():       # first step: the moments' ratio is the gradient's sign
        assert torch.allclose(value, before[name] * (1 - 0.05 * 0.01) - 0.05, atol=1e-5)
        assert value.grad is None


@pytest.mark.parametrize("optimizer", ("adamw", "muon"))
def test_a_new_optimizer_has_the_state_of_no_step_and_has_moved_nothing(optimizer):
    """torch's checkpoint functions take a step where they find no state."""
    module = make_module()
    before = weights(module)
    optimizers = make_optimizers(module, TrainerConfig(optimizer=optimizer, learning_rate=0.3, weight_decay=0.5))
    assert all(torch.equal(value, before[name]) and value.grad is None for name, value in module.named_parameters())
    for made in optimizers:
        assert [group["lr"] for group in made.param_groups] == [0.3]
        assert len(made.state) == sum(len(group["params"]) for group in made.param_groups)
        assert not any(value.any() for state in made.state.values() for value in state.values())


def test_clipping_scales_all_gradients_together():
    module = make_module()
    optimizers = [torch.optim.SGD([{"params": list(module.parameters()), "lr_scale": 1.0}], 1.0)]
    count = sum(value.numel() for value in module.parameters())
    before = weights(module)
    set_gradients(module, 3.0)
    assert update(optimizers, 1.0, 0.5).gradient_norm == pytest.approx(3 * math.sqrt(count))
    moved = torch.cat([(before[name] - value).flatten() for name, value in module.named_parameters()])
    moved = moved.detach()
    assert float(moved.norm()) == pytest.approx(0.5, rel=1e-5) and float(moved.std()) < 1e-6


@pytest.mark.parametrize("value", (math.nan, math.inf))
@pytest.mark.parametrize("optimizer", ("adamw", "muon"))
def test_gradient_that_is_not_finite_changes_nothing(optimizer, value):
    module = make_module()
    optimizers, before = make_optimizers(module, TrainerConfig(optimizer=optimizer)), weights(module)
    set_gradients(module, 0.1)
    module.norm.grad[2] = value
    assert not update(optimizers, 0.1, 1.0).applied
    assert all(torch.equal(value, before[name]) and value.grad is None for name, value in module.named_parameters())
    assert not any(value.any() for optimizer in optimizers for state in optimizer.state.values() for value in state.values())


def test_muon_takes_the_matrices_only():
    module = make_module()
    adam, muon = make_optimizers(module, TrainerConfig(optimizer="muon"))
    assert [id(value) for group in muon.param_groups for value in group["params"]] == [id(module.qkv)]
    assert {id(value) for group in adam.param_groups for value in group["params"]} == {
        id(module.lm_head), id(module.fc_norm), id(module.norm)}


@pytest.mark.parametrize("optimizer", ("adamw", "muon"))
def test_optimizers_lower_a_loss(optimizer):
    module = make_module()
    optimizers = make_optimizers(module, TrainerConfig(optimizer=optimizer))
    goal, losses = torch.randn(8, 6), []
    for _ in range(200):
        loss = (module.qkv @ (module.lm_head * module.norm).t() - goal).square().mean()
        loss.backward()
        losses.append(float(loss.detach()))
        update(optimizers, 0.02, 1.0)
    assert losses[-1] < losses[0] / 3


def test_average_follows_and_goes_through_a_checkpoint():
    module = make_module()
    ema, expected = Ema(module, 0.5), {name: value.double() for name, value in weights(module).items()}
    for step in range(1, 12):
        with torch.no_grad():
            for value in module.parameters():
                value.add_(0.1)
        ema.update(module)
        decay = min(0.5, (1 + step) / (10 + step))
        expected = {name: decay * expected[name] + (1 - decay) * value for name, value in weights(module).items()}
    resumed = Ema(module, 0.5)
    for name, value in resumed.tensors.items():
        value.copy_(ema.tensors[name])
    with torch.no_grad():
        module.norm.add_(1.0)
    ema.update(module)
    resumed.update(module)
    assert torch.equal(ema.tensors["norm"], resumed.tensors["norm"])
    assert torch.allclose(ema.tensors["qkv"].double(), expected["qkv"] * 0.5 + module.qkv.detach() * 0.5, atol=1e-6)


def _rank(rank, store, folder):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    module = make_module()
    optimizers, before = make_optimizers(module, TrainerConfig()), weights(module)
    set_gradients(module, math.nan if rank == 1 else 0.1)
    applied = update(optimizers, 0.1, 1.0).applied
    same = all(torch.equal(value, before[name]) for name, value in module.named_parameters())
    (Path(folder) / str(rank)).write_text(f"{applied} {same}")
    dist.destroy_process_group()


def test_all_ranks_skip_together(tmp_path):
    mp.start_processes(_rank, (tmp_path / "store", tmp_path), nprocs=2, start_method="spawn")
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == ["False True"] * 2
