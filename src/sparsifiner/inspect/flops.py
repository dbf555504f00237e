"""Multiply-adds, by the paper's count and as measured. One multiply-add is two FLOPs; the paper says FLOPs.

The paper counts the attention core and the predictor only. `count_flops` reports those and the rest of the
model beside them, so that neither is mistaken for the other.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from sparsifiner.config import BlockTokens
from sparsifiner.convert import config_of, conversion_of, part_of, restore, sparse_layers
from sparsifiner.errors import ConfigError
from sparsifiner.hosts import Host, tokens_of
from sparsifiner.inspect.statistics import LayerStatistics, measure
from sparsifiner.nn.attention import SparseAttention
from sparsifiner.nn.grid import TokenGrid
from sparsifiner.tokens.install import pruning_blocks

# The effective density of A~_down W_up that reproduces the paper's DeiT-S rows to 0.1 %, and LV-ViT-S's.
DEIT_S_DENSITY = 0.1743
LV_VIT_S_DENSITY = 0.184

Convention = Literal["paper", "measured"]


def dense_layer(tokens: int, dim: int) -> int:
    """Scores and values of dense attention: ``2 n^2 D``."""
    return 2 * tokens * tokens * dim


@dataclasses.dataclass(frozen=True)
class LayerCount:
    """Multiply-adds of one sparse attention layer for one image, in the paper's three parts and ours."""

    attention: float
    predictor: float
    residual: float = 0.0

    @property
    def total(self) -> float:
        """All three."""
        return self.attention + self.predictor + self.residual


def sparse_layer(
    tokens: int,
    dim: int,
    num_heads: int,
    budget: int,
    n_down: int = 32,
    density: float = DEIT_S_DENSITY,
    num_prefix: int = 1,
) -> LayerCount:
    """The paper's count of one layer without residual.

    ``2 P n D`` for the prefix rows, ``2 (n-P) B D`` for the connections; the predictor is ``n m D`` to pool
    the keys, ``(n-P) m D`` for the low-rank attention and ``rho (n-P) m n H`` for the scores.
    """
    patches = tokens - num_prefix
    return LayerCount(
        attention=2 * num_prefix * tokens * dim + 2 * patches * min(budget, tokens) * dim,
        predictor=tokens * n_down * dim + patches * n_down * dim + density * patches * n_down * tokens * num_heads,
    )


def linformer_layer(tokens: int, dim: int, n_down: int) -> int:
    """Linformer: keys and values pooled, scores and values over the landmarks, ``4 n m D``."""
    return 4 * tokens * n_down * dim


@dataclasses.dataclass(frozen=True)
class FlopCount:
    """Multiply-adds for one image.

    Attributes:
        attention: scores and values of the attention core.
        predictor: the connectivity predictor.
        residual: the low-rank residual; the paper's convention does not have it.
        projections: qkv and output projections.
        mlp: the feed-forward parts.
        other: patch embedding, head and whatever else multiplies.
        dense_attention: what the attention core of the dense host costs.
        dense_rest: what all else of the dense host costs; more than ours where tokens are dropped.
        convention: how attention, predictor and residual were counted.
    """

    attention: float
    predictor: float
    residual: float
    projections: float
    mlp: float
    other: float
    dense_attention: float
    dense_rest: float
    convention: str

    @property
    def mhsa(self) -> float:
        """What the paper calls MHSA FLOPs: core, predictor and, where it is counted, residual."""
        return self.attention + self.predictor + self.residual

    @property
    def total(self) -> float:
        """The whole model."""
        return self.mhsa + self.projections + self.mlp + self.other

    @property
    def dense_total(self) -> float:
        """The whole dense host."""
        return self.dense_attention + self.dense_rest

    def to_dict(self) -> dict[str, float | str]:
        """For JSON and tables."""
        derived = {"mhsa": self.mhsa, "total": self.total, "dense_total": self.dense_total}
        return dataclasses.asdict(self) | derived

    def __str__(self) -> str:
        return json.dumps(self.to_dict())


def count_flops(
    student: nn.Module,
    images: Tensor | Iterable | None = None,
    *,
    convention: Convention = "paper",
    density: float = DEIT_S_DENSITY,
    statistics: Sequence[LayerStatistics] | None = None,
    outside: Outside | None = None,
) -> FlopCount:
    """Counts the multiply-adds of a converted model for one image at its current input size.

    Args:
        student: a converted model.
        images: what ``convention="measured"`` is measured on.
        convention: ``"paper"`` fills every budget and assumes the paper's density; ``"measured"`` counts the
            connections and non-zero products on ``images``, the residual included.
        density: the density the paper's convention assumes.
        statistics: measured already by `sparsifiner.inspect.statistics.measure`; instead of ``images``.
        outside: counted already by `outside_attention`; no setting changes it, so one count serves many.
    """
    student = part_of(student)
    if convention not in ("paper", "measured"):
        raise ConfigError(f"unknown convention {convention!r}: choose 'paper' or 'measured'")
    if convention == "measured" and statistics is None:
        if images is None:
            raise ConfigError("the measured convention needs images: real counts depend on them")
        statistics = measure(student, images)
    record = conversion_of(student)
    layers = sparse_layers(student)
    grid = record.host.grid(student)
    record.grid.begin(grid.size)  # budgets are shares of it
    seen = layer_tokens(student)
    measured = statistics if convention == "measured" and statistics is not None else [None] * len(layers)
    parts = [_layer(layer, n, density, found) for layer, n, found in zip(layers, seen, measured, strict=True)]
    dense_attention = sum(dense_layer(grid.num_tokens, layer.num_heads * layer.head_dim) for layer in layers)
    outside = outside_attention(student) if outside is None else outside
    projections = sum(count * n.attention / grid.num_tokens for count, n in zip(outside.projections, seen, strict=True))
    mlp = sum(count * n.feed_forward / grid.num_tokens for count, n in zip(outside.mlp, seen, strict=True))
    return FlopCount(
        attention=sum(part.attention for part in parts),
        predictor=sum(part.predictor for part in parts),
        residual=sum(part.residual for part in parts),
        projections=projections,
        mlp=mlp,
        other=outside.other_at(seen[-1].feed_forward) + _scorers(student, grid),
        dense_attention=dense_attention,
        dense_rest=sum(outside.projections) + sum(outside.mlp) + outside.other,
        convention=convention,
    )


def layer_tokens(student: nn.Module) -> list[BlockTokens]:
    """How many tokens each layer's attention and feed-forward part see at the model's own input size."""
    record, depth, tokens = conversion_of(student), len(sparse_layers(student)), config_of(student).tokens
    grid = record.host.grid(student)
    if tokens is None or record.grid.dense:
        return [BlockTokens(grid.num_prefix, grid.num_tokens, grid.num_tokens)] * depth
    return tokens.layer_tokens(grid.num_tokens - grid.num_prefix, grid.num_prefix, depth)


def _scorers(student: nn.Module, grid: TokenGrid) -> int:
    """The networks that choose tokens: every linear map, once for each token that is there before the choice."""
    patches, total = grid.num_tokens - grid.num_prefix, 0
    for block in pruning_blocks(student) if not conversion_of(student).grid.dense else ():
        if block.scorer is not None:
            total += patches * sum(m.weight.numel() for m in block.scorer.modules() if isinstance(m, nn.Linear))
        patches = block.config.kept(patches)
    return total


def _layer(layer: SparseAttention, seen: BlockTokens, density: float, measured: LayerStatistics | None) -> LayerCount:
    """One layer, by the paper's count or as it was measured."""
    n, prefix = seen.attention, seen.prefix
    heads, head_dim, landmarks = layer.num_heads, layer.head_dim, layer.config.n_down
    dim, patches, pattern = heads * head_dim, n - prefix, layer.config.pattern
    if layer.is_dense(n):
        return LayerCount(dense_layer(n, dim), 0)
    if pattern == "linformer":
        return LayerCount(2 * prefix * n * dim, linformer_layer(n, dim, landmarks) - 2 * prefix * landmarks * dim)
    if pattern == "cells":
        return _cells_layer(layer, n, prefix, measured)
    if measured is None:
        count = sparse_layer(n, dim, heads, layer.budget(), landmarks, density, prefix)
        return count if pattern == "learned" else LayerCount(count.attention, 0)
    low_rank = n * landmarks * dim + patches * landmarks * dim  # a product with all tokens, and one with the queries
    estimates = low_rank + measured.connections * landmarks  # pooled values, and what the estimate says of kept keys
    residual = layer.config.residual
    return LayerCount(
        attention=2 * prefix * n * dim + 2 * measured.connections * head_dim,
        predictor=low_rank + measured.score_products if pattern == "learned" or residual else 0,
        residual=estimates if residual else 0,
    )


def _cells_layer(layer: SparseAttention, n: int, prefix: int, measured: LayerStatistics | None) -> LayerCount:
    """A layer that opens cells: groups of queries meet every mean key, queries what is opened and what stands."""
    dim, patches, opening = layer.num_heads * layer.head_dim, n - prefix, layer.opening()
    levels = opening.levels()
    keys = min(n, prefix + levels.opened[0] * math.prod(opening.cells[0]))
    standing = patches * (levels.longest - keys) if opening.closed else 0
    keys *= patches
    if measured is not None:
        keys, standing = measured.connections / layer.num_heads, measured.standing / layer.num_heads
    shared = opening.tile is not None  # a tile's mean query asks, and its queries have still to meet what stands
    tiles = math.prod(-(-side // part) for side, part in zip(opening.grid, opening.tile_sides, strict=True))
    return LayerCount(
        attention=2 * prefix * n * dim + 2 * keys * dim,
        predictor=min(patches, tiles) * levels.starts[-1] * dim + 2 * patches * dim,  # spreads: squared distances
        residual=standing * dim * (2 if shared else 1),
    )


@dataclasses.dataclass(frozen=True)
class Outside:
    """What the dense host multiplies outside the attention core; by block where that depends on its tokens.

    Attributes:
        projections: one for each attention layer.
        mlp: one for each attention layer.
        other: all else, where the head sees every token.
        other_at: all else, where the head sees so many tokens; attention pooling and LV-ViT's second head are cheaper
            where some were dropped.
    """

    projections: list[float]
    mlp: list[float]
    other: float
    other_at: Callable[[int], float]


def outside_attention(student: nn.Module) -> Outside:
    """What `count_flops` counts outside the attention core, by torch's own counter on the meta device."""
    student = part_of(student)
    record = conversion_of(student)
    # Without gradients: torch's counter stumbles over a parameter that is expanded, as attention pooling does.
    dense = restore(student).to("meta").eval().requires_grad_(False)
    root = type(dense).__name__
    sites = {f"{root}.{site.name}": site for site in record.host.sites(dense)}
    names = {module: f"{root}.{name}" for name, module in dense.named_modules()}
    all_tokens, counts = record.host.grid(dense).num_tokens, _module_counts(record.host, dense)
    # What a block multiplies outside its attention is its feed-forward part, whatever that is called.
    blocks = [names[block.module] for block in record.host.blocks(dense)]
    attention = [sum(counts[site] for site in sites if f"{site}.".startswith(f"{block}.")) for block in blocks]
    mlp = [counts[block] - inside for block, inside in zip(blocks, attention, strict=True)]

    @functools.cache
    def other_at(tokens: int) -> float:
        own = counts if tokens == all_tokens else _module_counts(record.host, dense, tokens)
        return own[root] - sum(own[name] for name in blocks)

    return Outside(
        projections=[
            counts[name] - dense_layer(all_tokens, site.num_heads * site.head_dim) for name, site in sites.items()
        ],
        # One for each layer, unless blocks have several attentions; tokens are not dropped in such models.
        mlp=mlp if len(mlp) == len(sites) else [sum(mlp) / len(sites)] * len(sites),
        other=other_at(all_tokens),
        other_at=other_at,
    )


def _module_counts(host: Host, dense: nn.Module, tokens: int | None = None) -> dict[str, float]:
    """Multiply-adds of each module of a model on the meta device; the head sees the first ``tokens`` or all."""
    dtype = next(dense.parameters()).dtype
    image = torch.empty(1, *host.input_shape(dense), dtype=dtype, device="meta")

    def shorten(block: nn.Module, inputs: Any, output: Any) -> Any:
        fewer = tokens_of(output)[:, :tokens]
        return fewer if isinstance(output, Tensor) else (fewer, *output[1:])

    cut = host.last_block(dense).register_forward_hook(shorten)
    try:
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            dense(image, **host.settings(dense))
    finally:
        cut.remove()
    return {name: sum(by_op.values()) / 2 for name, by_op in counter.get_flop_counts().items()}
