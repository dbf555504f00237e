"""calibrate(): predictors that fit a pretrained model, in seconds, without training it.

One pass over a few hundred images through the dense model, then two steps, each layer on its own:

1. Ridge regression of the true attention on the low-rank one, in closed form: ``w_up = (G + λI)⁻¹ R`` with
   ``G = Σ A_downᵀ A_down`` and ``R = Σ A_downᵀ A``, accumulated in float64 during the pass.
2. Refinement, where the residual is on: what matters is then not the attention but the error that dropping
   keys leaves in the output, ``Σ_dropped (s_ij - A_ij)(v_j - o_i)`` with ``o_i`` the output over the kept
   keys. A few gradient steps on queries, keys and values held from the pass make its square small.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from sparsifiner.convert import Conversion, conversion_of, dense_mode, sparse_layers
from sparsifiner.data.batches import as_batches
from sparsifiner.errors import ConfigError, DataError
from sparsifiner.inspect.observe import observing
from sparsifiner.inspect.statistics import LayerStatistics, measure
from sparsifiner.nn.attention import Observation, SparseAttention
from sparsifiner.nn.grid import landmark_pooling
from sparsifiner.nn.patterns import RANKINGS, pattern_mask
from sparsifiner.ops.connectivity import accumulation_dtype, low_rank_attention, query_groups
from sparsifiner.ops.eager import top_budget
from sparsifiner.progress import Progress

# Rows of the true attention built at a time.
QUERY_CHUNK = 256
# Images on which the report measures recall and density.
REPORT_IMAGES = 32
BATCH_SIZE = 16
# The refinement: steps per layer, images a step, and the share of their queries; chosen on DeiT-Tiny.
STEPS = 32
STEP_IMAGES = 32
STEP_QUERIES = 0.25
# Elements of the attention a step may build (32 MiB in float32), and bytes of queries, keys and values held.
STEP_ELEMENTS = 1 << 23
HELD_BYTES = 2 << 30


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
        ConfigError: the model opens cells, which needs no calibration.
        DataError: no images, not finite, or not of the model's size.
    """
    if not ridge > 0:
        raise ConfigError(f"ridge must be more than 0, got {ridge!r}")
    record = _predicting(student)
    record.grid.begin(record.host.grid(student).size)  # the model's own, whatever image came last
    source = list(images) if isinstance(images, Iterator) else images  # an iterator could not be read again
    start = time.perf_counter()
    # Even where the caller is in inference mode: the refinement differentiates what the layers show.
    with torch.inference_mode(False), torch.no_grad():
        # Linformer drops nothing that a residual could put back.
        refines = refine and record.config.residual and record.config.pattern != "linformer"
        held = _Held(student, _count(source)) if refines else None
        seen = _fit_attention(student, source, ridge, progress, held)
        for layer in sparse_layers(student):
            # Prefix keys are kept whatever their score: a score of zero leaves the whole budget to the patches.
            # The residual does not change, for what the estimate says of kept keys cancels.
            layer.predictor.w_up[..., : layer.grid.num_prefix] = 0
        if held is not None:
            _refine(held, progress)
    seconds = time.perf_counter() - start
    return CalibrationReport(seen, seconds, tuple(measure(student, _first(source, REPORT_IMAGES))))


def fit_attention(
    student: nn.Module,
    images: Tensor | Iterable[Any],
    *,
    ridge: float = 1e-4,
    progress: Progress | None = None,
) -> None:
    """The first step alone: ``w_up`` by ridge regression of the true attention, prefix keys included."""
    record = _predicting(student)
    record.grid.begin(record.host.grid(student).size)
    _fit_attention(student, images, ridge, progress, None)


def _predicting(student: nn.Module) -> Conversion:
    """The record of a converted model, or an error if there is nothing to fit."""
    record = conversion_of(student)
    if not record.config.asks_predictor:
        raise ConfigError("pattern='cells' asks no predictor: there is nothing to calibrate, use the model as it is")
    return record


def _fit_attention(student, images, ridge: float, progress: Progress | None, held: _Held | None) -> int:
    """Returns the number of images; shows them to ``held`` on the way."""
    layers = sparse_layers(student)
    sums = {id(layer): _RegressionSums(layer) for layer in layers}

    def observe(seen: Observation) -> None:
        sums[id(seen.layer)].add(seen)
        if held is not None:
            held.add(seen)

    count = _pass(student, images, observe, progress)
    solutions = [sums[id(layer)].solve(ridge) for layer in layers]
    for layer, w_up in zip(layers, solutions, strict=True):  # nothing is written before all of it is known
        layer.predictor.rebase(layer.grid.size)
        with torch.no_grad():
            layer.predictor.w_down.copy_(sums[id(layer)].w_down)
            layer.predictor.w_up.copy_(w_up)
    return count


class _RegressionSums:
    """``G`` and ``R`` of one layer, for landmarks that are the means of their cells."""

    def __init__(self, layer: SparseAttention) -> None:
        heads, landmarks, device = layer.num_heads, layer.predictor.n_down, layer.predictor.w_up.device
        pooling = landmark_pooling(landmarks, layer.grid.size, layer.grid.num_prefix)
        self.w_down = pooling.to(device).expand(heads, -1, -1)
        self.gram = torch.zeros(heads, landmarks, landmarks, dtype=torch.float64, device=device)
        self.cross = torch.zeros(heads, landmarks, layer.grid.num_tokens, dtype=torch.float64, device=device)

    def add(self, seen: Observation) -> None:
        layer, n, own = seen.layer, seen.q.shape[2], self.cross.shape[2]
        if n != own:
            raise DataError(
                f"these images make {n} tokens, the model's own size makes {own}: calibrate on images of the model's "
                "own size (set_input_size changes it; config.image_size says it of transformers' DINOv2)"
            )
        a_down = low_rank_attention(seen.q, seen.k, self.w_down, layer.grid.num_prefix, layer.scale)
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


def _attention_rows(seen: Observation) -> Iterator[tuple[slice, Tensor]]:
    """The true attention of the patch queries, ``[batch, heads, chunk, n]`` at a time."""
    dtype = accumulation_dtype(seen.q.dtype)
    prefix = seen.layer.grid.num_prefix
    q, k = seen.q[:, :, prefix:].to(dtype), seen.k.to(dtype)
    for start in range(0, q.shape[2], QUERY_CHUNK):
        rows = slice(start, start + QUERY_CHUNK)
        yield rows, torch.softmax(q[:, :, rows] @ k.mT * seen.layer.scale, dim=-1)


class _Held:
    """Queries, keys and values of the layers that will be sparse, of as many images as memory allows.

    Where not all fit, they are spread over the stream: data on disk is often sorted by class.
    """

    def __init__(self, student: nn.Module, images: int) -> None:
        self.parts: dict[SparseAttention, list[tuple[Tensor, Tensor, Tensor]]] = {}
        layers = [layer for layer in sparse_layers(student) if not layer.is_dense()]
        for layer in layers:
            self.parts[layer] = []
        dtype = next(student.parameters()).dtype
        per_image = sum(3 * layer.grid.num_tokens * layer.num_heads * layer.head_dim for layer in layers)
        self.room = max(1, HELD_BYTES // max(1, per_image * dtype.itemsize))  # images
        self.every = max(1, -(-images // self.room))
        self.passed = dict.fromkeys(layers, 0)

    def add(self, seen: Observation) -> None:
        if seen.layer not in self.parts:
            return
        passed = self.passed[seen.layer]
        numbers = range(passed, passed + len(seen.q))
        chosen = [i - passed for i in numbers if i % self.every == 0 and i // self.every < self.room]
        self.passed[seen.layer] = passed + len(seen.q)
        if len(chosen) == len(seen.q):
            self.parts[seen.layer].append((seen.q, seen.k, seen.v))
        elif chosen:
            self.parts[seen.layer].append((seen.q[chosen], seen.k[chosen], seen.v[chosen]))

    def take(self, layer: SparseAttention) -> tuple[Tensor, Tensor, Tensor]:
        """All that is held of a layer, which is held no longer."""
        q, k, v = zip(*self.parts.pop(layer), strict=True)
        return torch.cat(q), torch.cat(k), torch.cat(v)


def _refine(held: _Held, progress: Progress | None) -> None:
    advance = progress("fitting the output, layers", len(held.parts)) if progress else None
    for number, layer in enumerate(list(held.parts)):
        _Descent(layer, *held.take(layer), seed=number).run()
        if advance:
            advance(1)


class _Descent:
    """Gradient steps of one layer on the squared error that dropping keys leaves in its output.

    Adam's steps have the size of the learning rate, so the rates are set relative to the size of the entries:
    ``w_up`` spreads a mass of about one over n keys, ``w_down`` averages n / m of them.
    """

    def __init__(self, layer: SparseAttention, q: Tensor, k: Tensor, v: Tensor, seed: int) -> None:
        predictor = layer.predictor
        heads, landmarks, n = predictor.w_down.shape
        self.dtype = accumulation_dtype(predictor.w_up.dtype)
        self.layer, self.q, self.k, self.v = layer, q, k, v
        self.mixing = layer.adapter.mixing(layer.host).detach().to(self.dtype)
        self.members = query_groups(layer.grid.size, layer.grid.num_prefix, layer.config.tile, q.device)
        self.w_down = predictor.w_down.detach().to(self.dtype, copy=True).requires_grad_()
        self.w_up = predictor.w_up.detach().to(self.dtype, copy=True).requires_grad_()
        self.rates = {self.w_up: 0.6 / n, self.w_down: 0.004 * landmarks / n}
        groups = [{"params": [parameter]} for parameter in self.rates]
        self.optimiser = torch.optim.Adam(groups, lr=0.0, betas=(0.9, 0.95), eps=1e-12)
        self.images = min(STEP_IMAGES, len(q))
        room = STEP_ELEMENTS // (self.images * heads * n * self.members.shape[1])
        self.groups = max(1, min(math.ceil(STEP_QUERIES * len(self.members)), room))
        self.random = torch.Generator().manual_seed(seed)

    def run(self) -> None:
        order: list[int] = []
        for step in range(STEPS):
            schedule = 0.5 * (1 + math.cos(math.pi * step / STEPS)) * min(1.0, (step + 1) / 4)
            for group, rate in zip(self.optimiser.param_groups, self.rates.values(), strict=True):
                group["lr"] = rate * schedule
            if len(order) < self.images:
                order += torch.randperm(len(self.q), generator=self.random).tolist()
            images, order = order[: self.images], order[self.images :]
            chosen = torch.randperm(len(self.members), generator=self.random)[: self.groups]
            self.optimiser.zero_grad()
            with torch.enable_grad():
                self._loss(images, self.members[chosen.to(self.members.device)]).backward()
            self.optimiser.step()
        with torch.no_grad():
            self.layer.predictor.w_down.copy_(self.w_down)
            self.layer.predictor.w_up.copy_(self.w_up)

    def _loss(self, images: list[int], members: Tensor) -> Tensor:
        real = (members >= 0).flatten()
        tokens = members.clamp(min=self.layer.grid.num_prefix).flatten()
        q = self.q[images][:, :, tokens].to(self.dtype)  # [images, heads, rows, d]
        k, v = self.k[images].to(self.dtype), self.v[images].to(self.dtype)
        a_down = low_rank_attention(q, k, self.w_down, 0, self.layer.scale)
        with torch.no_grad():
            kept = self._kept(a_down, members, tokens)
            attention = torch.softmax(q @ k.mT * self.layer.scale, dim=-1)
            exact = torch.where(kept, attention, 0)
            exact = (exact / exact.sum(-1, keepdim=True)) @ v  # the output over the kept keys
            wanted = attention @ v - exact
        estimate = torch.where(kept, 0, a_down @ self.w_up)
        error = estimate @ v - estimate.sum(-1, keepdim=True) * exact - wanted
        error = error.transpose(1, 2).flatten(2) @ self.mixing.mT  # what the block adds to its tokens
        return error.square().sum(-1)[:, real].mean()

    def _kept(self, a_down: Tensor, members: Tensor, tokens: Tensor) -> Tensor:
        """The keys that each row would keep now, as a mask: Eq. 2-3 on some rows only."""
        layer = self.layer
        if layer.config.pattern in RANKINGS:  # whatever the image
            prefix = layer.grid.num_prefix
            mask = pattern_mask(layer.config.pattern, layer.grid.size, prefix, layer.budget()).to(tokens.device)
            return mask[tokens].expand(*a_down.shape[:2], -1, -1)
        coefficients = torch.where(a_down > layer.config.tau, a_down, 0).unflatten(2, members.shape)
        real = (members >= 0).to(a_down.dtype)[..., None]
        coefficients = (coefficients * real).sum(3) / real.sum(1)
        basis = torch.where(self.w_up > layer.basis_threshold, self.w_up, 0)
        mask = top_budget(coefficients @ basis, layer.budget()).repeat_interleave(members.shape[1], dim=2)
        mask[..., : layer.grid.num_prefix] = True
        mask[:, :, torch.arange(len(tokens), device=tokens.device), tokens] = True
        return mask


def _pass(
    student: nn.Module,
    images: Tensor | Iterable[Any],
    observer: Callable[[Observation], None],
    progress: Progress | None,
) -> int:
    """Runs the dense host over the images, every layer watched; returns how many there were."""
    layers = sparse_layers(student)
    device = next(student.parameters()).device
    was_training = student.training
    student.eval()
    advance = progress("fitting the attention", _count(images)) if progress else None
    count = 0
    try:
        with torch.no_grad(), dense_mode(student), observing(layers, observer):
            for batch in as_batches(images, BATCH_SIZE):
                student(batch.to(device))
                count += len(batch)
                if advance:
                    advance(len(batch))
    finally:
        student.train(was_training)
    return count


def _count(images: Tensor | Iterable[Any]) -> int:
    """How many images there are, or 0 where that cannot be told without reading them."""
    if isinstance(images, Tensor):
        return len(images)
    if isinstance(images, list):
        return sum(len(item[0] if isinstance(item, tuple | list) else item) for item in images)
    return getattr(images, "num_images", 0)


def _first(images: Tensor | Iterable[Any], count: int) -> Iterator[Tensor]:
    """Batches with the first so many images."""
    for batch in as_batches(images, BATCH_SIZE):
        yield batch[:count]
        count -= len(batch)
        if count <= 0:
            return
