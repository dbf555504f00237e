"""Eq. 1-3: from queries and keys to the lists of keys each query attends to.

Shapes: ``[batch, heads, n, d]`` for queries, keys and values, with ``num_prefix`` prefix tokens (class,
distillation, registers) first and the patches of the grid after them in row-major order. A grid has rows and columns,
or of clips frames, rows and columns: what is written here for any number of sides.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from sparsifiner.errors import ConfigError
from sparsifiner.sides import Sides, on_grid


@dataclasses.dataclass(frozen=True)
class Connectivity:
    """The keys each patch query attends to, as index lists: memory proportional to the connections.

    Patch queries come in groups that share a list: one query a group, or the queries of a tile. Prefix
    queries have no list: they attend to everything.

    Attributes:
        indices: int32 ``[batch, heads, groups, width]``, key indices in ascending order, padded with -1.
        counts: int32 ``[batch, heads, groups]``, how many entries of each list are real.
        members: int64 ``[groups, size]``, the token indices of each group's queries, padded with -1.
        num_tokens: n, prefix included.
        num_prefix: how many tokens at the start are prefix tokens.
        adds_self: each query attends to itself even where its group's list does not hold it.
    """

    indices: Tensor
    counts: Tensor
    members: Tensor
    num_tokens: int
    num_prefix: int
    adds_self: bool = False

    def __post_init__(self) -> None:
        batch, heads, groups, _ = self.indices.shape
        if self.counts.shape != (batch, heads, groups) or self.members.shape[0] != groups:
            raise ConfigError(
                f"lists, counts and members do not belong together: {tuple(self.indices.shape)}, "
                f"{tuple(self.counts.shape)}, {tuple(self.members.shape)}"
            )

    def mask(self, queries: Tensor | None = None) -> Tensor:
        """The connections as a boolean ``[batch, heads, queries, n]``: for tests and for people who look.

        Args:
            queries: token indices of the rows wanted; None for all n.
        """
        n, device = self.num_tokens, self.indices.device
        rows = torch.arange(n, device=device) if queries is None else queries
        lists = self.indices[:, :, self._group_of()[rows]].long()
        mask = torch.zeros(*lists.shape[:3], n + 1, dtype=torch.bool, device=device)
        mask.scatter_(3, torch.where(lists < 0, n, lists), True)
        mask = mask[..., :n]
        if self.adds_self:
            mask[:, :, torch.arange(len(rows), device=device), rows] = True
        mask[:, :, rows < self.num_prefix] = True
        return mask

    def _group_of(self) -> Tensor:
        """The group of each token, int64; 0 for prefix tokens, which have none."""
        group_of = torch.zeros(self.num_tokens + 1, dtype=torch.long, device=self.members.device)
        numbers = torch.arange(len(self.members), device=self.members.device)[:, None]
        group_of[torch.where(self.members < 0, self.num_tokens, self.members)] = numbers  # padding goes to the last
        return group_of[:-1]

    def with_own_keys(self) -> Connectivity:
        """A list for each query with one more key: a copy of the query's own, which is in no other list.

        The copies are tokens after all others, in the order of the patches.
        """
        patches = self.num_tokens - self.num_prefix
        queries = torch.arange(self.num_prefix, self.num_tokens, device=self.members.device)
        group = self._group_of()[queries]
        lists = torch.nn.functional.pad(self.indices[:, :, group], (0, 1), value=-1)
        counts = self.counts[:, :, group]
        copies = (queries + patches).int().expand(counts.shape)
        return dataclasses.replace(
            self,
            indices=lists.scatter(3, counts[..., None].long(), copies[..., None]),
            counts=counts + 1,
            members=queries[:, None],
            num_tokens=self.num_tokens + patches,
        )

    def connections(self) -> Tensor:
        """How many (patch query, key) pairs are connected: int64 ``[batch, heads]``."""
        sizes = (self.members >= 0).sum(1)  # [groups]
        total = (self.counts * sizes).sum(-1)
        if self.adds_self:
            listed = (self.indices[..., None, :] == self.members[:, :, None]).any(-1) | (self.members < 0)
            total = total + (~listed).sum((2, 3))
        return total

    @classmethod
    def from_mask(cls, mask: Tensor, num_prefix: int) -> Connectivity:
        """Lists from a boolean ``[batch, heads, n, n]``: for fixed patterns and for tests."""
        if mask.dtype != torch.bool or mask.ndim != 4 or mask.shape[2] != mask.shape[3]:
            raise ConfigError(f"mask must be boolean [batch, heads, n, n], got {mask.dtype} {tuple(mask.shape)}")
        rows = mask[:, :, num_prefix:]
        if not bool(rows.any(-1).all()):
            raise ConfigError("a query of the mask attends to nothing: every row needs at least one key")
        indices, counts = lists_from_mask(rows, int(rows.sum(-1).max()))
        n = mask.shape[2]
        members = torch.arange(num_prefix, n, device=mask.device)[:, None]
        return cls(indices, counts, members, num_tokens=n, num_prefix=num_prefix)


def list_width(num_tokens: int, budget: int, num_prefix: int, group_size: int) -> int:
    """The longest a list can be: known before the scores are, so shapes never depend on data."""
    return min(num_tokens, budget + num_prefix + (group_size == 1))


def lists_from_mask(mask: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Compacts a boolean ``[..., n]`` into ascending int32 lists ``[..., width]`` and their counts."""
    counts = mask.sum(-1, dtype=torch.int32)
    flat = mask.flatten(0, -2)
    rows, columns = flat.nonzero(as_tuple=True)  # row-major, so columns ascend within a row
    starts = counts.flatten().cumsum(0) - counts.flatten()
    lists = torch.full((flat.shape[0], width), -1, dtype=torch.int32, device=mask.device)
    lists[rows, torch.arange(rows.numel(), device=mask.device) - starts[rows]] = columns.int()
    return lists.view(*mask.shape[:-1], width), counts


def query_groups(grid: Sides, num_prefix: int, tile: Sides | None, device: torch.device) -> Tensor:
    """The token indices that share a list, int64 ``[groups, size]``, -1 padded where a tile is cut.

    Tiles start at the first frame's top left corner; where they do not divide the grid, the last ones are smaller.
    """
    tokens = torch.arange(math.prod(grid), device=device).view(grid) + num_prefix
    if tile is None:
        return tokens.reshape(-1, 1)
    parts = [min(part, side) for part, side in zip(on_grid(tile, grid, "a tile"), grid, strict=True)]
    room = [(0, -side % part) for part, side in zip(parts, grid, strict=True)]
    padded = torch.nn.functional.pad(tokens, [end for ends in reversed(room) for end in ends], value=-1)
    for axis, part in enumerate(parts):  # tiles along each side, and the patches along it in each
        padded = padded.unflatten(2 * axis, (-1, part))
    axes = range(padded.ndim)
    return padded.permute(*axes[::2], *axes[1::2]).reshape(-1, math.prod(parts))


def tiles_of(grid: Sides, tile: Sides, places: Tensor) -> tuple[Tensor, int]:
    """The tile, by number, of patches at ``places`` of the grid, and how many tiles there are."""
    groups = query_groups(grid, 0, tile, places.device)
    tile_of = torch.zeros(math.prod(grid) + 1, dtype=torch.long, device=places.device)
    tile_of[groups] = torch.arange(len(groups), device=places.device)[:, None]  # padding, -1, writes to the last
    return tile_of[places], len(groups)


def tile_means(rows: Tensor, tiles: Tensor, count: int) -> Tensor:
    """Rows ``[batch, heads, patches, d]``, each replaced by the mean over its tile, ``tiles`` ``[batch, patches]``."""
    index = tiles[:, None, :, None].expand_as(rows)
    sums = rows.new_zeros(*rows.shape[:2], count, rows.shape[3])
    counts = torch.zeros_like(sums).scatter_add_(2, index, torch.ones_like(rows))
    return (sums.scatter_add_(2, index, rows) / counts.clamp(min=1)).gather(2, index)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Sums are carried in float32 at least, whatever the inputs are stored in."""
    return torch.promote_types(dtype, torch.float32)


def low_rank_attention(q: Tensor, k: Tensor, w_down: Tensor, num_prefix: int, scale: float) -> Tensor:
    """Eq. 1 for the patch queries: ``softmax(q (w_down k)^T * scale)``, ``[batch, heads, n - prefix, m]``."""
    dtype = accumulation_dtype(q.dtype)
    k_down = w_down.to(dtype) @ k.to(dtype)  # [batch, heads, m, d]
    return torch.softmax(q[:, :, num_prefix:].to(dtype) @ k_down.mT * scale, dim=-1)
