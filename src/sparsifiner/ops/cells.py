"""Attention at several resolutions: the keys of a few cells of the grid one by one, every other cell as one token.

A cell's mean key says what it would get, so that nothing is learned and nothing fitted: no weights, no calibration, and
any grid. For query i with logits ``l_ij`` over keys and ``m_ic = scale q_i · mean key of c`` over cells,

    o_i = [Σ_opened e^l v + Σ_others |c| e^m (mean value of c)] / [Σ_opened e^l + Σ_others |c| e^m]

Cells may have several levels, each made of whole cells of the one before: all cells of the coarsest are looked at, some
are opened into finer ones, and some of the finest into keys. The prefix and the cells in which a group of queries lies
are always opened. All cells opened is dense attention.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.flop_counter import register_flop_formula

from sparsifiner.errors import ConfigError
from sparsifiner.ops import cpu, dispatch, transforms
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
class Levels:
    """How many cells of each level are looked at and opened, by a grid's size alone: shapes never depend on data.

    Attributes:
        starts: cells are numbered through, finest level first: level l has ``starts[l]`` to ``starts[l + 1]``.
        opened: how many of each level are opened, at most.
        longest: the most keys and cells that a list holds.
    """

    starts: tuple[int, ...]
    opened: tuple[int, ...]
    longest: int


def _touched(side: int, tile: int, cell: int) -> int:
    """The most cells that a tile reaches into, along one side of the grid."""
    return max((min(start + tile, side) - 1) // cell - start // cell + 1 for start in range(0, side, tile))


@dataclasses.dataclass(frozen=True)
class Cells:
    """Which cells each patch token lies in.

    Attributes:
        of: int64 ``[images, patches]``, the finest cell of each; one row for all images where no tokens were dropped.
        parent: int64 ``[count]``, the coarser cell that holds each cell; -1 at the coarsest level.
        starts: as in `Levels`.
    """

    of: Tensor
    parent: Tensor
    starts: tuple[int, ...]

    @property
    def count(self) -> int:
        """How many cells there are, of all levels."""
        return self.starts[-1]

    @property
    def sizes(self) -> Tensor:
        """How many tokens each cell holds: int64 ``[images, count]``."""
        ones = torch.ones_like(self.of)[:, None, :, None]
        return self._sums(ones)[:, 0, :, 0]

    def left(self, places: Tensor) -> Cells:
        """Where tokens have been dropped: the cells of those that are left, at ``places`` ``[batch, patches]``."""
        return dataclasses.replace(self, of=self.of[0][places])

    def pool(self, patches: Tensor) -> Tensor:
        """Means over the cells: ``[batch, heads, patches, d]`` to ``[batch, heads, count, d]``; zero where empty."""
        return self._sums(patches) / self.sizes.clamp(min=1)[:, None, :, None]

    def spreads(self, patches: Tensor, means: Tensor) -> Tensor:
        """The mean squared distance of tokens from the mean of their cell, ``[batch, heads, count]``."""
        index = self.of[:, None, :, None].expand(patches.shape)
        distances = (patches - means.gather(2, index)).square().sum(-1, keepdim=True)
        sizes = self.sizes.to(patches.dtype)[:, None, :, None]
        levels = [self._add_finest(distances)]
        for start, end in itertools.pairwise(self.starts[:-1]):
            parent = self.parent[start:end]
            apart = (means[:, :, start:end] - means[:, :, parent]).square().sum(-1, keepdim=True)
            levels.append(self._add(levels[-1] + sizes[:, :, start:end] * apart, start, end))
        return (torch.cat(levels, 2) / sizes.clamp(min=1)).squeeze(-1)

    def open(self, opened: Tensor) -> Tensor:
        """Whether each patch lies in an opened finest cell: boolean ``[..., cells]`` to ``[..., patches]``."""
        index = self.of[:, None, None].expand(*opened.shape[:3], self.of.shape[1])
        return opened.gather(3, index)

    def _sums(self, patches: Tensor) -> Tensor:
        levels = [self._add_finest(patches)]
        for start, end in itertools.pairwise(self.starts[:-1]):
            levels.append(self._add(levels[-1], start, end))
        return torch.cat(levels, 2)

    def _add_finest(self, patches: Tensor) -> Tensor:
        sums = patches.new_zeros(*patches.shape[:2], self.starts[1], patches.shape[3])
        if len(self.of) == 1:
            return sums.index_add(2, self.of[0], patches)
        return sums.scatter_add(2, self.of[:, None, :, None].expand(patches.shape), patches)

    def _add(self, finer: Tensor, start: int, end: int) -> Tensor:
        parent = self.parent[start:end] - end
        width = self.starts[self.starts.index(end) + 1] - end
        return finer.new_zeros(*finer.shape[:2], width, finer.shape[3]).index_add(2, parent, finer)


def cut_cells(grid: tuple[int, int], cells: Sequence[tuple[int, int]], device: torch.device) -> Cells:
    """Cuts a grid into cells from the top left corner; the last ones are smaller where they do not divide it.

    Args:
        grid: rows and columns of patches.
        cells: rows and columns of a cell of each level, finest first.
        device: of the result.
    """
    sides = [(-(-grid[0] // rows), -(-grid[1] // columns)) for rows, columns in cells]
    starts = tuple(itertools.accumulate([down * across for down, across in sides], initial=0))

    def numbers(side: tuple[int, ...], part: tuple[int, ...], start: int, columns: int) -> Tensor:
        down, across = (torch.arange(n, device=device) // p for n, p in zip(side, part, strict=True))
        return (start + down[:, None] * columns + across).flatten()

    of = numbers(grid, cells[0], 0, sides[0][1])
    parents = []
    for level, (fine, coarse) in enumerate(itertools.pairwise(cells)):
        ratio = (coarse[0] // fine[0], coarse[1] // fine[1])
        parents.append(numbers(sides[level], ratio, starts[level + 1], sides[level + 1][1]))
    parents.append(torch.full((starts[-1] - starts[-2],), -1, device=device))
    return Cells(of[None], torch.cat(parents), starts)


@torch.library.custom_op("sparsifiner::open_cells", mutates_args=())
def open_cells(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    of: Tensor,
    parent: Tensor,
    starts: Sequence[int],
    opened: Sequence[int],
    members: Tensor,
    tiles: Tensor | None,
    num_prefix: int,
    scale: float,
    tolerance: float,
    closed: bool,
    longest: int,
) -> tuple[Tensor, Tensor]:
    """The lists of keys and, behind them, cells of each group of queries, and their lengths.

    Left closed, a cell errs by the weight it gets times how far its keys and values are from their means. So its score
    is ``m_ic + log |c| + log (spread of keys · spread of values) / 2``. Of every level the highest scores are opened,
    the group's own cells first, ties to the lower index. A group's queries are represented by their mean.

    Args:
        q: queries ``[batch, heads, n, d]``; ``k`` and ``v`` alike.
        k: keys.
        v: values.
        of: as in `Cells`; ``parent`` and ``starts`` too.
        parent: see there.
        starts: see there.
        opened: as in `Levels`; ``longest`` too.
        members: int64 ``[groups, size]``, the queries of each group, as in `Connectivity`.
        tiles: int64 ``[batch, patches]``, the tile of each query where tokens have been dropped and tiles share.
        num_prefix: tokens before the patches.
        scale: of the logits.
        tolerance: only cells are opened whose error, as a share of the softmax's sum, is larger; 0 for no such bound.
        closed: whether cells that are not opened are listed.
        longest: the width of the lists.
    """
    cells = Cells(of, parent, tuple(starts))
    lists, counts = [], []
    for keys, standing in _opened_parts(q, k, v, cells, opened, members, tiles, num_prefix, scale, tolerance):
        chosen = functional.pad(cells.open(keys), (num_prefix, 0), value=True)
        part = lists_from_mask(torch.cat([chosen, standing & closed], dim=-1), longest)
        lists.append(part[0])
        counts.append(part[1])
    return torch.cat(lists, 2), torch.cat(counts, 2)


def _opened_parts(q, k, v, cells, opened, members, tiles, num_prefix, scale, tolerance) -> Iterator[tuple[Tensor, ...]]:
    """Finest cells that are opened and cells that stand, some groups at a time: ``[batch, heads, chunk, cells]``."""
    dtype = accumulation_dtype(k.dtype)
    keys, values = (x[:, :, num_prefix:].detach().to(dtype) for x in (k, v))
    mean_keys, mean_values = cells.pool(keys), cells.pool(values)
    spreads = (
        x.clamp(min=_NOTHING).log() for x in (cells.spreads(keys, mean_keys), cells.spreads(values, mean_values))
    )
    sizes = cells.sizes.to(dtype).log()[:, None]  # minus infinity where there are none
    gain = (sizes + sum(spreads) / 2)[:, :, None]
    queries, own = _asked(q[:, :, num_prefix:].detach().to(dtype), cells, members, tiles, num_prefix)
    there = (cells.sizes > 0)[:, None, None]
    finest = slice(0, cells.starts[1])
    columns = cells.count + k.shape[2]
    for part in torch.arange(queries.shape[2], device=q.device).split(
        max(1, CHUNK_ELEMENTS // (q.shape[0] * q.shape[1] * columns))
    ):
        logits = queries[:, :, part] @ mean_keys.mT * scale
        # What is not a number must not be hidden: its cell is opened.
        scores = (logits + gain).nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
        scores = scores.masked_fill(own[..., part, :], torch.inf).masked_fill(~there, -torch.inf)
        least = torch.full_like(scores[..., :1], -torch.inf)
        if tolerance > 0:
            prefix = queries[:, :, part] @ k[:, :, :num_prefix].detach().to(dtype).mT * scale
            whole = torch.cat([prefix, (logits + sizes[:, :, None])[..., finest]], -1)
            least = torch.logsumexp(whole, -1, keepdim=True) + math.log(tolerance)
        yield _open_levels(scores, cells, opened, least)


def _open_levels(scores: Tensor, cells: Cells, opened: Sequence[int], least: Tensor) -> tuple[Tensor, Tensor]:
    """From scores of all cells to the finest that are opened and those of any level that stand."""
    standing: list[Tensor] = []
    chosen = scores.new_zeros(())
    for level in reversed(range(len(opened))):
        part = slice(cells.starts[level], cells.starts[level + 1])
        rows = scores[..., part]
        if level < len(opened) - 1:
            rows = rows.masked_fill(~chosen[..., cells.parent[part] - cells.starts[level + 1]], -torch.inf)
        there = rows > -torch.inf
        chosen = top_mask(rows, opened[level]) & there & ~(rows < least)
        standing.insert(0, there & ~chosen)
    return chosen, torch.cat(standing, -1)


def _asked(
    queries: Tensor, cells: Cells, members: Tensor, tiles: Tensor | None, num_prefix: int
) -> tuple[Tensor, Tensor]:
    """The mean query of each group, and the cells that its queries lie in: ``[batch or 1, 1, groups, count]``."""
    holds = torch.zeros(*cells.of.shape, cells.count, dtype=torch.bool, device=queries.device)
    number = cells.of
    for _ in cells.starts[1:]:
        holds.scatter_(2, number[..., None], True)
        number = cells.parent[number]
    if tiles is not None:
        count = int(tiles.max()) + 1
        together = torch.zeros(len(tiles), count, cells.count, dtype=torch.int32, device=queries.device)
        together.scatter_add_(1, tiles[..., None].expand_as(holds), holds.int())
        return tile_means(queries, tiles, count), together.gather(1, tiles[..., None].expand_as(holds))[:, None] > 0
    if members.shape[1] == 1:
        return queries, holds[:, None]
    real = (members >= 0)[..., None]
    tokens = (members - num_prefix).clamp(min=0)
    means = (queries[:, :, tokens] * real.to(queries.dtype)).sum(3) / real.sum(1).to(queries.dtype)
    return means, (holds[:, tokens] & real).any(2)[:, None]


@open_cells.register_fake
def _(q, k, v, of, parent, starts, opened, members, tiles, num_prefix, scale, tolerance, closed, longest):
    shape = (*q.shape[:2], members.shape[0])
    return q.new_empty(*shape, longest, dtype=torch.int32), q.new_empty(shape, dtype=torch.int32)


_HEADS = ((1, 1, 1, *[None] * 11), (1, 1))
open_cells.register_vmap(transforms.mapped(open_cells, *_HEADS))


register_flop_formula(torch.ops.sparsifiner.open_cells)(cpu.open_flops)


@dataclasses.dataclass(frozen=True)
class Opened:
    """What a layer attends to: keys one by one, and cells as one token each.

    Attributes:
        lists: over keys and, behind them, cells: ``lists.num_tokens`` is their sum.
        cells: the cells.
    """

    lists: Connectivity
    cells: Cells

    @property
    def keys(self) -> Connectivity:
        """The lists without the cells: for those who look."""
        n = self.lists.num_tokens - self.cells.count
        is_key = (self.lists.indices >= 0) & (self.lists.indices < n)
        counts = is_key.sum(-1, dtype=torch.int32)
        indices = torch.where(is_key, self.lists.indices, -1)[..., : int(counts.max())]  # keys come first
        return dataclasses.replace(self.lists, indices=indices, counts=counts, num_tokens=n)


@dataclasses.dataclass(frozen=True)
class Opening:
    """How cells are cut and opened: what `connect` and `fused` need beside queries, keys and values.

    Attributes:
        grid: rows and columns of patches.
        cells: rows and columns of patches in a cell of each level, finest first.
        budget: B, the keys that the opened cells may hold.
        refine: the share of a coarser level's cells that are opened; more where the budget needs them.
        tolerance: as in `open_cells`.
        num_prefix: tokens before the patches, which attend to everything and are attended to by all.
        tile: patch queries of such a tile open the same cells.
        closed: whether cells that are not opened stand for their keys, or are left out.
    """

    grid: tuple[int, int]
    budget: int
    cells: Sequence[tuple[int, int]] = ((2, 2),)
    refine: float = 0.5
    tolerance: float = 0.0
    num_prefix: int = 1
    tile: tuple[int, int] | None = None
    closed: bool = True

    def levels(self) -> Levels:
        """What the budget of keys opens at each level of this grid."""
        grid, cells, budget = self.grid, self.cells, self.budget
        coarsest, (rows, columns) = cells[-1], cells[0]
        if coarsest[0] > grid[0] or coarsest[1] > grid[1]:
            raise ConfigError(
                f"cells of {coarsest[0]} x {coarsest[1]} patches are larger than the grid of {grid[0]} x {grid[1]}: "
                "make them smaller"
            )
        if budget < rows * columns:
            raise ConfigError(
                f"a budget of {budget} keys is less than one cell of {rows} x {columns} patches: raise keep, or make "
                "cells smaller"
            )
        counts = [-(-grid[0] // rows) * -(-grid[1] // columns) for rows, columns in cells]
        candidates, opened, standing = counts[-1], [], 0
        for level in reversed(range(len(cells))):
            area = math.prod(cells[level])
            wanted = budget // area if level == 0 else max(math.ceil(self.refine * candidates), -(-budget // area))
            rows_touched, columns_touched = (
                _touched(side, across, part)
                for side, across, part in zip(grid, self.tile or (1, 1), cells[level], strict=True)
            )
            own = rows_touched * columns_touched
            opened.append(min(candidates, max(wanted, own)))
            standing += candidates - opened[-1]
            if level:
                candidates = min(counts[level - 1], opened[-1] * area // math.prod(cells[level - 1]))
        keys = min(grid[0] * grid[1], opened[-1] * rows * columns)
        starts = tuple(itertools.accumulate(counts, initial=0))
        return Levels(starts, tuple(reversed(opened)), self.num_prefix + keys + standing * self.closed)


# Of a whole grid: levels, cells, and groups of queries as in `Connectivity`.
_Whole = tuple[Levels, Cells, Tensor]


def _whole(opening: Opening, device: torch.device) -> _Whole:
    """What does not depend on images; remembered, for making it takes as long as a small layer."""
    if torch.compiler.is_compiling():
        return _make_whole(opening, device)
    with torch.inference_mode(False):  # whoever comes next may want gradients
        return _remembered(opening, device)


def _make_whole(opening: Opening, device: torch.device) -> _Whole:
    levels = opening.levels()
    cells = cut_cells(opening.grid, opening.cells, device)
    return levels, cells, query_groups(opening.grid, opening.num_prefix, opening.tile, device)


_remembered = functools.lru_cache(maxsize=64)(_make_whole)


def connect(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    opening: Opening,
    *,
    scale: float | None = None,
    positions: Tensor | None = None,
    backend: str = "auto",
) -> Opened:
    """Chooses the cells that are opened and writes the lists; as `predict`, not differentiable.

    Args:
        q: queries ``[batch, heads, n, d]``; ``k`` and ``v`` alike.
        k: keys.
        v: values.
        opening: how cells are opened.
        scale: of the logits.
        positions: ``[batch, n]`` where tokens have been dropped.
        backend: what computes it.
    """
    scale = float(q.shape[-1] ** -0.5) if scale is None else scale
    prefix = opening.num_prefix
    levels, cells, members = _whole(opening, q.device)
    if positions is not None:
        cells = cells.left(positions[:, prefix:].long() - prefix)
    settings = (prefix, scale, opening.tolerance, opening.closed, levels.longest)
    about = (q.detach(), k.detach(), v.detach(), cells.of, cells.parent, cells.starts, levels.opened)
    if positions is None:
        if dispatch.resolve(backend, q) is cpu:
            lists = cpu.open_cells(*about, members, *settings)
        else:
            lists = open_cells(*about, members, None, *settings)
    else:  # a tile has other members in every image, so that each query is its own group
        members = torch.arange(prefix, q.shape[2], device=q.device)[:, None]
        tiles = None
        if opening.tile is not None:
            tiles, _ = tiles_of(opening.grid, opening.tile, positions[:, prefix:].long() - prefix)
        lists = open_cells(*about, members, tiles, *settings)
    number = q.shape[2] + cells.count
    return Opened(Connectivity(*lists, members=members, num_tokens=number, num_prefix=prefix), cells)


def cell_attention(
    q: Tensor, k: Tensor, v: Tensor, opened: Opened, *, scale: float | None = None, backend: str = "auto"
) -> Tensor:
    """Attention over opened keys and standing cells in one softmax, ``[batch, heads, n, d]``; differentiable."""
    scale = float(q.shape[-1] ** -0.5) if scale is None else scale
    lists, cells = opened.lists, opened.cells
    prefix, n = lists.num_prefix, q.shape[2]
    dtype = accumulation_dtype(q.dtype)
    keys, values = (torch.cat([x, cells.pool(x[:, :, prefix:].to(dtype)).to(x.dtype)], dim=2) for x in (k, v))
    bias = functional.pad(cells.sizes.clamp(min=1).to(dtype).log(), (n, 0))
    none = q.new_empty(*q.shape[:2], n - prefix, 0), q.new_empty(q.shape[1], 0, n + cells.count)
    rows = dispatch.resolve(backend, q).attend(q, keys, values, lists, *none, scale, bias)
    if prefix == 0:
        return rows
    exact = functional.scaled_dot_product_attention(q[:, :, :prefix], k, v, scale=scale)
    return torch.cat([exact, rows], dim=2)


def fused(
    q: Tensor, k: Tensor, v: Tensor, opening: Opening, *, scale: float | None = None, positions: Tensor | None = None
) -> Tensor:
    """`connect` and `cell_attention` in one call of the fused CPU kernels, for inference; not differentiable."""
    scale = float(q.shape[-1] ** -0.5) if scale is None else scale
    levels, cells, members = _whole(opening, q.device)
    if positions is not None:
        cells = cells.left(positions[:, opening.num_prefix :].long() - opening.num_prefix)
    settings = (opening.num_prefix, scale, opening.tolerance, opening.closed)
    about = (q.detach(), k.detach(), v.detach(), cells.of, cells.parent, cells.starts, levels.opened)
    return cpu.fused_cells(*about, members, positions, *settings)


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
    spread, number = torch.zeros_like(weights[..., prefix:n]), cells.of
    for _ in cells.starts[1:]:  # a key gets what its cells of all levels get
        spread = spread + each.gather(3, number[:, None, None].expand(spread.shape[0], *each.shape[1:3], n - prefix))
        number = cells.parent[number]
    return weights[..., :n] + functional.pad(spread, (prefix, 0))
