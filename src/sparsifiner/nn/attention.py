"""SparseAttention: the module that takes the place of a host's attention."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from sparsifiner import config as configuration
from sparsifiner.errors import ConfigError
from sparsifiner.nn.grid import PerThread, TokenGrid
from sparsifiner.nn.patterns import pattern_connectivity, pattern_mask
from sparsifiner.nn.predictor import ConnectivityPredictor
from sparsifiner.nn.standin import StandIn
from sparsifiner.ops import cells, dispatch
from sparsifiner.ops.attention import (
    Residual,
    class_attention,
    predict,
    presence_bias,
    sparse_attention,
)
from sparsifiner.ops.connectivity import Connectivity, low_rank_attention, query_groups
from sparsifiner.sides import on_grid, spelled


class Context(Protocol):
    """What else a call brings, such as the tables of `rotary.Rotary`; it belongs to that call."""

    def left(self, cells: Tensor) -> Context:
        """For the patches that are left, int64 ``[batch, patches left]``, where blocks before dropped some."""
        ...


@dataclasses.dataclass(frozen=True)
class AttentionAdapter:
    """How one attention class of a host gives its queries, keys and values, and takes the result.

    Attributes:
        qkv: from the host module, tokens ``[batch, n, D]`` and the call's context to q, k, v ``[batch, heads, n, d]``.
        project: from the host module, heads' output ``[batch, heads, n, d]``, the tokens and the context to what the
            module returns.
        mixing: the matrix ``[D, heads * d]`` in `project` that mixes the heads.
        scale: what the host module multiplies its logits by.
        arguments: from the host module and what it is called with to the tokens ``[batch, n, D]``, or ``[batch, rows,
            columns, D]``, the context, or None where the tokens say it all, and a line that says why sparse attention
            cannot do what else is asked for, or None if it can.
    """

    qkv: Callable[[Any, Tensor, Any], tuple[Tensor, Tensor, Tensor]]
    project: Callable[[Any, Tensor, Tensor, Any], Any]
    mixing: Callable[[Any], Tensor]
    scale: Callable[[Any], float]
    arguments: Callable[..., tuple[Tensor, Context | None, str | None]]


# What `arguments` says of a mask, whatever the host calls it.
NO_MASK = "sparse attention takes no attention mask: set keep=1.0, or call it without one"


@dataclasses.dataclass(frozen=True)
class Observation:
    """What a layer shows its observers: inputs of the attention and, where it ran sparse, the connectivity.

    A dense layer has neither connectivity nor residual; one with low-rank attention alone has no connectivity, and one
    that opens cells has no residual.
    """

    layer: SparseAttention
    q: Tensor
    k: Tensor
    v: Tensor
    connectivity: Connectivity | None
    residual: Residual | None
    opened: cells.Opened | None = None


Core = Callable[["SparseAttention", Tensor, Tensor, Tensor], Tensor]


class SparseAttention(StandIn):
    """Sparse attention with the parameters, names and results of the host module it replaces.

    The host's submodules are its own, so the host's parameters keep their keys; ours are added under ``predictor``. A
    layer made for cells adds none. Where the budget covers all tokens the host module itself runs.
    """

    ADDED = ("predictor",)

    def __init__(
        self,
        host: nn.Module,
        adapter: AttentionAdapter,
        grid: TokenGrid,
        *,
        num_heads: int,
        head_dim: int,
        config: configuration.SparseConfig,
        settings: configuration.LayerSettings,
    ) -> None:
        super().__init__(host)
        self.adapter = adapter
        self.grid = grid
        self.num_heads = num_heads
        self.head_dim = head_dim
        if config.asks_predictor:
            reference = next(host.parameters())
            predictor = ConnectivityPredictor(num_heads, config.n_down, grid.size, grid.num_prefix)
            self._modules["predictor"] = predictor.to(reference.device, reference.dtype)
        self._observers = PerThread(list)
        self._groups: tuple[tuple, Tensor] | None = None  # of the last grid and tile
        self._pattern: tuple[tuple, Tensor] | None = None  # of the last grid, pattern and budget
        self.core: Core | None = None  # stands in for predict-and-attend: oracles and baselines to compare with
        self.configure(config, settings)
        self.complete()

    @property
    def has_predictor(self) -> bool:
        """Whether there is one: not in a layer that was made for cells."""
        return "predictor" in self._modules

    @property
    def predictor(self) -> ConnectivityPredictor:
        """What says which keys matter, and estimates the others; an error where there is none."""
        if not self.has_predictor:
            raise ConfigError(
                "this model was made with pattern='cells' and has no predictors: sparsify the dense model anew with "
                "another pattern"
            )
        found: Any = self._modules["predictor"]
        return found

    @property
    def scale(self) -> float:
        """Of the logits: the host's."""
        return self.adapter.scale(self.host)

    @property
    def observers(self) -> list[Callable[[Observation], None]]:
        """Those who are shown what this thread's calls attend to."""
        return self._observers.state

    def configure(self, config: configuration.SparseConfig, settings: configuration.LayerSettings) -> None:
        """Takes new settings, those that `check` lets pass: of the whole model, and of this layer."""
        self.check(config)
        self.config = config
        self.keep, self.dense, self.tile = settings

    def check(self, config: configuration.SparseConfig) -> None:
        """An error if this layer cannot take these settings: its predictor fixes ``n_down``, the lack of one cells.

        Tiles and cells several frames deep need a grid of frames.
        """
        for tile in config.tiles:
            on_grid(tile, self.grid.own_size, "a tile")
        for cell in config.cells:
            on_grid(cell, self.grid.own_size, "a cell")
        if config.asks_predictor and not self.has_predictor:
            raise ConfigError(
                f"pattern={config.pattern!r} asks predictors, and this model, made with pattern='cells', has none: "
                "sparsify the dense model anew"
            )
        if self.has_predictor and config.n_down != self.predictor.n_down:
            raise ConfigError(
                f"n_down is {self.predictor.n_down} in this model's predictors and cannot become {config.n_down}: "
                "sparsify the dense model anew"
            )

    def budget(self) -> int:
        """``B``: how many keys a patch query selects; a share of the whole grid, however many tokens are left."""
        return configuration.budget(self.keep, self.grid.num_tokens)

    def is_dense(self, num_tokens: int | None = None) -> bool:
        """Whether attention over so many tokens, or over all of the grid, is dense."""
        n = self.grid.num_tokens if num_tokens is None else num_tokens
        covers = self.core is None and self.config.pattern != "linformer" and self.budget() >= n
        return self.grid.dense or self.dense or covers

    def forward(self, *arguments: Any, **settings: Any) -> Any:
        """Takes and returns what the host module does; a mask is only possible where the layer is dense."""
        host, call = self.host, self.grid.call
        x, context, refusal = self.adapter.arguments(host, *arguments, **settings)
        dense = self.is_dense(x.shape[1:-1].numel())
        partial = context is not None and call.cells is not None  # the host would need what it has for all tokens
        # Nothing is asked of this layer that the host's own attention does not do.
        plain = dense and call.ranks is None and call.presence is None and not partial
        if refusal and not plain:
            raise ConfigError(refusal)
        if plain and not self.observers:
            return host.forward(*arguments, **settings)
        if context is not None and call.cells is not None:
            context = context.left(call.cells)
        q, k, v = self.adapter.qkv(host, x, context)
        if call.ranks is not None:
            pooled = call.ranks == "pooled"
            call.class_attention = class_attention(q, k, self.grid.prefix, self.scale, pooled=pooled)
        if dense and self.observers:
            self._show(Observation(self, q, k, v, None, None))
        if plain:
            return host.forward(*arguments, **settings)
        heads = self._dense(q, k, v) if dense else self.attend(q, k, v)
        return self.adapter.project(host, heads, x, context)

    def _dense(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention to all tokens that are there."""
        bias = None
        if self.grid.presence is not None:
            bias = presence_bias(self.grid.presence, q.shape[2]).to(q.dtype)
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=self.scale)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The attention core: what the FLOPs are counted of."""
        if torch.amp.is_autocast_available(q.device.type) and torch.is_autocast_enabled(q.device.type):
            # Inputs come in the lower precision; what is computed from them has its own, in the kernels as in eager.
            with torch.autocast(q.device.type, enabled=False):
                return self.attend(q, k, v)
        if self.core is not None:
            return self.core(self, q, k, v)
        if self.config.pattern == "linformer":
            return self._low_rank(q, k, v)
        if self.config.pattern == "cells":
            return self._open_cells(q, k, v)
        backend = dispatch.resolve(self.config.backend, q, self.config.n_down)
        if hasattr(backend, "fused") and self._can_fuse(q, k, v):
            return self._fused(backend, q, k, v)
        connectivity, residual = self.predict(q, k)
        if self.observers:
            self._show(Observation(self, q, k, v, connectivity, residual))
        return sparse_attention(
            q,
            k,
            v,
            connectivity,
            residual=residual if self.config.residual else None,
            scale=self.scale,
            backend=self.config.backend,
            presence=self.grid.presence,
        )

    def _low_rank(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Linformer: the low-rank attention is all there is; prefix rows stay exact, as in every form."""
        prefix = self.grid.prefix
        w_down, w_up = map(self.grid.pick, self.predictor.at(self.grid.size))
        a_down = low_rank_attention(q, k, w_down, prefix, self.scale)
        if self.observers:
            self._show(Observation(self, q, k, v, None, Residual(a_down, w_up)))
        values = v.to(a_down.dtype)
        rows = a_down @ (w_up.to(a_down.dtype) @ values)
        if self.grid.presence is not None:  # a query's own column counts in full
            lacking = (self.predictor.at(self.grid.size)[1] - w_up)[..., prefix:].mT  # [batch, heads, n - prefix, m]
            rows = rows + (a_down * lacking).sum(-1, keepdim=True) * values[:, :, prefix:]
        return torch.cat([self._dense(q[:, :, :prefix], k, v), rows.to(q.dtype)], dim=2)

    def opening(self) -> cells.Opening:
        """How ``pattern="cells"`` cuts and opens the current grid."""
        least, keep = math.prod(self.config.cells[0]), self.config.keep
        if isinstance(keep, Sequence) or configuration.budget(keep, self.grid.num_tokens) < least:
            least = 0  # the mean of all layers must hold a cell; what one layer gets of it need not
        return cells.Opening(
            grid=self.grid.size,
            budget=max(least, self.budget()),
            cells=self.config.cells,
            breadth=self.config.breadth,
            tolerance=self.config.tolerance,
            num_prefix=self.grid.prefix,
            tile=self.tile,
            closed=self.config.residual,
        )

    def _open_cells(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention at several resolutions: no predictor is asked."""
        self._check_grid(q.shape[2])
        if self.grid.presence is not None:
            raise ConfigError("DynamicViT cannot be trained with pattern='cells': train it with another, or use EViT")
        opening = self.opening()
        about: dict[str, Any] = {"scale": self.scale, "positions": self.grid.positions()}
        backend = dispatch.resolve(self.config.backend, q)
        if hasattr(backend, "fused_cells") and not self.observers and not self._needs_gradient(q, k, v):
            return cells.fused(q, k, v, opening, **about)
        opened = cells.connect(q, k, v, opening, **about, backend=self.config.backend)
        if self.observers:
            self._show(Observation(self, q, k, v, opened.keys, None, opened))
        return cells.cell_attention(q, k, v, opened, scale=self.scale, backend=self.config.backend)

    def _can_fuse(self, *inputs: Tensor) -> bool:
        """Whether nothing is wanted but the output."""
        learned = self.config.pattern == "learned" and self.grid.presence is None
        return learned and not self.observers and not self._needs_gradient(*inputs)

    def _needs_gradient(self, *inputs: Tensor) -> bool:
        weights = self.predictor.parameters() if self.config.asks_predictor else ()
        return torch.is_grad_enabled() and any(x.requires_grad for x in (*inputs, *weights))

    def _fused(self, backend: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self._check_grid(q.shape[2])
        return backend.fused(
            q,
            k,
            v,
            self.predictor.packed(self.grid, self.basis_threshold),
            self._query_groups(q.device),
            budget=self.budget(),
            tau=self.config.tau,
            scale=self.scale,
            num_prefix=self.grid.prefix,
            residual=self.config.residual,
            positions=self.grid.positions(),
            narrow=self.config.narrow,
        )

    def _query_groups(self, device: torch.device) -> Tensor:
        key = (self.grid.size, self.grid.prefix, self.tile, device)
        if torch.compiler.is_compiling():
            return query_groups(*key).int()
        known = self._groups  # looked at once: another thread may put its own here at any time
        if known is None or known[0] != key:
            known = self._groups = (key, query_groups(*key).int())
        return known[1]

    def _check_grid(self, n: int) -> None:
        if n != self.grid.tokens_left:
            raise ConfigError(
                f"{n} tokens came in but the {spelled(self.grid.size)} grid and "
                f"{self.grid.num_prefix} prefix tokens make {self.grid.tokens_left}"
            )

    def predict(self, q: Tensor, k: Tensor) -> tuple[Connectivity, Residual]:
        """Eq. 1-3 with this layer's predictor for the tokens that are there; or the lists of a fixed pattern."""
        batch, heads, n, _ = q.shape
        self._check_grid(n)
        prefix, positions = self.grid.prefix, self.grid.positions()
        w_down, w_up = map(self.grid.pick, self.predictor.at(self.grid.size))
        if self.config.pattern != "learned":
            connectivity = pattern_connectivity(self._mask(q.device), prefix, batch, heads, positions)
            return connectivity, Residual(low_rank_attention(q, k, w_down, prefix, self.scale), w_up)
        return predict(
            q,
            k,
            w_down,
            w_up,
            budget=self.budget(),
            grid=self.grid.size,
            num_prefix=prefix,
            tau=self.config.tau,
            basis_threshold=self.basis_threshold,
            tile=self.tile,
            scale=self.scale,
            backend=self.config.backend,
            positions=positions,
        )

    def _mask(self, device: torch.device) -> Tensor:
        """The fixed pattern on the whole grid."""
        key = (self.config.pattern, self.grid.size, self.grid.prefix, self.budget())
        known = self._pattern
        if known is None or known[0] != (*key, device):
            known = self._pattern = ((*key, device), pattern_mask(*key).to(device))
        return known[1]

    @property
    def basis_threshold(self) -> float:
        """The threshold at the current grid: resampling spreads w_up's mass, so it scales alike."""
        own, now = math.prod(self.predictor.grid), math.prod(self.grid.size)
        return self.config.basis_threshold * own / now

    def _show(self, observation: Observation) -> None:
        with torch.no_grad():
            for observer in self.observers:
                observer(observation)

    def extra_repr(self) -> str:
        """Shown by print(model)."""
        return f"keep={self.keep}, residual={self.config.residual}, tile={self.tile}"
