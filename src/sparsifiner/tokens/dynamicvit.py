"""DynamicViT: a small network looks at the tokens and says which to keep."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from sparsifiner.config import TokenConfig
from sparsifiner.nn.grid import TokenGrid
from sparsifiner.tokens.evit import take, top_tokens


class TokenScorer(nn.Module):
    """From patch tokens to the log-probabilities of keeping and dropping each.

    Half of a token's features are its own, the other half the mean over the tokens that are there.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.enter = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, dim), nn.GELU())
        self.decide = nn.Sequential(
            nn.Linear(dim, dim // 2), nn.GELU(), nn.Linear(dim // 2, dim // 4), nn.GELU(), nn.Linear(dim // 4, 2)
        )

    def forward(self, patches: Tensor, presence: Tensor | None = None) -> Tensor:
        """``[batch, patches, D]`` to ``[batch, patches, 2]``: keep, drop. ``presence`` ``[batch, patches]``."""
        own, pooled = self.enter(patches).chunk(2, dim=-1)
        if presence is None:
            whole = pooled.mean(1, keepdim=True)
        else:
            weight = presence[..., None].to(pooled.dtype)
            whole = (pooled * weight).sum(1, keepdim=True) / weight.sum(1, keepdim=True).clamp(min=1)
        return self.decide(torch.cat([own, whole.expand_as(pooled)], dim=-1)).log_softmax(-1)

    def prune(self, x: Tensor, grid: TokenGrid, config: TokenConfig) -> Tensor:
        """Drops patch tokens of ``x`` ``[batch, n, D]`` and tells the grid.

        In training all tokens stay and a Gumbel-softmax sample says which still count: ``grid.presence``. At inference
        the most probable are kept and the others are gone.
        """
        prefix = grid.prefix
        patches = x[:, prefix:]
        if not self.training:
            chances = self(patches)[..., 0]
            kept = top_tokens(chances, config.kept(patches.shape[1]))
            grid.drop(kept)
            return torch.cat([x[:, :prefix], take(patches, kept)], dim=1)
        before = grid.presence
        was_there = torch.ones_like(x[:, prefix:, 0]) if before is None else before[:, prefix:]
        drawn = functional.gumbel_softmax(self(patches, was_there), hard=True)[..., 0]
        grid.weigh(torch.cat([torch.ones_like(x[:, :prefix, 0]), drawn * was_there], dim=1))
        return x


def ratio_loss(shares: list[Tensor], config: TokenConfig) -> Tensor:
    """How far the share of its patches that each image keeps in training is from keep, keep², keep³.

    The squared difference, its mean over images and stages: an image cannot make up for another.
    """
    wanted = [config.keep ** (stage + 1) for stage in range(len(shares))]
    return torch.stack([(share - want) ** 2 for share, want in zip(shares, wanted, strict=True)]).mean()
