"""What we know of other people's models: a table of hosts, one file each."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

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

    def put(self, module: nn.Module) -> None:
        """Stands another module in its place."""
        setattr(self.parent, self.attribute, module)


@dataclasses.dataclass(frozen=True)
class BlockAdapter:
    """The two halves of a host's block, between which tokens can be dropped.

    Attributes:
        attend: from the block, tokens ``[batch, n, D]`` and what else it is called with, to tokens with the attention
            added.
        feed: from the block and such tokens to tokens with the feed-forward part added.
        dim: D.
    """

    attend: Callable[..., Tensor]
    feed: Callable[[Any, Tensor], Tensor]
    dim: Callable[[Any], int]


@dataclasses.dataclass(frozen=True)
class BlockSite:
    """One block of a host model, and how to run its halves; no adapter where they cannot be told apart."""

    parent: nn.Module
    attribute: str
    module: nn.Module
    adapter: BlockAdapter | None

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
        class_token: whether the first token stands for the class.
        blocks: the blocks in the order they run.
        last_block: the module whose output are the tokens ``[batch, n, D]`` that the head sees, but for a norm.
        num_classes: classes that the model predicts; 0 if it has no head.
        unused: names of parameters that `logits` does not depend on.
        logits: from what the model returns to the tensor that is compared with the teacher's, ``[batch, classes]`` or
            features.
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
    class_token: Callable[[nn.Module], bool]
    blocks: Callable[[nn.Module], list[BlockSite]]
    last_block: Callable[[nn.Module], nn.Module]
    num_classes: Callable[[nn.Module], int]
    unused: Callable[[nn.Module], set[str]]
    logits: Callable[[Any], Tensor]


# Hosts whose library is optional, and that library; the extra that installs it has the host's name.
OPTIONAL = {"huggingface": "transformers"}


def table() -> dict[str, Host]:
    """Every host by name; optional ones where their library is installed, which is not imported for that."""
    names = ["timm", *(name for name, library in OPTIONAL.items() if importlib.util.find_spec(library))]
    hosts = (importlib.import_module(f"sparsifiner.hosts.{name}").HOST for name in names)
    return {host.name: host for host in hosts}
