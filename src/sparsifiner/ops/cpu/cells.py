"""Attention at several resolutions: its lists, and all of it in one call."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from sparsifiner.errors import BackendError
from sparsifiner.ops import transforms
from sparsifiner.ops.cpu.library import native, new_output, rows, view


@torch.library.custom_op("sparsifiner::cpu_open_cells", mutates_args=())
def open_cells(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    of: Tensor,
    parent: Tensor,
    starts: Sequence[int],
    opened: Sequence[int],
    members: Tensor,
    num_prefix: int,
    scale: float,
    tolerance: float,
    closed: bool,
    longest: int,
) -> tuple[Tensor, Tensor]:
    """As `sparsifiner.ops.cells.open_cells`, where no tokens have been dropped: the same lists."""
    shape = (*q.shape[:2], members.shape[0])
    lists = torch.empty(*shape, longest, dtype=torch.int32)
    counts = torch.empty(shape, dtype=torch.int32)
    written = (lists.data_ptr(), counts.data_ptr(), longest)
    _open(q, k, v, q, of, parent, starts, opened, members, None, num_prefix, scale, tolerance, closed, written)
    return lists, counts


@open_cells.register_fake
def _(q, k, v, of, parent, starts, opened, members, num_prefix, scale, tolerance, closed, longest):
    shape = (*q.shape[:2], members.shape[0])
    return q.new_empty(*shape, longest, dtype=torch.int32), q.new_empty(shape, dtype=torch.int32)


open_cells.register_vmap(transforms.mapped(open_cells, (1, 1, 1, *[None] * 10), (1, 1)))


@torch.library.custom_op("sparsifiner::fused_cells", mutates_args=())
def fused_cells(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    of: Tensor,
    parent: Tensor,
    starts: Sequence[int],
    opened: Sequence[int],
    members: Tensor,
    positions: Tensor | None,
    num_prefix: int,
    scale: float,
    tolerance: float,
    closed: bool,
) -> Tensor:
    """Attention at several resolutions in one call, ``[batch, heads, n, d]``; not differentiable.

    Args as of `sparsifiner.ops.cells.open_cells`; ``members`` are by original position, as ``positions`` ``[batch, n]``
    are where tokens have been dropped.
    """
    out = new_output(q)
    _open(q, k, v, out, of, parent, starts, opened, members, positions, num_prefix, scale, tolerance, closed, (0, 0, 0))
    return out


@fused_cells.register_fake
def _(q, *args):
    return new_output(q)


# Images are apart from each other, but for those from which tokens have been dropped.
fused_cells.register_vmap(transforms.mapped(fused_cells, (1, 1, 1, *[None] * 10), (1,)))


def _open(
    q, k, v, out, of, parent, starts, opened, members, positions, num_prefix, scale, tolerance, closed, written
) -> None:
    batch, heads, n, head_dim = q.shape
    if not (q.shape == k.shape == v.shape and q.dtype == k.dtype == v.dtype):
        raise BackendError(f"queries, keys and values differ: {[(tuple(x.shape), x.dtype) for x in (q, k, v)]}")
    if of.shape not in ((1, n - num_prefix), (batch, n - num_prefix)):
        raise BackendError(f"cells must be of [1 or {batch}, {n - num_prefix}] patches, got {tuple(of.shape)}")
    if positions is not None and positions.shape != (batch, n):
        raise BackendError(f"positions must be [{batch}, {n}], got {tuple(positions.shape)}")
    q, k, v = rows(q), rows(k), rows(v)
    of, parent, members = (x.int().contiguous() for x in (of, parent, members))
    where = None if positions is None else positions.int().contiguous()
    known = n if where is None else int(max(where.max(), members.max())) + 1
    try:
        native().open_cells(
            (batch, heads, n, head_dim, 0, num_prefix),
            view(q),
            view(k),
            view(v),
            view(out),
            of.data_ptr(),
            0 if of.shape[0] == 1 else of.shape[1],
            parent.data_ptr(),
            parent.shape[0],
            list(starts),
            list(opened),
            closed,
            native().Groups(members.data_ptr(), *members.shape),
            0 if where is None else where.data_ptr(),
            known,
            scale,
            tolerance,
            *written,
            torch.get_num_threads(),
        )
    except ValueError as error:  # numbers that lead out of the tensors
        raise BackendError(str(error)) from None


def open_flops(
    q_shape, k_shape, v_shape, of_shape, parent_shape, starts, opened, members_shape, *args, **kwargs
) -> int:
    """Two per multiply-add: the products of (mean) queries and mean keys."""
    batch, heads, _, head_dim = q_shape
    return 2 * batch * heads * members_shape[0] * parent_shape[0] * head_dim


register_flop_formula(torch.ops.sparsifiner.cpu_open_cells)(open_flops)


@register_flop_formula(torch.ops.sparsifiner.fused_cells)
def _fused_cells_flops(
    q_shape, k_shape, v_shape, of_shape, parent_shape, starts, opened, members_shape, *args, **kwargs
) -> int:
    """Two per multiply-add; shapes do not know how large a cell is: patches are spread evenly over the finest."""
    batch, heads, n, head_dim = q_shape
    closed = args[4] if len(args) > 4 else kwargs.get("closed", True)
    patches, standing, candidates = of_shape[1], 0, starts[-1] - starts[-2]
    for level in reversed(range(len(opened))):
        standing += candidates - opened[level]
        if level:
            finer = starts[level] - starts[level - 1]
            candidates = min(finer, -(-opened[level] * finer // (starts[level + 1] - starts[level])))
    keys = opened[0] * patches // starts[1] + n - patches
    asked = members_shape[0] * parent_shape[0] * head_dim
    return 2 * batch * heads * (asked + n * 2 * head_dim * (keys + standing * closed))
