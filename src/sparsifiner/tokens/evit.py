"""EViT: the patches that the class token attends to most stay, the others go, or live on in one token."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsifiner.config import TokenConfig
from sparsifiner.nn.grid import TokenGrid


def top_tokens(scores: Tensor, count: int) -> Tensor:
    """The ``count`` highest of ``[batch, tokens]`` scores, as ascending numbers; ties go to the lower number."""
    order = torch.sort(scores, dim=1, descending=True, stable=True).indices
    return order[:, :count].sort(dim=1).values


def take(tokens: Tensor, numbers: Tensor) -> Tensor:
    """Of ``[batch, n, D]`` those with ``numbers`` ``[batch, count]``."""
    return tokens.gather(1, numbers[..., None].expand(-1, -1, tokens.shape[-1]))


def prune(x: Tensor, attention: Tensor, grid: TokenGrid, config: TokenConfig) -> Tensor:
    """Drops patch tokens of ``x`` ``[batch, n, D]`` and tells the grid.

    Args:
        x: tokens: prefix, a fused one if there was an earlier pruning, patches.
        attention: what the class token pays each token, ``[batch, n]``.
        grid: the tokens' places.
        config: how many are kept, and whether the rest is fused. A token that was fused earlier is no patch and never
            kept, but part of the new one; unless ``fuse="official"``.
    """
    if config.fuse == "official":
        return _prune_officially(x, attention, grid, config)
    prefix = grid.prefix
    patches = x[:, prefix:]
    kept = top_tokens(attention[:, prefix:].detach(), config.kept(patches.shape[1]))
    parts = [x[:, : grid.num_prefix], take(patches, kept)]
    if config.fuse:
        rest = attention.scatter(1, kept + prefix, 0.0)[:, grid.num_prefix :, None].to(x.dtype)
        parts.insert(1, (rest * x[:, grid.num_prefix :]).sum(1, keepdim=True))
    grid.drop(kept, int(config.fuse))
    return torch.cat(parts, dim=1)


def _prune_officially(x: Tensor, attention: Tensor, grid: TokenGrid, config: TokenConfig) -> Tensor:
    """As the official code: a token that was fused earlier is counted, ranked and perhaps kept as a patch."""
    first = grid.num_prefix
    tokens, paid = x[:, first:], attention[:, first:]
    count = config.kept(tokens.shape[1])
    if count == tokens.shape[1]:  # nothing to fuse
        return x
    kept = top_tokens(paid.detach(), count)
    rest = paid.scatter(1, kept, 0.0)
    heaviest = paid.detach().scatter(1, kept, -1.0).argmax(1, keepdim=True)
    kept = grid.absorb(kept, heaviest)
    fused = (rest[..., None].to(x.dtype) * tokens).sum(1, keepdim=True)
    return torch.cat([x[:, :first], fused, take(tokens, kept)], dim=1)
