"""Runs the model, once for each image and setting, and remembers what every layer did.

A converted model is shared, mutable state: its settings, its grid and its observers change with every request. So
only one thread ever touches it, and all that is kept of a pass are tensors that nobody changes any more.
"""

from __future__ import annotations

import collections
import dataclasses
import threading
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn

from sparsifiner.config import SparseConfig
from sparsifiner.convert import config_of, conversion_of, dense_mode, reconfigure, sparse_layers
from sparsifiner.errors import DataError
from sparsifiner.explorer.pictures import Picture
from sparsifiner.inspect.flops import FlopCount, count_flops, outside_attention
from sparsifiner.inspect.observe import observing
from sparsifiner.inspect.statistics import LayerStatistics, statistics_of
from sparsifiner.nn.attention import Observation
from sparsifiner.ops.attention import Residual
from sparsifiner.ops.cells import Opened, shares
from sparsifiner.ops.connectivity import Connectivity, accumulation_dtype

# What passes may hold in all; one of DeiT-Tiny takes some 6 MiB.
MEMORY = 256 << 20


@dataclasses.dataclass(frozen=True)
class LayerPass:
    """One layer in one pass of one image.

    Attributes:
        q, k: queries and keys, ``[heads, n, d]``.
        scale: of their products.
        num_prefix: how many of the n tokens, at the start, are no patches; one fused from dropped ones included.
        cells: the grid cell of each patch token, ascending; None if all are there.
        connectivity: the lists of keys; None in a dense layer, and where low-rank attention is all there is.
        residual: the low-rank estimate; None in a dense layer, and where cells are opened.
        budget: keys a patch query may select.
        statistics: recall, connections and densities.
        opened: the cells, where some are opened and others stand for their keys.
    """

    q: Tensor
    k: Tensor
    scale: float
    num_prefix: int
    cells: Tensor | None
    connectivity: Connectivity | None
    residual: Residual | None
    budget: int
    statistics: LayerStatistics
    opened: Opened | None = None

    @property
    def is_dense(self) -> bool:
        """Whether every token attended to every token."""
        return self.connectivity is None and self.residual is None

    @property
    def size(self) -> int:
        """Bytes held, but for what belongs to the model."""
        held = [self.q, self.k, self.cells]
        if self.connectivity is not None:
            held += [self.connectivity.indices, self.connectivity.counts]
        if self.opened is not None:
            held += [self.opened.lists.indices, self.opened.lists.counts]
        if self.residual is not None:
            held.append(self.residual.a_down)
            held += [self.residual.w_up] if self.residual.w_up.ndim == 4 else []
        return sum(tensor.nbytes for tensor in held if tensor is not None)


@dataclasses.dataclass(frozen=True)
class Pass:
    """What a model did with an image at some settings.

    Attributes:
        config: the settings.
        logits: ``[classes]``.
        layers: what each layer did.
        flops: multiply-adds, as counted on this image.
    """

    config: SparseConfig
    logits: Tensor
    layers: tuple[LayerPass, ...]
    flops: FlopCount

    @property
    def size(self) -> int:
        """Bytes held."""
        return sum(layer.size for layer in self.layers)


@dataclasses.dataclass(frozen=True)
class Row:
    """One query's attention in one head, over the n tokens that are there.

    Attributes:
        mask: True where the query attends to the key.
        full: the true attention.
        sparse: the attention over the kept keys, renormalised.
        used: what the output is made of: ``sparse``, with the residual mixed in where that is on.
        estimate: the low-rank estimate; None in a dense layer and for prefix queries.
        coefficients: of the estimate, one for each landmark.
    """

    mask: Tensor
    full: Tensor
    sparse: Tensor
    used: Tensor
    estimate: Tensor | None
    coefficients: Tensor | None

    @property
    def recall(self) -> float:
        """The share of the true attention that lies on kept keys."""
        return self.full[self.mask].sum().item()


class Engine:
    """Passes of one model, one at a time, the last ones remembered; may be asked from any thread."""

    def __init__(self, student: nn.Module, memory: int = MEMORY) -> None:
        self.student = student.eval()
        self.config = config_of(self.student)
        self._memory = memory
        self._passes: collections.OrderedDict[tuple[str, SparseConfig], Pass] = collections.OrderedDict()
        self._held = 0
        self._lock = threading.Lock()
        # One thread of our own rather than a lock: torch keeps a pool of helpers for each thread that calls it.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="model")
        self._outside = self._thread.submit(outside_attention, self.student).result()

    def run(self, picture: Picture, config: SparseConfig) -> Pass:
        """The pass of a picture at some settings."""
        key = (picture.key, config)
        found = self._find(key)
        return found or self._thread.submit(self._compute, picture, config, key).result()

    def dense(self, picture: Picture) -> Tensor:
        """The dense model's logits ``[classes]``."""
        if picture.dense is None:
            self._thread.submit(self._compute_dense, picture).result()
        assert picture.dense is not None
        return picture.dense

    def forget(self, picture: Picture) -> None:
        """Lets go of all that is known of a picture, for good."""
        with self._lock:
            picture.gone = True
            for key in [key for key in self._passes if key[0] == picture.key]:
                self._held -= self._passes.pop(key).size

    def close(self) -> None:
        """Ends the model's thread."""
        self._thread.shutdown(cancel_futures=True)

    def _find(self, key: tuple[str, SparseConfig]) -> Pass | None:
        with self._lock:
            if key in self._passes:
                self._passes.move_to_end(key)
            return self._passes.get(key)

    def _compute(self, picture: Picture, config: SparseConfig, key: tuple[str, SparseConfig]) -> Pass:
        if found := self._find(key):  # somebody else asked for the same while this waited
            return found
        result = self._pass(picture, config)
        with self._lock:
            if not picture.gone:
                self._passes[key] = result
                self._held += result.size
            while self._held > self._memory and len(self._passes) > 1:
                self._held -= self._passes.popitem(last=False)[1].size
        return result

    def _compute_dense(self, picture: Picture) -> None:
        if picture.dense is None:
            with dense_mode(self.student):
                picture.dense = self._logits(picture)

    @torch.inference_mode()
    def _logits(self, picture: Picture) -> Tensor:
        host = conversion_of(self.student).host
        output = host.logits(self.student, self.student(picture.tensor))[0].float()
        if not bool(torch.isfinite(output).all()):
            raise DataError("the model's output is not finite on this image: are its weights?")
        return output

    def _pass(self, picture: Picture, config: SparseConfig) -> Pass:
        reconfigure(self.student, **{name.name: getattr(config, name.name) for name in dataclasses.fields(config)})
        layers = sparse_layers(self.student)
        seen: dict[int, LayerPass] = {}

        def watch(observation: Observation) -> None:
            seen[id(observation.layer)] = _layer_pass(observation)

        with observing(layers, watch):
            logits = self._logits(picture)
        found = tuple(seen[id(layer)] for layer in layers)
        flops = count_flops(
            self.student,
            convention="measured",
            statistics=[layer.statistics for layer in found],
            outside=self._outside,
        )
        return Pass(config, logits, found, flops)


def _layer_pass(seen: Observation) -> LayerPass:
    layer = seen.layer
    cells = layer.grid.cells
    return LayerPass(
        q=seen.q[0].clone(),  # not a view: that would hold the values too
        k=seen.k[0].clone(),
        scale=layer.scale,
        num_prefix=layer.grid.prefix,
        cells=None if cells is None else cells[0].clone(),
        connectivity=seen.connectivity,
        residual=seen.residual,
        opened=seen.opened,
        budget=layer.budget(),
        statistics=statistics_of(seen),
    )


@torch.inference_mode()
def attention_row(layer: LayerPass, head: int, position: int, with_residual: bool) -> Row:
    """What one query attends to.

    Args:
        layer: of a pass.
        head: which head.
        position: the query among the tokens that are there.
        with_residual: whether the layer put the estimate of dropped keys back.
    """
    dtype = accumulation_dtype(layer.q.dtype)
    logits = layer.k[head].to(dtype) @ layer.q[head, position].to(dtype) * layer.scale
    full = torch.softmax(logits, dim=0)
    mask = torch.ones_like(full, dtype=torch.bool)
    if layer.opened is not None and layer.connectivity is not None and position >= layer.num_prefix:
        query = torch.tensor([position])
        mask = layer.connectivity.mask(query)[0, head, 0]
        sparse = torch.softmax(logits.masked_fill(~mask, -torch.inf), dim=0)
        used = shares(layer.q[None], layer.k[None], layer.opened, query, layer.scale)[0, head, 0]
        return Row(mask, full, sparse, used if with_residual else sparse, used.masked_fill(mask, 0), None)
    if layer.residual is None or position < layer.num_prefix:
        return Row(mask, full, full, full, None, None)
    if layer.connectivity is None:  # low-rank attention alone keeps no key of a patch query
        mask, with_residual = torch.zeros_like(mask), True
    else:
        mask = layer.connectivity.mask(torch.tensor([position]))[0, head, 0]
    coefficients = layer.residual.a_down[0, head, position - layer.num_prefix]
    w_up = layer.residual.w_up[0] if layer.residual.w_up.ndim == 4 else layer.residual.w_up
    estimate = coefficients @ w_up[head].to(dtype)
    sparse = used = torch.softmax(logits.masked_fill(~mask, -torch.inf), dim=0).nan_to_num(0.0)
    if with_residual:  # the kept keys share what the estimate leaves them
        dropped = estimate.masked_fill(mask, 0)
        used = sparse * (1 - dropped.sum().clamp(0, 1)) + dropped
    return Row(mask, full, sparse, used, estimate, coefficients)
