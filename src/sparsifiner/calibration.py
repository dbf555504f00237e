"""calibrate(): predictors that fit a pretrained model, in seconds, without training it.

One pass over a few hundred images through the dense model, then two steps, each layer on its own:

1. Ridge regression of the true attention on the low-rank one, in closed form: ``w_up = (G + λI)⁻¹ R`` with
   ``G = Σ A_downᵀ A_down`` and ``R = Σ A_downᵀ A``, accumulated in float64 during the pass.
2. Refinement, where the residual is on: what matters is then not the attention but the error that dropping
   keys leaves in the output, ``Σ_dropped (s_ij - A_ij)(v_j - o_i)`` with ``o_i`` the output over the kept
   keys. A few gradient steps on queries, keys and values held from the pass make its square small.

Both look at a sample of an image's queries, spread over its grid: the cost grows with the tokens, not with their square
(but for the dense model's own).
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sparsifiner.convert import Conversion, conversion_of, dense_mode, part_of, sparse_layers
from sparsifiner.data.batches import as_batches
from sparsifiner.errors import ConfigError, DataError
from sparsifiner.inspect.observe import observing
from sparsifiner.inspect.statistics import LayerStatistics, measure
from sparsifiner.nn.attention import Observation, SparseAttention
from sparsifiner.nn.grid import landmark_pooling
from sparsifiner.nn.patterns import RANKINGS, pattern_mask
from sparsifiner.ops.connectivity import accumulation_dtype, query_groups
from sparsifiner.ops.eager import top_budget
from sparsifiner.progress import Progress

# Queries of an image that are looked at: at 197 tokens all of them, at more a sample, so that the cost grows with the
# tokens and not with their square.
QUERIES = 256
# The refinement: steps per layer, images a step, and queries of each; chosen on DeiT-Tiny. With many tokens a step has
# fewer images, so that it reads so many keys.
STEPS = 32
STEP_IMAGES = 32
STEP_QUERIES = 24
STEP_KEYS = 48 << 10
# Tokens of the images that go through the model together, and elements of the attention built at a time.
BATCH_SIZE = 16
BATCH_TOKENS = 1 << 14
CHUNK_ELEMENTS = 1 << 20
# Bytes of queries, keys and values held for the refinement.
HELD_BYTES = 2 << 30
# Images on which the report measures recall and density, and their tokens.
REPORT_IMAGES = 32
REPORT_TOKENS = 1 << 13


@dataclasses.dataclass(frozen=True)
class CalibrationReport:
    """What a calibration did.

    Attributes:
        images: how many images were seen.
        seconds: time for fitting, the report's own measurements not included.
        layers: recall, connections and densities of each layer at the current settings, measured on the first
            images: 32, or fewer with many tokens.
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

    Deterministic: the same images in the same batches give the same predictors, for which queries are looked at is
    settled by the number of the image. The refinement fits the settings the model has now (keep, tile, thresholds);
    others can be set afterwards without calibrating anew.

    Args:
        student: a converted model.
        images: a tensor of preprocessed images, or an iterable of batches (with or without labels); a few
            hundred images are enough. What can be gone through only once is held in memory.
        ridge: the λ of the regression, relative to the mean of G's diagonal.
        refine: do the second step; needs the residual.
        progress: called with a title and a number, of images (0 if unknown) or of steps; returns a function that is
            told how many more are done. `sparsifiner.progress.show_progress` gives one that shows the time left.

    Raises:
        ConfigError: the model opens cells, which needs no calibration.
        DataError: no images, not finite, or not of the model's size.
    """
    if not ridge > 0:
        raise ConfigError(f"ridge must be more than 0, got {ridge!r}")
    student = part_of(student)
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
    few = min(REPORT_IMAGES, -(-REPORT_TOKENS // record.grid.num_tokens))
    return CalibrationReport(seen, seconds, tuple(measure(student, _first(source, few, record.grid.num_tokens))))


def fit_attention(
    student: nn.Module,
    images: Tensor | Iterable[Any],
    *,
    ridge: float = 1e-4,
    progress: Progress | None = None,
) -> None:
    """The first step alone: ``w_up`` by ridge regression of the true attention, prefix keys included."""
    student = part_of(student)
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

    def observe(seen: Observation, first: int) -> None:
        layer = seen.layer
        _check_tokens(seen.q.shape[2], sums[id(layer)].cross.shape[2])
        members = torch.stack([_sampled_queries(layer, first + i) for i in range(len(seen.q))]).to(seen.q.device)
        q = _rows(seen.q.transpose(0, 1), members.clamp(min=0).flatten(1))
        sums[id(layer)].add(q, seen.k.transpose(0, 1), members.flatten(1) >= 0)
        if held is not None:
            held.add(seen, first, q, members)

    count = _pass(student, images, observe, progress)
    solutions = [sums[id(layer)].solve(ridge) for layer in layers]
    for layer, w_up in zip(layers, solutions, strict=True):  # nothing is written before all of it is known
        layer.predictor.rebase(layer.grid.size)
        with torch.no_grad():
            layer.predictor.w_down.copy_(sums[id(layer)].w_down)
            layer.predictor.w_up.copy_(w_up)
    return count


def _check_tokens(n: int, own: int) -> None:
    if n != own:
        raise DataError(
            f"these images make {n} tokens, the model's own size makes {own}: calibrate on images of the model's "
            "own size (set_input_size changes it; config.image_size says it of transformers' DINOv2)"
        )


def _sampled_queries(layer: SparseAttention, image: int) -> Tensor:
    """Which patch queries of an image are looked at: whole groups that share a list, ``[groups, size]`` as members.

    They are spread over the grid, and other ones in each image; the same whatever the batches.
    """
    groups = query_groups(layer.grid.size, layer.grid.num_prefix, layer.tile, torch.device("cpu"))
    patches = layer.grid.num_tokens - layer.grid.num_prefix
    count = -(-len(groups) * min(QUERIES, patches) // patches)
    return groups[_spread(count, len(groups), torch.Generator().manual_seed(image))]


def _spread(count: int, total: int, random: torch.Generator) -> Tensor:
    """``count`` of the numbers below ``total``: one, at random, of each of as many equal parts."""
    bounds = torch.arange(count + 1) * total // count
    first, width = bounds[:-1], bounds.diff()
    return first + (torch.rand(count, dtype=torch.float64, generator=random) * width).long()


def _rows(x: Tensor, tokens: Tensor) -> Tensor:
    """Of ``[heads, batch, n, d]`` the rows ``[batch, count]``, which differ from image to image."""
    return x[:, torch.arange(len(tokens), device=x.device)[:, None], tokens]


def _chunks(images: int, elements: int) -> Iterator[slice]:
    """Images at a time, so that what takes so many elements of each stays small."""
    step = max(1, CHUNK_ELEMENTS // elements)
    return (slice(start, min(start + step, images)) for start in range(0, images, step))


class _RegressionSums:
    """``G`` and ``R`` of one layer, for landmarks that are the means of their cells."""

    def __init__(self, layer: SparseAttention) -> None:
        heads, landmarks, device = layer.num_heads, layer.predictor.n_down, layer.predictor.w_up.device
        pooling = landmark_pooling(landmarks, layer.grid.size, layer.grid.num_prefix)
        self.scale = layer.scale
        self.w_down = pooling.to(device).expand(heads, -1, -1)
        self.gram = torch.zeros(heads, landmarks, landmarks, dtype=torch.float64, device=device)
        self.cross = torch.zeros(heads, landmarks, layer.grid.num_tokens, dtype=torch.float64, device=device)

    def add(self, q: Tensor, k: Tensor, real: Tensor) -> None:
        """Rows of queries and all keys, ``[heads, batch, ..., d]``; ``real`` ``[batch, rows]`` says which count."""
        dtype = accumulation_dtype(q.dtype)
        q, k = q.to(dtype), k.to(dtype)
        a_down = _low_rank(q, k, self.w_down.to(dtype), self.scale) * real[..., None]
        for images in _chunks(len(real), q[:, 0, :, 0].numel() * k.shape[2]):
            attention = torch.softmax(q[:, images] @ k[:, images].mT * self.scale, dim=-1)
            part = a_down[:, images].flatten(1, 2)  # [heads, images * rows, m]
            self.gram += (part.mT @ part).double()
            self.cross += (part.mT @ attention.flatten(1, 2)).double()

    def solve(self, ridge: float) -> Tensor:
        diagonal = self.gram.diagonal(dim1=1, dim2=2)
        penalty = torch.diag_embed((ridge * diagonal.mean(-1, keepdim=True)).expand_as(diagonal))
        factor, failed = torch.linalg.cholesky_ex(self.gram + penalty)
        if bool(failed.any()) or not bool(torch.isfinite(factor).all()):
            raise DataError("the model's attention is not finite on these images: are its weights?")
        return torch.cholesky_solve(self.cross, factor)


def _low_rank(q: Tensor, k: Tensor, w_down: Tensor, scale: float) -> Tensor:
    """Eq. 1 with heads first, so that all images are one product with the weights of their head."""
    _, images, _, width = k.shape
    k_down = (w_down @ k.transpose(1, 2).flatten(2)).unflatten(2, (images, width)).transpose(1, 2)
    return torch.softmax(q @ k_down.mT * scale, dim=-1)


class _Sample(NamedTuple):
    """Of some images in one layer, heads first: sampled queries, all keys and values, whose queries they are."""

    q: Tensor
    k: Tensor
    v: Tensor
    members: Tensor


class _Held:
    """Samples of the layers that will be sparse, of as many images as memory allows.

    Where not all fit, they are spread over the stream: data on disk is often sorted by class.
    """

    def __init__(self, student: nn.Module, images: int) -> None:
        self.parts: dict[SparseAttention, list[_Sample]] = {}
        layers = [layer for layer in sparse_layers(student) if not layer.is_dense()]
        values = 0
        for layer in layers:
            self.parts[layer] = []
            tokens = 2 * layer.grid.num_tokens + _sampled_queries(layer, 0).numel()
            values += tokens * layer.num_heads * layer.head_dim
        dtype = next(student.parameters()).dtype
        self.room = max(1, HELD_BYTES // max(1, values * dtype.itemsize))  # images
        self.every = max(1, -(-images // self.room))

    def add(self, seen: Observation, first: int, q: Tensor, members: Tensor) -> None:
        if seen.layer not in self.parts:
            return
        numbers = range(first, first + len(seen.q))
        chosen = [i - first for i in numbers if i % self.every == 0 and i // self.every < self.room]
        if chosen:  # copies: what the layers show are views of tensors that hold more
            k, v = (x.transpose(0, 1)[:, chosen] for x in (seen.k, seen.v))
            self.parts[seen.layer].append(_Sample(q[:, chosen], k, v, members[chosen]))

    def take(self, layer: SparseAttention) -> _Sample:
        """All that is held of a layer, which is held no longer."""
        q, k, v, members = zip(*self.parts.pop(layer), strict=True)
        return _Sample(torch.cat(q, 1), torch.cat(k, 1), torch.cat(v, 1), torch.cat(members))


def _refine(held: _Held, progress: Progress | None) -> None:
    advance = progress("fitting the output", STEPS * len(held.parts)) if progress else None
    for number, layer in enumerate(list(held.parts)):
        _Descent(layer, held.take(layer), seed=number).run(advance)


class _Descent:
    """Gradient steps of one layer on the squared error that dropping keys leaves in its output.

    Adam's steps have the size of the learning rate, so the rates are set relative to the size of the entries:
    ``w_up`` spreads a mass of about one over n keys, ``w_down`` averages n / m of them.
    """

    def __init__(self, layer: SparseAttention, held: _Sample, seed: int) -> None:
        predictor = layer.predictor
        _, landmarks, n = predictor.w_down.shape
        self.dtype = accumulation_dtype(predictor.w_up.dtype)
        self.layer, self.held = layer, held
        self.mixing = layer.adapter.mixing(layer.host).detach().to(self.dtype)
        self.w_down = predictor.w_down.detach().to(self.dtype, copy=True).requires_grad_()
        self.w_up = predictor.w_up.detach().to(self.dtype, copy=True).requires_grad_()
        self.rates = {self.w_up: 0.6 / n, self.w_down: 0.004 * landmarks / n}
        groups = [{"params": [parameter]} for parameter in self.rates]
        self.optimiser = torch.optim.Adam(groups, lr=0.0, betas=(0.9, 0.95), eps=1e-12)
        count, groups, size = held.members.shape
        self.images = min(STEP_IMAGES, count, max(1, STEP_KEYS // n))
        self.groups = min(groups, -(-STEP_QUERIES // size))
        self.random = torch.Generator().manual_seed(seed)

    def run(self, advance: Callable[[int], None] | None) -> None:
        order: list[int] = []
        for step in range(STEPS):
            schedule = 0.5 * (1 + math.cos(math.pi * step / STEPS)) * min(1.0, (step + 1) / 4)
            for group, rate in zip(self.optimiser.param_groups, self.rates.values(), strict=True):
                group["lr"] = rate * schedule
            if len(order) < self.images:
                order += torch.randperm(len(self.held.members), generator=self.random).tolist()
            images, order = order[: self.images], order[self.images :]
            self.optimiser.zero_grad()
            self._differentiate(images)
            self.optimiser.step()
            if advance:
                advance(1)
        with torch.no_grad():
            self.layer.predictor.w_down.copy_(self.w_down)
            self.layer.predictor.w_up.copy_(self.w_up)

    def _differentiate(self, images: list[int]) -> None:
        """Adds up the gradient of the mean error over some queries of each image, other ones in each."""
        total = self.held.members.shape[1]
        groups = torch.stack([_spread(self.groups, total, self.random) for _ in images])
        sample = self._pick(torch.tensor(images), groups)
        queries = (sample.members >= 0).sum()
        heads, _, rows, _ = sample.q.shape
        for chunk in _chunks(len(images), heads * rows * sample.k.shape[2]):
            q, k, v = (x[:, chunk] for x in sample[:3])
            with torch.enable_grad():
                (self._loss(_Sample(q, k, v, sample.members[chunk])) / queries).backward()

    def _pick(self, images: Tensor, groups: Tensor) -> _Sample:
        """Groups ``[images, count]`` of some images."""
        images, groups = images.to(self.held.q.device), groups.to(self.held.q.device)
        members = self.held.members[images[:, None], groups]
        size = members.shape[2]
        rows = (groups[..., None] * size + torch.arange(size, device=groups.device)).flatten(1)
        q = self.held.q[:, images[:, None], rows]
        k, v = self.held.k[:, images], self.held.v[:, images]
        return _Sample(q.to(self.dtype), k.to(self.dtype), v.to(self.dtype), members)

    def _loss(self, sample: _Sample) -> Tensor:
        """The sum of the squared errors of the sample's rows."""
        q, k, v, members = sample
        a_down = _low_rank(q, k, self.w_down, self.layer.scale)  # [heads, images, rows, m]
        with torch.no_grad():
            kept = self._kept(a_down, members)
            attention = torch.softmax(q @ k.mT * self.layer.scale, dim=-1)
            exact = torch.where(kept, attention, 0)
            exact = exact / exact.sum(-1, keepdim=True)  # over the kept keys
        estimate = (a_down.flatten(1, 2) @ self.w_up).unflatten(1, q.shape[1:3])
        missed = torch.where(kept, 0, estimate - attention)
        error = (missed - missed.sum(-1, keepdim=True) * exact) @ v
        error = error.permute(1, 2, 0, 3).flatten(2) @ self.mixing.mT  # what the block adds to its tokens
        return error.square().sum(-1)[members.flatten(1) >= 0].sum()

    def _kept(self, a_down: Tensor, members: Tensor) -> Tensor:
        """The keys that each row would keep now, as a mask: Eq. 2-3 on some rows only."""
        layer, size = self.layer, members.shape[2]
        tokens = members.clamp(min=layer.grid.num_prefix).flatten(1)
        if layer.config.pattern in RANKINGS:  # whatever the image
            prefix = layer.grid.num_prefix
            mask = pattern_mask(layer.config.pattern, layer.grid.size, prefix, layer.budget()).to(tokens.device)
            return mask[tokens].expand(len(a_down), -1, -1, -1)
        coefficients = torch.where(a_down > layer.config.tau, a_down, 0).unflatten(2, (-1, size))
        real = (members >= 0).to(a_down.dtype)[..., None]
        coefficients = (coefficients * real).sum(3) / real.sum(2)  # [heads, images, groups, m]
        basis = torch.where(self.w_up > layer.basis_threshold, self.w_up, 0)
        scores = (coefficients.flatten(1, 2) @ basis).unflatten(1, coefficients.shape[1:3])
        mask = top_budget(scores, layer.budget()).repeat_interleave(size, dim=2)
        mask[..., : layer.grid.num_prefix] = True
        return mask.scatter_(3, tokens[..., None].expand(*mask.shape[:3], 1), True)


def _pass(
    student: nn.Module,
    images: Tensor | Iterable[Any],
    observer: Callable[[Observation, int], None],
    progress: Progress | None,
) -> int:
    """Runs the dense host over the images, every layer watched; returns how many there were.

    The observer is told the number of the first image too.
    """
    layers = sparse_layers(student)
    device = next(student.parameters()).device
    was_training = student.training
    student.eval()
    advance = progress("fitting the attention", _count(images)) if progress else None
    count = 0
    try:
        with torch.no_grad(), dense_mode(student), observing(layers, lambda seen: observer(seen, count)):
            for batch in _batches(images, conversion_of(student).grid.num_tokens):
                student(batch.to(device))
                count += len(batch)
                if advance:
                    advance(len(batch))
    finally:
        student.train(was_training)
    return count


def _batches(images: Tensor | Iterable[Any], tokens: int) -> Iterator[Tensor]:
    """No larger than memory should hold of images with so many tokens."""
    for batch in as_batches(images, BATCH_SIZE):
        yield from batch.split(max(1, BATCH_TOKENS // tokens))


def _count(images: Tensor | Iterable[Any]) -> int:
    """How many images there are, or 0 where that cannot be told without reading them."""
    if isinstance(images, Tensor):
        return len(images)
    if isinstance(images, list):
        return sum(len(item[0] if isinstance(item, tuple | list) else item) for item in images)
    return getattr(images, "num_images", 0)


def _first(images: Tensor | Iterable[Any], count: int, tokens: int) -> Iterator[Tensor]:
    """Batches with the first so many images."""
    for batch in _batches(images, tokens):
        yield batch[:count]
        count -= len(batch)
        if count <= 0:
            return
