"""Putting blocks that drop tokens into a model, and taking them out again."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import nn

from sparsifiner.config import TokenConfig
from sparsifiner.errors import ConfigError, UnsupportedModelError
from sparsifiner.hosts import Host
from sparsifiner.nn.attention import SparseAttention
from sparsifiner.nn.grid import TokenGrid
from sparsifiner.tokens.block import PruningBlock
from sparsifiner.tokens.dynamicvit import TokenScorer

# The method of timm's models that lays the tokens of several blocks out on the grid; `features_only=True` calls it too.
LAYOUT = "forward_intermediates"


@dataclasses.dataclass
class _LayOut:
    """Stands before that method in a model that drops tokens: what is left would be laid out as if it were all.

    An object, not a closure, so that a deep copy of the model has one of its own.
    """

    model: nn.Module
    grid: TokenGrid

    def __call__(self, *arguments: Any, **settings: Any) -> Any:
        drops = not self.grid.dense and any(block.config.keep < 1 for block in pruning_blocks(self.model))
        if drops and settings.get("output_fmt", "NCHW") != "NLC":
            raise ConfigError(
                f"{LAYOUT} lays out all tokens and this model drops some: sparsifiner.feature_map(student, images) "
                "puts them back on the grid, output_fmt='NLC' gives those that are left"
            )
        return getattr(type(self.model), LAYOUT)(self.model, *arguments, **settings)


def pruning_blocks(model: nn.Module) -> list[PruningBlock]:
    """The blocks that drop tokens, in the order they run."""
    return [module for module in model.modules() if isinstance(module, PruningBlock)]


def install_pruning(
    model: nn.Module, host: Host, grid: TokenGrid, config: TokenConfig | None, scorers: dict[int, TokenScorer]
) -> None:
    """Makes blocks of a model whose attention is converted drop tokens; others that did no longer do.

    DynamicViT's networks that are no longer used go to ``scorers``, by block, and are taken from there when they are.
    """
    present = pruning_blocks(model)
    depth = len(host.blocks(model))
    blocks = () if config is None else config.blocks_of(depth)
    if config is not None and [(b.config.method, b.number) for b in present] == [(config.method, n) for n in blocks]:
        for block in present:
            block.configure(config)
        return
    if config is not None and (reason := host.every_token(model)):
        raise UnsupportedModelError(f"tokens cannot be dropped in a {type(model).__name__}: {reason}")
    scorers |= {block.number: block.scorer for block in present if block.scorer is not None}
    remove_pruning(model, host)
    sites = host.blocks(model)
    for number in blocks:  # all are looked at before any is changed
        block = sites[number].module
        attentions = [module for module in block.modules() if isinstance(module, SparseAttention)]
        if sites[number].adapter is None or len(attentions) != 1:
            own = block.host if isinstance(block, SparseAttention) else block
            raise UnsupportedModelError(
                f"tokens cannot be dropped in a {type(own).__name__}: its attention and feed-forward parts do not come "
                "one after the other"
            )
    if config is None:
        return
    for number in blocks:
        block = PruningBlock(sites[number], grid, config, number, host.class_token(model), scorers.get(number))
        sites[number].put(block)
    if hasattr(type(model), LAYOUT):
        setattr(model, LAYOUT, _LayOut(model, grid))


def remove_pruning(model: nn.Module, host: Host) -> None:
    """Puts the host's own blocks back."""
    model.__dict__.pop(LAYOUT, None)
    for site in host.blocks(model):
        if isinstance(site.module, PruningBlock):
            site.put(site.module.release())
