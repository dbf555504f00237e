"""The fused CPU kernels (csrc/) as a backend.

`fused` goes from queries, keys, values and packed predictor weights to the output in one call, for inference. `select`
and `attend` are the two halves with the lists between them, for training and for whoever looks at the lists.

Pointers go down raw, so everything about a tensor is checked here first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from sparsifiner.errors import BackendError
from sparsifiner.ops import eager, transforms
from sparsifiner.ops.connectivity import Connectivity, list_width

_native: ModuleType | None
_missing = ""
try:  # after torch, whose OpenMP library it then shares
    from sparsifiner import _native  # pyright: ignore[reportAttributeAccessIssue]
except ImportError as error:
    _native, _missing = None, str(error)

_MAX_HEAD_DIM: int = _native.max_head_dim if _native else 0
_MAX_LANDMARKS: int = _native.max_landmarks if _native else 0

_DTYPES = (torch.float32, torch.bfloat16)
# Columns of scores computed together, in vectors; the bit sets of `Packed.occupied` are per strip.
_STRIP_VECTORS = 8
# Up to so many tokens nearly every strip has every landmark, and looking for those it lacks costs more than they do.
_SKIP_BEYOND = 512
# With more of its weights non-zero than this, w_down is multiplied as a dense matrix.
_SPARSE_DOWN = 0.25


def unavailable() -> str | None:
    """Why the kernels are not there, if they are not."""
    if _native is None:
        return f"the compiled kernels are not installed ({_missing}): reinstall with a C++17 compiler"
    return None


def instruction_set() -> str:
    """Which of the compiled variants runs on this machine."""
    return native().instruction_set()


def native() -> ModuleType:
    """The compiled module."""
    if _native is None:
        raise BackendError(str(unavailable()))
    return _native


def can_run(q: Tensor, landmarks: int = 0) -> str | None:
    """None, or why tensors like ``q``, and a predictor of so many landmarks, cannot go to the kernels."""
    if reason := unavailable():
        return reason
    if q.device.type != "cpu":
        return f"the kernels are for the CPU and the tensors are on {q.device}"
    if q.dtype not in _DTYPES:
        return f"the kernels take float32 and bfloat16, not {str(q.dtype).removeprefix('torch.')}"
    if q.shape[-1] > _MAX_HEAD_DIM:
        return f"the kernels take head dimensions up to {_MAX_HEAD_DIM}, not {q.shape[-1]}"
    if landmarks > _MAX_LANDMARKS:
        return f"the kernels take up to {_MAX_LANDMARKS} landmarks, not {landmarks}"
    return None


@dataclasses.dataclass(frozen=True)
class Packed:
    """Predictor weights as the kernels read them; made once and used until the weights change.

    ``down`` is the dense w_down transposed, or empty where ``start``, ``landmark``, ``value`` hold its few non-zeros by
    head and token.
    """

    up: Tensor  # float32 [heads, n, padded]: w_up transposed
    basis: Tensor  # float32 [heads, m, width]: zero at or below the threshold
    occupied: Tensor  # int64 [heads, strips, 2]: bit l set where landmark l is not zero in a strip of columns
    row_sums: Tensor  # float32 [heads, padded]
    down: Tensor
    start: Tensor
    landmark: Tensor
    value: Tensor

    def tensors(self) -> tuple[Tensor, ...]:
        """In the order the kernels take them."""
        return (self.up, self.basis, self.occupied, self.row_sums, self.down, self.start, self.landmark, self.value)


def pack(w_down: Tensor, w_up: Tensor, basis_threshold: float) -> Packed:
    """Packs ``[heads, m, n]`` weights.

    In a compiled graph it is one more operator, run at every call, and w_down stays dense: shapes may not depend on
    values there.
    """
    if torch.compiler.is_compiling():
        return Packed(*_pack(w_down, w_up, basis_threshold), *(w_up.new_empty(0, dtype=t) for t in _SPARSE_TYPES))
    with torch.no_grad():
        up, row_sums = _transposed(w_up)
        basis, occupied = _basis(w_up, basis_threshold)
        down = w_down.detach().float()
        empty, none = torch.empty(0), torch.empty(0, dtype=torch.int32)
        if int(down.count_nonzero()) > _SPARSE_DOWN * down.numel():
            return Packed(up, basis, occupied, row_sums, _transposed(down)[0], none, none, empty)
        heads, _, n = down.shape
        head, token, landmark = down.mT.nonzero(as_tuple=True)  # by head, then token, then landmark
        per_token = torch.bincount(head * n + token, minlength=heads * n)
        start = torch.cat([per_token.new_zeros(1), per_token.cumsum(0)]).int()
        value = down[head, landmark, token].contiguous()
        return Packed(up, basis, occupied, row_sums, empty, start, landmark.int(), value)


_SPARSE_TYPES = (torch.int32, torch.int32, torch.float32)  # of start, landmark and value


@torch.library.custom_op("sparsifiner::pack", mutates_args=())
def _pack(w_down: Tensor, w_up: Tensor, basis_threshold: float) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    up, row_sums = _transposed(w_up)
    basis, occupied = _basis(w_up, basis_threshold)
    return up, basis, occupied, row_sums, _transposed(w_down)[0]


@_pack.register_fake
def _(w_down, w_up, basis_threshold):
    heads, landmarks, n = w_up.shape
    width, strips = _score_width(n)
    up = w_up.new_empty(heads, n, _padded(landmarks), dtype=torch.float32)
    return (
        up,
        w_up.new_empty(heads, landmarks, width, dtype=torch.float32),
        w_up.new_empty(heads, strips, 2, dtype=torch.int64),
        w_up.new_empty(heads, up.shape[-1], dtype=torch.float32),
        torch.empty_like(up),
    )


def _transposed(weights: Tensor) -> tuple[Tensor, Tensor]:
    """``[heads, n, padded]`` with whole vectors of landmarks, and the sums over n ``[heads, padded]``."""
    heads, landmarks, n = weights.shape
    out = torch.zeros(heads, n, _padded(landmarks))
    out[..., :landmarks] = weights.detach().mT
    return out, out.sum(1)


def _basis(w_up: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    heads, landmarks, n = w_up.shape
    width, strips = _score_width(n)
    strip = _STRIP_VECTORS * native().lanes()
    basis = torch.zeros(heads, landmarks, strips * strip)
    basis[..., :n] = torch.where(w_up.detach() > threshold, w_up.detach(), 0)
    there = (basis.view(heads, landmarks, strips, strip) != 0).any(-1).mT  # [heads, strips, m]
    if n <= _SKIP_BEYOND:
        there = torch.ones_like(there)
    bits = torch.zeros(heads, strips, 128, dtype=torch.int64)
    bits[..., :landmarks] = there.long()
    # The sum of distinct powers of two sets bits; bit 63 is the sign, and wraps as wanted.
    occupied = (bits.view(heads, strips, 2, 64) << torch.arange(64)).sum(-1)
    return basis[..., :width].contiguous(), occupied


def _score_width(n: int) -> tuple[int, int]:
    """Columns of a score row, in whole pairs of vectors, and strips they make."""
    lanes = native().lanes()
    width = -(-n // (2 * lanes)) * 2 * lanes
    return width, -(-width // (_STRIP_VECTORS * lanes))


def _padded(landmarks: int) -> int:
    lanes = native().lanes()
    return -(-landmarks // lanes) * lanes


def _rows(x: Tensor) -> Tensor:
    """The tensor itself if its rows are contiguous, as slices of a host's qkv are; a copy otherwise."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _view(x: Tensor) -> tuple[int, int, int, int, bool]:
    return (x.data_ptr(), x.stride(0), x.stride(1), x.stride(2), x.dtype == torch.bfloat16)


def _native_weights(landmarks: int, tensors: tuple[Tensor, ...]):
    up, basis, occupied, row_sums, down, start, landmark, value = tensors
    heads, positions, padded = up.shape
    width, _ = _score_width(positions)
    if padded != _padded(landmarks) or basis.shape != (heads, landmarks, width):
        raise BackendError("these weights were packed for another instruction set or another shape: pack them again")
    return native().Weights(
        positions,
        padded,
        width,
        up.data_ptr(),
        basis.data_ptr(),
        occupied.data_ptr(),
        row_sums.data_ptr(),
        down.data_ptr() if down.numel() else 0,
        start.data_ptr(),
        landmark.data_ptr(),
        value.data_ptr(),
    )


def _groups(members: Tensor, num_tokens: int, num_prefix: int):
    """The native groups; ``members`` is int32, contiguous, and must live as long."""
    # The kernels write where the members say.
    if bool(((members >= num_tokens) | ((members < num_prefix) & (members != -1))).any()):
        raise BackendError(f"members must be patch tokens, {num_prefix} to {num_tokens - 1}, or -1")
    return native().Groups(members.data_ptr(), *members.shape)


def _new_output(q: Tensor, prefix: int = 0) -> Tensor:
    """``[batch, heads, n, d]`` laid out as the host's projection wants it: heads innermost, so no copy follows."""
    batch, heads, n, head_dim = q.shape
    return q.new_empty(batch, n - prefix, heads, head_dim).transpose(1, 2)


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
    q, k, v = _rows(q), _rows(k), _rows(v)
    out = _new_output(q)
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
        _view(q),
        _view(k),
        _view(v),
        _view(out),
        _native_weights(landmarks, (up, basis, occupied, row_sums, down, start, landmark, value)),
        _groups(members, known, num_prefix),
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
    return _new_output(q)


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
    basis, occupied = _basis(w_up, basis_threshold)
    lists = a_down.new_empty(batch, heads, count, width, dtype=torch.int32)
    counts = a_down.new_empty(batch, heads, count, dtype=torch.int32)
    weights = native().Weights(
        n, _padded(landmarks), basis.shape[-1], 0, basis.data_ptr(), occupied.data_ptr(), 0, 0, 0, 0, 0
    )
    native().select(
        (batch, heads, n, 1, landmarks, num_prefix),
        coefficients.data_ptr(),
        weights,
        _groups(members, n, num_prefix),
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
        self.padded = _padded(landmarks)
        members = members.int().contiguous()
        up, row_sums = _transposed(w_up)
        coefficients, lists = a_down.detach().float().contiguous(), indices.int().contiguous()
        q, k, v = _rows(q), _rows(k), _rows(v)
        added = None if bias is None else bias.float().contiguous()
        if added is not None and added.shape != k.shape[:3]:
            raise BackendError(f"bias must be {list(k.shape[:3])}, got {tuple(added.shape)}")
        self.held = (members, up, row_sums, coefficients, lists, q, k, v, out, normaliser, added)
        self.native = native().Attend(
            self.shape,
            _view(q),
            _view(k),
            _view(v),
            _view(out),
            coefficients.data_ptr(),
            up.data_ptr(),
            row_sums.data_ptr(),
            self.padded,
            _groups(members, n, num_prefix),
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
    out = _new_output(q, num_prefix)
    normaliser = q.new_zeros(q.shape[:3], dtype=torch.float32)
    call = _Call(q, k, v, out, normaliser, indices, members, a_down, w_up, bias, scale, num_prefix, adds_self)
    native().attend(call.native)
    return out, normaliser


@_attend.register_fake
def _(q, k, v, indices, members, a_down, w_up, bias, scale, num_prefix, adds_self):
    return _new_output(q, num_prefix), q.new_empty(q.shape[:3], dtype=torch.float32)


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
    grad = _rows(grad)
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
        _view(grad),
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
    out = _new_output(q)
    _open(q, k, v, out, of, parent, starts, opened, members, positions, num_prefix, scale, tolerance, closed, (0, 0, 0))
    return out


@fused_cells.register_fake
def _(q, *args):
    return _new_output(q)


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
    q, k, v = _rows(q), _rows(k), _rows(v)
    of, parent, members = (x.int().contiguous() for x in (of, parent, members))
    where = None if positions is None else positions.int().contiguous()
    known = n if where is None else int(max(where.max(), members.max())) + 1
    try:
        native().open_cells(
            (batch, heads, n, head_dim, 0, num_prefix),
            _view(q),
            _view(k),
            _view(v),
            _view(out),
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
