"""Losses of one supervised place with their gradients, and the learnable distributions' bookkeeping.

Every loss takes logits [n, D] of the drafter over its vocabulary and `p` [n, D] fp32, the target's probabilities of those
tokens out of its full vocabulary (a row sums to the coverage p(D) <= 1), and returns the loss [n] fp32 and its gradient
[n, D] fp32 with respect to the logits. All sums are fp32.
"""

from collections.abc import Callable

import torch

LEAST = 1e-8  # acceptance under this counts as this in a logarithm


def cross_entropy(logits: torch.Tensor, p: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Σ_v p_v (-log q_v): cross-entropy to p restricted to the draft vocabulary, weighted by its coverage (EAGLE-3)."""
    shifted = logits.float()
    shifted = shifted - shifted.amax(-1, keepdim=True)
    exponents = shifted.exp()
    total = exponents.sum(-1, keepdim=True)
    coverage = p.sum(-1, keepdim=True)
    loss = coverage.squeeze(-1) * total.squeeze(-1).log() - (p * shifted).sum(-1)
    return loss, exponents * (coverage / total) - p


def total_variation(logits: torch.Tensor, p: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """1 - α with α = Σ_v min(p_v, q_v), the chance that sampling accepts the token (TVD of DistillSpec, 2310.08461)."""
    acceptance, slope = _acceptance(logits, p)
    return 1 - acceptance.squeeze(-1), -slope


def log_acceptance(logits: torch.Tensor, p: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """-log α: total variation's gradient divided by α, so that a poor drafter learns as fast as a good one.

    The parameter-free loss of "LK Losses: Direct Acceptance Rate Optimization for Speculative Decoding" (2602.23881).
    """
    acceptance, slope = _acceptance(logits, p)
    floor = acceptance.clamp_min(LEAST)
    return -floor.squeeze(-1).log(), -slope / floor


def _acceptance(logits, p):
    """α [n, 1] and dα/dlogits [n, D]: q_v (1[q_v < p_v] - Σ_u q_u 1[q_u < p_u])."""
    shifted = logits.float()
    shifted = shifted - shifted.amax(-1, keepdim=True)
    exponents = shifted.exp()
    q = exponents / exponents.sum(-1, keepdim=True)
    rising = torch.where(q < p, q, 0.0)
    return torch.minimum(q, p).sum(-1, keepdim=True), rising - q * rising.sum(-1, keepdim=True)


LOSSES: dict[str, Callable] = {
    "cross_entropy": cross_entropy, "total_variation": total_variation, "log_acceptance": log_acceptance}
"""By the name that `trainer.loss` takes."""
