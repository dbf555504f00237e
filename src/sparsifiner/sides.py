"""Sides of grids, tiles and cells: (rows, columns) of an image, (frames, rows, columns) of a clip. Light: no torch."""

from __future__ import annotations

from collections.abc import Sequence

from sparsifiner.errors import ConfigError

Sides = tuple[int, ...]


def spelled(sides: Sequence[int]) -> str:
    """For sentences: ``2 x 4``."""
    return " x ".join(map(str, sides))


def short(sides: Sequence[int]) -> str:
    """As people write them, and for names of forms: ``2x4``."""
    return "x".join(map(str, sides))


def on_grid(part: Sides, grid: Sides, what: str) -> Sides:
    """The sides of a tile or cell with one number for each side of the grid: rows and columns alone are a frame deep.

    Args:
        part: of a tile or a cell.
        grid: of the patches.
        what: for the error, of a part that is several frames deep where the grid has none.
    """
    if len(part) <= len(grid):
        return (1,) * (len(grid) - len(part)) + part
    if part[0] == 1:
        return part[1:]
    raise ConfigError(
        f"{what} of {spelled(part)} patches is {part[0]} frames deep and the model's grid of {spelled(grid)} has no "
        f"frames: give rows and columns alone, {short(part[1:])}"
    )
