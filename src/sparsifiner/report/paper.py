"""The paper's four tables: its numbers, and ours by formula. What is measured comes from elsewhere and says so.

Multiply-adds are in millions and of the attention core and its predictor, which the paper calls MHSA FLOPs, unless they
are called overall.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from sparsifiner.config import TokenConfig, budget
from sparsifiner.inspect.flops import (
    DEIT_S_DENSITY,
    LV_VIT_S_DENSITY,
    dense_layer,
    linformer_layer,
    sparse_layer,
)


@dataclasses.dataclass(frozen=True)
class Backbone:
    """The shape of a model of the paper: what its counts depend on."""

    name: str
    tokens: int
    dim: int
    heads: int
    depth: int
    density: float
    mlp_ratio: int = 4

    def attention(self, keep: float = 1.0, tokens: TokenConfig | None = None) -> float:
        """Attention core and predictor. The budget is fixed by the full number of tokens."""
        keys = budget(keep, self.tokens)
        total = 0.0
        for seen in self._seen(tokens):
            if keep == 1:
                total += dense_layer(seen.attention, self.dim)
            else:  # the paper pays for the predictor even where the budget covers all tokens that are left
                total += sparse_layer(seen.attention, self.dim, self.heads, keys, density=self.density).total
        return total / 1e6

    def linformer(self, landmarks: int) -> float:
        """Linformer with so many landmarks."""
        return self.depth * linformer_layer(self.tokens, self.dim, landmarks) / 1e6

    def feed_forward(self, tokens: TokenConfig | None = None) -> float:
        """The feed-forward parts."""
        seen = sum(block.feed_forward for block in self._seen(tokens))
        return 2 * seen * self.mlp_ratio * self.dim**2 / 1e6

    def projections(self, tokens: TokenConfig | None = None) -> float:
        """To queries, keys and values, and from the heads."""
        return 4 * sum(block.attention for block in self._seen(tokens)) * self.dim**2 / 1e6

    def _seen(self, tokens: TokenConfig | None) -> Any:
        return (tokens or TokenConfig(1.0)).layer_tokens(self.tokens - 1, 1, self.depth)


DEIT_S = Backbone("DeiT-S", 197, 384, 6, 12, DEIT_S_DENSITY)
LV_VIT_S = Backbone("LV-ViT-S", 197, 384, 6, 16, LV_VIT_S_DENSITY, mlp_ratio=3)
# The paper's rows at 384 pixels leave no room for the score product: its density there is zero.
DEIT_T_384 = Backbone("DeiT-T 384", 577, 192, 3, 12, 0.0)

TITLES = {
    1: "Token pruning and sparse attention (224 px)",
    2: "The attention budget (DeiT-S, 224 px)",
    3: "High resolution (DeiT-T, 384 px)",
    4: "Low-rank attention (DeiT-S, 224 px)",
}


@dataclasses.dataclass(frozen=True)
class PaperRow:
    """A row of one of the paper's tables, and ours by formula.

    Attributes:
        table: 1 to 4.
        backbone: the model.
        method: as the paper calls it.
        token_keep: share of the tokens a pruning keeps; 1 for all.
        keep: share of the keys; 1 for all, None for Linformer.
        paper: million multiply-adds, as printed.
        paper_top1: percent, as printed.
        formula: ours.
        paper_overall: billion multiply-adds of the model, where the paper prints them.
    """

    table: int
    backbone: Backbone
    method: str
    token_keep: float
    keep: float | None
    paper: float
    paper_top1: float
    formula: float
    paper_overall: float | None = None

    @property
    def difference(self) -> float:
        """Relative: ours over the paper's, minus one."""
        return self.formula / self.paper - 1

    @property
    def tokens(self) -> TokenConfig | None:
        """Which tokens are dropped; both methods are counted alike in the paper."""
        return None if self.token_keep == 1 else TokenConfig(self.token_keep)

    @property
    def overall(self) -> float:
        """Billions, by the paper's convention: attention and feed-forward parts."""
        return (self.formula + self.backbone.feed_forward(self.tokens)) / 1e3

    @property
    def whole(self) -> float:
        """Billions: with the projections, which the paper leaves out. Patch embedding and head are not in it."""
        return self.overall + self.backbone.projections(self.tokens) / 1e3

    @property
    def model(self) -> str:
        """The backbone's name."""
        return self.backbone.name

    @property
    def setting(self) -> str:
        """What tells a row apart from others of the same count."""
        if self.keep is None:
            return "Linformer (68 landmarks)"
        keys = f"keep {self.keep:g} (B = {budget(self.keep, self.backbone.tokens)})"
        if self.token_keep == 1:
            return "dense" if self.keep == 1 else keys
        return f"EViT / DynamicViT {self.token_keep:g}" if self.keep == 1 else f"EViT {self.token_keep:g} and {keys}"

    def to_dict(self) -> dict[str, Any]:
        """For JSON and CSV."""
        own = {"table": self.table, "model": self.model, "method": self.method, "setting": self.setting}
        own |= {"token_keep": self.token_keep, "keep": self.keep, "paper": self.paper, "formula": self.formula}
        own |= {"difference": self.difference, "paper_top1": self.paper_top1, "paper_overall": self.paper_overall}
        return own | {"overall": self.overall, "whole": self.whole}


def _row(table: int, backbone: Backbone, method: str, token_keep: float, keep: float, paper, top1, overall=None):
    tokens = None if token_keep == 1 else TokenConfig(token_keep)
    return PaperRow(table, backbone, method, token_keep, keep, paper, top1, backbone.attention(keep, tokens), overall)


# Share of keys, million multiply-adds, top-1.
_BUDGETS = (
    (1.0, 357.7, 79.82),
    (0.9, 396.8, 80.02),
    (0.8, 360.6, 79.97),
    (0.7, 324.6, 79.96),
    (0.6, 290.3, 79.98),
    (0.5, 254.2, 79.94),
    (0.4, 218.0, 79.92),
    (0.3, 183.6, 79.83),
    (0.2, 147.5, 79.71),
    (0.1, 111.4, 79.42),
    (0.05, 93.3, 78.75),
    (0.01, 78.9, 73.03),
)


def paper_rows() -> list[PaperRow]:
    """Every row of the paper's four tables, in its order."""
    rows = [_row(1, DEIT_S, "DeiT-S", 1, 1, 357.7, 79.8)]
    for token_keep, pruned, both, accuracies in (
        (0.7, 193.1, 113.3, (79.5, 79.3, 79.5, 79.3)),
        (0.5, 149.1, 86.6, (78.5, 77.3, 78.7, 78.4)),
    ):
        rows += [
            _row(1, DEIT_S, "EViT", token_keep, 1, pruned, accuracies[0]),
            _row(1, DEIT_S, "DynamicViT", token_keep, 1, pruned, accuracies[1]),
            _row(1, DEIT_S, "Sparsifiner + EViT", token_keep, 0.25, both, accuracies[2]),
            _row(1, DEIT_S, "Sparsifiner", token_keep, 0.25, both, accuracies[3]),
        ]
    rows.append(_row(1, LV_VIT_S, "LV-ViT-S", 1, 1, 476.9, 83.3))
    for method, accuracies in (("EViT", (83.0, 82.5)), ("DynamicViT", (83.0, 82.0))):
        rows += [
            _row(1, LV_VIT_S, method, 0.7, 1, 256.0, accuracies[0]),
            _row(1, LV_VIT_S, method, 0.5, 1, 198.8, accuracies[1]),
        ]
    for keep, paper, top1 in ((0.5, 339.7, 83.4), (0.25, 221.7, 83.3), (0.1, 149.5, 82.8)):
        rows.append(_row(1, LV_VIT_S, "Sparsifiner", 1, keep, paper, top1))
    rows += [_row(2, DEIT_S, "DeiT-S" if k == 1 else "Sparsifiner", 1, k, paper, top1) for k, paper, top1 in _BUDGETS]
    for keep, paper, overall, top1 in (
        (1.0, 1534.1, 3.58, 75.45),
        (0.5, 851.0, 2.89, 75.45),
        (0.25, 452.9, 2.49, 75.35),
        (0.1, 240.5, 2.28, 74.58),
    ):
        method = "DeiT-T" if keep == 1 else "Sparsifiner"
        rows.append(_row(3, DEIT_T_384, method, 1, keep, paper, top1, overall))
    rows.append(PaperRow(4, DEIT_S, "Linformer", 1, None, 246.73, 77.54, DEIT_S.linformer(68)))
    # "The reduced dimension equal to the attention budget": 68 keys. The count then does not fit the other rows'
    # density; 0.467 would.
    rows.append(_row(4, DEIT_S, "Sparsifiner", 1, 0.345, 224.04, 79.79))
    return rows


def flops_rows() -> list[PaperRow]:
    """One row for each count of the paper's tables: several methods can share one."""
    return list({(row.model, row.setting): row for row in reversed(paper_rows())}.values())[::-1]
