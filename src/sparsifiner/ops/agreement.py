"""Whether a backend agrees with the reference: how far rounding may carry it, and which differences that explains.

Backends add in their own order, with fused multiply-adds or without, in vectors of any width. Where a score lies within
rounding of the cut two of them may select differently, and both are right. The bounds here say how much "within
rounding" is: worst cases of IEEE arithmetic (each of ``k`` operations is off by at most half a unit in the last place),
computed in float64 from the inputs at hand. They hold on every machine, so nothing is tuned to one. A difference that
they do not explain is an error.

Shapes: rows are patch queries, ``q [batch, heads, rows, d]``, ``k`` and ``v`` ``[batch, heads, n, d]``, weights
``[heads, m, n]`` or ``[batch, heads, m, n]``; all float64. ``dtype`` is what the backend computes in.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from sparsifiner.ops import reference

_SMALLEST = 2.0**-149  # what a float32 below the normal ones is a multiple of: underflow costs half of it
_FLUSHED = 2.0**-125  # a kernel's exponential may be zero below this
_EXPONENTIAL = 8  # units in the last place that an exponential and the division after it may be off
_OVERFLOW = 300.0  # exponents beyond it say no more than "anything"


@dataclasses.dataclass(frozen=True)
class Bounds:
    """An exact value, and the least and the most that a backend may make of it."""

    exact: Tensor
    lower: Tensor
    upper: Tensor

    @classmethod
    def certain(cls, exact: Tensor) -> Bounds:
        """Of an input, or of what every backend computes without rounding."""
        return cls(exact, exact, exact)

    @property
    def error(self) -> Tensor:
        """How far off it may be."""
        return torch.maximum(self.upper - self.exact, self.exact - self.lower)


def growth(operations: int, dtype: torch.dtype = torch.float32) -> float:
    """The relative error of a sum of positive terms after so many roundings each; its computation here included."""
    unit = torch.finfo(dtype).eps / 2 + torch.finfo(torch.float64).eps
    return operations * unit / (1 - operations * unit)


def softmax_bounds(logits: Tensor, error: Tensor, dtype: torch.dtype = torch.float32) -> Bounds:
    """Of the softmax over the last dimension, ``-inf`` left out, of logits that are off by at most ``error``."""
    exact = torch.softmax(logits, -1)
    distance = (logits.amax(-1, keepdim=True) - logits).masked_fill(exact == 0, 0)
    exponent = (error + growth(1, dtype) * distance + growth(_EXPONENTIAL, dtype)).clamp(max=_OVERFLOW)
    more, less = exact * exponent.exp(), exact * (-exponent).exp()
    rounded = growth(logits.shape[-1] + 2, dtype)
    upper = more / less.sum(-1, keepdim=True) * (1 + rounded) + _FLUSHED
    lower = less / more.sum(-1, keepdim=True) * (1 - rounded) - _FLUSHED
    there = ~logits.isneginf()
    return Bounds(exact, lower.clamp(min=0) * there, upper.clamp(max=1 + rounded) * there)


def _logits(q: Tensor, k: Tensor, k_error: Tensor | float, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """``q k^T * scale`` and how far off it may be, where ``k`` already is by ``k_error``."""
    size = q.abs() @ (k.abs() + k_error).mT * scale
    error = size * growth(q.shape[-1] + 2, dtype) + q.shape[-1] * _SMALLEST
    if isinstance(k_error, Tensor):
        error = error + q.abs() @ k_error.mT * scale
    return q @ k.mT * scale, error


def coefficient_bounds(
    q: Tensor, k: Tensor, w_down: Tensor, scale: float, dtype: torch.dtype = torch.float32
) -> Bounds:
    """Of Eq. 1, ``[batch, heads, rows, m]``."""
    terms = int((w_down != 0).sum(-1).amax()) + 1  # adding zeros costs nothing
    k_down = w_down @ k
    error = w_down.abs() @ k.abs() * growth(terms, dtype) + terms * _SMALLEST
    return softmax_bounds(*_logits(q, k_down, error, scale, dtype), dtype)


def _above(bounds: Bounds, threshold: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The bounds of what is zero unless it is above the threshold, which is itself rounded to ``dtype``."""
    slack = abs(threshold) * growth(1, dtype)
    low = torch.where(bounds.lower > threshold + slack, bounds.lower, 0)
    return low, torch.where(bounds.upper > threshold - slack, bounds.upper, 0)


def groups_of_rows(members: Tensor, num_tokens: int, num_prefix: int, positions: Tensor | None = None) -> Tensor:
    """The number of each row's group, ``[1 or batch, rows]``; ``members`` as in `Connectivity`, by position."""
    group_of = members.new_zeros(num_tokens + 1, dtype=torch.long)
    group_of[members.long()] = torch.arange(len(members), device=members.device)[:, None]  # -1 writes to the last
    tokens = torch.arange(num_tokens, device=members.device)[None] if positions is None else positions.long()
    return group_of[tokens[:, num_prefix:]]


def _group_means(x: Tensor, group_of: Tensor) -> Tensor:
    """Each row replaced by the mean over its group."""
    index = group_of[:, None, :, None].expand_as(x)
    sums = x.new_zeros(*x.shape[:2], int(group_of.max()) + 1, x.shape[-1])
    counts = torch.zeros_like(sums).scatter_add_(2, index, torch.ones_like(x))
    return (sums.scatter_add_(2, index, x) / counts.clamp(min=1)).gather(2, index)


def score_bounds(
    coefficients: Bounds,
    w_up: Tensor,
    tau: float,
    basis_threshold: float,
    group_of: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Bounds:
    """Of Eq. 2-3's scores ``[batch, heads, rows, n]``; with `groups_of_rows`, of the mean over each row's group."""
    basis_low, basis_high = _above(Bounds.certain(w_up), basis_threshold, dtype)
    low, high = _above(coefficients, tau, dtype)
    middle = torch.where(coefficients.exact > tau, coefficients.exact, 0)
    operations = w_up.shape[-2] + 1
    if group_of is not None:
        low, high, middle = (_group_means(x, group_of) for x in (low, high, middle))
        operations += int(group_of[0].bincount().max()) + 2
    # Every term is positive, so the sum's error is relative to the sum itself.
    rounded, underflow = growth(operations, dtype), operations * _SMALLEST
    upper = high @ basis_high
    upper = torch.where(upper > 0, upper * (1 + rounded) + underflow, 0)
    lower = ((low @ basis_low) * (1 - rounded) - underflow).clamp(min=0)
    return Bounds(middle @ torch.where(w_up > basis_threshold, w_up, 0), lower, upper)


def forced_keys(rows: int, num_tokens: int, num_prefix: int, device: torch.device | None = None) -> Tensor:
    """What each row keeps whatever its score, ``[rows, n]``: the prefix, and the query itself."""
    forced = torch.zeros(rows, num_tokens, dtype=torch.bool, device=device)
    forced[:, :num_prefix] = True
    forced.diagonal(num_prefix).fill_(True)
    return forced


def unexplained(chosen: Tensor, lower: Tensor, upper: Tensor, budget: int, forced: Tensor) -> Tensor:
    """The rows whose selection is no backend's right: no scores within the bounds have it as their B highest.

    It is exact: with ``lower == upper`` every selection but the reference's own is unexplained, ties (which go to the
    lower index) and zeros (which are discarded) included.

    Args:
        chosen: the keys that were selected, boolean ``[..., n]``.
        lower: the least that the scores may be.
        upper: the most.
        budget: B.
        forced: the keys that are in every selection, whatever their score.

    Returns:
        Booleans ``[...]``.
    """
    index = torch.arange(chosen.shape[-1], device=chosen.device)
    taken, left = chosen & ~forced, ~chosen & ~forced
    # The case in favour: what was taken scores as high as it may, what was left as low. Then one must end where the
    # other begins, by score and among equal scores by index.
    worst = torch.where(taken, upper, torch.inf).amin(-1, keepdim=True)
    worst_at = torch.where(taken & (upper == worst), index, -1).amax(-1, keepdim=True)
    best = torch.where(left, lower, -torch.inf).amax(-1, keepdim=True)
    best_at = torch.where(left & (lower == best), index, len(index)).amin(-1, keepdim=True)
    inverted = (best > worst) | ((best == worst) & (best_at < worst_at))
    # Forced keys have their part in the budget where they score high enough: some must, some may.
    ahead = forced & (lower > 0) & ((lower > worst) | ((lower == worst) & (index < worst_at)))
    possible = forced & (upper > 0) & ((upper > best) | ((upper == best) & (index < best_at)))
    count = taken.sum(-1)
    too_many = count + ahead.sum(-1) > budget
    too_few = (best.squeeze(-1) > 0) & (count + possible.sum(-1) < budget)
    of_zeros, lacking = (taken & (upper <= 0)).any(-1), (forced & ~chosen).any(-1)
    return inverted.squeeze(-1) | too_many | too_few | of_zeros | lacking


def undecided(scores: Bounds, budget: int, forced: Tensor) -> Tensor:
    """The rows where rounding has a choice: the reference's selection is not that of all scores within the bounds."""
    chosen = reference.top_budget(scores.exact, min(budget, scores.exact.shape[-1])) | forced
    # As `unexplained`, with the worst case for the selection in place of the best.
    return unexplained(chosen, scores.upper, scores.lower, budget, forced)


def output_error(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    scale: float,
    residual: tuple[Bounds, Tensor, Tensor] | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """How far the output of rows with these keys may be off, ``[batch, heads, rows, d]``, before it is stored.

    Args:
        q: the rows' queries.
        k: keys, as attention reads them.
        v: values, likewise.
        mask: the keys of each row.
        scale: of the logits.
        residual: the coefficients, w_up, and the values of which the low-rank estimate is made; None without it.
        dtype: what is computed in.
    """
    logits, error = _logits(q, k, 0.0, scale, dtype)
    p = softmax_bounds(logits.masked_fill(~mask, -torch.inf), error, dtype)
    terms = int(mask.sum(-1).max()) + 2
    rounded, size = growth(terms, dtype), v.abs()
    if residual is None:
        return p.error @ size + (p.exact + p.error) @ size * rounded + terms * _SMALLEST
    a_down, w_up, values = residual
    n, landmarks = w_up.shape[-1], w_up.shape[-2]
    most, products = a_down.exact + a_down.error, growth(landmarks + 1, dtype)
    estimate = a_down.exact @ w_up
    estimate_error = (a_down.error + most * products) @ w_up.abs() + landmarks * _SMALLEST
    kept, kept_error = torch.where(mask, estimate, 0), torch.where(mask, estimate_error, 0)
    # The dropped mass: all estimates, by the sums of w_up's rows, less those that are kept.
    sums = w_up.sum(-1).abs()[..., None]
    mass_error = (a_down.error + most * products) @ sums
    mass_error = mass_error + most @ w_up.abs().sum(-1, keepdim=True) * growth(n, dtype)
    mass_error = mass_error + (kept_error + (kept.abs() + kept_error) * growth(terms + 2, dtype)).sum(-1, keepdim=True)
    share = 1 - (estimate.sum(-1, keepdim=True) - kept.sum(-1, keepdim=True)).clamp(0, 1)
    mass_error = mass_error.clamp(max=1) + growth(2, dtype)
    weight = (share + mass_error) * (p.exact + p.error) + kept.abs() + kept_error
    weight_error = mass_error * p.exact + (share + mass_error) * p.error + kept_error + weight * growth(3, dtype)
    v_down = w_up @ values
    v_down_error = w_up.abs() @ values.abs() * growth(n, dtype) + n * _SMALLEST
    low_rank = most @ (v_down.abs() + v_down_error)
    low_rank_error = a_down.error @ v_down.abs() + most @ v_down_error + low_rank * products
    total = low_rank + weight @ size
    return weight_error @ size + low_rank_error + total * growth(terms + 1, dtype) + terms * _SMALLEST


def stored(error: Tensor, exact: Tensor, dtype: torch.dtype) -> Tensor:
    """The error after the result is rounded to ``dtype``."""
    return (
        error + (exact.abs() + error) * growth(1, dtype) + torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    )


def keys_used(attend: Callable[[Tensor], Tensor], values: Tensor) -> Tensor:
    """Which keys each row of the output is made of, boolean ``[batch, heads, n, n]``.

    Values that are one for one key and zero for all others tell, as many keys at a time as there are features. A key
    whose weight underflows is not seen.

    Args:
        attend: from values to the output, which it weighs by a softmax (without residual).
        values: ``[batch, heads, n, d]``: shape, type and layout of what ``attend`` takes; it is not read.
    """
    n, width = values.shape[2:]
    used = []
    for start in range(0, n, width):
        count = min(width, n - start)
        telling = torch.zeros_like(values)
        telling[:, :, torch.arange(start, start + count), torch.arange(count)] = 1
        used.append(attend(telling)[..., :count] != 0)
    return torch.cat(used, -1)
