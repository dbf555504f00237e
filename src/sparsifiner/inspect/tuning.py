"""tune(): where sparse attention pays on the machine at hand, measured once and written into the model's settings.

A measurement and not a model, because the crossover depends on the instruction set, the caches, the threads and on how
good this machine's dense attention is; and on how many keys a layer's queries look for, so each layer has its own. But
what a model computes is never decided while it runs: `tune` changes the config, on purpose and on record.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from sparsifiner.convert import config_of, conversion_of, part_of, reconfigure, sparse_layers
from sparsifiner.data.batches import as_batches
from sparsifiner.inspect.speed import take_turns
from sparsifiner.nn.attention import SparseAttention
from sparsifiner.progress import Progress

MARGIN = 0.97  # of the dense time: measurements are noisy, and a conversion must not make a model slower
SECONDS = 0.05  # for either of the two in each layer


@dataclasses.dataclass(frozen=True)
class LayerTiming:
    """The least of many times of one layer's attention in milliseconds; None for a layer whose budget is all tokens."""

    sparse: float | None
    dense: float | None

    @property
    def pays(self) -> bool:
        """Whether the sparse form is faster beyond doubt."""
        return self.sparse is not None and self.dense is not None and self.sparse <= MARGIN * self.dense


@dataclasses.dataclass(frozen=True)
class TuningReport:
    """What `tune` and `time_layers` found.

    Attributes:
        layers: a timing each.
        images: in the batch that was timed.
        tokens: of each image.
        threads: of torch.
    """

    layers: tuple[LayerTiming, ...]
    images: int
    tokens: int
    threads: int

    @property
    def dense(self) -> tuple[int, ...]:
        """The layers in which dense attention is the faster, or as fast."""
        timed = ((number, layer) for number, layer in enumerate(self.layers) if layer.sparse is not None)
        return tuple(number for number, layer in timed if not layer.pays)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return dataclasses.asdict(self) | {"dense": list(self.dense)}

    @property
    def conditions(self) -> str:
        """What was measured, in words."""
        threads = f"{self.threads} thread" + "s" * (self.threads > 1)
        return f"{self.tokens} tokens, batch {self.images}, {threads}"

    def __str__(self) -> str:
        lines = [f"attention at {self.conditions}", "layer  sparse ms  dense ms  faster"]
        for number, layer in enumerate(self.layers):
            if layer.sparse is None:
                lines.append(f"{number:5d}          -         -  dense by its budget")
            else:
                lines.append(
                    f"{number:5d}  {layer.sparse:9.3f}  {layer.dense:8.3f}  {'sparse' if layer.pays else 'dense'}"
                )
        return "\n".join(lines)


def tune(
    student: nn.Module, images: Tensor | Iterable[Any], *, seconds: float = SECONDS, progress: Progress | None = None
) -> TuningReport:
    """Measures each layer on this machine, and makes those dense in which sparse attention is not faster.

    The outcome is the setting ``dense`` of the model's config: it travels with the checkpoint, and
    ``reconfigure(student, dense=())`` takes it back. A model that is to be trained should be tuned before.

    Args:
        student: a converted model, at the size, the batch size and the number of threads it will run with.
        images: a batch of preprocessed images, or an iterable of batches, whose first is taken.
        seconds: for each of the two ways in each layer.
        progress: called with a title and a number of layers; returns a function that is told how many are done.

    Example:
        ``report = tune(student, images[:8])``
    """
    report = time_layers(student, images, seconds=seconds, progress=progress)
    reconfigure(student, dense=report.dense)
    return report


def time_layers(
    student: nn.Module, images: Tensor | Iterable[Any], *, seconds: float = SECONDS, progress: Progress | None = None
) -> TuningReport:
    """What `tune` measures, without its consequences; layers that are dense by setting are timed all the same."""
    student = part_of(student)
    batch = next(as_batches(images, sys.maxsize))
    layers = sparse_layers(student)
    found: dict[int, LayerTiming] = {}
    advance = progress("timing attention, layers", len(layers)) if progress else None

    def timed(layer: SparseAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        layer.core = None
        if not layer.is_dense(q.shape[2]):
            found[id(layer)] = _time(layer, q, k, v, seconds)
        if advance:
            advance(1)
        return functional.scaled_dot_product_attention(q, k, v, scale=layer.scale)

    with _as_it_would_run(student), torch.inference_mode():
        for layer in layers:
            layer.core = timed
        student(batch.to(next(student.parameters()).device))
    nothing, grid = LayerTiming(None, None), conversion_of(student).grid
    return TuningReport(
        layers=tuple(found.get(id(layer), nothing) for layer in layers),
        images=len(batch),
        tokens=grid.num_prefix + math.prod(grid.latest.size),
        threads=torch.get_num_threads(),
    )


def _time(layer: SparseAttention, q: Tensor, k: Tensor, v: Tensor, seconds: float) -> LayerTiming:
    def finish() -> None:
        if q.is_cuda:  # whose kernels run on after a call has returned
            torch.cuda.synchronize(q.device)

    def sparse() -> None:
        layer.attend(q, k, v)
        finish()

    def dense() -> None:
        functional.scaled_dot_product_attention(q, k, v, scale=layer.scale)
        finish()

    times = take_turns({"sparse": sparse, "dense": dense}, seconds)
    return LayerTiming(times["sparse"].minimum, times["dense"].minimum)


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
