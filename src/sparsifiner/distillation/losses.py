"""The losses of Eq. 7-12. Pure functions of tensors."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from sparsifiner.errors import ConfigError
from sparsifiner.ops.connectivity import accumulation_dtype, low_rank_attention

QUERY_CHUNK = 128  # rows of the true attention at a time, where its squares are summed


def attention_loss(
    q: Tensor,
    k: Tensor,
    w_down: Tensor,
    w_up: Tensor,
    *,
    num_prefix: int,
    scale: float,
    tau: float,
    constant: bool = False,
) -> Tensor:
    """Eq. 10: the squared error of the low-rank attention, ``|Ã W - A|²``, in O(n m) memory.

    Written out, ``tr(Ã W Wᵀ Ãᵀ) - 2 tr(Ã (A Wᵀ)ᵀ) + |A|²``: ``A Wᵀ`` is ordinary attention with the basis in the
    place of the values, so nothing of size n x n is built. Summed over the keys and averaged over the patch queries:
    n times the mean over all entries, which would be too small for an optimiser's epsilon.

    Args:
        q: queries ``[batch, heads, n, d]``, prefix included.
        k: keys.
        w_down: ``[heads, m, n]``.
        w_up: ``[heads, m, n]``.
        num_prefix: tokens at the start whose attention is exact and is not predicted.
        scale: of the logits.
        tau: coefficients up to this count as zero (Eq. 2).
        constant: add ``|A|²``, which has no gradient: the value is then the error itself.
    """
    if torch.is_autocast_enabled(q.device.type):
        with torch.autocast(q.device.type, enabled=False):
            about = {"num_prefix": num_prefix, "scale": scale, "tau": tau, "constant": constant}
            return attention_loss(q, k, w_down, w_up, **about)
    a_down = low_rank_attention(q, k, w_down, num_prefix, scale)  # [batch, heads, rows, m]
    kept = torch.where(a_down > tau, a_down, 0)
    basis = w_up.to(kept.dtype)
    rows = kept.shape[0] * kept.shape[1] * kept.shape[2]
    square = (kept @ (basis @ basis.mT) * kept).sum()
    cross = (kept * attend_to(q[:, :, num_prefix:], k, basis.mT, scale)).sum()
    loss = (square - 2 * cross) / rows
    return loss + attention_square(q, k, num_prefix, scale) if constant else loss


def attend_to(q: Tensor, k: Tensor, values: Tensor, scale: float) -> Tensor:
    """``softmax(q kᵀ scale) values`` for values ``[heads, n, m]`` of any width, shared by the batch.

    In slices as wide as the queries, with contiguous rows: anything else makes torch build the whole attention.
    """
    batch, width = len(q), q.shape[-1]
    columns = values.shape[-1]
    padded = functional.pad(values, (0, -columns % width)).to(q.dtype)
    parts = [
        functional.scaled_dot_product_attention(q, k, part.contiguous().expand(batch, -1, -1, -1), scale=scale)
        for part in padded.split(width, dim=-1)
    ]
    return torch.cat(parts, dim=-1)[..., :columns].to(accumulation_dtype(q.dtype))


@torch.no_grad()
def attention_square(q: Tensor, k: Tensor, num_prefix: int, scale: float) -> Tensor:
    """``|A|²``: the squares of the true attention, summed over the keys and averaged over the patch queries."""
    dtype = accumulation_dtype(q.dtype)
    q, k = q[:, :, num_prefix:].to(dtype), k.to(dtype)
    total = torch.zeros((), dtype=torch.float64, device=q.device)
    for chunk in q.split(QUERY_CHUNK, dim=2):
        total += torch.softmax(chunk @ k.mT * scale, dim=-1).square().sum(dtype=torch.float64)
    return (total / (q.shape[0] * q.shape[1] * q.shape[2])).to(dtype)


def token_loss(student: Tensor, teacher: Tensor, presence: Tensor | None = None) -> Tensor:
    """Eq. 8: mean squared error of the last block's tokens ``[batch, n, D]``, of those that are there if some are not.

    ``presence`` ``[batch, n]`` has no part in the gradient: a token is not dropped for being hard to match.
    """
    if presence is None:
        return functional.mse_loss(student.float(), teacher.float())
    error = (student.float() - teacher.float()).square().mean(-1)
    weight = presence.detach().float()
    return (error * weight).sum() / weight.sum()


def kept_tokens(tokens: Tensor, cells: Tensor, num_prefix: int) -> Tensor:
    """Of all tokens ``[batch, n, D]`` the prefix and the patches of ``cells`` ``[batch, kept]``."""
    patches = tokens[:, num_prefix:].gather(1, cells[..., None].expand(-1, -1, tokens.shape[-1]))
    return torch.cat([tokens[:, :num_prefix], patches], dim=1)


def prediction_loss(student: Tensor, teacher: Tensor) -> Tensor:
    """Eq. 9: ``KL(teacher || student)`` of predictions ``[batch, classes, ...]``, averaged over images and places."""
    ours, theirs = (x.float().log_softmax(1) for x in (student, teacher))
    total = functional.kl_div(ours, theirs, reduction="sum", log_target=True)
    return total * student.shape[1] / student.numel()


def label_loss(student: Tensor, labels: Tensor, smoothing: float = 0.0) -> Tensor:
    """Eq. 7: cross-entropy with class numbers, or with shares of classes as mixup makes them.

    Class numbers are ``[batch]``, or ``[batch, rows, columns]`` for predictions ``[batch, classes, rows, columns]``,
    where -100 does not count.
    """
    shares = labels.is_floating_point()
    if not shares and student.shape[:1] + student.shape[2:] != labels.shape:
        raise ConfigError(
            f"labels of shape {tuple(labels.shape)} need predictions [batch, classes, ...] of the same places, got "
            f"{tuple(student.shape)}: say with predict what the model predicts of each, or give a loss of your own"
        )
    return functional.cross_entropy(student.float(), labels, label_smoothing=smoothing)
