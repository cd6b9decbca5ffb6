"""Functions compiled once for a process and for shapes that vary with every batch, and products in the layout a CPU likes."""

from collections.abc import Callable
from functools import cache

import torch

from torchspec_lite.kernels import KERNELS, TYPES, compiler


@cache
def _fast(function: Callable) -> Callable:
    kernel = KERNELS[function.__name__]
    # dynamic=True: a streaming trainer sees new row counts at every step and must not compile again for them.
    compiled = torch.compile(function, dynamic=True)

    def call(*inputs):
        if inputs[0].device.type != "cpu":
            return compiled(*inputs)
        return (kernel if compiler() and inputs[0].dtype in TYPES else function)(*inputs)
    return call


def piece(function: Callable, compile: bool) -> Callable:
    """`function` itself, or its fast form: torch.compile's, and on a CPU a kernel of ours where a compiler is there."""
    return _fast(function) if compile else function


@cache
def _has_amx() -> bool:
    return bool(torch.cpu.get_capabilities().get("amx_tile"))


def outer(left: torch.Tensor, right: torch.Tensor, compile: bool) -> torch.Tensor:
    """left.T @ right [N, M] fp32 of left [S, N] and right [S, M], accumulated in fp32.

    On a CPU with AMX the narrower factor is transposed in memory first: there a transposed operand halves oneDNN's rate.
    """
    if left.device.type != "cpu" or left.dtype == torch.float32 or not _has_amx():
        return (left.t() @ right).float()
    if left.shape[1] <= right.shape[1]:
        return (left.t().contiguous() @ right).float()
    return piece(transposed, compile)(right.t().contiguous() @ left)


def transposed(x: torch.Tensor) -> torch.Tensor:
    """x.T in fp32, contiguous. x [M, N]."""
    return x.t().float().contiguous()
