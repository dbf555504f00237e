"""calibrate(): predictors that fit a pretrained model, in seconds, without training it.

Two steps, each one pass over a few hundred images, each layer on its own:

1. Ridge regression of the true attention on the low-rank one, in closed form: ``w_up = (G + λI)⁻¹ R`` with
   ``G = Σ A_downᵀ A_down`` and ``R = Σ A_downᵀ A``, accumulated in float64.
2. Refinement, where the residual is on: what matters is then not the attention but the error that dropping
   keys leaves in the output, ``Σ_dropped (s_ij - A_ij)(v_j - o_i)`` with ``o_i`` the output over the kept keys.
   A few gradient steps per layer, one a batch, make its square small. Nothing is propagated from layer to layer.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from sparsifiner.convert import conversion_of, dense_mode, sparse_layers
from sparsifiner.data.batches import as_batches
from sparsifiner.errors import ConfigError, DataError
from sparsifiner.inspect.observe import observing
from sparsifiner.inspect.statistics import LayerStatistics, measure
from sparsifiner.nn.attention import Observation, SparseAttention
from sparsifiner.ops.connectivity import accumulation_dtype, low_rank_attention

# Rows of the true attention built at a time.
QUERY_CHUNK = 256
# Images on which the report measures recall and density.
REPORT_IMAGES = 32
# A batch is a step of the refinement; tensors are cut into batches of this size.
BATCH_SIZE = 16

Progress = Callable[[str, int], Callable[[int], None]]


@dataclasses.dataclass(frozen=True)
class CalibrationReport:
    """What a calibration did.

    Attributes:
        images: how many images were seen.
        seconds: time for fitting, the report's own measurements not included.
        layers: recall, connections and densities of each layer at the current settings, measured on the first
            images.
    """

    images: int
    seconds: float
    layers: tuple[LayerStatistics, ...]

    @property
    def recall(self) -> float:
        """Mean over layers."""
        return sum(layer.recall for layer in self.layers) / len(self.layers)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return dataclasses.asdict(self) | {"recall": self.recall}

    def __str__(self) -> str:
        lines = [f"calibrated on {self.images} images in {self.seconds:.1f} s"]
        lines.append("layer  recall  connections  coefficients  basis   (shares)")
        for number, layer in enumerate(self.layers):
            lines.append(
                f"{number:5d}  {layer.recall:6.3f}  {layer.kept_share:11.3f}  {layer.coefficient_density:12.3f}  "
                f"{layer.basis_density:5.3f}"
            )
        lines.append(f" mean  {self.recall:6.3f}")
        return "\n".join(lines)


def calibrate(
    student: nn.Module,
    images: Tensor | Iterable[Any],
    *,
    ridge: float = 1e-4,
    refine: bool = True,
    progress: Progress | None = None,
) -> CalibrationReport:
    """Fits the predictors of a converted model to images; the host's weights stay as they are.

    Deterministic: the same images in the same batches give the same predictors. The refinement fits the
    settings the model has now (keep, tile, thresholds); others can be set afterwards without calibrating anew.

    Args:
        student: a converted model.
        images: a tensor of preprocessed images, or an iterable of batches (with or without labels); a few
            hundred images are enough. What can be gone through only once is held in memory.
        ridge: the λ of the regression, relative to the mean of G's diagonal.
        refine: do the second step; needs the residual.
        progress: called with a title and the number of images, or 0 if unknown; returns a function that is told
            how many more are done.

    Raises:
        DataError: no images, not finite, or not of the model's size.
    """
    conversion_of(student)
    if not ridge > 0:
        raise ConfigError(f"ridge must be more than 0, got {ridge!r}")
    batches = _Repeatable(images)
    start = time.perf_counter()
    # Even where the caller is in inference mode: the refinement differentiates what the layers show.
    with torch.inference_mode(False), torch.no_grad():
        fit_attention(student, batches, ridge=ridge, progress=progress)
        for layer in sparse_layers(student):
            # Prefix keys are kept whatever their score: a score of zero leaves the whole budget to the patches.
            # The residual does not change, for what the estimate says of kept keys cancels.
            layer.predictor.w_up[..., : layer.grid.num_prefix] = 0
        if refine and conversion_of(student).config.residual:
            _refine(student, batches, progress)
    seconds = time.perf_counter() - start
    return CalibrationReport(batches.seen, seconds, tuple(measure(student, batches.first(REPORT_IMAGES))))


def fit_attention(
    student: nn.Module,
    images: Tensor | Iterable[Any],
    *,
    ridge: float = 1e-4,
    progress: Progress | None = None,
) -> None:
    """The first step alone: ``w_up`` by ridge regression of the true attention, prefix keys included."""
    layers = sparse_layers(student)
    for layer in layers:
        layer.predictor.rebase(conversion_of(student).host.grid(student).size)
    sums = {id(layer): _RegressionSums(layer) for layer in layers}
    _pass(student, images, lambda seen: sums[id(seen.layer)].add(seen), "fitting the attention", progress)
    for layer in layers:
        solution = sums[id(layer)].solve(ridge)
        with torch.no_grad():
            layer.predictor.w_up.copy_(solution)


class _RegressionSums:
    """``G`` and ``R`` of one layer."""

    def __init__(self, layer: SparseAttention) -> None:
        w_down = layer.predictor.w_down
        heads, landmarks, n = w_down.shape
        self.gram = torch.zeros(heads, landmarks, landmarks, dtype=torch.float64, device=w_down.device)
        self.cross = torch.zeros(heads, landmarks, n, dtype=torch.float64, device=w_down.device)

    def add(self, seen: Observation) -> None:
        layer = seen.layer
        w_down = layer.predictor.w_down
        a_down = low_rank_attention(seen.q, seen.k, w_down, layer.grid.num_prefix, layer.scale)
        for rows, attention in _attention_rows(seen):
            part = a_down[:, :, rows].transpose(0, 1).flatten(1, 2)  # [heads, batch * rows, m]
            self.gram += (part.mT @ part).double()
            self.cross += (part.mT @ attention.transpose(0, 1).flatten(1, 2)).double()

    def solve(self, ridge: float) -> Tensor:
        diagonal = self.gram.diagonal(dim1=1, dim2=2)
        penalty = torch.diag_embed((ridge * diagonal.mean(-1, keepdim=True)).expand_as(diagonal))
        factor, failed = torch.linalg.cholesky_ex(self.gram + penalty)
        if bool(failed.any()) or not bool(torch.isfinite(factor).all()):
            raise DataError("the model's attention is not finite on these images: are its weights?")
        return torch.cholesky_solve(self.cross, factor)


def _attention_rows(seen: Observation, first: int = 0, every: int = 1) -> Iterator[tuple[Tensor, Tensor]]:
    """The true attention of patch queries: their numbers, and ``[batch, heads, chunk, n]`` at a time."""
    dtype = accumulation_dtype(seen.q.dtype)
    prefix = seen.layer.grid.num_prefix
    q, k = seen.q[:, :, prefix:].to(dtype), seen.k.to(dtype)
    for rows in torch.arange(first, q.shape[2], every, device=q.device).split(QUERY_CHUNK):
        yield rows, torch.softmax(q[:, :, rows] @ k.mT * seen.layer.scale, dim=-1)


def _refine(student: nn.Module, batches: _Repeatable, progress: Progress | None) -> None:
    layers = [layer for layer in sparse_layers(student) if not layer.is_dense(layer.grid.num_tokens)]
    descents = {id(layer): _Descent(layer, batches.count) for layer in layers}

    def step(seen: Observation) -> None:
        if id(seen.layer) in descents:
            descents[id(seen.layer)].step(seen)

    _pass(student, batches, step, "fitting the output", progress)


class _Descent:
    """Gradient steps of one layer on the squared error that dropping keys leaves in its output.

    Adam's steps have the size of the learning rate, so the rates are set relative to the size of the entries:
    ``w_up`` spreads a mass of about one over n keys, ``w_down`` averages n / m of them.
    """

    def __init__(self, layer: SparseAttention, steps: int) -> None:
        predictor = layer.predictor
        _, landmarks, n = predictor.w_down.shape
        dtype = accumulation_dtype(predictor.w_up.dtype)
        self.layer, self.steps, self.done = layer, steps, 0
        self.w_down = predictor.w_down.detach().to(dtype, copy=True).requires_grad_()
        self.w_up = predictor.w_up.detach().to(dtype, copy=True).requires_grad_()
        groups = [
            {"params": [self.w_up], "rate": 0.6 / n},
            {"params": [self.w_down], "rate": 0.004 * landmarks / n},
        ]
        self.optimiser = torch.optim.Adam(groups, lr=0.0, betas=(0.9, 0.95), eps=1e-12)

    def step(self, seen: Observation) -> None:
        warm_up = min(1.0, (self.done + 1) / 4)
        cosine = 0.5 * (1 + math.cos(math.pi * self.done / self.steps))
        for group in self.optimiser.param_groups:
            group["lr"] = group["rate"] * warm_up * cosine
        self.optimiser.zero_grad()
        with torch.enable_grad():
            self._backward(seen)
        self.optimiser.step()
        self.done += 1
        self._write()

    def _backward(self, seen: Observation) -> None:
        layer, prefix = self.layer, self.layer.grid.num_prefix
        a_down = low_rank_attention(seen.q, seen.k, self.w_down, prefix, layer.scale)
        with torch.no_grad():
            connectivity, _ = layer.predict(seen.q, seen.k)
        v = seen.v.to(a_down.dtype)
        # Chunks need the graph of a_down only through this leaf: it is gone through once, at the end.
        leaf = a_down.detach().requires_grad_()
        # Neighbouring queries tell much the same: every second one, by turns, halves the work and loses nothing.
        every = min(2, a_down.shape[2])
        for rows, attention in _attention_rows(seen, self.done % every, every):
            with torch.no_grad():
                kept = connectivity.mask(rows + prefix)
                exact = torch.where(kept, attention, 0)
                exact = (exact / exact.sum(-1, keepdim=True)) @ v  # the output over the kept keys
                wanted = attention @ v - exact
            estimate = torch.where(kept, 0, leaf[:, :, rows] @ self.w_up)
            error = estimate @ v - estimate.sum(-1, keepdim=True) * exact - wanted
            (error.square().sum(-1).mean() * (len(rows) / a_down.shape[2])).backward()
        a_down.backward(leaf.grad)

    def _write(self) -> None:
        with torch.no_grad():
            self.layer.predictor.w_down.copy_(self.w_down)
            self.layer.predictor.w_up.copy_(self.w_up)
            self.layer.predictor.w_up[..., : self.layer.grid.num_prefix] = 0


def _pass(
    student: nn.Module,
    images: Tensor | Iterable[Any],
    observer: Callable[[Observation], None],
    title: str,
    progress: Progress | None,
) -> None:
    """Runs the dense host over the images, every layer watched."""
    layers = sparse_layers(student)
    device = next(student.parameters()).device
    was_training = student.training
    student.eval()
    advance = progress(title, getattr(images, "total", 0)) if progress else None
    try:
        with torch.no_grad(), dense_mode(student), observing(layers, observer):
            for batch in as_batches(images, BATCH_SIZE):
                student(batch.to(device))
                if advance:
                    advance(len(batch))
    finally:
        student.train(was_training)


class _Repeatable:
    """Images that can be gone through again and again, counted."""

    def __init__(self, images: Tensor | Iterable[Any]) -> None:
        # An iterator is used up after one pass: it is its own iter().
        self.source = list(images) if isinstance(images, Iterator) else images
        self.total = len(images) if isinstance(images, Tensor) else getattr(images, "num_images", 0)
        self.seen = self.count = 0

    def __iter__(self) -> Iterator[Tensor]:
        seen = count = 0
        for batch in as_batches(self.source, BATCH_SIZE):
            seen, count = seen + len(batch), count + 1
            yield batch
        self.seen, self.count = seen, count

    def first(self, images: int) -> Iterator[Tensor]:
        """Batches with the first so many images."""
        for batch in as_batches(self.source, BATCH_SIZE):
            yield batch[:images]
            images -= len(batch)
            if images <= 0:
                return
