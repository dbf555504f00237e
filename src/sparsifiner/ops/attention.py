"""The two operations of a sparse attention layer: `predict` (Eq. 1-3) and `sparse_attention` (Eq. 4-6)."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor
from torch.nn import functional

from sparsifiner.errors import ConfigError
from sparsifiner.ops import dispatch
from sparsifiner.ops.connectivity import (
    Connectivity,
    accumulation_dtype,
    low_rank_attention,
    query_groups,
)


@dataclasses.dataclass(frozen=True)
class Residual:
    """The low-rank estimate of the attention, ``a_down @ w_up``, from which dropped mass is put back.

    Attributes:
        a_down: un-thresholded coefficients of the patch queries, ``[batch, heads, n - prefix, m]``.
        w_up: the dense basis, ``[heads, m, n]``.
    """

    a_down: Tensor
    w_up: Tensor


def predict(
    q: Tensor,
    k: Tensor,
    w_down: Tensor,
    w_up: Tensor,
    *,
    budget: int,
    grid: tuple[int, int],
    num_prefix: int = 1,
    tau: float = 0.05,
    basis_threshold: float = 0.01,
    tile: tuple[int, int] | None = None,
    scale: float | None = None,
    backend: str = "auto",
) -> tuple[Connectivity, Residual]:
    """Eq. 1-3: which keys each patch query needs.

    The lists are not differentiable; the coefficients in the returned `Residual` are.
    """
    _check(q, k)
    heads, n = q.shape[1:3]
    if num_prefix + grid[0] * grid[1] != n:
        raise ConfigError(f"{n} tokens are not {num_prefix} prefix tokens and a {grid[0]} x {grid[1]} grid")
    if w_down.shape != w_up.shape or w_up.ndim != 3 or (w_up.shape[0], w_up.shape[2]) != (heads, n):
        raise ConfigError(
            f"w_down and w_up must be [heads, n_down, n] = [{heads}, n_down, {n}], "
            f"got {tuple(w_down.shape)} and {tuple(w_up.shape)}"
        )
    if budget < 1:
        raise ConfigError(f"budget must be at least 1, got {budget}")
    scale = float(q.shape[-1] ** -0.5) if scale is None else scale
    a_down = low_rank_attention(q, k, w_down, num_prefix, scale)
    members = query_groups(grid, num_prefix, tile, q.device)
    chosen = dispatch.resolve(backend, q, w_up.shape[1])
    indices, counts = chosen.select(
        a_down.detach(), w_up.detach(), members, min(budget, n), tau, basis_threshold, num_prefix
    )
    connectivity = Connectivity(
        indices,
        counts,
        members,
        num_tokens=n,
        num_prefix=num_prefix,
        adds_self=members.shape[1] > 1,
    )
    return connectivity, Residual(a_down, w_up)


def sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    connectivity: Connectivity,
    *,
    residual: Residual | None = None,
    scale: float | None = None,
    backend: str = "auto",
) -> Tensor:
    """Attention over the connected keys only, ``[batch, heads, n, d]``; differentiable.

    Prefix queries attend to everything. With ``residual`` the estimate of what was dropped is added
    back; gradients then reach ``a_down`` and ``w_up`` too.
    """
    _check(q, k, v)
    if connectivity.num_tokens != q.shape[2] or connectivity.indices.shape[:2] != q.shape[:2]:
        raise ConfigError(
            f"connectivity of {tuple(connectivity.indices.shape[:2])} and {connectivity.num_tokens} tokens "
            f"does not fit queries of shape {tuple(q.shape)}"
        )
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    prefix = connectivity.num_prefix
    chosen = dispatch.resolve(backend, q)
    if residual is None:  # no landmarks: every estimate is an empty sum
        batch, heads, n, _ = q.shape
        a_down, w_up = q.new_empty(batch, heads, n - prefix, 0), q.new_empty(heads, 0, n)
    else:
        a_down, w_up = residual.a_down, residual.w_up
    rows = chosen.attend(q, k, v, connectivity, a_down, w_up, scale)
    if residual is not None:
        dtype = accumulation_dtype(q.dtype)
        v_down = w_up.to(dtype) @ v.to(dtype)  # [batch, heads, m, d]
        rows = rows + (a_down @ v_down).to(q.dtype)
    if prefix == 0:
        return rows
    exact = functional.scaled_dot_product_attention(q[:, :, :prefix], k, v, scale=scale)
    return torch.cat([exact, rows], dim=2)


def _check(q: Tensor, *others: Tensor) -> None:
    if q.ndim != 4 or not q.is_floating_point():
        raise ConfigError(f"queries must be floating point [batch, heads, n, d], got {q.dtype} {tuple(q.shape)}")
    for tensor in others:
        if tensor.shape != q.shape or tensor.dtype != q.dtype or tensor.device != q.device:
            raise ConfigError(
                f"queries, keys and values must agree in shape, dtype and device: {tuple(q.shape)} {q.dtype} "
                f"{q.device} against {tuple(tensor.shape)} {tensor.dtype} {tensor.device}"
            )
