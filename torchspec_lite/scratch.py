"""A block of memory for logits that are used up where they are made.

On a CPU a block of this size gets fresh pages whenever it is allocated anew, which costs a tenth of the product that
fills it; a GPU's allocator keeps its own.
"""

import threading

import torch

_kept = threading.local()


def scratch(rows: int, columns: int, like: torch.Tensor) -> torch.Tensor:
    """Uninitialised [rows, columns] in `like`'s dtype and device; on a CPU valid until this thread asks again."""
    if like.device.type != "cpu":
        return like.new_empty(rows, columns)
    nbytes = rows * columns * like.element_size()
    block = getattr(_kept, "block", None)
    if block is None or len(block) < nbytes:
        _kept.block = None  # let go before the bigger one is taken
        block = _kept.block = torch.empty(nbytes, dtype=torch.uint8)
    return block[:nbytes].view(like.dtype).view(rows, columns)
