"""The equations line by line, with n x n tensors, in any dtype up to float64.

This is the oracle every backend is tested against. It is written to be read beside the paper, not to be
fast. Shapes: q, k, v ``[batch, heads, n, d]``; w_down, w_up ``[heads, m, n]``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparsifiner.ops.connectivity import Connectivity, accumulation_dtype, lists_from_mask


def can_run(q: Tensor, landmarks: int = 0) -> str | None:
    """The reference runs wherever there are values."""
    return "the reference compacts its masks by their values, and meta tensors have none" if q.is_meta else None


def full_attention(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """``A = softmax(Q K^T / sqrt(d))``, ``[batch, heads, n, n]``."""
    return torch.softmax(q @ k.mT * scale, dim=-1)


def coefficients(q: Tensor, k: Tensor, w_down: Tensor, scale: float) -> Tensor:
    """Eq. 1: ``A_down = softmax(Q (W_down K)^T / sqrt(d))``, ``[batch, heads, n, m]``."""
    return torch.softmax(q @ (w_down @ k).mT * scale, dim=-1)


def scores(a_down: Tensor, w_up: Tensor, tau: float, basis_threshold: float) -> Tensor:
    """Eq. 2 and the product of Eq. 3: ``S = A~_down W_up``, ``[batch, heads, rows, n]``."""
    sparse_coefficients = torch.where(a_down > tau, a_down, 0)
    sparse_basis = torch.where(w_up > basis_threshold, w_up, 0)
    return sparse_coefficients @ sparse_basis


def share_scores(patch_scores: Tensor, members: Tensor, num_prefix: int) -> Tensor:
    """The queries of a tile average their score rows: ``[batch, heads, rows, n]``, equal within a tile."""
    shared = torch.empty_like(patch_scores)
    for group in members:
        rows = group[group >= 0] - num_prefix
        shared[:, :, rows] = patch_scores[:, :, rows].mean(dim=2, keepdim=True)
    return shared


def top_budget(score_rows: Tensor, budget: int) -> Tensor:
    """Eq. 3: the B largest of each row, zeros discarded, ties to the lower index; a boolean mask."""
    order = torch.sort(score_rows, dim=-1, descending=True, stable=True).indices[..., :budget]
    chosen = torch.zeros_like(score_rows, dtype=torch.bool).scatter_(-1, order, True)
    return chosen & (score_rows > 0)


def select(
    a_down: Tensor,
    w_up: Tensor,
    members: Tensor,
    budget: int,
    tau: float,
    basis_threshold: float,
    num_prefix: int,
) -> tuple[Tensor, Tensor]:
    """The backend's form of Eq. 2-3: lists and counts, as `eager.select` gives them."""
    patch_scores = scores(a_down, w_up.to(a_down.dtype), tau, basis_threshold)
    shares = members.shape[1] > 1
    if shares:
        patch_scores = share_scores(patch_scores, members, num_prefix)
    mask = top_budget(patch_scores[:, :, members[:, 0] - num_prefix], budget)  # a row per group
    mask[..., :num_prefix] = True
    if not shares:
        mask[:, :, torch.arange(mask.shape[2]), members[:, 0]] = True
    return lists_from_mask(mask, min(mask.shape[-1], budget + num_prefix + (not shares)))


def masked_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, bias: Tensor | None = None) -> Tensor:
    """Eq. 4-6: softmax over the connected keys only, then the product with their values."""
    logits = q @ k.mT * scale
    if bias is not None:
        logits = logits + bias[:, :, None]
    return torch.softmax(logits.masked_fill(~mask, -torch.inf), dim=-1) @ v


def kept_part(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    scale: float,
    a_down: Tensor,
    w_up: Tensor,
    bias: Tensor | None = None,
) -> Tensor:
    """What the kept connections contribute beside the residual: ``(1 - rho) softmax_kept(...) V - sum_kept s v``.

    ``s = A_down W_up``, un-thresholded; ``rho = clamp(sum_all s - sum_kept s, 0, 1)``. All rows given are
    patch queries.
    """
    estimate = a_down @ w_up  # [batch, heads, rows, n]
    kept = torch.where(mask, estimate, 0)
    dropped_mass = (estimate.sum(-1) - kept.sum(-1)).clamp(0, 1)[..., None]
    return (1 - dropped_mass) * masked_attention(q, k, v, mask, scale, bias) - kept @ v


def residual_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, a_down: Tensor, w_up: Tensor
) -> Tensor:
    """Eq. 4-6 with the low-rank estimate of what the mask drops put back, for patch queries."""
    return kept_part(q, k, v, mask, scale, a_down, w_up) + a_down @ (w_up @ v)


def stand(q: Tensor, k: Tensor, v: Tensor, holds: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Mean keys, mean values and biases of cells, as the mean of the queries weighs the keys of each.

    Args:
        q: patch queries ``[batch, heads, patches, d]``; ``k`` and ``v`` alike.
        k: keys.
        v: values.
        holds: boolean ``[batch, cells, patches]``, the patches that each cell holds.
        scale: of the logits.
    """
    mean_query = q.mean(2, keepdim=True) * scale
    logits = (mean_query @ k.mT).masked_fill(~holds[:, None], -torch.inf)  # [batch, heads, cells, patches]
    there = holds.any(-1)[:, None, :, None]
    shares = torch.softmax(logits.masked_fill(~there, 0), -1).detach()  # of an empty cell, whatever they are
    means = shares @ k
    sums = torch.logsumexp(logits.masked_fill(~there, 0), -1, keepdim=True)
    bias = (sums - means @ mean_query.mT).masked_fill(~there, -torch.inf)
    return means, shares @ v, bias.squeeze(-1)


def cell_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, holds: Tensor, scale: float) -> Tensor:
    """Attention at several resolutions for patch queries: some keys, and some cells as one token each.

    Args:
        q: patch queries ``[batch, heads, patches, d]``; ``k`` and ``v`` with the prefix.
        k: keys ``[batch, heads, n, d]``.
        v: values.
        mask: boolean ``[batch, heads, patches, n + cells]``, the keys and cells of each query.
        holds: boolean ``[batch, cells, patches]``, the patches that each cell holds.
        scale: of the logits.
    """
    prefix = k.shape[2] - holds.shape[2]
    mean_keys, mean_values, bias = stand(q, k[:, :, prefix:], v[:, :, prefix:], holds, scale)
    logits = torch.cat([q @ k.mT * scale, q @ mean_keys.mT * scale + bias[:, :, None]], -1)
    weights = torch.softmax(logits.masked_fill(~mask, -torch.inf), dim=-1)
    return weights @ torch.cat([v, mean_values], 2)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    connectivity: Connectivity,
    a_down: Tensor,
    w_up: Tensor,
    scale: float,
    bias: Tensor | None = None,
) -> Tensor:
    """The backend's form: `kept_part` from lists, patch rows only, as `eager.attend`."""
    dtype = accumulation_dtype(q.dtype)
    prefix = connectivity.num_prefix
    mask = connectivity.mask(torch.arange(prefix, q.shape[2], device=q.device))
    queries, keys, values = q[:, :, prefix:].to(dtype), k.to(dtype), v.to(dtype)
    bias = None if bias is None else bias.to(dtype)
    return kept_part(queries, keys, values, mask, scale, a_down.to(dtype), w_up.to(dtype), bias).to(q.dtype)
