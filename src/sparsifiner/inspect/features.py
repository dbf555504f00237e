"""feature_map(): the tokens of a model that drops some, back on the grid."""

from __future__ import annotations

import contextlib
import math
from typing import Any, Literal

import torch
from torch import Tensor, nn

from sparsifiner.convert import conversion_of, part_of
from sparsifiner.errors import ConfigError
from sparsifiner.hosts import tokens_of


def feature_map(
    student: nn.Module, images: Tensor, *, dropped: Literal["last", "zero"] = "last"
) -> tuple[Tensor, Tensor]:
    """Runs a converted model and lays the last block's patch tokens out on the grid: for dense prediction.

    Args:
        student: a converted model, whether it drops tokens or not.
        images: ``[batch, channels, height, width]``.
        dropped: where a token was dropped, ``"last"`` puts what it was when it was dropped, ``"zero"`` nothing.

    Returns:
        Features ``[batch, D, rows, columns]``, before the host's last norm, and a boolean ``[batch, rows, columns]``,
        True where the token was there to the end. Of clips frames come before rows.

    Example:
        ``features, kept = feature_map(student, images)``
    """
    if dropped not in ("last", "zero"):
        raise ConfigError(f"dropped must be 'last' or 'zero', got {dropped!r}")
    student = part_of(student)
    record = conversion_of(student)
    grid, sites = record.grid, record.host.blocks(student)
    canvas: list[Tensor] = []  # one tensor, of all cells

    def patches_of(tokens: Tensor) -> Tensor:
        """Also where they are on a grid already, or where other tokens come after them."""
        tokens = tokens.flatten(1, -2)
        return tokens[:, grid.prefix - sites[0].behind : tokens.shape[1] - sites[0].behind]

    def prime(_: nn.Module, inputs: tuple[Any, ...]) -> None:
        canvas[:] = [patches_of(inputs[0])]  # before the first block all tokens are there

    def paint(_: nn.Module, __: Any, output: Any) -> None:
        patches, merged = patches_of(tokens_of(output)), grid.merged()
        if grid.cells is None:
            canvas[:] = [patches]
            return
        below = canvas[0] if dropped == "last" else torch.zeros_like(canvas[0])
        index = grid.cells[..., None].expand_as(patches)
        if merged is not None:  # a token that stands for many is not the one whose place it has
            patches = torch.where(merged[..., None], below.gather(1, index), patches)
        canvas[:] = [below.scatter(1, index, patches)]

    with contextlib.ExitStack() as stack:
        blocks = [site.module for site in sites]
        stack.callback(blocks[0].register_forward_pre_hook(prime).remove)
        for block in blocks:
            stack.callback(block.register_forward_hook(paint).remove)
        student(images)
    call = grid.latest
    kept = torch.ones(len(images), math.prod(call.size), dtype=torch.bool, device=canvas[0].device)
    if call.cells is not None:
        merged = call.merged()
        there = torch.ones_like(call.cells, dtype=torch.bool) if merged is None else ~merged
        kept = torch.zeros_like(kept).scatter_(1, call.cells, there)
    return canvas[0].mT.unflatten(2, call.size), kept.unflatten(1, call.size)
