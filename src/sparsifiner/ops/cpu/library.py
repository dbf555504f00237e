"""The compiled kernels: whether they are there, what they take, and how tensors are handed to them.

Pointers go down raw, so everything about a tensor is checked on this side first.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from sparsifiner.errors import BackendError

_native: ModuleType | None
_missing = ""
try:  # after torch, whose OpenMP library it then shares
    from sparsifiner import _native  # pyright: ignore[reportAttributeAccessIssue]
except ImportError as error:
    _native, _missing = None, str(error)

_MAX_HEAD_DIM: int = _native.max_head_dim if _native else 0
_MAX_LANDMARKS: int = _native.max_landmarks if _native else 0

_DTYPES = (torch.float32, torch.bfloat16)


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


def rows(x: Tensor) -> Tensor:
    """The tensor itself if its rows are contiguous, as slices of a host's qkv are; a copy otherwise."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def view(x: Tensor) -> tuple[int, int, int, int, bool]:
    """Where it lies, its strides, and whether it is bfloat16: the kernels' `Tokens`."""
    return (x.data_ptr(), x.stride(0), x.stride(1), x.stride(2), x.dtype == torch.bfloat16)


def groups_of(members: Tensor, num_tokens: int, num_prefix: int):
    """The native groups; ``members`` is int32, contiguous, and must live as long."""
    # The kernels write where the members say.
    if bool(((members >= num_tokens) | ((members < num_prefix) & (members != -1))).any()):
        raise BackendError(f"members must be patch tokens, {num_prefix} to {num_tokens - 1}, or -1")
    return native().Groups(members.data_ptr(), *members.shape)


def new_output(q: Tensor, prefix: int = 0) -> Tensor:
    """``[batch, heads, n, d]`` laid out as the host's projection wants it: heads innermost, so no copy follows."""
    batch, heads, n, head_dim = q.shape
    return q.new_empty(batch, n - prefix, heads, head_dim).transpose(1, 2)
