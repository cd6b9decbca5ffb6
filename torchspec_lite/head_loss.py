"""The drafter's head and the loss of all unrolled steps as one, gradients taken in the forward pass.

Targets are gone through in chunks: the target's distribution of a chunk is computed once for all steps that predict it,
logits exist for one chunk only, and their place in memory is overwritten by their gradient.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from torchspec_lite.batch import ROUND, Batch, Plan, round_up
from torchspec_lite.compiling import outer, piece
from torchspec_lite.losses import LOSSES
from torchspec_lite.scratch import scratch
from torchspec_lite.target import FrozenHead
from torchspec_lite.teacher import first_largest, normed, restricted_head

CHUNK_BYTES = 1 << 26  # logits of one chunk of targets, all steps


@dataclass(frozen=True)
class HeadResult:
    loss_sums: torch.Tensor         # [K] fp32, unweighted
    agreements: torch.Tensor        # [K, R0] bool, supervised and the drafter's first choice is the target's
    output_gradient: torch.Tensor | None  # like outputs
    weight_gradient: torch.Tensor | None  # [D, H] fp32


def head_loss(outputs: torch.Tensor, weight: torch.Tensor, draft_ids: torch.Tensor, head: FrozenHead, batch: Batch,
              plan: Plan, offsets: list[int], scales: torch.Tensor, loss: str, compile: bool,
              gradient: bool) -> HeadResult:
    """Losses of all supervised places and, if `gradient`, their gradients times scales[k].

    outputs [ΣR, H]: normed outputs of all steps, those of step k from row offsets[k]; weight [D, H] in the same dtype;
    scales [K] fp32.
    """
    device, steps = outputs.device, len(plan.supervised)
    step, live, target, rows = _by_target(plan, offsets)                    # [S] each, on the CPU
    sums = torch.zeros(steps, device=device)
    agreements = torch.zeros(plan.supervised.shape, dtype=torch.bool, device=device)
    output_gradient = torch.zeros_like(outputs) if gradient else None
    if not len(target):
        nothing = torch.zeros(weight.shape, device=device) if gradient else None
        return HeadResult(sums, agreements, output_gradient, nothing)
    weight_gradient = None
    teacher = restricted_head(head, draft_ids, outputs.dtype)               # [D, Ht]
    chunk = max(ROUND, CHUNK_BYTES // (len(weight) * outputs.element_size()) // ROUND * ROUND)
    step, live, target, rows = (part.to(device) for part in (step, live, target, rows))
    for a in range(0, len(target), chunk):
        part = slice(a, a + chunk)
        count = len(target[part])
        targets, place = torch.unique_consecutive(target[part], return_inverse=True)  # [C], [n]
        targets = round_up(targets)
        logits = F.linear(normed(batch.last[targets], head, teacher.dtype), teacher)  # [C, D]
        p = piece(restricted_probabilities, compile)(logits, batch.target_lse[targets])
        scale = F.pad(scales[step[part]], (0, -count % ROUND))
        chosen = outputs[round_up(rows[part])]                              # [n, H]
        draft = scratch(len(chosen), len(weight), chosen)                   # [n, D]
        torch.mm(chosen, weight.t(), out=draft)
        losses, best = piece(_step_losses[loss], compile)(draft, p, round_up(place), scale)
        sums.index_add_(0, step[part], losses[:count])
        agreements[step[part], live[part]] = draft_ids[best[:count]] == batch.target_argmax[target[part]]
        if gradient:
            output_gradient[rows[part]] = (draft @ weight)[:count]
            product = outer(draft, chosen, compile)
            weight_gradient = product if weight_gradient is None else weight_gradient.add_(product)
    return HeadResult(sums, agreements, output_gradient, weight_gradient)


def _by_target(plan: Plan, offsets: list[int]):
    """Supervised places ordered by the token that they predict: step, live row, target's row in the batch, row of outputs."""
    step, live = plan.supervised.nonzero(as_tuple=True)
    target = plan.live.cpu()[live] + 1 + step
    order = target.argsort(stable=True)
    rows = torch.empty_like(live)
    for k, part in enumerate(plan.steps):
        mine = step == k
        rows[mine] = offsets[k] + torch.searchsorted(part.index.cpu(), live[mine])
    return step[order], live[order], target[order], rows[order]


def restricted_probabilities(logits: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """The target's probabilities [C, D] fp32 of the draft vocabulary, out of its full vocabulary. lse [C]."""
    return (logits.float() - lse[:, None]).exp()


def _in_place(loss):
    def step_losses(logits, p, place, scale):
        """Losses [n] and first choices [n]; overwrites logits [n, D] with their gradient times scale [n]."""
        wide = logits.float()
        best = first_largest(wide, wide.amax(-1, keepdim=True))
        losses, slopes = loss(logits, p[place])
        logits.copy_(slopes * scale[:, None])
        return losses, best
    step_losses.__name__ = loss.__name__
    return step_losses


_step_losses = {name: _in_place(loss) for name, loss in LOSSES.items()}
