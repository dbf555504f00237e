"""Rotary embeddings: tables that a call brings with it, by which queries and keys are turned."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Rotary(NamedTuple):
    """Turns the patches' queries and keys by where they stand; the tokens before them, which stand nowhere, stay.

    Attributes:
        turn: from patches ``[batch, heads, n, d]`` and the tables to the patches turned.
        tables: of sines, cosines or both, a row for each patch: each can be broadcast to ``[batch, heads, n, ...]``.
    """

    turn: Callable[..., Tensor]
    tables: tuple[Tensor, ...]

    def left(self, cells: Tensor) -> Rotary:
        """For the patches that are left, ``[batch, patches left]``, counted on the whole grid."""
        return Rotary(self.turn, tuple(_rows(table, cells) for table in self.tables))

    def __call__(self, x: Tensor) -> Tensor:
        """Queries or keys ``[batch, heads, n, d]``; of each image the last tokens are its patches."""
        prefix = x.shape[2] - self.tables[0].shape[-2]
        turned = self.turn(x[:, :, prefix:], *self.tables)
        return torch.cat([x[:, :, :prefix], turned.to(x.dtype)], dim=2) if prefix else turned.to(x.dtype)


def _rows(table: Tensor, cells: Tensor) -> Tensor:
    """``[..., n, features]`` to ``[batch, heads or 1, patches left, features]``."""
    table = table.reshape(*(1,) * (4 - table.ndim), *table.shape)
    index = cells[:, None, :, None].expand(-1, table.shape[1], -1, table.shape[3])
    return table.expand(len(cells), -1, -1, -1).gather(2, index)


def turn_halves(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Each feature of the first half with its partner in the second, as most hosts do it."""
    first, second = x.chunk(2, dim=-1)
    return x * cosines + torch.cat([-second, first], dim=-1) * sines
