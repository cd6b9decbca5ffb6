"""Optimizing a drafter: AdamW or Muon, learning rates for endless runs, clipping, steps skipped, a moving average."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from torchspec_lite.config import TrainerConfig
from torchspec_lite.sharding import whole

FLOOR = 0.1         # of the peak learning rate, where cosine and wsd end
STABLE_SHARE = 0.8  # of a run, for which wsd stays at the peak


def learning_rate(options: TrainerConfig, step: int, progress: float) -> float:
    """Learning rate of optimizer step `step`, the first is 1.

    `progress` is how much of the run is done, 0 to 1, by whatever limits it (steps, minutes, prompts); a run without an
    end passes 0 and stays at the peak. Linear warm-up, then `constant`, `cosine` (Loshchilov and Hutter, 1608.03983)
    or `wsd` (warm-up, stable, decay: MiniCPM, 2404.06395).
    """
    warmup = min(1.0, step / (options.warmup_steps + 1))
    done = min(max(progress, 0.0), 1.0)
    shape = 1.0
    if options.schedule == "cosine":
        shape = FLOOR + (1 - FLOOR) * (1 + math.cos(math.pi * done)) / 2
    elif options.schedule == "wsd":
        shape = 1 - (1 - FLOOR) * max(0.0, (done - STABLE_SHARE) / (1 - STABLE_SHARE))
    return options.learning_rate * warmup * shape


def make_optimizers(module: nn.Module, options: TrainerConfig) -> list[Optimizer]:
    """AdamW for everything; or Muon for the layer's matrices and AdamW for `lm_head` and the norms.

    Muon: Jordan et al., 2024, its update scaled to AdamW's size (Moonlight, 2502.16982) so that one learning rate
    serves both. Each group has `lr_scale`, its factor on the learning rate.
    """
    named = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
    by_muon = [name for name, parameter in named if options.optimizer == "muon" and _is_matrix(name, parameter)]
    adam = [parameter for name, parameter in named if name not in by_muon]
    optimizers: list[Optimizer] = [torch.optim.AdamW(
        [{"params": adam, "lr_scale": 1.0}], options.learning_rate, options.betas, weight_decay=options.weight_decay,
        fused=True)]
    if by_muon:
        matrices = [parameter for name, parameter in named if name in by_muon]
        optimizers.append(torch.optim.Muon(
            [{"params": matrices, "lr_scale": 1.0}], options.learning_rate, weight_decay=options.weight_decay,
            adjust_lr_fn="match_rms_adamw"))
    for optimizer in optimizers:
        _fill_state(optimizer)
    return optimizers


def _fill_state(optimizer: Optimizer) -> None:
    """Give an optimizer the state that it has before its first step. torch's checkpoint functions would else make it by a
    step without a gradient that counts: the first real one would be corrected as the second, and be too small."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for state in optimizer.state.values():
        if "step" in state:
            state["step"].zero_()


def _is_matrix(name: str, parameter: torch.Tensor) -> bool:
    last = name.rpartition(".")[2]
    return parameter.ndim == 2 and last != "lm_head" and not last.endswith("norm")


@dataclass(frozen=True)
class Update:
    """What one optimizer step did. One with a gradient that is not finite changes nothing (`applied` false)."""

    applied: bool
    gradient_norm: float  # before clipping


@torch.no_grad()
def update(optimizers: Sequence[Optimizer], rate: float, clip_norm: float) -> Update:
    """Clip the gradients of all groups together, step at learning rate `rate` and clear the gradients.

    With torch.distributed set up every rank must call this, and all skip when one gradient anywhere is not finite.
    """
    parameters = [parameter for optimizer in optimizers for group in optimizer.param_groups
                  for parameter in group["params"]]
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = _total_norm(gradients)
    applied = _everywhere(math.isfinite(norm), parameters[0].device)
    if applied:
        if norm > clip_norm:
            torch._foreach_mul_(gradients, clip_norm / norm)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate * group["lr_scale"]
            optimizer.step()
    for optimizer in optimizers:
        optimizer.zero_grad(set_to_none=True)
    return Update(applied, norm)


def _total_norm(gradients: list[torch.Tensor]) -> float:
    if not gradients:
        return 0.0
    return float(whole(nn.utils.get_total_norm(gradients, error_if_nonfinite=False)))


def _everywhere(fine: bool, device: torch.device) -> bool:
    """Whether `fine` holds on all ranks."""
    if not dist.is_initialized():
        return fine
    flag = torch.tensor(float(fine), device=device)
    dist.all_reduce(flag, dist.ReduceOp.MIN)
    return bool(flag)


class Ema:
    """A moving average of a module's parameters, fp32, for exports.

    `tensors` is its whole state, for checkpoints: the averages by the parameters' names, and `updates`, their number.
    """

    def __init__(self, module: nn.Module, decay: float):
        self.decay = decay
        self.tensors = {name: value.detach().clone() for name, value in module.named_parameters()}
        self.tensors["updates"] = torch.zeros(1)

    @torch.no_grad()
    def update(self, module: nn.Module) -> None:
        updates = int(self.tensors["updates"].add_(1))
        # A young average follows quickly, so that the first exports are not the random start.
        decay = min(self.decay, (1 + updates) / (10 + updates))
        named = dict(module.named_parameters())
        torch._foreach_lerp_([self.tensors[name] for name in named], list(named.values()), 1 - decay)
