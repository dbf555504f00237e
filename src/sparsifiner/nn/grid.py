"""Tokens as positions on a grid: landmark cells, and resampling to another grid."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor
from torch.nn import functional

from sparsifiner.errors import ConfigError


@dataclasses.dataclass
class TokenGrid:
    """The grid of patches behind the tokens of the current input; one object shared by a model's layers.

    Mutable on purpose: a host calls `begin` with each input, and blocks that drop tokens tell what is left.

    Attributes:
        size: rows and columns of patches.
        num_prefix: tokens at the start that are no patches (class, distillation, registers).
        prunes: whether blocks that can drop tokens do.
        num_fused: tokens after the prefix that stand for dropped ones; layers treat them as prefix tokens.
        cells: int64 ``[batch, patches left]``, the grid cell of each patch token in ascending order; None for all.
        presence: ``[batch, n]`` in [0, 1], where tokens are dropped by weight instead (training); None for all.
        shares: ``[batch]`` each, what share of the patches counted after each dropping by weight.
    """

    size: tuple[int, int]
    num_prefix: int
    prunes: bool = True
    num_fused: int = 0
    cells: Tensor | None = None
    presence: Tensor | None = None
    shares: list[Tensor] = dataclasses.field(default_factory=list)

    def __deepcopy__(self, memo: dict) -> TokenGrid:
        """A copy without what belongs to the last input."""
        twin = memo[id(self)] = TokenGrid(self.size, self.num_prefix, self.prunes)
        return twin

    @property
    def num_tokens(self) -> int:
        """Prefix tokens and patches of the whole grid, however many are left."""
        return self.num_prefix + self.size[0] * self.size[1]

    @property
    def prefix(self) -> int:
        """How many of the present tokens, at the start, are no patches."""
        return self.num_prefix + self.num_fused

    @property
    def tokens_left(self) -> int:
        """How many tokens there are now."""
        return self.num_tokens if self.cells is None else self.prefix + self.cells.shape[1]

    def begin(self, size: tuple[int, int]) -> None:
        """A new input: all of its tokens are there."""
        self.size, self.num_fused, self.cells, self.presence, self.shares = size, 0, None, None, []

    def drop(self, kept: Tensor, num_fused: int = 0) -> None:
        """Only the present patch tokens ``kept`` (int64 ``[batch, count]``, ascending, counted from 0) are left."""
        self.cells = kept if self.cells is None else self.cells.gather(1, kept)
        self.num_fused = num_fused

    def weigh(self, presence: Tensor) -> None:
        """The tokens stay, and count as much as ``presence`` ``[batch, n]`` says."""
        self.presence = presence
        self.shares.append(presence[:, self.prefix :].mean(1))

    def positions(self) -> Tensor | None:
        """``[batch, n]``: where the present tokens stand among prefix, fused tokens and grid; None if all are there."""
        if self.cells is None:
            return None
        first = torch.arange(self.prefix, device=self.cells.device).expand(len(self.cells), -1)
        return torch.cat([first, self.cells + self.prefix], dim=1)

    def widen(self, weights: Tensor) -> Tensor:
        """Predictor weights ``[heads, m, n]`` with a column of zeros for each fused token, which has no place."""
        if not self.num_fused:
            return weights
        fused = weights.new_zeros(*weights.shape[:-1], self.num_fused)
        return torch.cat([weights[..., : self.num_prefix], fused, weights[..., self.num_prefix :]], dim=-1)

    def pick(self, weights: Tensor) -> Tensor:
        """Predictor weights ``[heads, m, n]`` for the present tokens; ``[batch, heads, m, n]`` if images differ."""
        weights, positions = self.widen(weights), self.positions()
        if positions is not None:
            index = positions[:, None, None].expand(-1, *weights.shape[:2], -1)
            weights = weights.expand(len(positions), -1, -1, -1).gather(3, index)
        if self.presence is not None:
            own = weights if weights.ndim == 4 else weights[None]
            weights = own * self.presence[:, None, None].to(weights.dtype)
        return weights


def landmark_cells(count: int, grid: tuple[int, int]) -> Tensor:
    """Cuts the grid into ``count`` cells as square as can be: int64 ``[rows, columns]``, a cell index each.

    Rows of patches form bands of equal height, each cut into cells of equal width, to one patch.
    """
    rows, columns = grid
    if not 1 <= count <= rows * columns:
        raise ConfigError(f"cannot cut a {rows} x {columns} grid into {count} cells")
    feasible = [bands for bands in range(1, rows + 1) if -(-count // bands) <= columns and bands <= count]

    def elongation(bands: int) -> tuple[float, int]:
        height, width = rows / bands, columns * bands / count
        # Among equals, whole patches and equal bands make the more regular cells.
        return max(height / width, width / height), (rows % bands) + (count % bands)

    bands = min(feasible, key=elongation)
    cells = torch.empty(rows, columns, dtype=torch.int64)
    first = 0
    for band in range(bands):
        here = (band + 1) * count // bands - band * count // bands
        band_rows = slice(band * rows // bands, (band + 1) * rows // bands)
        cells[band_rows] = first + torch.arange(columns) * here // columns
        first += here
    return cells


def landmark_pooling(count: int, grid: tuple[int, int], num_prefix: int) -> Tensor:
    """Each landmark the mean of its cell: ``[count, n]``, rows that sum to one, nothing of the prefix."""
    cells = landmark_cells(count, grid).flatten()
    pooling = torch.zeros(count, num_prefix + len(cells))
    pooling[cells, num_prefix + torch.arange(len(cells))] = 1.0
    return pooling / pooling.sum(1, keepdim=True)


def resample(weights: Tensor, old: tuple[int, int], new: tuple[int, int], num_prefix: int) -> Tensor:
    """Carries ``[heads, m, n]`` from one grid to another as position embeddings are: bicubic over the patches.

    Prefix columns are copied. Rows keep the sum over their patches: a landmark stays a mean of keys
    (w_down), and the attention mass it stands for is spread over more or fewer keys (w_up).
    """
    if old == new:
        return weights
    heads, landmarks, _ = weights.shape
    prefix, patches = weights[..., :num_prefix], weights[..., num_prefix:]
    images = patches.reshape(1, heads * landmarks, *old).float()
    resized = functional.interpolate(images, size=new, mode="bicubic", antialias=True)
    resized = resized.reshape(heads, landmarks, -1)
    before, after = patches.float().sum(-1, keepdim=True), resized.sum(-1, keepdim=True)
    # Rows that sum to nearly nothing have no mass to keep and would only be blown up.
    usable = after.abs() > 1e-3 * resized.abs().sum(-1, keepdim=True)
    area = old[0] * old[1] / (new[0] * new[1])
    resized = resized * torch.where(usable, before / torch.where(usable, after, 1), area)
    return torch.cat([prefix, resized.to(weights.dtype)], dim=-1)
