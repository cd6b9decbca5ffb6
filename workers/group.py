"""A group of trainer ranks: what they sum, and how they agree, each step."""

import datetime
import os

import psutil
import torch
import torch.distributed as dist

GROUP_TIMEOUT_S = 600


def open_store(host: str, ranks: int) -> dist.TCPStore:
    """Rank 0's meeting place; its port is bound at once, so nobody else can take it before the others arrive."""
    return dist.TCPStore(host, 0, ranks, is_master=True, wait_for_workers=False,
                         timeout=datetime.timedelta(seconds=GROUP_TIMEOUT_S))


def join_store(host: str, port: int, ranks: int) -> dist.TCPStore:
    """The meeting place as every other rank sees it. Raises torch's DistNetworkError when rank 0 is not there."""
    return dist.TCPStore(host, port, ranks, is_master=False, timeout=datetime.timedelta(seconds=GROUP_TIMEOUT_S))


def use_interface(address: str) -> None:
    """Let gloo and NCCL talk over the interface that has this address; they would guess, by the host's name, and on many
    machines that is loopback. What the environment says already stays."""
    for name, addresses in psutil.net_if_addrs().items():
        if address in {one.address.partition("%")[0] for one in addresses}:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", name)


class Group:
    """Collectives over all trainer ranks; with one rank nothing is sent. Every rank gets the same bits back."""

    def __init__(self, rank: int, ranks: int, backend: str, store: dist.Store | None):
        """`store` None with one rank. Raises torch's DistStoreError when a rank stays away for GROUP_TIMEOUT_S."""
        self.rank, self.ranks = rank, ranks
        if ranks > 1:
            limit = datetime.timedelta(seconds=GROUP_TIMEOUT_S)
            dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=limit)
            # Decisions are small and on the CPU whatever carries the gradients.
            self.decisions = dist.group.WORLD if backend == "gloo" else dist.new_group(backend="gloo", timeout=limit)

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum of a small CPU tensor over ranks."""
        if self.ranks > 1:
            values = values.clone()
            dist.all_reduce(values, group=self.decisions)
        return values

    def most(self, number: int) -> int:
        """The largest number that any rank gives."""
        if self.ranks == 1:
            return number
        box = torch.tensor([number])
        dist.all_reduce(box, dist.ReduceOp.MAX, group=self.decisions)
        return int(box)

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
