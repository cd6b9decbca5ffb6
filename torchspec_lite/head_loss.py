"""The drafter's head and the loss of all unrolled steps as one, gradients taken in the forward pass.

Targets are gone through in chunks: the target's distribution of a chunk is computed once for all steps that predict it,
logits exist for one chunk only, and their place in memory is overwritten by their gradient.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from torchspec_lite.batch import Batch, Plan
from torchspec_lite.compiling import piece
from torchspec_lite.losses import LOSSES
from torchspec_lite.target import FrozenHead
from torchspec_lite.teacher import normed, restricted_head

CHUNK_BYTES = 1 << 26  # logits of one chunk of targets, all steps
BLOCK_ROWS = 512       # rows of logits worked on while they are in cache


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
    weight_gradient = torch.zeros(weight.shape, device=device) if gradient else None
    if not len(target):
        return HeadResult(sums, agreements, output_gradient, weight_gradient)
    teacher = restricted_head(head, draft_ids, outputs.dtype)               # [D, Ht]
    unique, place = torch.unique_consecutive(target, return_inverse=True)   # [J], [S]
    chunk = max(16, CHUNK_BYTES // (len(weight) * outputs.element_size() * steps))
    bounds = torch.searchsorted(place, torch.arange(0, len(unique) + chunk, chunk)).tolist()
    unique, place, step, live, rows = (part.to(device) for part in (unique, place, step, live, rows))
    # The target's first choice as a draft id; -1 when it lies outside the draft vocabulary, which no draft can equal.
    choice = torch.searchsorted(draft_ids, batch.target_argmax[unique]).clamp_max(len(draft_ids) - 1)
    choice = torch.where(draft_ids[choice] == batch.target_argmax[unique], choice, -1)
    buffer = torch.empty(max(b - a for a, b in zip(bounds, bounds[1:], strict=False)), len(weight), dtype=outputs.dtype,
                         device=device)
    for number, (a, b) in enumerate(zip(bounds, bounds[1:], strict=False)):
        targets = unique[number * chunk:(number + 1) * chunk]
        logits = F.linear(normed(batch.last[targets], head, teacher.dtype), teacher)  # [C, D]
        p = piece(restricted_probabilities, compile)(logits, batch.target_lse[targets])
        local = place[a:b] - number * chunk
        chosen = outputs[rows[a:b]]                                         # [n, H]
        best = torch.empty(b - a, dtype=torch.int64, device=device)
        losses = torch.empty(b - a, device=device)
        for start in range(0, b - a, BLOCK_ROWS):
            block = slice(start, min(start + BLOCK_ROWS, b - a))
            torch.mm(chosen[block], weight.t(), out=buffer[block])
            losses[block], best[block] = piece(_step_losses[loss], compile)(
                buffer[block], p, local[block], scales[step[a:b][block]])
        sums.index_add_(0, step[a:b], losses)
        agreements[step[a:b], live[a:b]] = best == choice[place[a:b]]
        if gradient:
            output_gradient[rows[a:b]] = buffer[:b - a] @ weight
            weight_gradient += buffer[:b - a].t() @ chosen
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
        columns = torch.arange(logits.shape[-1], device=logits.device, dtype=torch.float32)
        # The first of equal maxima, as argmax in serving; by a minimum because that vectorises.
        best = torch.where(wide == wide.amax(-1, keepdim=True), columns, float(1 << 24)).amin(-1).long()
        losses, slopes = loss(logits, p[place])
        logits.copy_(slopes * scale[:, None])
        return losses, best
    return step_losses


_step_losses = {name: _in_place(loss) for name, loss in LOSSES.items()}
