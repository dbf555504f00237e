"""Multiply-adds, by the paper's count and as measured. One multiply-add is two FLOPs; the paper says FLOPs.

The paper counts the attention core and the predictor only. `count_flops` reports those and the rest of the
model beside them, so that neither is mistaken for the other.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from sparsifiner.convert import conversion_of, restore, sparse_layers
from sparsifiner.errors import ConfigError
from sparsifiner.inspect.statistics import LayerStatistics, measure

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


def pruned_tokens(tokens: int, ratio: float, stages: Sequence[int], num_prefix: int = 1) -> list[int]:
    """Tokens that each layer's attention sees when token pruning keeps ``ratio`` of them after every stage.

    ``stages`` are the numbers of layers between prunings; their sum is the depth. As in the counts the paper
    quotes, the kept part is rounded up and the prefix stays.
    """
    counts = []
    for layers in stages:
        counts += [tokens] * layers
        tokens = -int(-ratio * (tokens - num_prefix) // 1) + num_prefix
    return counts


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
        convention: how attention, predictor and residual were counted.
    """

    attention: float
    predictor: float
    residual: float
    projections: float
    mlp: float
    other: float
    dense_attention: float
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
        return self.total - self.mhsa + self.dense_attention

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
) -> FlopCount:
    """Counts the multiply-adds of a converted model for one image at its current input size.

    Args:
        student: a converted model.
        images: what ``convention="measured"`` is measured on.
        convention: ``"paper"`` fills every budget and assumes the paper's density; ``"measured"`` counts the
            connections and non-zero products on ``images``, the residual included.
        density: the density the paper's convention assumes.
        statistics: measured already by `sparsifiner.inspect.statistics.measure`; instead of ``images``.
    """
    if convention not in ("paper", "measured"):
        raise ConfigError(f"unknown convention {convention!r}: choose 'paper' or 'measured'")
    if convention == "measured" and statistics is None:
        if images is None:
            raise ConfigError("the measured convention needs images: real counts depend on them")
        statistics = measure(student, images)
    record = conversion_of(student)
    layers = sparse_layers(student)
    grid = record.host.grid(student)
    n, prefix = grid.num_tokens, grid.num_prefix
    parts, dense_attention = [], 0
    for index, layer in enumerate(layers):
        heads = layer.num_heads
        dim = heads * layer.head_dim
        dense_attention += dense_layer(n, dim)
        if layer.is_dense(n):
            parts.append(LayerCount(dense_layer(n, dim), 0))
        elif convention == "paper":
            landmarks = layer.predictor.n_down
            parts.append(sparse_layer(n, dim, heads, layer.budget(n), landmarks, density, prefix))
        else:
            assert statistics is not None
            parts.append(_measured_layer(layer, statistics[index], n, prefix))
    projections, mlp, other = _outside_attention(student)
    return FlopCount(
        attention=sum(part.attention for part in parts),
        predictor=sum(part.predictor for part in parts),
        residual=sum(part.residual for part in parts),
        projections=projections,
        mlp=mlp,
        other=other,
        dense_attention=dense_attention,
        convention=convention,
    )


def _measured_layer(layer, seen: LayerStatistics, n: int, prefix: int) -> LayerCount:
    heads, head_dim, landmarks = layer.num_heads, layer.head_dim, layer.predictor.n_down
    dim, patches = heads * head_dim, n - prefix
    residual = 0.0
    if layer.config.residual:  # pooled values, their product with the coefficients, estimates on kept keys
        residual = n * landmarks * dim + patches * landmarks * dim + seen.connections * landmarks
    return LayerCount(
        attention=2 * prefix * n * dim + 2 * seen.connections * head_dim,
        predictor=n * landmarks * dim + patches * landmarks * dim + seen.score_products,
        residual=residual,
    )


def _outside_attention(student: nn.Module) -> tuple[float, float, float]:
    """Projections, MLPs and the rest of the dense host, by torch's own counter on the meta device."""
    record = conversion_of(student)
    dense = restore(student).to("meta").eval()
    height, width = record.host.image_size(dense)
    channels = next(p for p in dense.parameters() if p.ndim == 4).shape[1]
    dtype = next(dense.parameters()).dtype
    image = torch.empty(1, channels, height, width, dtype=dtype, device="meta")
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        dense(image)
    counts = {name: sum(by_op.values()) / 2 for name, by_op in counter.get_flop_counts().items()}
    root = type(dense).__name__
    sites = [f"{root}.{site.name}" for site in record.host.sites(dense)]
    attention = sum(counts[name] for name in sites)
    projections = sum(count for name, count in counts.items() if name.rpartition(".")[0] in sites)
    mlp = sum(count for name, count in counts.items() if name.endswith(".mlp"))
    return projections, mlp, counter.get_total_flops() / 2 - attention - mlp
