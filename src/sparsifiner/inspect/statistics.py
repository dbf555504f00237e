"""What the layers of a converted model really do on given images: recall, connections, densities."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from sparsifiner.convert import part_of, sparse_layers
from sparsifiner.data.batches import as_batches
from sparsifiner.inspect.observe import observing
from sparsifiner.nn.attention import Observation, SparseAttention
from sparsifiner.ops.connectivity import Connectivity, accumulation_dtype

# Rows of the true attention built at a time: n x n is never whole.
QUERY_CHUNK = 256


@dataclasses.dataclass(frozen=True)
class LayerStatistics:
    """Means over images of one layer. A dense layer keeps everything and predicts nothing.

    Attributes:
        tokens: how many tokens the layer saw.
        recall: share of the true attention mass of patch queries that lies on kept keys, over all heads.
        recall_per_head: the same for each head.
        connections: (patch query, key) pairs per image, over all heads.
        kept_share: connections as a share of all (patch query, key) pairs.
        coefficient_density: share of low-rank coefficients above tau.
        basis_density: share of w_up entries above the threshold.
        score_density: share of the products in ``A~_down W_up`` that are not zero (rho in the paper's count).
        score_products: those products per image, over all heads.
        standing: (patch query, cell) pairs per image in which a cell stands for its keys, over all heads.
    """

    tokens: int
    recall: float
    recall_per_head: tuple[float, ...]
    connections: float
    kept_share: float
    coefficient_density: float
    basis_density: float
    score_density: float
    score_products: float
    standing: float = 0.0


def measure(student: nn.Module, images: Tensor | Iterable) -> list[LayerStatistics]:
    """Runs the model on images as it is configured and returns one record per attention layer."""
    student = part_of(student)
    layers = sparse_layers(student)
    tallies = {id(layer): _Tally(layer) for layer in layers}

    def watch(seen: Observation) -> None:
        tallies[id(seen.layer)].add(seen)

    device = next(student.parameters()).device
    was_training = student.training
    student.eval()
    try:
        with observing(layers, watch), torch.inference_mode():
            for batch in as_batches(images):
                student(batch.to(device))
    finally:
        student.train(was_training)
    return [tallies[id(layer)].result() for layer in layers]


def statistics_of(seen: Observation) -> LayerStatistics:
    """The record of one layer in one pass, for those who watch the pass themselves."""
    tally = _Tally(seen.layer)
    tally.add(seen)
    return tally.result()


def kept_mass(q: Tensor, k: Tensor, connectivity: Connectivity, scale: float) -> Tensor:
    """The true attention mass on kept keys, summed over patch queries: ``[batch, heads]``, float64."""
    dtype = accumulation_dtype(q.dtype)
    total = torch.zeros(q.shape[:2], dtype=torch.float64, device=q.device)
    groups, size = connectivity.members.shape
    step = max(1, QUERY_CHUNK // size)
    for start in range(0, groups, step):
        members = connectivity.members[start : start + step]  # [chunk, size]
        tokens = members.clamp(min=0)
        rows = q[:, :, tokens.flatten()].to(dtype) @ k.to(dtype).mT * scale
        rows = torch.softmax(rows, dim=-1).unflatten(2, tokens.shape)  # [batch, heads, chunk, size, n]
        lists = connectivity.indices[:, :, start : start + step].long()
        picked = rows.gather(4, lists.clamp(min=0)[..., None, :].expand(*rows.shape[:4], -1))
        mass = (picked * (lists >= 0)[..., None, :]).sum(-1)  # [batch, heads, chunk, size]
        if connectivity.adds_self:
            own = rows.gather(4, tokens[..., None].expand(*rows.shape[:4], 1)).squeeze(-1)
            mass = mass + own * ~(lists[..., None, :] == members[..., None]).any(-1)
        total += (mass * (members >= 0)).sum((2, 3), dtype=torch.float64)
    return total


class _Tally:
    def __init__(self, layer: SparseAttention) -> None:
        self.layer = layer
        self.images = 0
        self.mass = torch.zeros(layer.num_heads, dtype=torch.float64)
        self.connections = 0.0
        self.standing = 0.0
        self.nonzero = 0.0
        self.products = 0.0
        self.basis = 0.0
        self.rows = self.groups = self.tokens = 0

    def add(self, seen: Observation) -> None:
        batch, _, n, _ = seen.q.shape
        rows = n - self.layer.grid.prefix
        self.images += batch
        self.rows, self.tokens = rows, n
        if seen.opened is not None and seen.connectivity is not None:  # what is predicted is in no weights
            self.mass += kept_mass(seen.q, seen.k, seen.connectivity, self.layer.scale).sum(0).cpu()
            self.connections += seen.connectivity.connections().sum().item()
            lists = seen.opened.lists
            self.standing += lists.connections().sum().item() - seen.connectivity.connections().sum().item()
            return
        if seen.residual is None:  # dense: all is kept, nothing is predicted
            self.mass += batch * rows
            self.connections += batch * self.layer.num_heads * rows * n
            return
        if seen.connectivity is None:  # low rank: nothing is kept, all is predicted
            self.nonzero += seen.residual.a_down.numel()
            self.basis = self.layer.num_heads * seen.residual.w_up.shape[-2] * n
            return
        connectivity, a_down, w_up = seen.connectivity, seen.residual.a_down, seen.residual.w_up
        self.mass += kept_mass(seen.q, seen.k, connectivity, self.layer.scale).sum(0).cpu()
        self.connections += connectivity.connections().sum().item()
        used = a_down > self.layer.config.tau  # [batch, heads, rows, m]
        self.nonzero += used.sum().item()
        members = connectivity.members
        if members.shape[1] > 1:  # a tile multiplies its mean coefficients, non-zero where any member's are
            index = (members - connectivity.num_prefix).clamp(min=0)
            used = (used[:, :, index] & (members >= 0)[..., None]).any(3)
        self.groups = members.shape[0]
        entries = (w_up > self.layer.basis_threshold).sum(-1)  # [heads, m], of each image where tokens were dropped
        self.basis = entries.sum().item() / (len(entries) if entries.ndim == 3 else 1)
        if self.layer.config.pattern == "learned":
            self.products += (used.sum(2) * entries).sum().item()

    def result(self) -> LayerStatistics:
        heads, landmarks = self.layer.num_heads, self.layer.config.n_down
        queries = self.images * self.rows
        per_head = (self.mass / queries).tolist()
        return LayerStatistics(
            tokens=self.tokens,
            recall=sum(per_head) / heads,
            recall_per_head=tuple(per_head),
            connections=self.connections / self.images,
            standing=self.standing / self.images,
            kept_share=self.connections / (queries * heads * self.tokens),
            coefficient_density=self.nonzero / (queries * heads * landmarks),
            basis_density=self.basis / (heads * landmarks * self.tokens),
            score_density=self.products / max(1, self.images * heads * self.groups * landmarks * self.tokens),
            score_products=self.products / self.images,
        )
