"""The two operations of a sparse attention layer: `predict` (Eq. 1-3) and `sparse_attention` (Eq. 4-6)."""

from __future__ import annotations

import dataclasses
import math

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
    tile_means,
    tiles_of,
)
from sparsifiner.sides import Sides, spelled


@dataclasses.dataclass(frozen=True)
class Residual:
    """The low-rank estimate of the attention, ``a_down @ w_up``, from which dropped mass is put back.

    Attributes:
        a_down: un-thresholded coefficients of the patch queries, ``[batch, heads, n - prefix, m]``.
        w_up: the dense basis, ``[heads, m, n]``, or ``[batch, heads, m, n]`` where images have kept different tokens.
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
    grid: Sides,
    num_prefix: int = 1,
    tau: float = 0.05,
    basis_threshold: float = 0.01,
    tile: Sides | None = None,
    scale: float | None = None,
    backend: str = "auto",
    positions: Tensor | None = None,
) -> tuple[Connectivity, Residual]:
    """Eq. 1-3: which keys each patch query needs.

    The lists are not differentiable; the coefficients in the returned `Residual` are.

    Where tokens have been dropped, ``positions`` ``[batch, n]`` says where on the grid those that are left stand
    (prefix tokens first), and the weights are ``[batch, heads, n_down, n]``: each image's own columns.
    """
    _check(q, k)
    batch, heads, n = q.shape[:3]
    if positions is None and num_prefix + math.prod(grid) != n:
        raise ConfigError(f"{n} tokens are not {num_prefix} prefix tokens and a {spelled(grid)} grid")
    if positions is not None and positions.shape != (batch, n):
        raise ConfigError(f"positions must be [{batch}, {n}], got {tuple(positions.shape)}")
    shared, own = (heads, n), (batch, heads, n)
    if w_down.shape != w_up.shape or (*w_up.shape[:-2], w_up.shape[-1]) not in (shared, own):
        raise ConfigError(
            f"w_down and w_up must be [heads, n_down, n] = [{heads}, n_down, {n}], or such for each of {batch} images, "
            f"got {tuple(w_down.shape)} and {tuple(w_up.shape)}"
        )
    if budget < 1:
        raise ConfigError(f"budget must be at least 1, got {budget}")
    scale = float(q.shape[-1] ** -0.5) if scale is None else scale
    a_down = low_rank_attention(q, k, w_down, num_prefix, scale)
    coefficients, basis = a_down.detach(), w_up.detach()
    if positions is None:
        members = query_groups(grid, num_prefix, tile, q.device)
    else:  # a tile has other members in every image, so that each query gets the list of its tile
        members = torch.arange(num_prefix, n, device=q.device)[:, None]
        if tile is not None:
            coefficients = torch.where(coefficients > tau, coefficients, 0)
            tiles = tiles_of(grid, tile, positions[:, num_prefix:].long() - num_prefix)
            coefficients, tau = tile_means(coefficients, *tiles), 0.0
    chosen = dispatch.resolve(backend, q, w_up.shape[-2])
    if basis.ndim == 4:  # images are heads with their own weights
        coefficients, basis = _folded(coefficients), basis.flatten(0, 1)
    lists = chosen.select(coefficients, basis, members, min(budget, n), tau, basis_threshold, num_prefix)
    indices, counts = (x.view(batch, heads, *x.shape[2:]) for x in lists)
    connectivity = Connectivity(
        indices,
        counts,
        members,
        num_tokens=n,
        num_prefix=num_prefix,
        adds_self=members.shape[1] > 1,
    )
    return connectivity, Residual(a_down, w_up)


def _folded(x: Tensor) -> Tensor:
    """``[batch, heads, ...]`` as ``[1, batch * heads, ...]``."""
    return x.flatten(0, 1)[None]


def sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    connectivity: Connectivity,
    *,
    residual: Residual | None = None,
    scale: float | None = None,
    backend: str = "auto",
    presence: Tensor | None = None,
) -> Tensor:
    """Attention over the connected keys only, ``[batch, heads, n, d]``; differentiable.

    Prefix queries attend to everything. With ``residual`` the estimate of what was dropped is added
    back; gradients then reach ``a_down`` and ``w_up`` too.

    With ``presence`` ``[batch, n]`` (1 for prefix tokens) each key's part in the softmax is multiplied by it, but for a
    query's own key, which must be in its list and always counts in full, as in DynamicViT's code. Weights of the
    residual do not know of it: give those of the tokens that are there.
    """
    _check(q, k, v)
    if connectivity.num_tokens != q.shape[2] or connectivity.indices.shape[:2] != q.shape[:2]:
        raise ConfigError(
            f"connectivity of {tuple(connectivity.indices.shape[:2])} and {connectivity.num_tokens} tokens "
            f"does not fit queries of shape {tuple(q.shape)}"
        )
    if presence is not None and presence.shape != (q.shape[0], q.shape[2]):
        raise ConfigError(f"presence must be [{q.shape[0]}, {q.shape[2]}], got {tuple(presence.shape)}")
    scale = float(q.shape[-1] ** -0.5) if scale is None else scale
    prefix, bias = connectivity.num_prefix, None
    if presence is None:
        rows = _patch_rows(q, k, v, connectivity, residual, scale, backend)
    else:
        rows = _weighed_rows(q, k, v, connectivity, residual, scale, backend, presence)
        bias = presence_bias(presence, prefix).to(q.dtype)
    if prefix == 0:
        return rows
    exact = functional.scaled_dot_product_attention(q[:, :, :prefix], k, v, attn_mask=bias, scale=scale)
    return torch.cat([exact, rows], dim=2)


def _patch_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    connectivity: Connectivity,
    residual: Residual | None,
    scale: float,
    backend: str,
) -> Tensor:
    """The rows of the patch queries, ``[batch, heads, n - prefix, d]``."""
    if residual is not None and residual.w_up.ndim == 4:  # images are heads with their own weights
        lists = {"indices": _folded(connectivity.indices), "counts": _folded(connectivity.counts)}
        rows = _patch_rows(
            _folded(q),
            _folded(k),
            _folded(v),
            dataclasses.replace(connectivity, **lists),
            Residual(_folded(residual.a_down), residual.w_up.flatten(0, 1)),
            scale,
            backend,
        )
        return rows.view(*q.shape[:2], *rows.shape[2:])
    chosen = dispatch.resolve(backend, q)
    if residual is None:  # no landmarks: every estimate is an empty sum
        batch, heads, n, _ = q.shape
        empty = q.new_empty(batch, heads, n - connectivity.num_prefix, 0), q.new_empty(heads, 0, n)
        return chosen.attend(q, k, v, connectivity, *empty, scale)
    a_down, w_up = residual.a_down, residual.w_up
    dtype = accumulation_dtype(q.dtype)
    v_down = w_up.to(dtype) @ v.to(dtype)  # [batch, heads, m, d]
    return chosen.attend(q, k, v, connectivity, a_down, w_up, scale) + (a_down @ v_down).to(q.dtype)


def _weighed_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    connectivity: Connectivity,
    residual: Residual | None,
    scale: float,
    backend: str,
    presence: Tensor,
) -> Tensor:
    """`_patch_rows` where keys count as much as they are there, and a query's own key in full.

    Kernels know one weight a key. So each patch stands among the keys twice: as others see it, with its presence, and
    as it sees itself besides, with what it lacks of 1, in its own list alone. The estimates know only the first, but
    for a millionth of the mass: where all tokens that are there are kept nothing is dropped, and the sign of a rounding
    error would decide whether that nothing has a gradient.
    """
    width, prefix = q.shape[-1], connectivity.num_prefix
    patches = q.shape[2] - prefix
    weights = torch.cat([presence, 1 - presence[:, prefix:]], dim=1)
    k, v = (torch.cat([x, x[:, :, prefix:]], dim=2) for x in (k, v))
    q, k, v = with_presence(functional.pad(q, (0, 0, 0, patches)), k, v, weights, scale)
    if residual is not None:
        a_down = functional.pad(residual.a_down, (0, 0, 0, patches))
        residual = Residual(a_down, functional.pad(residual.w_up, (0, patches), value=1e-6 / patches))
    rows = _patch_rows(q, k, v, connectivity.with_own_keys(), residual, scale, backend)
    return rows[:, :, :patches, :width]


def _check(q: Tensor, *others: Tensor) -> None:
    if q.ndim != 4 or not q.is_floating_point():
        raise ConfigError(f"queries must be floating point [batch, heads, n, d], got {q.dtype} {tuple(q.shape)}")
    for tensor in others:
        if tensor.shape != q.shape or tensor.dtype != q.dtype or tensor.device != q.device:
            raise ConfigError(
                f"queries, keys and values must agree in shape, dtype and device: {tuple(q.shape)} {q.dtype} "
                f"{q.device} against {tuple(tensor.shape)} {tensor.dtype} {tensor.device}"
            )


def class_attention(q: Tensor, k: Tensor, num_prefix: int, scale: float, pooled: bool = False) -> Tensor:
    """How much attention each token gets from the class token, the mean over heads: ``[batch, n]``.

    With ``pooled`` the mean of the patch queries stands in for a class token's.
    """
    dtype = accumulation_dtype(q.dtype)
    query = q[:, :, num_prefix:].mean(2, keepdim=True) if pooled else q[:, :, :1]
    row = torch.softmax(query.to(dtype) @ k.to(dtype).mT * scale, dim=-1)
    return row[:, :, 0].mean(1)


# What a token that is not there keeps of its weight, so that the gradient says what it would be worth.
ABSENT = 1e-6


def log_presence(presence: Tensor) -> Tensor:
    """What to add to logits so that each key's part in the softmax is multiplied by its presence."""
    return torch.log(presence + ABSENT)


def presence_bias(presence: Tensor, queries: int) -> Tensor:
    """`log_presence` for the first so many queries, ``[batch, 1, queries, n]``; nothing for a query's own key."""
    own = torch.eye(queries, presence.shape[1], dtype=torch.bool, device=presence.device)
    return log_presence(presence)[:, None, None].masked_fill(own, 0.0)


def with_presence(q: Tensor, k: Tensor, v: Tensor, presence: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values with one more feature, whose product adds `log_presence` to the logits."""
    bias = (log_presence(presence) / scale)[:, None, :, None].to(q.dtype).expand(*k.shape[:3], 1)
    return torch.cat([q, torch.ones_like(bias)], -1), torch.cat([k, bias], -1), functional.pad(v, (0, 1))
