"""The connectivity predictor's parameters (Eq. 1-3): per head, indexed by token position."""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor, nn

from sparsifiner.errors import BackendError, ConfigError
from sparsifiner.nn.grid import TokenGrid, landmark_pooling, resample
from sparsifiner.ops import cpu
from sparsifiner.sides import Sides, spelled


def is_predictors(name: str) -> bool:
    """Whether a tensor of this name in a state dict is a predictor's; V-JEPA 2 calls a part of its own so."""
    return f".{name}".endswith((".predictor.w_down", ".predictor.w_up"))


class ConnectivityPredictor(nn.Module):
    """``w_down`` and ``w_up`` of one attention layer, ``[heads, m, n]`` each.

    They belong to the grid they were made or calibrated for; at another grid `at` resamples them.

    Before calibration a landmark is the mean key of a cell of the grid, and stands for its cell evenly.
    """

    def __init__(self, num_heads: int, n_down: int, grid: Sides, num_prefix: int) -> None:
        super().__init__()
        patches = math.prod(grid)
        if n_down > patches:
            raise ConfigError(
                f"n_down={n_down} is more landmarks than the {spelled(grid)} grid has patches ({patches})"
            )
        self.grid = grid
        self.num_prefix = num_prefix
        pooling = landmark_pooling(n_down, grid, num_prefix)
        self.w_down = nn.Parameter(pooling.expand(num_heads, -1, -1).clone())
        self.w_up = nn.Parameter(pooling.expand(num_heads, -1, -1).clone())
        # A key, what was made, and the weights it was made of: while they are held no others get their address.
        self._resampled: tuple[tuple, tuple[Tensor, Tensor], tuple] | None = None
        self._packed: tuple[tuple, cpu.Packed, tuple] | None = None

    @property
    def n_down(self) -> int:
        """The number of landmarks."""
        return self.w_down.shape[1]

    def at(self, grid: Sides) -> tuple[Tensor, Tensor]:
        """``(w_down, w_up)`` for a grid; what was resampled is kept until the weights change."""
        if grid == self.grid:
            return self.w_down, self.w_up
        if torch.compiler.is_compiling() or (torch.is_grad_enabled() and self.w_up.requires_grad):
            return self._resample(grid)
        key = (grid, *self._state())
        known = self._resampled  # looked at once: another thread may put its own here at any time
        if known is None or known[0] != key:
            # Not an inference tensor: a later training step may save it.
            with torch.inference_mode(False), torch.no_grad():
                known = self._resampled = (key, self._resample(grid), (self.w_down, self.w_up))
        return known[1]

    def packed(self, grid: TokenGrid, basis_threshold: float) -> cpu.Packed:
        """The weights for a grid as the CPU kernels read them; kept until the weights change."""
        if torch.compiler.is_compiling():
            return self._pack(grid, basis_threshold)
        key = (grid.size, grid.num_fused, basis_threshold, cpu.instruction_set(), *self._state())
        known = self._packed
        if known is None or known[0] != key:
            with torch.inference_mode(False), torch.no_grad():
                known = self._packed = (key, self._pack(grid, basis_threshold), (self.w_down, self.w_up))
        return known[1]

    def _pack(self, grid: TokenGrid, basis_threshold: float) -> cpu.Packed:
        w_down, w_up = self.at(grid.size)
        return cpu.pack(grid.widen(w_down), grid.widen(w_up), basis_threshold)

    def _state(self) -> tuple:
        """Changes whenever a weight does, or another takes its place (`torch.func.functional_call`)."""
        weights = (self.w_down, self.w_up)
        if any(w.is_inference() for w in weights):  # as a model copied in inference mode has; torch counts no changes
            return (object(),)
        try:
            return tuple((id(w), w.data_ptr(), w._version, w.dtype) for w in weights)
        except RuntimeError as error:  # a tensor that torch.vmap maps over has no memory of its own
            raise BackendError("torch.vmap over a predictor's weights needs backend='eager' or 'reference'") from error

    def _resample(self, grid: Sides) -> tuple[Tensor, Tensor]:
        return (
            resample(self.w_down, self.grid, grid, self.num_prefix),
            resample(self.w_up, self.grid, grid, self.num_prefix),
        )

    def rebase(self, grid: Sides) -> None:
        """Makes ``grid`` the predictor's own: the parameters themselves are resampled."""
        if grid == self.grid:
            return
        with torch.no_grad():
            w_down, w_up = self._resample(grid)
        self.w_down = nn.Parameter(w_down, requires_grad=self.w_down.requires_grad)
        self.w_up = nn.Parameter(w_up, requires_grad=self.w_up.requires_grad)
        self.grid, self._resampled, self._packed = grid, None, None

    def __deepcopy__(self, memo: dict) -> ConnectivityPredictor:
        """A copy without what was derived from the weights, which belongs to this module's tensors."""
        twin = object.__new__(type(self))
        memo[id(self)] = twin
        state = {key: value for key, value in self.__dict__.items() if key not in ("_resampled", "_packed")}
        twin.__dict__.update(copy.deepcopy(state, memo), _resampled=None, _packed=None)
        return twin

    def extra_repr(self) -> str:
        """Shown by print(model)."""
        heads, landmarks, n = self.w_down.shape
        return f"heads={heads}, n_down={landmarks}, tokens={n}, grid={self.grid}"
