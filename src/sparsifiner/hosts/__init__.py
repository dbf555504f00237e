"""What we know of other people's models: a table of hosts, one file each."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from sparsifiner.nn.attention import AttentionAdapter
from sparsifiner.nn.grid import TokenGrid


@dataclasses.dataclass(frozen=True)
class Site:
    """One attention module of a host model, and how to talk to it."""

    name: str
    parent: nn.Module
    attribute: str
    module: nn.Module
    adapter: AttentionAdapter
    num_heads: int
    head_dim: int
    scale: float

    def put(self, module: nn.Module) -> None:
        """Stands another module in its place."""
        setattr(self.parent, self.attribute, module)


@dataclasses.dataclass(frozen=True)
class Host:
    """A library whose models can be converted.

    Attributes:
        name: how messages and checkpoints call it.
        supported: one line for people whose model is not.
        refusal: one line that says why this model cannot be converted, or None if it can.
        grid: the model's token grid at its own input size.
        watch: makes the grid follow the size of each input; returns a handle with ``remove()``.
        sites: the attention modules in the order they run.
        describe: the arguments that make the model again, for checkpoints.
        build: makes a model from such arguments, without weights and without a network.
        image_size: height and width of the images the model takes now.
        last_block: the module whose output are the tokens ``[batch, n, D]`` that the head sees, but for a norm.
    """

    name: str
    supported: str
    refusal: Callable[[nn.Module], str | None]
    grid: Callable[[nn.Module], TokenGrid]
    watch: Callable[[nn.Module, TokenGrid], Any]
    sites: Callable[[nn.Module], Iterator[Site]]
    describe: Callable[[nn.Module], dict[str, Any]]
    build: Callable[[dict[str, Any]], nn.Module]
    image_size: Callable[[nn.Module], tuple[int, int]]
    last_block: Callable[[nn.Module], nn.Module]


def table() -> dict[str, Host]:
    """Every host by name."""
    from sparsifiner.hosts import timm

    return {host.name: host for host in (timm.HOST,)}
