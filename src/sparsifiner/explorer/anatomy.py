"""The parts of a model that no request changes, read once: only the engine's thread may look at the model itself."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn

from sparsifiner.config import TokenConfig
from sparsifiner.convert import config_of, conversion_of, sparse_layers
from sparsifiner.explorer.refusal import Refusal
from sparsifiner.nn.attention import SparseAttention
from sparsifiner.nn.grid import TokenGrid


@dataclasses.dataclass(frozen=True)
class Anatomy:
    """What the page must know of a model to point at its parts.

    Attributes:
        image: height and width of the images it takes.
        grid: rows and columns of patches.
        prefix: names of the tokens that come before the patches.
        basis: of each layer ``[heads, m, patches]``: ``w_up`` without the prefix; no rows without predictors.
        pattern: how keys are chosen.
        token_blocks: the blocks that drop tokens if asked to; None if this model cannot.
    """

    image: tuple[int, int]
    grid: tuple[int, int]
    prefix: tuple[str, ...]
    basis: tuple[Tensor, ...]
    pattern: str
    token_blocks: tuple[int, ...] | None

    @property
    def patches(self) -> int:
        """Patches of the whole grid."""
        return self.grid[0] * self.grid[1]

    @property
    def tokens(self) -> int:
        """Prefix tokens and patches."""
        return len(self.prefix) + self.patches

    def check(self, layer: int, head: int, query: int = 0) -> None:
        """An error if there is no such layer, head or query."""
        _check("layer", "layers", layer, len(self.basis))
        _check("head", "heads", head, len(self.basis[layer]))
        _check("query", "queries", query, self.tokens)


def _check(what: str, plural: str, number: int, count: int) -> None:
    if not 0 <= number < count:
        raise Refusal(404, f"{what} {number} does not exist: the model has {plural} 0 to {count - 1}")


def anatomy_of(student: nn.Module) -> Anatomy:
    """Reads a model that nobody runs at the same time."""
    host = conversion_of(student).host
    grid = host.grid(student)
    rows, columns = grid.size  # of photos: `lens_of` has refused what is not timm's
    first = ["class token"] if host.class_token(student) else []
    names = first + [f"extra token {number + 1}" for number in range(grid.num_prefix)]
    with torch.inference_mode():
        basis = [_basis(layer, grid) for layer in sparse_layers(student)]
    return Anatomy(
        image=host.image_size(student),
        grid=(rows, columns),
        prefix=tuple(names[: grid.num_prefix]),
        basis=tuple(basis),
        pattern=config_of(student).pattern,
        token_blocks=_token_blocks(student),
    )


def _basis(layer: SparseAttention, grid: TokenGrid) -> Tensor:
    if not layer.has_predictor:
        return torch.empty(layer.num_heads, 0, grid.num_tokens - grid.num_prefix)
    return layer.predictor.at(grid.size)[1][..., grid.num_prefix :].clone()


def _token_blocks(student: nn.Module) -> tuple[int, ...] | None:
    blocks = conversion_of(student).host.blocks(student)
    tokens = config_of(student).tokens
    numbers = (tokens or TokenConfig(0.5)).blocks_of(len(blocks))
    if tokens is None and any(blocks[number].adapter is None for number in numbers):
        return None
    return numbers if len(blocks) == len(sparse_layers(student)) else None
