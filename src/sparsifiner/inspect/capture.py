"""capture(): what chosen layers, heads and queries attend to, without changing the result."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from sparsifiner.convert import sparse_layers
from sparsifiner.errors import ConfigError
from sparsifiner.inspect.observe import observing
from sparsifiner.nn.attention import Observation
from sparsifiner.ops.cells import Opened, shares
from sparsifiner.ops.connectivity import Connectivity, accumulation_dtype
from sparsifiner.sides import Sides


@dataclasses.dataclass(frozen=True)
class LayerCapture:
    """One layer's attention in the last forward pass. ``Q`` counts the chosen queries, ``h`` the chosen heads.

    Attributes:
        queries: token indices of the rows below, prefix tokens first.
        heads: which heads the rows below are of.
        grid: rows and columns of patches of the image; of a clip frames, rows and columns.
        num_prefix: tokens before the patches, one fused from dropped ones included.
        cells: int64 ``[batch, n - num_prefix]``, the grid cell of each patch token (counted row by row, frame by
            frame); None where no tokens have been dropped. A fused token that was kept as a patch has the cell of the
            heaviest in it.
        mask: boolean ``[batch, h, Q, n]``, True where the query attends to the key.
        full_map: the true attention ``[batch, h, Q, n]``.
        sparse_map: the attention over the kept keys, renormalised; zero elsewhere.
        estimate: the low-rank estimate ``A_down W_up``; zero rows for prefix queries; None in a dense layer. Where
            cells are opened: what keys that are not kept get through the cell that stands for them.
        coefficients: ``A_down`` ``[batch, h, Q, m]``; zero rows for prefix queries; None in a dense layer.
        connectivity: all lists of the layer, all heads; None in a dense layer.
        opened: all lists over keys and cells; None unless cells are opened. `seen_cells` reads them.
    """

    queries: Tensor
    heads: Tensor
    grid: Sides
    num_prefix: int
    cells: Tensor | None
    mask: Tensor
    full_map: Tensor
    sparse_map: Tensor
    estimate: Tensor | None
    coefficients: Tensor | None
    connectivity: Connectivity | None
    opened: Opened | None = None


def seen_cells(opened: Opened, queries: Tensor) -> Tensor:
    """The number of the cell as which some queries see each patch, int64 ``[batch, heads, Q, patches]``.

    That is the cell which stands for it, of whichever level, and where it is seen itself the finest one it lies in.

    Args:
        opened: what a layer attends to.
        queries: int64 ``[Q]``, tokens.
    """
    cells, n = opened.cells, opened.keys.num_tokens
    stands = opened.lists.mask(queries)[..., n:]  # [batch, heads, Q, cells]
    parent = cells.parent
    shape = (*stands.shape[:3], cells.of.shape[1])
    finest = number = cells.of[:, None, None].expand(shape)
    found = finest.clone()
    while bool((parent[number] >= 0).any()):
        number = torch.where(parent[number] >= 0, parent[number], number)
        found = torch.where(stands.gather(3, number), number, found)
    return found


@contextlib.contextmanager
def capture(
    student: nn.Module,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    queries: Sequence[int] | None = None,
) -> Iterator[dict[int, LayerCapture]]:
    """Within it, each forward pass fills the yielded dict: layer number to `LayerCapture`.

    Args:
        student: a converted model.
        layers: which attention layers, counted from 0; None for all.
        heads: which heads; None for all.
        queries: which token indices (prefix tokens first); None for all, which builds n x n maps.

    Example:
        ``with capture(student, layers=[3], queries=[1]) as seen: student(image)`` then ``seen[3].full_map``
    """
    available = sparse_layers(student)
    chosen = _within(layers, len(available), "layer")
    number = {id(available[index]): index for index in chosen}
    for index in chosen:
        _within(heads, available[index].num_heads, "head")
    seen: dict[int, LayerCapture] = {}

    def watch(observation: Observation) -> None:
        seen[number[id(observation.layer)]] = _record(observation, heads, queries)

    with observing([available[index] for index in chosen], watch):
        yield seen


def _within(chosen: Sequence[int] | None, count: int, what: str) -> list[int]:
    if chosen is None:
        return list(range(count))
    for index in chosen:
        if not 0 <= index < count:
            plural = "queries" if what == "query" else f"{what}s"
            raise ConfigError(f"{what} {index} does not exist: the model has {plural} 0 to {count - 1}")
    return list(chosen)


def _record(seen: Observation, heads: Sequence[int] | None, queries: Sequence[int] | None) -> LayerCapture:
    layer, n = seen.layer, seen.q.shape[2]
    device = seen.q.device
    rows = torch.tensor(_within(queries, n, "query"), device=device)
    picked = torch.tensor(_within(heads, layer.num_heads, "head"), device=device)
    prefix = layer.grid.prefix
    dtype = accumulation_dtype(seen.q.dtype)
    q, k = seen.q[:, picked][:, :, rows].to(dtype), seen.k[:, picked].to(dtype)
    logits = q @ k.mT * layer.scale
    full_map = torch.softmax(logits, dim=-1)
    mask = torch.ones_like(full_map, dtype=torch.bool)
    estimate = coefficients = None
    is_patch = (rows >= prefix)[:, None]
    if seen.opened is not None and seen.connectivity is not None:
        mask = seen.connectivity.mask(rows)[:, picked]
        each = shares(seen.q, seen.k, seen.opened, rows, layer.scale)[:, picked]
        estimate = each.masked_fill(mask, 0)
    elif seen.residual is not None:
        # Low-rank attention alone keeps no key of a patch query.
        mask = (~is_patch).expand_as(mask) if seen.connectivity is None else seen.connectivity.mask(rows)[:, picked]
        a_down = seen.residual.a_down[:, picked][:, :, (rows - prefix).clamp(min=0)]
        coefficients = torch.where(is_patch, a_down, 0)
        estimate = coefficients @ seen.residual.w_up[..., picked, :, :].to(dtype)
    return LayerCapture(
        queries=rows,
        heads=picked,
        grid=layer.grid.size,
        num_prefix=prefix,
        cells=layer.grid.cells,
        mask=mask,
        full_map=full_map,
        sparse_map=torch.softmax(logits.masked_fill(~mask, -torch.inf), dim=-1).nan_to_num(0.0),
        estimate=estimate,
        coefficients=coefficients,
        connectivity=seen.connectivity,
        opened=seen.opened,
    )
