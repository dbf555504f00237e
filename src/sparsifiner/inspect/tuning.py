"""tune(): which form of attention pays on the machine at hand, measured once and written into the model's settings.

A measurement and not a model, because the crossover depends on the instruction set, the caches, the threads and on how
good this machine's dense attention is; and on how many keys a layer's queries look for, so each layer has its own. But
what a model computes is never decided while it runs: `tune` changes the config, on purpose and on record.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from sparsifiner.config import SparseConfig, Tile, name_tile, parse_tile
from sparsifiner.convert import config_of, conversion_of, note_tuning, part_of, reconfigure, sparse_layers
from sparsifiner.data.batches import as_batches
from sparsifiner.errors import CheckpointError, ConfigError
from sparsifiner.inspect.machine import machine_name
from sparsifiner.inspect.speed import take_turns
from sparsifiner.nn.attention import SparseAttention
from sparsifiner.progress import Progress

MARGIN = 0.97  # measurements are noisy: what loses more must be faster than that, and a conversion never slower
SECONDS = 0.05  # for each form of each layer
DENSE = "dense"
PER_QUERY = "per query"


@dataclasses.dataclass(frozen=True)
class LayerTiming:
    """The least of many times of one layer's attention in each form, in milliseconds.

    The forms are in the order of what they lose, which is the order in which they are preferred: ``"dense"`` loses
    nothing, ``"per query"`` less than a tile, a small tile less than a large one. A layer whose budget is all tokens
    has none.
    """

    milliseconds: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def dense(self) -> float | None:
        """The time of dense attention."""
        return self.milliseconds.get(DENSE)

    @property
    def sparse(self) -> float | None:
        """The least time of a sparse form."""
        return min((time for form, time in self.milliseconds.items() if form != DENSE), default=None)

    @property
    def chosen(self) -> str:
        """Of the sparse forms that beat dense beyond doubt, the first that is as fast as the fastest; else dense."""
        times = self.milliseconds
        pays = {form: time for form, time in times.items() if form != DENSE and time <= MARGIN * times[DENSE]}
        return next((form for form, time in pays.items() if MARGIN * time <= min(pays.values())), DENSE)


@dataclasses.dataclass(frozen=True)
class TuningReport:
    """What `tune` and `time_layers` found.

    Attributes:
        layers: a timing each.
        images: in the batch that was timed.
        tokens: of each image.
        threads: of torch.
        dtype: of the model's weights.
        machine: its name, as `sparsifiner bench` has it.
    """

    layers: tuple[LayerTiming, ...]
    images: int
    tokens: int
    threads: int
    dtype: str = "float32"
    machine: str = ""

    @property
    def dense(self) -> tuple[int, ...]:
        """The layers in which dense attention is the faster, or as fast."""
        timed = ((number, layer) for number, layer in enumerate(self.layers) if layer.milliseconds)
        return tuple(number for number, layer in timed if layer.chosen == DENSE)

    def settings(self, config: SparseConfig) -> dict[str, Any]:
        """What `reconfigure` is to be told. Layers that are dense keep their tile, should they be made sparse again."""
        tiles = list(config.tile_per_layer(len(self.layers)))
        for number, layer in enumerate(self.layers):
            if layer.milliseconds and layer.chosen != DENSE:
                tiles[number] = _tile_of(layer.chosen)
        return {"dense": self.dense, "tile": tiles[0] if len(set(tiles)) == 1 else tiles}

    def to_dict(self) -> dict[str, Any]:
        """For JSON; `from_dict` reads it."""
        layers = [
            {"milliseconds": dict(layer.milliseconds), "chosen": layer.chosen if layer.milliseconds else None}
            for layer in self.layers
        ]
        about = {name: getattr(self, name) for name in ("images", "tokens", "threads", "dtype", "machine")}
        return {"layers": layers, "dense": list(self.dense)} | about

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> TuningReport:
        """Reads what `to_dict` wrote, out of a checkpoint say; an error if it is anything else."""
        try:
            layers = []
            for layer in content["layers"]:
                times = {str(form): float(time) for form, time in layer["milliseconds"].items()}
                if times and DENSE not in times:
                    raise ValueError("no time of dense attention")
                layers.append(LayerTiming(times))
            counts = [int(content[name]) for name in ("images", "tokens", "threads")]
            return cls(tuple(layers), *counts, dtype=str(content["dtype"]), machine=str(content["machine"]))
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise CheckpointError(f"what tune noted is damaged: {type(error).__name__} {error}") from None

    @property
    def conditions(self) -> str:
        """What was measured, in words."""
        threads = f"{self.threads} thread" + "s" * (self.threads > 1)
        return f"{self.tokens} tokens, batch {self.images}, {threads}"

    def __str__(self) -> str:
        forms = list(dict.fromkeys(form for layer in self.layers for form in layer.milliseconds))
        lines = [
            f"attention at {self.conditions}, {self.dtype}, on {self.machine or 'a machine without a name'}",
            f"taken: dense, unless a sparse form is {100 * (1 - MARGIN):.0f} % faster; of those, the first that is as "
            "fast as the fastest",
            "  ".join(["layer", *(f"{form} ms" for form in forms), "taken"]),
        ]
        for number, layer in enumerate(self.layers):
            times = [layer.milliseconds.get(form) for form in forms]
            told = ["-" if time is None else f"{time:.3f}" for time in times]
            padded = [text.rjust(len(form) + 3) for text, form in zip(told, forms, strict=True)]
            chosen = layer.chosen if layer.milliseconds else "dense by its budget"
            lines.append("  ".join([f"{number:5d}", *padded, chosen]))
        return "\n".join(lines)


def tune(
    student: nn.Module,
    images: Tensor | Iterable[Any],
    *,
    tiles: Sequence[Tile] | None = None,
    seconds: float = SECONDS,
    progress: Progress | None = None,
) -> TuningReport:
    """Measures each layer on this machine, and gives it the form of attention that is fastest there.

    Dense attention loses nothing, so it stays where no sparse form is at least 3 % faster. Of the sparse forms that
    are, a list per query loses less than one shared in a tile, and a small tile less than a large one: the first in
    this order that is within 3 % of the fastest is taken. The outcome is the settings ``dense`` and ``tile`` of the
    model's config, which travel with the checkpoint together with what was measured; ``reconfigure(student, dense=(),
    tile=(4, 4))`` takes them back. A model that is to be trained should be tuned before.

    Args:
        student: a converted model, at the size, the batch size and the number of threads it will run with.
        images: a batch of preprocessed images, or an iterable of batches, whose first is taken.
        tiles: to be compared in each layer, None for a list per query; if not given, a list per query and the tiles
            the config has now.
        seconds: for each form in each layer.
        progress: called with a title and a number of layers; returns a function that is told how many are done.

    Example:
        ``report = tune(student, images[:8], tiles=[None, (2, 2), (4, 4)])``
    """
    config = config_of(student)
    if tiles is None:
        tiles = (None, *config.tiles)
    elif not tiles:
        raise ConfigError("tiles is empty: name some to compare, None for a list per query")
    report = time_layers(student, images, tiles=tiles, seconds=seconds, progress=progress)
    reconfigure(student, **report.settings(config))
    note_tuning(student, report.to_dict())
    return report


def time_layers(
    student: nn.Module,
    images: Tensor | Iterable[Any],
    *,
    tiles: Sequence[Tile] | None = None,
    seconds: float = SECONDS,
    progress: Progress | None = None,
) -> TuningReport:
    """What `tune` measures, without its consequences; layers that are dense by setting are timed all the same.

    Without ``tiles``, each layer is timed with the tile it has.
    """
    student = part_of(student)
    batch = next(as_batches(images, sys.maxsize))
    layers = sparse_layers(student)
    if tiles is not None:  # an error now, if one is none
        tiles = [tile for each in tiles for tile in config_of(student).replace(tile=each).tiles or (None,)]
    found: dict[int, LayerTiming] = {}
    advance = progress("timing attention, layers", len(layers)) if progress else None

    def timed(layer: SparseAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        layer.core = None
        if not layer.is_dense(q.shape[2]):
            found[id(layer)] = _time(layer, q, k, v, [layer.tile] if tiles is None else tiles, seconds)
        if advance:
            advance(1)
        return functional.scaled_dot_product_attention(q, k, v, scale=layer.scale)

    weight = next(student.parameters())
    with _as_it_would_run(student), torch.inference_mode():
        for layer in layers:
            layer.core = timed
        student(batch.to(weight.device))
    grid = conversion_of(student).grid
    return TuningReport(
        layers=tuple(found.get(id(layer), LayerTiming()) for layer in layers),
        images=len(batch),
        tokens=grid.num_prefix + math.prod(grid.latest.size),
        threads=torch.get_num_threads(),
        dtype=str(weight.dtype).removeprefix("torch."),
        machine=machine_name(),
    )


def _time(
    layer: SparseAttention, q: Tensor, k: Tensor, v: Tensor, tiles: Sequence[Tile], seconds: float
) -> LayerTiming:
    def finish() -> None:
        if q.is_cuda:  # whose kernels run on after a call has returned
            torch.cuda.synchronize(q.device)

    def sparse(tile: Tile) -> Any:
        twin = copy.copy(layer)  # the same weights, but each form its own notes of the grid, as in a model that has it
        twin.__dict__["tile"] = tile

        def run() -> None:
            twin.attend(q, k, v)
            finish()

        return run

    def dense() -> None:
        functional.scaled_dot_product_attention(q, k, v, scale=layer.scale)
        finish()

    forms = {_name(tile): sparse(tile) for tile in sorted(set(tiles), key=_loses)}
    times = take_turns({DENSE: dense, **forms}, seconds)
    return LayerTiming({form: timing.minimum for form, timing in times.items()})


def _loses(tile: Tile) -> tuple[int, ...]:
    """For sorting: the more queries share a list, the less it is that of any of them."""
    return (0,) if tile is None else (math.prod(tile), *tile)


def _name(tile: Tile) -> str:
    return PER_QUERY if tile is None else f"tile {name_tile(tile)}"


def _tile_of(form: str) -> Tile:
    return None if form == PER_QUERY else parse_tile(form.removeprefix("tile "))


@contextlib.contextmanager
def _as_it_would_run(student: nn.Module) -> Iterator[None]:
    """Within it, a model is in evaluation mode and no layer dense but by its budget; afterwards it is as it was."""
    dense, was_training = config_of(student).dense, student.training
    cores = [(layer, layer.core) for layer in sparse_layers(student)]
    try:
        reconfigure(student.eval(), dense=())
        yield
    finally:
        for layer, core in cores:
            layer.core = core
        reconfigure(student.train(was_training), dense=dense)
