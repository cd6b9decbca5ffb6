"""torch.compile of small functions, each once for a process and for shapes that vary with every batch."""

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
