"""Attention at several resolutions: the keys of a few cells of the grid one by one, every other cell as one token.

A cell's mean key says what it would get, so that nothing is learned and nothing fitted: no weights, no calibration, and
any grid. For query i with logits ``l_ij`` over keys and ``m_ic`` over cells,

    o_i = [Σ_opened e^l v + Σ_others e^m (mean value of c)] / [Σ_opened e^l + Σ_others e^m]

Means are taken as the image's mean query ``q̄`` weighs the keys of a cell, ``p_j ∝ e^(scale q̄·k_j)``, and

    m_ic = log Σ_c e^(scale q̄·k_j) + scale (q_i - q̄) · (mean key of c)

so that a cell stands for its keys exactly where the query is the mean one, and to first order around it.

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
from sparsifiner.sides import Sides, on_grid, spelled

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
        levels = [self._add_finest(torch.ones_like(self.of)[:, None, :, None])]
        for start, end in itertools.pairwise(self.starts[:-1]):
            levels.append(self._add(levels[-1], start, end))
        return torch.cat(levels, 2)[:, 0, :, 0]

    def left(self, places: Tensor) -> Cells:
        """Where tokens have been dropped: the cells of those that are left, at ``places`` ``[batch, patches]``."""
        return dataclasses.replace(self, of=self.of[0][places])

    def weigh(self, logits: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Sums of ``e^logits`` over cells, and what each patch or cell is of the sum of the cell that holds it.

        Args:
            logits: ``[batch, heads, patches]``.

        Returns:
            The sums' logarithms ``[batch, heads, count]``, minus infinity where a cell is empty; and shares
            ``[batch, heads, patches]`` in the finest cells, then those of the cells of each level in the next.
        """
        sums, shares = [], []
        for level, (start, end) in enumerate(itertools.pairwise(self.starts)):
            holder = self.of if level == 0 else self.parent[None, self.starts[level - 1] : start] - start
            holder = holder[:, None].expand(logits.shape)
            empty = logits == -torch.inf
            most = logits.new_full((*logits.shape[:2], end - start), -torch.inf).scatter_reduce(
                2, holder, logits, "amax"
            )
            terms = (logits - most.gather(2, holder)).exp().masked_fill(empty, 0)
            sums.append(most + torch.zeros_like(most).scatter_add(2, holder, terms).log())
            shares.append((logits - sums[-1].gather(2, holder)).exp().masked_fill(empty, 0))
            logits = sums[-1]
        return torch.cat(sums, 2), shares

    def pool(self, patches: Tensor, shares: Sequence[Tensor]) -> Tensor:
        """Means over the cells by shares: ``[batch, heads, patches, d]`` to ``[batch, heads, count, d]``."""
        levels = [self._add_finest(patches * shares[0][..., None])]
        for level, (start, end) in enumerate(itertools.pairwise(self.starts[:-1]), 1):
            levels.append(self._add(levels[-1] * shares[level][..., None], start, end))
        return torch.cat(levels, 2)

    def spreads(self, patches: Tensor, means: Tensor, shares: Sequence[Tensor]) -> Tensor:
        """The mean squared distance of tokens from the mean of their cell, by shares, ``[batch, heads, count]``."""
        index = self.of[:, None, :, None].expand(patches.shape)
        apart = (patches - means.gather(2, index)).square().sum(-1, keepdim=True)
        levels = [self._add_finest(apart * shares[0][..., None])]
        for level, (start, end) in enumerate(itertools.pairwise(self.starts[:-1]), 1):
            apart = (means[:, :, start:end] - means[:, :, self.parent[start:end]]).square().sum(-1, keepdim=True)
            levels.append(self._add((levels[-1] + apart) * shares[level][..., None], start, end))
        return torch.cat(levels, 2).squeeze(-1)

    def open(self, opened: Tensor) -> Tensor:
        """Whether each patch lies in an opened finest cell: boolean ``[..., cells]`` to ``[..., patches]``."""
        index = self.of[:, None, None].expand(*opened.shape[:3], self.of.shape[1])
        return opened.gather(3, index)

    def _add_finest(self, patches: Tensor) -> Tensor:
        sums = patches.new_zeros(*patches.shape[:2], self.starts[1], patches.shape[3])
        if len(self.of) == 1:
            return sums.index_add(2, self.of[0], patches)
        return sums.scatter_add(2, self.of[:, None, :, None].expand(patches.shape), patches)

    def _add(self, finer: Tensor, start: int, end: int) -> Tensor:
        parent = self.parent[start:end] - end
        width = self.starts[self.starts.index(end) + 1] - end
        return finer.new_zeros(*finer.shape[:2], width, finer.shape[3]).index_add(2, parent, finer)


def cut_cells(grid: Sides, cells: Sequence[Sides], device: torch.device) -> Cells:
    """Cuts a grid into cells from its first patch on; the last ones are smaller where they do not divide it.

    Args:
        grid: rows and columns of patches, of clips frames before them.
        cells: as many sides of a cell of each level, finest first.
        device: of the result.
    """
    counts = [_number_along(grid, cell) for cell in cells]
    starts = tuple(itertools.accumulate([math.prod(along) for along in counts], initial=0))

    def numbers(sides: Sides, parts: Sides, level: int) -> Tensor:
        found = torch.zeros((), dtype=torch.int64, device=device)
        for side, part, count in zip(sides, parts, counts[level], strict=True):  # row by row, as patches are counted
            found = found[..., None] * count + torch.arange(side, device=device) // part
        return starts[level] + found.flatten()

    parents = []
    for level, (fine, coarse) in enumerate(itertools.pairwise(cells)):
        ratio = tuple(large // small for small, large in zip(fine, coarse, strict=True))
        parents.append(numbers(counts[level], ratio, level + 1))
    parents.append(torch.full((starts[-1] - starts[-2],), -1, device=device))
    return Cells(numbers(grid, cells[0], 0)[None], torch.cat(parents), starts)


def _number_along(sides: Sides, parts: Sides) -> Sides:
    """How many parts there are along each side; the last may be cut."""
    return tuple(-(-side // part) for side, part in zip(sides, parts, strict=True))


@dataclasses.dataclass(frozen=True)
class Standing:
    """One token for each cell, that stands for its keys.

    Attributes:
        keys: their means ``[batch, heads, count, d]``; ``values`` alike.
        values: see there.
        bias: ``[batch, heads, count]``, added to a cell's logit; minus infinity where it is empty.
        shares: as `Cells.weigh` gives them.
    """

    keys: Tensor
    values: Tensor
    bias: Tensor
    shares: list[Tensor]


def stand(q: Tensor, k: Tensor, v: Tensor, cells: Cells, num_prefix: int, scale: float) -> Standing:
    """What stands for the cells of these queries, keys and values, in the precision sums have.

    How the keys of a cell are weighed belongs to the choice, as the opening does, and has no gradient. Then the bias
    has none either: what the sum and the mean key give cancels.
    """
    dtype = accumulation_dtype(k.dtype)
    queries, keys, values = (x[:, :, num_prefix:].to(dtype) for x in (q, k, v))
    mean_query = queries.detach().mean(2, keepdim=True) * scale
    sums, shares = cells.weigh((mean_query @ keys.detach().mT).squeeze(2))
    mean_keys = cells.pool(keys, shares)
    bias = sums - (mean_query @ mean_keys.detach().mT).squeeze(2)
    return Standing(mean_keys, cells.pool(values, shares), bias, shares)


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
    is ``m_ic + log (spread of keys · spread of values) / 2``. Of every level the highest scores are opened, the group's
    own cells first, ties to the lower index. A group's queries are represented by their mean.

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
    q, k, v = (x.detach() for x in (q, k, v))
    stands = stand(q, k, v, cells, num_prefix, scale)
    spreads = [
        cells.spreads(x[:, :, num_prefix:].to(dtype), means, stands.shares).clamp(min=_NOTHING).log()
        for x, means in ((k, stands.keys), (v, stands.values))
    ]
    gain = ((spreads[0] + spreads[1]) / 2)[:, :, None]
    queries, own = _asked(q[:, :, num_prefix:].to(dtype), cells, members, tiles, num_prefix)
    there = (cells.sizes > 0)[:, None, None]
    finest = slice(0, cells.starts[1])
    columns = cells.count + k.shape[2]
    for part in torch.arange(queries.shape[2], device=q.device).split(
        max(1, CHUNK_ELEMENTS // (q.shape[0] * q.shape[1] * columns))
    ):
        logits = queries[:, :, part] @ stands.keys.mT * scale + stands.bias[:, :, None]
        # What is not a number must not be hidden: its cell is opened.
        scores = (logits + gain).nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
        scores = scores.masked_fill(own[..., part, :], torch.inf).masked_fill(~there, -torch.inf)
        least = torch.full_like(scores[..., :1], -torch.inf)
        if tolerance > 0:
            prefix = queries[:, :, part] @ k[:, :, :num_prefix].to(dtype).mT * scale
            whole = torch.cat([prefix, logits[..., finest]], -1)
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
        grid: rows and columns of patches, of clips frames before them.
        cells: rows and columns of patches in a cell of each level, finest first; of clips frames too.
        budget: B, the keys that the opened cells may hold.
        breadth: how many times the keys of the cells opened at one level those opened at the next coarser hold.
        tolerance: as in `open_cells`.
        num_prefix: tokens before the patches, which attend to everything and are attended to by all.
        tile: patch queries of such a tile open the same cells.
        closed: whether cells that are not opened stand for their keys, or are left out.
    """

    grid: Sides
    budget: int
    cells: Sequence[Sides] = ((2, 2),)
    breadth: float = 3.0
    tolerance: float = 0.0
    num_prefix: int = 1
    tile: Sides | None = None
    closed: bool = True

    @property
    def cell_sides(self) -> tuple[Sides, ...]:
        """As ``cells``, with a number for each side of the grid."""
        return tuple(on_grid(cell, self.grid, "a cell") for cell in self.cells)

    @property
    def tile_sides(self) -> Sides:
        """As ``tile``, with a number for each side of the grid; of one query where none share."""
        return on_grid(self.tile or (1, 1), self.grid, "a tile")

    def levels(self) -> Levels:
        """What the budget of keys opens at each level of this grid."""
        grid, cells, budget = self.grid, self.cell_sides, self.budget
        if any(part > side for part, side in zip(cells[-1], grid, strict=True)):
            raise ConfigError(
                f"cells of {spelled(cells[-1])} patches are larger than the grid of {spelled(grid)}: make them smaller"
            )
        if budget < math.prod(cells[0]):
            raise ConfigError(
                f"a budget of {budget} keys is less than one cell of {spelled(cells[0])} patches: raise keep, or make "
                "cells smaller"
            )
        counts = [math.prod(_number_along(grid, cell)) for cell in cells]
        candidates, opened, standing = counts[-1], [], 0
        for level in reversed(range(len(cells))):
            area = math.prod(cells[level])
            # The subtraction undoes binary rounding, as in `budget`.
            wanted = budget // area if level == 0 else math.ceil(budget * self.breadth**level / area - 1e-9)
            sides = zip(grid, self.tile_sides, cells[level], strict=True)
            own = math.prod([_touched(side, across, part) for side, across, part in sides])
            opened.append(min(candidates, max(wanted, own)))
            standing += candidates - opened[-1]
            if level:
                candidates = min(counts[level - 1], opened[-1] * area // math.prod(cells[level - 1]))
        keys = min(math.prod(grid), opened[-1] * math.prod(cells[0]))
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
    cells = cut_cells(opening.grid, opening.cell_sides, device)
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
    stands = stand(q, k, v, cells, prefix, scale)
    keys, values = (torch.cat([x, means.to(x.dtype)], 2) for x, means in ((k, stands.keys), (v, stands.values)))
    bias = functional.pad(stands.bias, (n, 0))
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
        q: all queries ``[batch, heads, n, d]``.
        k: all keys.
        opened: from `connect`.
        queries: int64 ``[Q]``, the tokens that are asked for.
        scale: of the logits.
    """
    cells, n, prefix = opened.cells, k.shape[2], opened.lists.num_prefix
    stands = stand(q, k, k, cells, prefix, scale)
    dtype = stands.keys.dtype
    asked, keys = q[:, :, queries].to(dtype), k.to(dtype)
    mask = opened.lists.mask(queries)
    mask[..., n:] &= (queries >= prefix)[:, None]  # the prefix attends to keys alone
    logits = torch.cat([asked @ keys.mT * scale, asked @ stands.keys.mT * scale + stands.bias[:, :, None]], dim=-1)
    weights = torch.softmax(logits.masked_fill(~mask, -torch.inf), dim=-1)
    spread, number, share = torch.zeros_like(weights[..., prefix:n]), cells.of, stands.shares[0]
    for level in range(len(stands.shares)):  # a key gets its share of what its cells of all levels get
        if level:
            inside = (number - cells.starts[level - 1])[:, None].expand(share.shape)
            share = share * stands.shares[level].gather(2, inside)
            number = cells.parent[number]
        of_cell = weights[..., n:].gather(3, number[:, None, None].expand(spread.shape))
        spread = spread + of_cell * share[:, :, None]
    return weights[..., :n] + functional.pad(spread, (prefix, 0))
