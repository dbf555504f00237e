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

    Mutable on purpose: a host that takes images of any size sets ``size`` before its blocks run.
    """

    size: tuple[int, int]
    num_prefix: int

    @property
    def num_tokens(self) -> int:
        """Prefix tokens and patches."""
        return self.num_prefix + self.size[0] * self.size[1]


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
