"""sparsify() and restore(): a dense model to a sparse one and back, by swapping its attention modules."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import math
import operator
import statistics
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from sparsifiner import processor
from sparsifiner.config import SparseConfig
from sparsifiner.errors import ConfigError, UnsupportedModelError
from sparsifiner.hosts import Found, Host, locate, table
from sparsifiner.nn.attention import SparseAttention
from sparsifiner.nn.grid import TokenGrid
from sparsifiner.sides import Sides, on_grid
from sparsifiner.tokens.dynamicvit import TokenScorer
from sparsifiner.tokens.install import install_pruning, remove_pruning

_RECORD = "_sparsifiner"
_PATH = "_sparsifiner_part"  # of a model that holds the converted one: where


@dataclasses.dataclass
class Conversion:
    """What a converted model remembers about its conversion.

    ``scorers`` are networks of DynamicViT not in use now; ``holder`` is the class of the model that was given, where
    the converted one is a part of it.
    """

    host_name: str
    config: SparseConfig
    grid: TokenGrid
    watchers: list[Any]
    scorers: dict[int, TokenScorer]
    tuning: tuple[SparseConfig, dict[str, Any]] | None = None  # the settings `tune` chose, and what it measured
    holder: str | None = None

    @property
    def host(self) -> Host:
        """The host's entry in the table."""
        return table()[self.host_name]


def find_part(model: nn.Module) -> Found:
    """What of a dense model can be converted: itself or an encoder in it; or an error that says why nothing can."""
    if not isinstance(model, nn.Module):
        raise UnsupportedModelError(f"expected a torch module, got {type(model).__name__}")
    return locate(model)


def find_host(model: nn.Module) -> Host:
    """The host whose models this is one of, or an error that says why there is none."""
    found = find_part(model)
    if found.path:
        raise UnsupportedModelError(
            f"a {type(model).__name__} holds a model that can be converted but is none itself: this is done with its "
            f"{found.path}, a {type(found.module).__name__}"
        )
    return found.host


def host_of(model: nn.Module) -> Host:
    """The host of a model, dense or converted."""
    record = getattr(model, _RECORD, None)
    return find_host(model) if record is None else record.host


def part_of(student: nn.Module) -> nn.Module:
    """The converted model itself, where `sparsify` was given one that holds it."""
    return student.get_submodule(path_of(student))


def path_of(student: nn.Module) -> str:
    """Where in a model is what `sparsify` converted of it; empty where that is the model itself."""
    return getattr(student, _PATH, "")


class Front(NamedTuple):
    """How cells are opened from so many patches on, where at most so much is kept."""

    patches: int
    tile: Sides | None
    cells: tuple[Sides, ...]
    breadth: float
    most: float = 1.0


# What measured best by the number of patches, see docs/cells.md; the last row that fits counts.
FRONTS = (
    Front(patches=0, tile=None, cells=((1, 2),), breadth=3.0),
    Front(patches=150, tile=(4, 4), cells=((1, 2),), breadth=3.0),
    Front(patches=400, tile=(4, 4), cells=((2, 2), (4, 4), (8, 8)), breadth=2.5),
    Front(patches=1100, most=0.15, tile=(4, 4), cells=((1, 2), (2, 4), (4, 8)), breadth=2.0),
)
# The same for clips, of the error and length of lists at 1,568 and 8,192 patches: see docs/video.md.
FRONTS_OF_CLIPS = (Front(patches=0, tile=(2, 2, 4), cells=((2, 1, 2), (4, 2, 4)), breadth=2.0),)


def suggest_config(model: nn.Module, keep: float | Sequence[float], **changes: Any) -> SparseConfig:
    """Settings that measured well without training, for the grid of this model.

    They open cells (``pattern="cells"``), which needs no calibration, with levels and tiles by the number of patches
    and by how much is kept (`FRONTS`, `FRONTS_OF_CLIPS`). With ``pattern="learned"``, or a fixed pattern, they are the
    predictor's. `SparseConfig` has the paper's own defaults; these differ: at most 64 landmarks, one for each square
    cell of the grid (49 on 14 x 14 patches), a ``tau`` of their mean coefficient, and a ``basis_threshold`` that is the
    same share of a key's mean attention at every number of tokens. See docs/cells.md, docs/video.md and
    docs/calibration.md.

    Args:
        model: the dense model that will be converted, or a converted one.
        keep: as in `SparseConfig`.
        **changes: settings of `SparseConfig` to be taken as they are.
    """
    model = part_of(model)
    if not hasattr(model, _RECORD):
        model = find_part(model).module
    grid = host_of(model).grid(model)
    pattern = changes.get("pattern", "cells")
    if pattern == "cells":
        of_predictors = [name for name in ("n_down", "tau", "basis_threshold") if name in changes]
        if of_predictors and "pattern" not in changes:
            raise ConfigError(f"{of_predictors[0]} is of predictors, and cells ask none: say pattern='learned' too")
        return SparseConfig(keep, **(_front(grid.size, keep) | changes))
    # As many as there are cells of equal sides, the smallest of which there are not too many.
    regular = (math.prod(-(-length // side) for length in grid.size) for side in itertools.count(2))
    landmarks = changes.get("n_down") or next(count for count in regular if count <= 64)
    settings = {"n_down": landmarks, "tau": 1 / max(2, landmarks), "basis_threshold": 2 / grid.num_tokens}
    return SparseConfig(keep, **(settings | changes))


def _front(size: Sides, keep: float | Sequence[float]) -> dict[str, Any]:
    """The row of the fronts for a grid, without levels whose cells are larger than it."""
    kept = SparseConfig(keep).keep  # or an error that says what is wrong with it
    mean = statistics.fmean(kept) if isinstance(kept, Sequence) else kept
    fronts = FRONTS if len(size) == 2 else FRONTS_OF_CLIPS
    row = next(row for row in reversed(fronts) if math.prod(size) >= row.patches and mean <= row.most)
    levels = [on_grid(cell, size, "a cell") for cell in row.cells]
    fitting = [cell for cell in levels if all(map(operator.le, cell, size))]
    cells = fitting or [tuple(map(min, levels[0], size))]
    return {"pattern": "cells", "tile": row.tile, "cells": tuple(cells), "breadth": row.breadth}


def sparsify(model: nn.Module, config: SparseConfig) -> nn.Module:
    """Makes a copy of a Vision Transformer, or of a model that holds one, whose attention is sparse.

    Of a model that holds one (a depth estimator's backbone, the image tower of CLIP or of a language model) that part
    is converted and all else left as it is; `calibrate`, `count_flops` and `feature_map` then look at the part alone.

    With ``pattern="cells"`` the copy is ready to use: nothing is added to it. With any other it is uncalibrated: its
    predictors know the geometry of the grid and nothing of the weights. Call `calibrate` before using it.

    Args:
        model: a model of a supported host; it is left untouched and is the natural teacher.
        config: how sparse, and how.

    Returns:
        The converted copy. Host parameters keep their names; predictors are added under ``….attn.predictor.``.

    Raises:
        UnsupportedModelError: the model cannot be converted; the message names the reason.
        ConfigError: the config does not fit this model.
    """
    if isinstance(model, nn.Module) and any(_RECORD in module.__dict__ for module in model.modules()):
        raise UnsupportedModelError(
            "the model is sparse already: change its settings with reconfigure(), or restore() it first"
        )
    if not isinstance(config, SparseConfig):
        raise ConfigError(f"expected a SparseConfig, got {type(config).__name__}")
    found = find_part(model)
    warn_of_bfloat16(model)
    with torch.inference_mode(False):  # tensors made in inference mode could never be calibrated or trained
        student = copy.deepcopy(model)
        _convert(student.get_submodule(found.path), found.host, config, type(model).__name__ if found.path else None)
    if found.path:
        setattr(student, _PATH, found.path)
    return student


def _convert(student: nn.Module, host: Host, config: SparseConfig, holder: str | None) -> None:
    """Makes a dense model sparse, itself."""
    sites = list(host.sites(student))
    grid = host.grid(student)
    for site, settings in zip(sites, config.per_layer(len(sites)), strict=True):
        site.put(
            SparseAttention(
                site.module,
                site.adapter,
                grid,
                num_heads=site.num_heads,
                head_dim=site.head_dim,
                config=config,
                settings=settings,
            )
        )
    scorers: dict[int, TokenScorer] = {}
    _check_holder(config, holder)
    install_pruning(student, host, grid, config.tokens, scorers)
    watchers = [
        student.register_forward_pre_hook(_Entrance(grid)),
        student.register_forward_hook(_Exit(grid), always_call=True),
        host.watch(student, grid),
    ]
    setattr(student, _RECORD, Conversion(host.name, config, grid, watchers, scorers, holder=holder))


def _check_holder(config: SparseConfig, holder: str | None) -> None:
    if holder is not None and config.tokens is not None:
        raise UnsupportedModelError(
            f"tokens cannot be dropped inside a {holder}, which may need every one of them: convert the part that has "
            "them by itself, and put it in its place"
        )


def warn_of_bfloat16(model: nn.Module) -> None:
    """Once, if it has weights in bfloat16 on a CPU on which torch's own bfloat16 faults."""
    if any(weight.dtype is torch.bfloat16 and weight.device.type == "cpu" for weight in model.parameters()):
        processor.warn()


@dataclasses.dataclass
class _Entrance:
    """Tells the grid that a call of the model begins. An object, so that a deep copy tells the copy's own grid."""

    grid: TokenGrid

    def __call__(self, model: nn.Module, inputs: Any) -> None:
        self.grid.enter()


@dataclasses.dataclass
class _Exit:
    """Tells the grid that a call of the model is over."""

    grid: TokenGrid

    def __call__(self, model: nn.Module, inputs: Any, output: Any) -> None:
        self.grid.leave()


def restore(student: nn.Module) -> nn.Module:
    """A dense copy of a converted model: the host again, with its own state-dict keys and current weights."""
    conversion_of(part_of(student))
    return restore_in_place(copy.deepcopy(student))


def restore_in_place(dense: nn.Module) -> nn.Module:
    """Makes a converted model the host again, itself."""
    part = part_of(dense)
    record = conversion_of(part)
    for watcher in record.watchers:
        watcher.remove()
    delattr(part, _RECORD)
    if part is not dense:
        delattr(dense, _PATH)
    remove_pruning(part, record.host)
    for parent in list(dense.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, SparseAttention):
                setattr(parent, name, child.release())
    return dense


def reconfigure(student: nn.Module, **changes: Any) -> None:
    """Changes settings of a converted model in place: all of `SparseConfig` but ``n_down``.

    A model with predictors keeps them where it takes ``pattern="cells"``; one made for cells has none, and takes no
    other pattern.

    DynamicViT's networks are new, and must be trained, unless the model has had some in the same blocks.

    Example:
        ``reconfigure(student, keep=0.05, tile=(2, 2))``
    """
    student = part_of(student)
    record = conversion_of(student)
    config = record.config.replace(**changes)
    _check_holder(config, record.holder)
    layers = sparse_layers(student)
    per_layer = config.per_layer(len(layers))
    for layer in layers:  # before anything is changed
        layer.check(config)
    if config.tokens != record.config.tokens:
        install_pruning(student, record.host, record.grid, config.tokens, record.scorers)
    for layer, settings in zip(layers, per_layer, strict=True):
        layer.configure(config, settings)
    record.config = config


def conversion_of(student: nn.Module) -> Conversion:
    """The record of a converted model, or an error if it is not one."""
    record = getattr(student, _RECORD, None)
    if record is None and (path := path_of(student)):
        raise UnsupportedModelError(
            f"of this {type(student).__name__} only its {path} is converted: this is done with that part, "
            f"student.{path}"
        )
    if record is None:
        raise UnsupportedModelError(
            f"{type(student).__name__} is not a converted model: call sparsify(model, SparseConfig(...)) first"
        )
    return record


def converted(model: nn.Module) -> nn.Module:
    """What `sparsify` gave, where a wrapper was given: of PEFT, DataParallel, torch.compile and the like."""
    marks = {_RECORD, _PATH}
    return next((module for module in model.modules() if not marks.isdisjoint(module.__dict__)), model)


def config_of(student: nn.Module) -> SparseConfig:
    """The settings a converted model runs with now."""
    return conversion_of(part_of(student)).config


def tuning_of(student: nn.Module) -> dict[str, Any] | None:
    """What `tune` measured when it chose the settings the model has now; None if they were not, or are others."""
    tuning = conversion_of(part_of(student)).tuning
    return tuning[1] if tuning is not None and tuning[0] == config_of(student) else None


def note_tuning(student: nn.Module, measured: dict[str, Any]) -> None:
    """Keeps what was measured when the settings the model has now were chosen, for people to read."""
    conversion_of(part_of(student)).tuning = config_of(student), measured


def sparse_layers(student: nn.Module) -> list[SparseAttention]:
    """The converted attention layers in the order they run."""
    return [module for module in student.modules() if isinstance(module, SparseAttention)]


@contextlib.contextmanager
def dense_mode(student: nn.Module) -> Iterator[None]:
    """Within it all tokens stay and every layer runs dense attention: the teacher without a second model.

    Calls of other threads are not concerned.
    """
    grid = conversion_of(part_of(student)).grid
    before, grid.dense = grid.dense, True
    try:
        yield
    finally:
        grid.dense = before
