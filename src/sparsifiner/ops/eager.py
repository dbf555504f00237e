"""The backend in plain PyTorch: index lists, gathers, no n x n tensor; any device, any float dtype.

It computes only the connections that were selected. Work is cut into chunks of groups so that what is
gathered stays small; the backward recomputes each chunk rather than keeping it, so memory in training
is that of the inputs, the lists and one chunk.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from sparsifiner.ops import transforms
from sparsifiner.ops.connectivity import Connectivity, accumulation_dtype, list_width, lists_from_mask

# Elements one chunk may gather: 4 MiB in float32. Measured best of 64 KiB to 16 MiB on two x86 cores.
CHUNK_ELEMENTS = 1 << 20


def can_run(q: Tensor, landmarks: int = 0) -> str | None:
    """Eager PyTorch runs everywhere."""
    return None


def _chunks(groups: int, elements_per_group: int) -> Iterator[slice]:
    step = max(1, CHUNK_ELEMENTS // max(1, elements_per_group))
    for start in range(0, groups, step):
        yield slice(start, min(start + step, groups))


@torch.library.custom_op("sparsifiner::select", mutates_args=())
def select(
    a_down: Tensor,
    w_up: Tensor,
    members: Tensor,
    budget: int,
    tau: float,
    basis_threshold: float,
    num_prefix: int,
) -> tuple[Tensor, Tensor]:
    """Eq. 2-3: the lists of keys of each group, and their lengths.

    A list holds the prefix, the query itself (where a group is one query) and the B highest scores above
    zero, ties going to the lower index.
    """
    batch, heads = a_down.shape[:2]
    groups, size = members.shape
    n = w_up.shape[-1]
    basis = torch.where(w_up > basis_threshold, w_up, 0).to(a_down.dtype)
    coefficients = torch.where(a_down > tau, a_down, 0)
    if size > 1:  # scores are linear in the coefficients: averaging these averages the score rows
        real = (members >= 0).to(a_down.dtype)[..., None]
        coefficients = coefficients[:, :, (members - num_prefix).clamp(min=0)] * real
        coefficients = coefficients.sum(3) / real.sum(1)
    width = list_width(n, budget, num_prefix, size)
    lists, counts = [], []
    for chunk in _chunks(groups, batch * heads * n):
        scores = coefficients[:, :, chunk] @ basis  # [batch, heads, chunk, n]
        mask = top_budget(scores, min(budget, n))
        mask[..., :num_prefix] = True
        if size == 1:
            mask.scatter_(-1, members[chunk].expand(batch, heads, -1, 1), True)
        chunk_lists, chunk_counts = lists_from_mask(mask, width)
        lists.append(chunk_lists)
        counts.append(chunk_counts)
    return torch.cat(lists, 2), torch.cat(counts, 2)


def top_budget(scores: Tensor, budget: int) -> Tensor:
    """Eq. 3 on rows of scores: the B largest, zeros discarded, ties to the lower index; a boolean mask."""
    cut = _cut(scores, budget)
    return _settled(scores, cut, (scores >= cut) & (scores > 0), budget)


def top_mask(scores: Tensor, budget: int) -> Tensor:
    """The B largest of each row whatever they are, ties to the lower index; a boolean mask."""
    cut = _cut(scores, budget)
    return _settled(scores, cut, scores >= cut, budget)


def _cut(scores: Tensor, budget: int) -> Tensor:
    """The B-th largest of each row; topk says nothing about ties, so it only finds that."""
    return torch.topk(scores, budget, dim=-1, sorted=False).values.amin(-1, keepdim=True)


def _settled(scores: Tensor, cut: Tensor, chosen: Tensor, budget: int) -> Tensor:
    """``chosen`` where no more than B are; rows with ties at the cut go by index."""
    tied = chosen.sum(-1) > budget
    if bool(tied.any()):
        rows, cut = scores[tied], cut[tied]
        above, level = rows > cut, rows == cut
        room = budget - above.sum(-1, keepdim=True)
        chosen[tied] = above | (level & (level.cumsum(-1) <= room))
    return chosen


@select.register_fake
def _(a_down, w_up, members, budget, tau, basis_threshold, num_prefix):
    batch, heads = a_down.shape[:2]
    groups, size = members.shape
    width = list_width(w_up.shape[-1], budget, num_prefix, size)
    return (
        a_down.new_empty(batch, heads, groups, width, dtype=torch.int32),
        a_down.new_empty(batch, heads, groups, dtype=torch.int32),
    )


# Heads are apart from each other in every operator, so `torch.vmap` makes more of them. Where they are in each input
# and output:
SELECT_HEADS = ((1, 0, None, None, None, None, None), (1, 1))
ATTEND_HEADS = (1, 1, 1, 1, None, 1, 0, 1, None, None, None)
GRADIENT_HEADS = (1, 1, 1, 1, 0)
select.register_vmap(transforms.mapped(select, *SELECT_HEADS))


def select_flops(a_down_shape, w_up_shape, members_shape, *args, out_shape=None, **kwargs) -> int:
    """Two per multiply-add, as torch counts; shapes know no thresholds, so this is the dense bound."""
    batch, heads, _, landmarks = a_down_shape
    return 2 * batch * heads * members_shape[0] * landmarks * w_up_shape[-1]


register_flop_formula(torch.ops.sparsifiner.select)(select_flops)


class _Chunk:
    """What forward and backward both need of a chunk of groups, gathered or recomputed.

    Without a residual the landmarks are zero in number, all estimates are empty sums and the mass
    ``rho`` is zero, so one set of formulas serves both.
    """

    def __init__(self, q, k, v, indices, members, a_down, w_up, bias, scale, num_prefix, adds_self, chunk) -> None:
        dtype = accumulation_dtype(q.dtype)
        lists = indices[:, :, chunk].long()  # [batch, heads, chunk, width]
        group = members[chunk]  # [chunk, size]
        self.is_query = group >= 0
        self.tokens = group.clamp(min=num_prefix)  # padding points at some patch; its results are dropped
        connected = (lists >= 0)[..., None, :].expand(-1, -1, -1, group.shape[1], -1)
        if adds_self:  # one more column per member, open to that member alone if its list lacks it
            own = self.tokens.expand(*lists.shape[:3], -1)
            absent = ~(lists[..., None, :] == own[..., None]).any(-1)  # [batch, heads, chunk, size]
            diagonal = torch.eye(group.shape[1], dtype=torch.bool, device=q.device)
            connected = torch.cat([connected, diagonal & absent[..., None]], -1)
            lists = torch.cat([lists, own], -1)
        batch, heads, n, _ = k.shape
        block = torch.arange(batch * heads, device=q.device).view(batch, heads, 1, 1)
        lists = lists.clamp(min=0)
        self.rows = (lists + block * n).flatten()  # into [batch * heads * n, d]
        self.basis_rows = (lists + block % heads * n).flatten()  # into [heads * n, m]
        self.shape = lists.shape

        self.queries = q[:, :, self.tokens].to(dtype)  # [batch, heads, chunk, size, d]
        self.keys = self._gather(k.flatten(0, 2), self.rows, dtype)  # [batch, heads, chunk, width, d]
        self.values = self._gather(v.flatten(0, 2), self.rows, dtype)
        self.coefficients = a_down[:, :, self.tokens - num_prefix].to(dtype)  # [..., size, m]
        self.basis = self._gather(w_up.mT.flatten(0, 1), self.basis_rows, dtype)  # [..., width, m]

        logits = self.queries @ self.keys.mT * scale
        if bias is not None:
            logits = logits + bias.to(dtype).gather(2, lists.flatten(2)).view(lists.shape)[..., None, :]
        logits = logits.masked_fill(~connected, -torch.inf)
        self.probabilities = torch.softmax(logits, dim=-1)  # [batch, heads, chunk, size, width]
        self.connected = connected
        estimates = (self.coefficients @ self.basis.mT).masked_fill(~connected, 0)
        self.row_sums = w_up.to(dtype).sum(-1)[:, None, None, :]  # [heads, 1, 1, m]
        self.mass = (self.coefficients * self.row_sums).sum(-1, keepdim=True) - estimates.sum(-1, keepdim=True)
        self.exact_share = 1 - self.mass.clamp(0, 1)  # 1 - rho
        self.weights = self.exact_share * self.probabilities - estimates

    def _gather(self, rows: Tensor, index: Tensor, dtype: torch.dtype) -> Tensor:
        return rows.index_select(0, index).view(*self.shape, rows.shape[-1]).to(dtype)


def _elements_per_group(q: Tensor, indices: Tensor, members: Tensor, a_down: Tensor) -> int:
    batch, heads, _, width = indices.shape
    return batch * heads * (width + members.shape[1]) * (2 * q.shape[-1] + a_down.shape[-1])


@torch.library.custom_op("sparsifiner::attend", mutates_args=())
def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    members: Tensor,
    a_down: Tensor,
    w_up: Tensor,
    bias: Tensor | None,
    scale: float,
    num_prefix: int,
    adds_self: bool,
) -> Tensor:
    """Eq. 4-6 over the lists, for patch rows: ``sum_kept ((1 - rho) p - s) v``."""
    batch, heads, n, head_dim = q.shape
    out = q.new_empty(batch, heads, n - num_prefix, head_dim)
    for chunk in _chunks(members.shape[0], _elements_per_group(q, indices, members, a_down)):
        part = _Chunk(q, k, v, indices, members, a_down, w_up, bias, scale, num_prefix, adds_self, chunk)
        rows = (part.weights @ part.values).to(q.dtype)  # [batch, heads, chunk, size, d]
        out[:, :, part.tokens[part.is_query] - num_prefix] = rows[:, :, part.is_query]
    return out


@_attend.register_fake
def _(q, k, v, indices, members, a_down, w_up, bias, scale, num_prefix, adds_self):
    batch, heads, n, head_dim = q.shape
    return q.new_empty(batch, heads, n - num_prefix, head_dim)


@torch.library.custom_op("sparsifiner::attend_backward", mutates_args=())
def _attend_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    members: Tensor,
    a_down: Tensor,
    w_up: Tensor,
    bias: Tensor | None,
    scale: float,
    num_prefix: int,
    adds_self: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of `_attend` for q, k, v, a_down and w_up, chunk by chunk."""
    dtype = accumulation_dtype(q.dtype)
    batch, heads, n, head_dim = k.shape
    landmarks = w_up.shape[1]
    q_grad = torch.zeros(q.shape, dtype=dtype, device=q.device)
    k_grad = torch.zeros(batch * heads * n, head_dim, dtype=dtype, device=q.device)
    v_grad = torch.zeros_like(k_grad)
    a_grad = torch.zeros(a_down.shape, dtype=dtype, device=q.device)
    basis_grad = torch.zeros(heads * n, landmarks, dtype=dtype, device=q.device)
    row_sum_grad = torch.zeros(heads, landmarks, dtype=dtype, device=q.device)
    for chunk in _chunks(members.shape[0], 2 * _elements_per_group(q, indices, members, a_down)):
        part = _Chunk(q, k, v, indices, members, a_down, w_up, bias, scale, num_prefix, adds_self, chunk)
        rows = grad[:, :, part.tokens - num_prefix].to(dtype) * part.is_query[..., None]
        v_grad.index_add_(0, part.rows, (part.weights.mT @ rows).flatten(0, -2))
        weights_grad = (rows @ part.values.mT).masked_fill(~part.connected, 0)

        mass_grad = -(part.probabilities * weights_grad).sum(-1, keepdim=True)
        mass_grad = mass_grad * ((part.mass >= 0) & (part.mass <= 1))
        estimates_grad = (-weights_grad - mass_grad).masked_fill(~part.connected, 0)
        coefficients_grad = estimates_grad @ part.basis + mass_grad * part.row_sums
        basis_grad.index_add_(0, part.basis_rows, (estimates_grad.mT @ part.coefficients).flatten(0, -2))
        row_sum_grad += (mass_grad * part.coefficients).sum((0, 2, 3))

        share_grad = part.exact_share * weights_grad
        centred = share_grad - (part.probabilities * share_grad).sum(-1, keepdim=True)
        logits_grad = part.probabilities * centred * scale
        k_grad.index_add_(0, part.rows, (logits_grad.mT @ part.queries).flatten(0, -2))

        queries = part.tokens[part.is_query]
        q_grad[:, :, queries] = (logits_grad @ part.keys)[:, :, part.is_query]
        a_grad[:, :, queries - num_prefix] = coefficients_grad[:, :, part.is_query]
    w_grad = basis_grad.view(heads, n, landmarks).mT + row_sum_grad[..., None]
    return (
        q_grad.to(q.dtype),
        k_grad.view(k.shape).to(k.dtype),
        v_grad.view(v.shape).to(v.dtype),
        a_grad.to(a_down.dtype),
        w_grad.to(w_up.dtype).contiguous(),
    )


@_attend_backward.register_fake
def _(grad, q, k, v, indices, members, a_down, w_up, bias, scale, num_prefix, adds_self):
    return tuple(tensor.new_empty(tensor.shape) for tensor in (q, k, v, a_down, w_up))


def _save(ctx, inputs, output) -> None:
    *tensors, scale, num_prefix, adds_self = inputs
    ctx.save_for_backward(*tensors)
    ctx.settings = (scale, num_prefix, adds_self)


def _backward(ctx, grad):
    q_grad, k_grad, v_grad, a_grad, w_grad = _differentiable_backward(grad, *ctx.saved_tensors, *ctx.settings)
    return q_grad, k_grad, v_grad, None, None, a_grad, w_grad, None, None, None, None


_attend.register_autograd(_backward, setup_context=_save)
_differentiable_backward = transforms.function(_attend_backward, (1, *ATTEND_HEADS), GRADIENT_HEADS)
_differentiable_attend = transforms.function(_attend, ATTEND_HEADS, (1,), _save, _backward)


def attend_flops(q_shape, k_shape, v_shape, indices_shape, members_shape, a_shape, *args, **kwargs) -> int:
    """Two per multiply-add. A list counts with its full width: shapes do not know how many are padding."""
    batch, heads, _, head_dim = q_shape
    connections = batch * heads * a_shape[2] * indices_shape[-1]
    return 2 * connections * (2 * head_dim + a_shape[-1])


register_flop_formula(torch.ops.sparsifiner.attend)(attend_flops)


def attend_backward_flops(grad_shape, *shapes, **kwargs) -> int:
    """The scores again, and two products for each of the forward's."""
    q_shape, _, _, indices_shape, _, a_shape = shapes[:6]
    batch, heads, _, head_dim = q_shape
    connections = batch * heads * a_shape[2] * indices_shape[-1]
    return 2 * connections * (5 * head_dim + 3 * a_shape[-1])


register_flop_formula(torch.ops.sparsifiner.attend_backward)(attend_backward_flops)


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
    """Patch rows of the sparse output, without the ``A_down (W_up V)`` term; differentiable.

    Keys and values may have more rows than there are queries: lists then name those too. ``bias``
    ``[batch, heads, rows]`` is added to the logits, and has no gradient.
    """
    return _differentiable_attend(
        q,
        k,
        v,
        connectivity.indices,
        connectivity.members,
        a_down,
        w_up,
        bias,
        scale,
        connectivity.num_prefix,
        connectivity.adds_self,
    )
