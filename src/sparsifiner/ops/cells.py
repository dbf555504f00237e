"""Attention at two resolutions: the keys of a few cells of the grid one by one, every other cell as one token.

A cell's mean key says what it would get, so that nothing is learned and nothing fitted: no weights, no calibration, and
any grid. For query i with logits ``l_ij`` over keys and ``m_ic = scale q_i · mean key of c`` over cells,

    o_i = [Σ_opened e^l v + Σ_others |c| e^m (mean value of c)] / [Σ_opened e^l + Σ_others |c| e^m]

The prefix and the cells in which a group of queries lies are always opened. All cells opened is dense attention.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from sparsifiner.errors import ConfigError
from sparsifiner.ops import dispatch
from sparsifiner.ops.connectivity import (
    Connectivity,
    accumulation_dtype,
    lists_from_mask,
    query_groups,
    tile_means,
    tiles_of,
)
from sparsifiner.ops.eager import CHUNK_ELEMENTS, top_mask

# Spreads below this count as this: a cell of equal keys has nothing to open, and its logarithm must be finite.
_NOTHING = 1e-30


@dataclasses.dataclass(frozen=True)
class Cells:
    """Which cell each patch token lies in.

    Attributes:
        of: int64 ``[images, patches]``; one row for all images where no tokens were dropped.
        sizes: int64 ``[images, count]``, how many tokens each cell holds.
        own: boolean ``[groups, count]``, the cells that a group of queries touches.
        members: int64 ``[groups, size]``, the queries of each group, as in `Connectivity`.
        area: the most tokens a cell can hold.
    """

    of: Tensor
    sizes: Tensor
    own: Tensor
    members: Tensor
    area: int

    @property
    def count(self) -> int:
        """How many cells there are."""
        return self.sizes.shape[1]

    def pool(self, patches: Tensor) -> Tensor:
        """Means over the cells: ``[batch, heads, patches, d]`` to ``[batch, heads, count, d]``; zero where empty."""
        index = self.of[:, None, :, None].expand(patches.shape)
        sums = patches.new_zeros(*patches.shape[:2], self.count, patches.shape[-1]).scatter_add(2, index, patches)
        return sums / self.sizes.clamp(min=1)[:, None, :, None]


def cut_cells(
    grid: tuple[int, int],
    cell: tuple[int, int],
    num_prefix: int,
    tile: tuple[int, int] | None,
    device: torch.device,
    positions: Tensor | None = None,
) -> Cells:
    """Cuts a grid into cells from the top left corner; the last ones are smaller where they do not divide it.

    Args:
        grid: rows and columns of patches.
        cell: rows and columns of a cell.
        num_prefix: tokens before the patches.
        tile: queries of such a tile share what they open; None for each its own.
        device: of the result.
        positions: ``[batch, n]`` where tokens have been dropped: the places of those that are left.
    """
    if cell[0] > grid[0] or cell[1] > grid[1]:
        raise ConfigError(
            f"cells of {cell[0]} x {cell[1]} patches are larger than the grid of {grid[0]} x {grid[1]}: make them "
            "smaller"
        )
    rows, columns = (torch.arange(side, device=device) // part for side, part in zip(grid, cell, strict=True))
    of = (rows[:, None] * (int(columns[-1]) + 1) + columns).flatten()  # [patches of the whole grid]
    count = int(of[-1]) + 1
    groups = query_groups(grid, num_prefix, tile, device)
    real = groups >= 0
    own = torch.zeros(len(groups), count + 1, dtype=torch.bool, device=device)  # the last takes the padding
    own.scatter_(1, torch.where(real, of[(groups - num_prefix).clamp(min=0)], count), True)
    own = own[:, :count]
    here = of[None]
    if positions is not None:  # a tile has other members in every image, so that each query is its own group
        places = positions[:, num_prefix:].long() - num_prefix
        here = of[places]
        groups = torch.arange(num_prefix, positions.shape[1], device=device)[:, None]
    sizes = torch.zeros(len(here), count, dtype=torch.long, device=device)
    sizes.scatter_add_(1, here, torch.ones_like(here))
    return Cells(here, sizes, own, groups, cell[0] * cell[1])


def opening_score(k: Tensor, v: Tensor, cells: Cells, num_prefix: int, scale: float) -> tuple[Tensor, Tensor]:
    """What opening a cell would mend, as a product with queries and a sum.

    Left closed, a cell errs by the weight it gets times how far its keys and values are from their means. So the score
    is ``m_ic + log |c| + log (spread of keys · spread of values) / 2``; a cell without tokens has minus infinity.

    Returns:
        Mean keys, scaled, ``[batch, heads, count, d]``, and what is added, ``[batch, heads, 1, count]``.
    """
    dtype = accumulation_dtype(k.dtype)
    means, spreads = [], []
    for x in (k, v):
        patches = x[:, :, num_prefix:].detach().to(dtype)
        mean = cells.pool(patches)
        means.append(mean)
        spreads.append((cells.pool(patches.square()) - mean.square()).sum(-1).clamp(min=_NOTHING).log())
    sizes = cells.sizes.to(dtype).log()[:, None]  # minus infinity where there are none
    return means[0] * scale, (sizes + (spreads[0] + spreads[1]) / 2)[:, :, None]


def open_cells(
    q: Tensor, k: Tensor, v: Tensor, cells: Cells, count: int, num_prefix: int, scale: float, tiles: Tensor | None
) -> Iterator[Tensor]:
    """Which cells each group of queries opens, some groups at a time: boolean ``[batch, heads, chunk, cells]``.

    The ``count`` highest scores, the group's own cells first, ties to the lower index. A group's queries are
    represented by their mean: so are the scores.

    Args:
        q: queries ``[batch, heads, n, d]``; ``k`` and ``v`` alike.
        k: keys.
        v: values.
        cells: from `cut_cells`.
        count: how many cells are opened, more where a group touches more.
        num_prefix: tokens before the patches.
        scale: of the logits.
        tiles: int64 ``[batch, patches]``, the tile of each query where tokens have been dropped and tiles share.
    """
    batch, heads = q.shape[:2]
    keys, bias = opening_score(k, v, cells, num_prefix, scale)
    queries = q[:, :, num_prefix:].detach().to(keys.dtype)
    own = cells.own
    if tiles is not None:
        queries = tile_means(queries, tiles, len(own))
        own = own[tiles][:, None]  # [batch, 1, patches, cells]
    elif cells.members.shape[1] > 1:
        real = (cells.members >= 0).to(keys.dtype)[..., None]
        queries = (queries[:, :, (cells.members - num_prefix).clamp(min=0)] * real).sum(3) / real.sum(1)
    elif cells.of.shape[0] > 1 or len(own) != queries.shape[2]:  # dropped tokens: each lies in its own cell
        own = functional.one_hot(cells.of, cells.count).bool()[:, None]
    empty = (cells.sizes == 0)[:, None, None]
    count = min(cells.count, max(count, int(cells.own.sum(1).max())))
    for part in torch.arange(queries.shape[2], device=q.device).split(
        max(1, CHUNK_ELEMENTS // (batch * heads * (cells.count + q.shape[2])))
    ):
        scores = queries[:, :, part] @ keys.mT + bias
        forced = own[..., part, :] & ~empty
        yield top_mask(scores.masked_fill(forced, torch.inf), count) & ~empty


@dataclasses.dataclass(frozen=True)
class Opened:
    """What a layer attends to: keys one by one, and cells as one token each.

    Attributes:
        lists: over keys and, behind them, cells: ``lists.num_tokens`` is their sum.
        keys: the same without the cells; for those who look.
        cells: the cells.
    """

    lists: Connectivity
    keys: Connectivity
    cells: Cells


def connect(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    budget: int,
    grid: tuple[int, int],
    cell: tuple[int, int],
    num_prefix: int = 1,
    tile: tuple[int, int] | None = None,
    scale: float | None = None,
    positions: Tensor | None = None,
    closed: bool = True,
) -> Opened:
    """Chooses the cells that are opened and writes the lists; as `predict`, not differentiable.

    Args:
        q: queries ``[batch, heads, n, d]``; ``k`` and ``v`` alike.
        k: keys.
        v: values.
        budget: B, the keys that the opened cells may hold.
        grid: rows and columns of patches.
        cell: rows and columns of a cell.
        num_prefix: tokens before the patches, which attend to everything and are attended to by all.
        tile: patch queries of such a tile open the same cells.
        scale: of the logits.
        positions: ``[batch, n]`` where tokens have been dropped.
        closed: whether cells that are not opened stand for their keys, or are left out.
    """
    area = cell[0] * cell[1]
    if budget < area:
        raise ConfigError(
            f"a budget of {budget} keys is less than one cell of {cell[0]} x {cell[1]} patches: raise keep, or make "
            "cells smaller"
        )
    scale = float(q.shape[-1] ** -0.5) if scale is None else scale
    cells = cut_cells(grid, cell, num_prefix, tile, q.device, positions)
    tiles = None
    if positions is not None and tile is not None:
        tiles, _ = tiles_of(grid, tile, positions[:, num_prefix:].long() - num_prefix)
    n, patches = q.shape[2], q.shape[2] - num_prefix
    count = min(cells.count, max(budget // area, int(cells.own.sum(1).max())))
    longest = num_prefix + min(patches, count * area)
    parts: list[list[Tensor]] = [[], [], [], []]
    for opened in open_cells(q, k, v, cells, budget // area, num_prefix, scale, tiles):
        chosen = opened.gather(3, cells.of[:, None, None].expand(*opened.shape[:3], patches))
        keys = functional.pad(chosen, (num_prefix, 0), value=True)
        standing = ~opened & (cells.sizes > 0)[:, None, None] & closed
        lists = lists_from_mask(torch.cat([keys, standing], dim=-1), longest + (cells.count - count) * closed)
        for part, found in zip(parts, (*lists, *lists_from_mask(keys, longest)), strict=True):
            part.append(found)
    indices, counts, key_indices, key_counts = (torch.cat(part, dim=2) for part in parts)
    about = {"members": cells.members, "num_prefix": num_prefix}
    return Opened(
        Connectivity(indices, counts, num_tokens=n + cells.count, **about),
        Connectivity(key_indices, key_counts, num_tokens=n, **about),
        cells,
    )


def cell_attention(
    q: Tensor, k: Tensor, v: Tensor, opened: Opened, *, scale: float | None = None, backend: str = "auto"
) -> Tensor:
    """Attention over opened keys and standing cells in one softmax, ``[batch, heads, n, d]``; differentiable."""
    scale = float(q.shape[-1] ** -0.5) if scale is None else scale
    lists, cells, width = opened.lists, opened.cells, q.shape[-1]
    prefix, n = lists.num_prefix, q.shape[2]
    dtype = accumulation_dtype(q.dtype)
    keys, values = (torch.cat([x, cells.pool(x[:, :, prefix:].to(dtype)).to(x.dtype)], dim=2) for x in (k, v))
    # Kernels know no bias: one more feature adds log |c| to the logits of a cell.
    bias = functional.pad(cells.sizes.clamp(min=1).to(dtype).log() / scale, (n, 0))[:, None, :, None]
    bias = bias.to(q.dtype).expand(*keys.shape[:3], 1)
    queries = functional.pad(torch.cat([q, torch.ones_like(q[..., :1])], -1), (0, 0, 0, cells.count))
    keys, values = torch.cat([keys, bias], -1), functional.pad(values, (0, 1))
    batch, heads = q.shape[:2]
    empty = q.new_empty(batch, heads, n + cells.count - prefix, 0), q.new_empty(heads, 0, n + cells.count)
    rows = dispatch.resolve(backend, queries).attend(queries, keys, values, lists, *empty, scale)
    rows = rows[:, :, : n - prefix, :width]
    if prefix == 0:
        return rows
    exact = functional.scaled_dot_product_attention(q[:, :, :prefix], k, v, scale=scale)
    return torch.cat([exact, rows], dim=2)


def shares(q: Tensor, k: Tensor, opened: Opened, queries: Tensor, scale: float) -> Tensor:
    """What every key gets of some queries, ``[batch, heads, Q, n]``: a standing cell's part is spread over its keys.

    For people who look; it builds Q x n.

    Args:
        q: the chosen queries ``[batch, heads, Q, d]``.
        k: all keys.
        opened: from `connect`.
        queries: int64 ``[Q]``, the tokens they are.
        scale: of the logits.
    """
    cells, n, prefix = opened.cells, k.shape[2], opened.lists.num_prefix
    dtype = accumulation_dtype(q.dtype)
    q, k = q.to(dtype), k.to(dtype)
    mask = opened.lists.mask(queries)
    mask[..., n:] &= (queries >= prefix)[:, None]  # the prefix attends to keys alone
    means = cells.pool(k[:, :, prefix:])
    bias = cells.sizes.clamp(min=1).to(dtype).log()[:, None, None]
    logits = torch.cat([q @ k.mT * scale, q @ means.mT * scale + bias], dim=-1)
    weights = torch.softmax(logits.masked_fill(~mask, -torch.inf), dim=-1)
    each = weights[..., n:] / cells.sizes.clamp(min=1)[:, None, None]
    spread = each.gather(3, cells.of[:, None, None].expand(*each.shape[:3], n - prefix))
    return weights[..., :n] + functional.pad(spread, (prefix, 0))
