"""Predictor weights as the kernels read them."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from sparsifiner.errors import BackendError
from sparsifiner.ops.cpu.library import native

# Columns of scores computed together, in vectors; the bit sets of `Packed.occupied` are per strip.
_STRIP_VECTORS = 8
# Up to so many tokens nearly every strip has every landmark, and looking for those it lacks costs more than they do.
_SKIP_BEYOND = 512
# With more of its weights non-zero than this, w_down is multiplied as a dense matrix.
_SPARSE_DOWN = 0.25


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
        up, row_sums = transposed(w_up)
        basis, occupied = thresholded(w_up, basis_threshold)
        down = w_down.detach().float()
        empty, none = torch.empty(0), torch.empty(0, dtype=torch.int32)
        if int(down.count_nonzero()) > _SPARSE_DOWN * down.numel():
            return Packed(up, basis, occupied, row_sums, transposed(down)[0], none, none, empty)
        heads, _, n = down.shape
        head, token, landmark = down.mT.nonzero(as_tuple=True)  # by head, then token, then landmark
        per_token = torch.bincount(head * n + token, minlength=heads * n)
        start = torch.cat([per_token.new_zeros(1), per_token.cumsum(0)]).int()
        value = down[head, landmark, token].contiguous()
        return Packed(up, basis, occupied, row_sums, empty, start, landmark.int(), value)


_SPARSE_TYPES = (torch.int32, torch.int32, torch.float32)  # of start, landmark and value


@torch.library.custom_op("sparsifiner::pack", mutates_args=())
def _pack(w_down: Tensor, w_up: Tensor, basis_threshold: float) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    up, row_sums = transposed(w_up)
    basis, occupied = thresholded(w_up, basis_threshold)
    return up, basis, occupied, row_sums, transposed(w_down)[0]


@_pack.register_fake
def _(w_down, w_up, basis_threshold):
    heads, landmarks, n = w_up.shape
    width, strips = score_width(n)
    up = w_up.new_empty(heads, n, padded_landmarks(landmarks), dtype=torch.float32)
    return (
        up,
        w_up.new_empty(heads, landmarks, width, dtype=torch.float32),
        w_up.new_empty(heads, strips, 2, dtype=torch.int64),
        w_up.new_empty(heads, up.shape[-1], dtype=torch.float32),
        torch.empty_like(up),
    )


def transposed(weights: Tensor) -> tuple[Tensor, Tensor]:
    """``[heads, n, padded]`` with whole vectors of landmarks, and the sums over n ``[heads, padded]``."""
    heads, landmarks, n = weights.shape
    out = torch.zeros(heads, n, padded_landmarks(landmarks))
    out[..., :landmarks] = weights.detach().mT
    return out, out.sum(1)


def thresholded(w_up: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """`Packed.basis` and `Packed.occupied`."""
    heads, landmarks, n = w_up.shape
    width, strips = score_width(n)
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


def score_width(n: int) -> tuple[int, int]:
    """Columns of a score row, in whole pairs of vectors, and strips they make."""
    lanes = native().lanes()
    width = -(-n // (2 * lanes)) * 2 * lanes
    return width, -(-width // (_STRIP_VECTORS * lanes))


def padded_landmarks(landmarks: int) -> int:
    """So many, in whole vectors."""
    lanes = native().lanes()
    return -(-landmarks // lanes) * lanes


def native_weights(landmarks: int, tensors: tuple[Tensor, ...]):
    """What `Packed.tensors` gave, as the kernels take it; the tensors must live as long."""
    up, basis, occupied, row_sums, down, start, landmark, value = tensors
    heads, positions, padded = up.shape
    width, _ = score_width(positions)
    if padded != padded_landmarks(landmarks) or basis.shape != (heads, landmarks, width):
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
