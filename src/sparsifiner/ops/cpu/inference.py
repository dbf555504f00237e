"""From queries, keys, values and packed predictor weights to the output in one call."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from sparsifiner.errors import BackendError
from sparsifiner.ops import transforms
from sparsifiner.ops.cpu.library import groups_of, native, new_output, rows, view
from sparsifiner.ops.cpu.packing import Packed, native_weights


@torch.library.custom_op("sparsifiner::fused", mutates_args=())
def _fused(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    up: Tensor,
    basis: Tensor,
    occupied: Tensor,
    row_sums: Tensor,
    down: Tensor,
    start: Tensor,
    landmark: Tensor,
    value: Tensor,
    members: Tensor,
    positions: Tensor | None,
    budget: int,
    tau: float,
    scale: float,
    num_prefix: int,
    residual: bool,
    narrow: bool,
) -> Tensor:
    batch, heads, n, head_dim = q.shape
    landmarks = basis.shape[1]
    q, k, v = rows(q), rows(k), rows(v)
    out = new_output(q)
    if not (q.shape == k.shape == v.shape and q.dtype == k.dtype == v.dtype):
        raise BackendError(f"queries, keys and values differ: {[(tuple(x.shape), x.dtype) for x in (q, k, v)]}")
    known = up.shape[1]
    where = None
    if positions is not None:
        where = positions.int().contiguous()
        if where.shape != (batch, n) or bool(((where < 0) | (where >= known)).any()):
            raise BackendError(f"positions must be [{batch}, {n}] numbers of the {known} tokens the weights know")
    elif n != known:
        raise BackendError(f"the weights know {known} tokens and {n} came in: pass their positions")
    members = members.int().contiguous()
    native().fused(
        (batch, heads, n, head_dim, landmarks, num_prefix),
        view(q),
        view(k),
        view(v),
        view(out),
        native_weights(landmarks, (up, basis, occupied, row_sums, down, start, landmark, value)),
        groups_of(members, known, num_prefix),
        0 if where is None else where.data_ptr(),
        min(budget, n),
        tau,
        scale,
        residual,
        narrow,
        torch.get_num_threads(),
    )
    return out


@_fused.register_fake
def _(q, *args):
    return new_output(q)


# Images are apart from each other: those that `torch.vmap` maps over join the batch.
_fused.register_vmap(transforms.mapped(_fused, (0, 0, 0, *[None] * 9, 0, *[None] * 6), (0,)))


@register_flop_formula(torch.ops.sparsifiner.fused)
def _fused_flops(q_shape, k_shape, v_shape, up_shape, basis_shape, *args, out_shape=None, **kwargs) -> int:
    """Two per multiply-add; shapes know no thresholds and not which tokens are a prefix, so this is an upper bound."""
    budget, residual = args[8], args[12]
    batch, heads, n, head_dim = q_shape
    landmarks = basis_shape[1]
    predictor = 2 * n * landmarks * head_dim + n * landmarks * n
    attention = n * budget * (2 * head_dim + (landmarks if residual else 0))
    low_rank = 2 * n * landmarks * head_dim if residual else 0
    return 2 * batch * heads * (predictor + attention + low_rank)


def fused(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packed: Packed,
    members: Tensor,
    *,
    budget: int,
    tau: float,
    scale: float,
    num_prefix: int,
    residual: bool,
    positions: Tensor | None = None,
    narrow: bool = False,
) -> Tensor:
    """Eq. 1-6 and the residual in one call, ``[batch, heads, n, d]``; not differentiable.

    Args:
        q: queries ``[batch, heads, n, d]``, with any strides but a contiguous last dimension; ``k`` and ``v`` alike.
        k: keys.
        v: values.
        packed: the predictor's weights from `pack`.
        members: the groups of queries that share a list, as in `Connectivity`, by original position.
        budget: B.
        tau: the coefficients' threshold.
        scale: of the logits.
        num_prefix: tokens at the start that attend to everything and are attended to by all.
        residual: whether the estimate of what is dropped is added back.
        positions: ``[batch, n]``, the original position of each token where tokens have been dropped.
        narrow: hold keys and values in 16 bits.
    """
    return _fused(q, k, v, *packed.tensors(), members, positions, budget, tau, scale, num_prefix, residual, narrow)
