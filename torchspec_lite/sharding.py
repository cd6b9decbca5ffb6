"""A module split over ranks by FSDP2, and its tensors put together again."""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor


def shard(module: nn.Module, ranks: int) -> None:
    """Split parameters, gradients and what an optimizer keeps of them over the ranks of the process group, in place.

    Parameters are whole only from a call of the module to the end of its backward pass, one after the other for each
    micro-batch, so every rank must make the same number of calls. Gradients are summed over ranks. All ranks hold the
    same weights beforehand.
    """
    device = next(module.parameters()).device
    fully_shard(module, mesh=init_device_mesh(device.type, (ranks,)), reshard_after_forward=False)
    # A sum and not FSDP's mean: the loss is divided by the places of all ranks already. A plain sum, because gloo has
    # no reduction that scales.
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor as every rank sees it; a sharded one is gathered, which every rank must ask for."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
