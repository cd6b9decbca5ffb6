"""A group of trainer ranks: what they sum, and how they agree, each step."""

import datetime

import torch
import torch.distributed as dist

GROUP_TIMEOUT_S = 600


class Group:
    """Collectives over all trainer ranks; with one rank nothing is sent. Sums are in fp32 or fp64 and every rank gets
    the same bits back."""

    def __init__(self, rank: int, ranks: int, backend: str, address: str | None):
        """`address` is `tcp://host:port` of rank 0's store. Raises torch's DistStoreError when a rank stays away for
        longer than GROUP_TIMEOUT_S."""
        self.rank, self.ranks = rank, ranks
        if ranks > 1:
            dist.init_process_group(backend, init_method=address, rank=rank, world_size=ranks,
                                    timeout=datetime.timedelta(seconds=GROUP_TIMEOUT_S))
            # Decisions are small and on the CPU whatever carries the gradients.
            self.decisions = dist.group.WORLD if backend == "gloo" else dist.new_group(backend="gloo")

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum of a small CPU tensor over ranks."""
        if self.ranks > 1:
            values = values.clone()
            dist.all_reduce(values, group=self.decisions)
        return values

    def sum_gradients(self, parameters: list[torch.nn.Parameter]) -> None:
        """Add up gradients in one flat message. They are already divided by the global number of supervised places,
        so a sum, not a mean, is the gradient of the global loss; a rank without samples adds zeros."""
        if self.ranks == 1:
            return
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        flat = torch.cat([parameter.grad.flatten() for parameter in parameters])
        dist.all_reduce(flat)
        start = 0
        for parameter in parameters:
            end = start + parameter.numel()
            parameter.grad.copy_(flat[start:end].view_as(parameter))
            start = end

    def same_weights(self, module: torch.nn.Module) -> None:
        """Give every rank rank 0's parameters and buffers."""
        if self.ranks > 1:
            for tensor in list(module.parameters()) + list(module.buffers()):
                dist.broadcast(tensor.data, src=0)

    def close(self) -> None:
        if self.ranks > 1:
            dist.destroy_process_group()
