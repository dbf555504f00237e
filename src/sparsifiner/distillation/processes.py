"""Several processes that train one model, under torchrun: gloo on CPUs, NCCL on GPUs."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, distributed


@dataclasses.dataclass(frozen=True)
class Processes:
    """This process among those that train together."""

    rank: int = 0
    world: int = 1
    device: torch.device = dataclasses.field(default_factory=lambda: torch.device("cpu"))

    @property
    def first(self) -> bool:
        """Whether this is the one that writes files and talks."""
        return self.rank == 0

    def wait(self) -> None:
        """Until all have come here."""
        if self.world > 1:
            distributed.barrier()

    def any(self, flag: bool) -> bool:
        """Whether it is so in any process."""
        if self.world == 1:
            return flag
        vote = torch.tensor([float(flag)], device=self.device)
        distributed.all_reduce(vote, op=distributed.ReduceOp.MAX)
        return bool(vote.item())

    def average(self, tensors: Iterable[Tensor]) -> None:
        """The mean over the processes, in place."""
        if self.world == 1:
            return
        given = list(tensors)
        flat = torch.cat([tensor.reshape(-1) for tensor in given])
        distributed.all_reduce(flat)
        flat /= self.world
        for tensor, part in zip(given, flat.split([tensor.numel() for tensor in given]), strict=True):
            tensor.copy_(part.view_as(tensor))

    def share(self, tensors: Iterable[Tensor]) -> None:
        """The first process's, for all."""
        if self.world > 1:
            for tensor in tensors:
                distributed.broadcast(tensor, 0)


@contextlib.contextmanager
def joined(device: str | None = None) -> Iterator[Processes]:
    """Joins the processes that torchrun started; alone if it started none."""
    world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    local = int(os.environ.get("LOCAL_RANK", 0))
    chosen = device or ("cuda" if torch.cuda.is_available() else "cpu")
    here = torch.device(f"cuda:{local}" if chosen == "cuda" else chosen)
    if here.type == "cuda":
        torch.cuda.set_device(here)
    if world == 1 or distributed.is_initialized():
        yield Processes(rank, world, here)
        return
    distributed.init_process_group("nccl" if here.type == "cuda" else "gloo")
    try:
        yield Processes(rank, world, here)
    finally:
        distributed.destroy_process_group()
