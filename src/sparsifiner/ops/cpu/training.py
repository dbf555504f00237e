"""The two halves with the lists between them, for training and for whoever looks at the lists."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from sparsifiner.errors import BackendError
from sparsifiner.ops import eager, transforms
from sparsifiner.ops.connectivity import Connectivity, list_width
from sparsifiner.ops.cpu.library import groups_of, native, new_output, rows, view
from sparsifiner.ops.cpu.packing import padded_landmarks, thresholded, transposed


@torch.library.custom_op("sparsifiner::cpu_select", mutates_args=())
def select(
    a_down: Tensor,
    w_up: Tensor,
    members: Tensor,
    budget: int,
    tau: float,
    basis_threshold: float,
    num_prefix: int,
) -> tuple[Tensor, Tensor]:
    """Eq. 2-3 as `eager.select`: the same lists."""
    batch, heads, _, landmarks = a_down.shape
    members = members.int().contiguous()
    count, size = members.shape
    n = w_up.shape[-1]
    width = list_width(n, budget, num_prefix, size)
    coefficients = a_down.float().contiguous()
    basis, occupied = thresholded(w_up, basis_threshold)
    lists = a_down.new_empty(batch, heads, count, width, dtype=torch.int32)
    counts = a_down.new_empty(batch, heads, count, dtype=torch.int32)
    weights = native().Weights(
        n, padded_landmarks(landmarks), basis.shape[-1], 0, basis.data_ptr(), occupied.data_ptr(), 0, 0, 0, 0, 0
    )
    native().select(
        (batch, heads, n, 1, landmarks, num_prefix),
        coefficients.data_ptr(),
        weights,
        groups_of(members, n, num_prefix),
        min(budget, n),
        width,
        tau,
        lists.data_ptr(),
        counts.data_ptr(),
        torch.get_num_threads(),
    )
    return lists, counts


@select.register_fake
def _(a_down, w_up, members, budget, tau, basis_threshold, num_prefix):
    batch, heads = a_down.shape[:2]
    groups, size = members.shape
    width = list_width(w_up.shape[-1], budget, num_prefix, size)
    return (
        a_down.new_empty(batch, heads, groups, width, dtype=torch.int32),
        a_down.new_empty(batch, heads, groups, dtype=torch.int32),
    )


select.register_vmap(transforms.mapped(select, *eager.SELECT_HEADS))


@register_flop_formula(torch.ops.sparsifiner.cpu_select)
def _select_flops(*shapes, **kwargs) -> int:
    return eager.select_flops(*shapes, **kwargs)


class _Call:
    """The native call behind `_attend` and its backward, and the tensors its pointers lead to, which live as long."""

    def __init__(
        self, q, k, v, out, normaliser, indices, members, a_down, w_up, bias, scale, num_prefix, adds_self
    ) -> None:
        batch, heads, n, head_dim = q.shape
        landmarks = w_up.shape[1]
        self.shape = (batch, heads, n, head_dim, landmarks, num_prefix)
        self.padded = padded_landmarks(landmarks)
        members = members.int().contiguous()
        up, row_sums = transposed(w_up)
        coefficients, lists = a_down.detach().float().contiguous(), indices.int().contiguous()
        q, k, v = rows(q), rows(k), rows(v)
        added = None if bias is None else bias.float().contiguous()
        if added is not None and added.shape != k.shape[:3]:
            raise BackendError(f"bias must be {list(k.shape[:3])}, got {tuple(added.shape)}")
        self.held = (members, up, row_sums, coefficients, lists, q, k, v, out, normaliser, added)
        self.native = native().Attend(
            self.shape,
            view(q),
            view(k),
            view(v),
            view(out),
            coefficients.data_ptr(),
            up.data_ptr(),
            row_sums.data_ptr(),
            self.padded,
            groups_of(members, n, num_prefix),
            lists.data_ptr(),
            lists.shape[-1],
            adds_self,
            k.shape[2],
            0 if added is None else added.data_ptr(),
            scale,
            normaliser.data_ptr(),
            torch.get_num_threads(),
        )


@torch.library.custom_op("sparsifiner::cpu_attend", mutates_args=())
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
) -> tuple[Tensor, Tensor]:
    """Eq. 4-6 over the lists, for patch rows, and the log of each softmax's denominator."""
    out = new_output(q, num_prefix)
    normaliser = q.new_zeros(q.shape[:3], dtype=torch.float32)
    call = _Call(q, k, v, out, normaliser, indices, members, a_down, w_up, bias, scale, num_prefix, adds_self)
    native().attend(call.native)
    return out, normaliser


@_attend.register_fake
def _(q, k, v, indices, members, a_down, w_up, bias, scale, num_prefix, adds_self):
    return new_output(q, num_prefix), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op("sparsifiner::cpu_attend_backward", mutates_args=())
def _attend_backward(
    grad: Tensor,
    out: Tensor,
    normaliser: Tensor,
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
    """Gradients of `_attend` for q, k, v, a_down and w_up."""
    grad = rows(grad)
    call = _Call(q, k, v, out, normaliser, indices, members, a_down, w_up, bias, scale, num_prefix, adds_self)
    batch, heads, n, head_dim, landmarks, _ = call.shape
    # Heads that are fewer than threads are cut into parts, whose sums are added in a fixed order.
    threads = torch.get_num_threads()
    parts = 1 if batch * heads >= threads else min(-(-threads // (batch * heads)), members.shape[0])
    q_grad = torch.zeros(batch, heads, n, head_dim)  # prefix rows have no gradient from here
    k_grad, v_grad = (torch.empty(batch, heads, parts, k.shape[2], head_dim) for _ in range(2))
    a_grad = torch.zeros(batch, heads, n - num_prefix, landmarks)
    up_grad = torch.zeros(batch, heads, parts, k.shape[2], call.padded)
    sums_grad = torch.zeros(batch, heads, parts, call.padded)
    native().backward(
        call.native,
        view(grad),
        parts,
        *(x.data_ptr() for x in (q_grad, k_grad, v_grad, a_grad, up_grad, sums_grad)),
    )
    w_grad = (up_grad + sums_grad[..., None, :]).sum((0, 2))[..., :landmarks].mT
    return (
        q_grad.to(q.dtype),
        k_grad.sum(2).to(k.dtype) if parts > 1 else k_grad.squeeze(2).to(k.dtype),
        v_grad.sum(2).to(v.dtype) if parts > 1 else v_grad.squeeze(2).to(v.dtype),
        a_grad.to(a_down.dtype),
        w_grad.to(w_up.dtype).contiguous(),
    )


@_attend_backward.register_fake
def _(grad, out, normaliser, q, k, v, indices, members, a_down, w_up, bias, scale, num_prefix, adds_self):
    return tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v, a_down, w_up))


def _save(ctx, inputs, output) -> None:
    *tensors, scale, num_prefix, adds_self = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*output, *tensors)
    ctx.settings = (scale, num_prefix, adds_self)


def _backward(ctx, grad, _):
    q_grad, k_grad, v_grad, a_grad, w_grad = _differentiable_backward(grad, *ctx.saved_tensors, *ctx.settings)
    return q_grad, k_grad, v_grad, None, None, a_grad, w_grad, None, None, None, None


_attend.register_autograd(_backward, setup_context=_save)
_differentiable_backward = transforms.function(_attend_backward, (1, 1, 1, *eager.ATTEND_HEADS), eager.GRADIENT_HEADS)
_differentiable_attend = transforms.function(_attend, eager.ATTEND_HEADS, (1, 1), _save, _backward)


@register_flop_formula(torch.ops.sparsifiner.cpu_attend)
def _attend_flops(*shapes, **kwargs) -> int:
    return eager.attend_flops(*shapes, **kwargs)


@register_flop_formula(torch.ops.sparsifiner.cpu_attend_backward)
def _attend_backward_flops(grad_shape, out_shape_, normaliser_shape, *shapes, **kwargs) -> int:
    return eager.attend_backward_flops(grad_shape, *shapes, **kwargs)


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
    """Patch rows of the sparse output, without the ``A_down (W_up V)`` term; differentiable. As `eager.attend`."""
    rows, _ = _differentiable_attend(
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
    return rows
