"""Connections that do not depend on the image: the fixed patterns that learned ones are compared with.

A pattern ranks all patches for every query, and the first B are kept: all patterns have the same number of
connections, at the border of the grid too.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from sparsifiner.errors import BackendError, ConfigError
from sparsifiner.nn.grid import landmark_cells
from sparsifiner.ops.connectivity import Connectivity, lists_from_mask
from sparsifiner.ops.eager import top_budget
from sparsifiner.sides import Sides


def _offsets(grid: Sides) -> Tensor:
    """How far every two patches are apart along each side of the grid: ``[patches, patches, sides]``."""
    place = torch.stack(torch.meshgrid(*map(torch.arange, grid), indexing="ij"), -1).view(-1, len(grid))
    return (place[:, None] - place[None]).abs()


def _window(grid: Sides, budget: int) -> Tensor:
    """The nearest patches."""
    return -_offsets(grid).square().sum(-1).float()


def _axial(grid: Sides, budget: int) -> Tensor:
    """The query's row and column, of clips the same place in other frames too, the nearest first; then what is beside.

    A patch on a line through the query differs from it along one side alone: how far it is off the nearest such line is
    the sum of all offsets but the largest.
    """
    offsets = _offsets(grid)
    farthest = offsets.amax(-1)
    return -((offsets.sum(-1) - farthest) * max(grid) + farthest).float()


def _strided(grid: Sides, budget: int) -> Tensor:
    """Patches at equal distances from the query in reading order, round the end to the beginning."""
    patches = math.prod(grid)
    steps = (torch.arange(budget) * patches / budget).round().long()
    keys = (torch.arange(patches)[:, None] + steps) % patches
    return torch.zeros(patches, patches).scatter_(1, keys, 1.0)


def _bigbird(grid: Sides, budget: int) -> Tensor:
    """As BigBird: a quarter of the keys are the same for all queries, half are a window, the rest are drawn once."""
    patches = math.prod(grid)
    score = torch.rand(patches, patches, generator=torch.Generator().manual_seed(0))
    near = top_budget(_window(grid, budget) + patches * patches, max(1, budget // 2))
    score[near] += 1
    if count := budget // 4:
        cells = landmark_cells(count, grid).flatten()
        middle = [int((cells == cell).nonzero().flatten().median()) for cell in range(count)]
        score[:, middle] += 2
    return score


# How each pattern ranks the patches ``[queries, keys]`` for a budget: the higher the earlier.
RANKINGS: dict[str, Callable[[Sides, int], Tensor]] = {
    "window": _window,
    "axial": _axial,
    "strided": _strided,
    "bigbird": _bigbird,
}


def pattern_mask(pattern: str, grid: Sides, num_prefix: int, budget: int) -> Tensor:
    """Which tokens are connected, boolean ``[n, n]``: B patches a query, the prefix and the query itself.

    Args:
        pattern: one of ``RANKINGS``.
        grid: rows and columns of patches, of clips frames before them.
        num_prefix: tokens at the start that attend to everything and are attended to by all.
        budget: B.
    """
    if pattern not in RANKINGS:
        raise ConfigError(f"unknown pattern {pattern!r}: choose one of {', '.join(RANKINGS)}")
    patches = math.prod(grid)
    budget = min(budget, patches)
    ranks = RANKINGS[pattern](grid, budget)
    mask = torch.ones(num_prefix + patches, num_prefix + patches, dtype=torch.bool)
    mask[num_prefix:, num_prefix:] = top_budget(ranks - ranks.min() + 1, budget)  # zeros would count as no connection
    mask.fill_diagonal_(True)
    return mask


def pattern_connectivity(
    mask: Tensor, num_prefix: int, batch: int, heads: int, positions: Tensor | None
) -> Connectivity:
    """The lists of a fixed mask, the same for all images and heads; or of the tokens left at ``positions``."""
    if mask.device.type == "meta":
        raise BackendError(
            "a fixed pattern's lists are as long as its values say, and meta tensors have none: "
            "infer shapes with pattern='learned', or run on small real inputs"
        )
    if positions is not None:
        mask = mask[positions[:, :, None], positions[:, None]]
    rows = mask[..., num_prefix:, :]
    indices, counts = lists_from_mask(rows, int(rows.sum(-1).max()))
    images = (batch, heads, *indices.shape[-2:])
    indices = (indices if positions is None else indices[:, None]).expand(images)
    counts = (counts if positions is None else counts[:, None]).expand(images[:3])
    n = mask.shape[-1]
    members = torch.arange(num_prefix, n, device=mask.device)[:, None]
    return Connectivity(indices.contiguous(), counts.contiguous(), members, num_tokens=n, num_prefix=num_prefix)
