"""Functions compiled once for a process and for shapes that vary with every batch, and products in the layout a CPU likes."""

from collections.abc import Callable
from functools import cache

import torch


@cache
def _compiled(function: Callable) -> Callable:
    # dynamic=True: a streaming trainer sees new row counts at every step and must not compile again for them.
    return torch.compile(function, dynamic=True)


def piece(function: Callable, compile: bool) -> Callable:
    """`function` itself, or its compiled form."""
    return _compiled(function) if compile else function


def outer(left: torch.Tensor, right: torch.Tensor, compile: bool) -> torch.Tensor:
    """left.T @ right [N, M] fp32 of left [S, N] and right [S, M], accumulated in fp32.

    On a CPU the narrower factor is transposed in memory first: a transposed operand halves oneDNN's rate.
    """
    if left.device.type != "cpu" or left.dtype == torch.float32:
        return (left.t() @ right).float()
    if left.shape[1] <= right.shape[1]:
        return (left.t().contiguous() @ right).float()
    return piece(transposed, compile)(right.t().contiguous() @ left)


def transposed(x: torch.Tensor) -> torch.Tensor:
    """x.T in fp32, contiguous. x [M, N]."""
    return x.t().float().contiguous()
