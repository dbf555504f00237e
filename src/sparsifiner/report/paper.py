"""The multiply-adds the paper lists, beside what the formulas give."""

from __future__ import annotations

import dataclasses
from typing import Any

from sparsifiner.config import budget
from sparsifiner.inspect.flops import (
    DEIT_S_DENSITY,
    LV_VIT_S_DENSITY,
    dense_layer,
    linformer_layer,
    pruned_tokens,
    sparse_layer,
)


@dataclasses.dataclass(frozen=True)
class PaperRow:
    """A number of the paper, in million multiply-adds, and ours."""

    model: str
    setting: str
    paper: float
    formula: float

    @property
    def difference(self) -> float:
        """Relative: ours over the paper's, minus one."""
        return self.formula / self.paper - 1

    def to_dict(self) -> dict[str, Any]:
        """For JSON and CSV."""
        return dataclasses.asdict(self) | {"difference": self.difference}


@dataclasses.dataclass(frozen=True)
class Backbone:
    """The shape of a model of the paper: what its counts depend on."""

    name: str
    tokens: int
    dim: int
    heads: int
    depth: int
    stages: tuple[int, ...]  # layers between prunings
    density: float

    def dense(self) -> float:
        """Attention of the dense model."""
        return self.depth * dense_layer(self.tokens, self.dim) / 1e6

    def sparse(self, keys: int) -> float:
        """Sparsifiner with a budget of ``keys``."""
        layer = sparse_layer(self.tokens, self.dim, self.heads, keys, density=self.density)
        return self.depth * layer.total / 1e6

    def pruned(self, ratio: float, keys: int | None = None) -> float:
        """Token pruning, alone or with a budget that is fixed by the full number of tokens."""
        total = 0.0
        for tokens in pruned_tokens(self.tokens, ratio, self.stages):
            if keys is None:
                total += dense_layer(tokens, self.dim)
            else:  # the paper pays for the predictor even where the budget covers all tokens that are left
                total += sparse_layer(tokens, self.dim, self.heads, keys, density=self.density).total
        return total / 1e6


DEIT_S = Backbone("DeiT-S", 197, 384, 6, 12, (4, 3, 3, 2), DEIT_S_DENSITY)
LV_VIT_S = Backbone("LV-ViT-S", 197, 384, 6, 16, (5, 4, 4, 3), LV_VIT_S_DENSITY)
# The paper's rows at 384 pixels leave no room for the score product: its density there is zero.
DEIT_T_384 = Backbone("DeiT-T 384", 577, 192, 3, 12, (4, 3, 3, 2), 0.0)

_DEIT_S_BUDGETS = {
    0.9: 396.8,
    0.8: 360.6,
    0.7: 324.6,
    0.6: 290.3,
    0.5: 254.2,
    0.4: 218.0,
    0.3: 183.6,
    0.2: 147.5,
    0.1: 111.4,
    0.05: 93.3,
    0.01: 78.9,
}


def flops_rows() -> list[PaperRow]:
    """Every attention count of the paper's tables that a formula can be given for."""
    rows = [
        PaperRow(backbone.name, "dense", paper, backbone.dense())
        for backbone, paper in ((DEIT_S, 357.7), (LV_VIT_S, 476.9), (DEIT_T_384, 1534.1))
    ]

    def sparse(backbone: Backbone, keep: float, paper: float) -> PaperRow:
        keys = budget(keep, backbone.tokens)
        return PaperRow(backbone.name, f"keep {keep:g} (B = {keys})", paper, backbone.sparse(keys))

    rows += [sparse(DEIT_S, keep, paper) for keep, paper in _DEIT_S_BUDGETS.items()]
    rows += [sparse(LV_VIT_S, keep, paper) for keep, paper in ((0.5, 339.7), (0.25, 221.7), (0.1, 149.5))]
    rows += [sparse(DEIT_T_384, keep, paper) for keep, paper in ((0.5, 851.0), (0.25, 452.9), (0.1, 240.5))]
    for backbone, papers in ((DEIT_S, (193.1, 149.1)), (LV_VIT_S, (256.0, 198.8))):
        rows += [
            PaperRow(backbone.name, f"EViT / DynamicViT {ratio:g}", paper, backbone.pruned(ratio))
            for ratio, paper in zip((0.7, 0.5), papers, strict=True)
        ]
    keys = budget(0.25, DEIT_S.tokens)
    rows += [
        PaperRow("DeiT-S", f"EViT {ratio:g} and keep 0.25 (B = {keys})", paper, DEIT_S.pruned(ratio, keys))
        for ratio, paper in ((0.7, 113.3), (0.5, 86.6))
    ]
    linformer = DEIT_S.depth * linformer_layer(DEIT_S.tokens, DEIT_S.dim, 68) / 1e6
    rows.append(PaperRow("DeiT-S", "Linformer (68 landmarks)", 246.73, linformer))
    return rows
