"""What the page is told: plain dicts of numbers, lists and words."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparsifiner import __version__
from sparsifiner.config import SparseConfig, TokenConfig, name_tile
from sparsifiner.errors import ConfigError
from sparsifiner.explorer import pictures, sessions
from sparsifiner.explorer.anatomy import Anatomy
from sparsifiner.explorer.engine import LayerPass, Pass, attention_row
from sparsifiner.explorer.refusal import Refusal
from sparsifiner.explorer.subject import Subject
from sparsifiner.inspect.capture import seen_cells

TOP_CLASSES = 5


def describe(subject: Subject, anatomy: Anatomy, config: SparseConfig) -> dict[str, Any]:
    """The model, its own settings, and the images that are offered."""
    samples = subject.gallery.samples.values()
    return {
        "version": __version__,
        "model": {
            "name": subject.name,
            "tokens": anatomy.tokens,
            "grid": anatomy.grid,
            "image": anatomy.image,
            "prefix": anatomy.prefix,
            "layers": [{"heads": len(basis), "landmarks": basis.shape[1]} for basis in anatomy.basis],
            "classes": len(subject.classes),
            "pattern": anatomy.pattern,
            "token_blocks": anatomy.token_blocks,
            "token_method": (config.tokens or TokenConfig(0.5)).method,
        },
        "settings": _settings(config),
        "images": [{"id": s.key, "name": s.name, "credit": s.credit, "link": s.link} for s in samples],
        "notes": subject.notes,
        "limits": {
            "bytes": pictures.MAX_BYTES,
            "pixels": pictures.MAX_PIXELS,
            "images": sessions.MAX_IMAGES,
            "heartbeat": sessions.HEARTBEAT,
        },
    }


def _settings(config: SparseConfig) -> dict[str, Any]:
    return {
        "keep": config.keep,
        "tau": config.tau,
        "basis_threshold": config.basis_threshold,
        "residual": config.residual,
        "tile": name_tile(config.tile),
        "token_keep": 1.0 if config.tokens is None else config.tokens.keep,
    }


def change(config: SparseConfig, anatomy: Anatomy, given: dict[str, Any]) -> SparseConfig:
    """The model's own settings, but for those that are given and not None; checked."""
    changes = {name: value for name, value in given.items() if value is not None}
    if "tile" in changes:
        tiles = [_tile(part, anatomy.grid) for part in changes["tile"].split(",")]
        changes["tile"] = tiles if len(tiles) > 1 else tiles[0]
    if "token_keep" in changes:
        own = config.tokens or TokenConfig(0.5)
        tokens = TokenConfig(changes.pop("token_keep"), own.method, own.blocks, own.fuse)
        changes["tokens"] = None if tokens.keep == 1 else tokens
        if changes["tokens"] and anatomy.token_blocks is None:
            raise ConfigError("this model's blocks cannot drop tokens: leave token_keep at 1")
    changed = config.replace(**changes)
    changed.per_layer(len(anatomy.basis))
    return changed


def _tile(text: str, grid: tuple[int, int]) -> tuple[int, int] | None:
    if text == "none":
        return None
    sides = text.split("x")
    if len(sides) != 2 or not all(side.isascii() and side.isdecimal() and len(side) < 5 for side in sides):
        raise ConfigError(f"tile must be 'none' or ROWSxCOLUMNS, such as 2x2, got {text[:20]!r}")
    rows, columns = int(sides[0]), int(sides[1])
    if rows > grid[0] or columns > grid[1]:
        raise ConfigError(f"tile {rows}x{columns} is larger than the grid of {grid[0]} x {grid[1]} patches")
    return rows, columns


def summary(classes: list[str], anatomy: Anatomy, run: Pass, dense: Tensor) -> dict[str, Any]:
    """What a pass predicts, costs and keeps, layer by layer."""
    statistics = [layer.statistics for layer in run.layers]
    heads = sum(len(basis) for basis in anatomy.basis)
    flops = run.flops
    return {
        "settings": _settings(run.config),
        "predictions": _predictions(classes, dense, run.logits),
        "costs": {
            "core": flops.attention,
            "predictor": flops.predictor,
            "residual": flops.residual,
            "attention": flops.mhsa,
            "dense_attention": flops.dense_attention,
            "total": flops.total,
            "dense_total": flops.dense_total,
        },
        "connections": {
            "kept": sum(layer.connections for layer in statistics),
            "all": heads * anatomy.patches * anatomy.tokens,
        },
        "recall": sum(layer.recall for layer in statistics) / len(statistics),
        "layers": [_layer(layer) for layer in run.layers],
    }


def _layer(layer: LayerPass) -> dict[str, Any]:
    return {
        "dense": layer.is_dense,
        "tokens": layer.statistics.tokens,
        "budget": layer.budget,
        "recall": layer.statistics.recall,
        "heads": layer.statistics.recall_per_head,
        "kept_share": layer.statistics.kept_share,
        "cells": None if layer.cells is None else layer.cells.tolist(),
    }


def _predictions(classes: list[str], dense: Tensor, sparse: Tensor) -> dict[str, Any] | None:
    """The classes either model finds most likely, the dense one's first."""
    if not classes:
        return None
    both = torch.stack([dense, sparse]).double().softmax(1)
    top = both.topk(min(TOP_CLASSES, len(classes))).indices
    chosen = list(dict.fromkeys(top.flatten().tolist()))
    listed = [
        {"class": number, "name": classes[number], "dense": both[0, number].item(), "sparse": both[1, number].item()}
        for number in chosen
    ]
    return {"dense": top[0, 0].item(), "sparse": top[1, 0].item(), "top": listed}


def view(anatomy: Anatomy, run: Pass, layer: int, head: int, query: int) -> dict[str, Any]:
    """What one query attends to in one layer and head.

    Args:
        anatomy: of the model.
        run: the pass that is looked at.
        layer: which layer, from 0.
        head: which head, from 0.
        query: a token of the whole grid, prefix tokens first, from 0.
    """
    anatomy.check(layer, head, query)
    found = run.layers[layer]
    row = attention_row(found, head, _position(anatomy, found, query), run.config.residual)
    maps = {"mask": row.mask.int(), "full": row.full, "sparse": row.sparse, "used": row.used, "estimate": row.estimate}
    return {
        "layer": layer,
        "head": head,
        "query": query,
        "dense": found.is_dense,
        "tokens": found.q.shape[1],
        "kept": int(row.mask.sum()),
        "recall": row.recall,
        "maps": {
            name: None if values is None else _spread(values, found, anatomy.patches) for name, values in maps.items()
        },
        "coefficients": None if row.coefficients is None else _numbers(row.coefficients),
        "cells": _cells(anatomy, found, head, query),
    }


def _cells(anatomy: Anatomy, layer: LayerPass, head: int, query: int) -> list[int | None] | None:
    """The number of the cell as which each patch is seen, opened or not; None for prefix queries and without cells."""
    position = _position(anatomy, layer, query)
    if layer.opened is None or position < layer.num_prefix:
        return None
    numbers = seen_cells(layer.opened, torch.tensor([position]))[0, head, 0].tolist()
    return _on_grid(numbers, layer, anatomy.patches)


def _position(anatomy: Anatomy, layer: LayerPass, query: int) -> int:
    """Where a token of the whole grid stands among those that are left."""
    cell = query - len(anatomy.prefix)
    if cell < 0:
        return query
    if layer.cells is None:
        return layer.num_prefix + cell
    there = (layer.cells == cell).nonzero()
    if not len(there):
        row, column = divmod(cell, anatomy.grid[1])
        raise Refusal(
            409,
            f"the patch in row {row + 1}, column {column + 1} was dropped before this layer: choose another patch, an "
            "earlier layer, or keep more tokens",
        )
    return layer.num_prefix + int(there[0])


def _spread(values: Tensor, layer: LayerPass, cells: int) -> dict[str, list[Any]]:
    """Values of present tokens as those of the prefix and of every cell of the grid, None where one was dropped."""
    numbers = _numbers(values)
    return {"prefix": numbers[: layer.num_prefix], "patches": _on_grid(numbers[layer.num_prefix :], layer, cells)}


def _on_grid(patches: list[Any], layer: LayerPass, cells: int) -> list[Any]:
    """Values of present patches at their places on the grid, None where one was dropped."""
    if layer.cells is None:
        return patches
    spread: list[Any] = [None] * cells
    for cell, value in zip(layer.cells.tolist(), patches, strict=True):
        spread[cell] = value
    return spread


def _numbers(values: Tensor) -> list[float]:
    """Five digits are more than anybody sees, and a third of the bytes."""
    return [float(f"{value:.5g}") for value in values.tolist()]


def basis(anatomy: Anatomy, layer: int, head: int) -> dict[str, Any]:
    """The rows of ``w_up`` of one head: no image and no setting changes them."""
    anatomy.check(layer, head)
    return {"layer": layer, "head": head, "rows": [_numbers(row) for row in anatomy.basis[layer][head]]}
