"""Functions compiled once for a process and for shapes that vary with every batch, and products in the layout a CPU likes."""

from collections.abc import Callable
from functools import cache

import torch

from torchspec_lite.kernels import KERNELS, TYPES, compiler


def _kernel(function: Callable, like: torch.Tensor) -> Callable | None:
    """Our own kernel of a function, where it can be used."""
    usable = like.device.type == "cpu" and compiler() and like.dtype in TYPES
    return KERNELS[function.__name__] if usable else None


@cache
def _fast(function: Callable) -> Callable:
    # dynamic=True: a streaming trainer sees new row counts at every step and must not compile again for them.
    compiled = torch.compile(function, dynamic=True)

    def call(*inputs):
        if inputs[0].device.type != "cpu":
            return compiled(*inputs)
        return (_kernel(function, inputs[0]) or function)(*inputs)
    return call


def piece(function: Callable, compile: bool) -> Callable:
    """`function` itself, or its fast form: torch.compile's, and on a CPU a kernel of ours where a compiler is there."""
    return _fast(function) if compile else function


def piece_into(out: torch.Tensor | None, function: Callable, compile: bool) -> Callable:
    """As `piece`, with the last result in `out`, where a kernel writes it in the first place. None: in memory of its own."""
    if out is None:
        return piece(function, compile)

    def call(*inputs):
        kernel = _kernel(function, inputs[0]) if compile else None
        if kernel is not None:
            return kernel(*inputs, out=out)
        results = piece(function, compile)(*inputs)
        if isinstance(results, tuple):
            return *results[:-1], out.copy_(results[-1])
        return out.copy_(results)
    return call


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
