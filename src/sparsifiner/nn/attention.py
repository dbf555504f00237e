"""SparseAttention: the module that takes the place of a host's attention."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from sparsifiner import config as configuration
from sparsifiner.errors import ConfigError
from sparsifiner.nn.grid import TokenGrid
from sparsifiner.nn.patterns import pattern_connectivity, pattern_mask
from sparsifiner.nn.predictor import ConnectivityPredictor
from sparsifiner.ops import cost, dispatch
from sparsifiner.ops.attention import (
    Residual,
    class_attention,
    log_presence,
    predict,
    sparse_attention,
    with_presence,
)
from sparsifiner.ops.connectivity import Connectivity, low_rank_attention, query_groups


@dataclasses.dataclass(frozen=True)
class AttentionAdapter:
    """How one attention class of a host gives its queries, keys and values, and takes the result.

    Attributes:
        qkv: from the host module and tokens ``[batch, n, D]`` to q, k, v ``[batch, heads, n, d]``.
        project: from the host module, heads' output ``[batch, heads, n, d]`` and the tokens to what the module returns.
        mixing: the matrix ``[D, heads * d]`` in `project` that mixes the heads.
        arguments: from the host module and what it is called with to the tokens ``[batch, n, D]``, and a line that says
            why sparse attention cannot do what else is asked for, or None if it can.
    """

    qkv: Callable[[Any, Tensor], tuple[Tensor, Tensor, Tensor]]
    project: Callable[[Any, Tensor, Tensor], Any]
    mixing: Callable[[Any], Tensor]
    arguments: Callable[..., tuple[Tensor, str | None]]


# What `arguments` says of a mask, whatever the host calls it.
NO_MASK = "sparse attention takes no attention mask: set keep=1.0, or call it without one"


@dataclasses.dataclass(frozen=True)
class Observation:
    """What a layer shows its observers: inputs of the attention and, where it ran sparse, the connectivity.

    A dense layer has neither connectivity nor residual; one with low-rank attention alone has no connectivity.
    """

    layer: SparseAttention
    q: Tensor
    k: Tensor
    v: Tensor
    connectivity: Connectivity | None
    residual: Residual | None


Core = Callable[["SparseAttention", Tensor, Tensor, Tensor], Tensor]


class SparseAttention(nn.Module):
    """Sparse attention with the parameters, names and results of the host module it replaces.

    The host's submodules are registered under their own names, so the host's parameters keep their keys;
    ours are added under ``predictor``. Where the budget covers all tokens the host module itself runs.
    """

    host: nn.Module

    def __init__(
        self,
        host: nn.Module,
        adapter: AttentionAdapter,
        grid: TokenGrid,
        *,
        num_heads: int,
        head_dim: int,
        scale: float,
        config: configuration.SparseConfig,
        keep: float,
    ) -> None:
        super().__init__()
        # Beside the module tree, or every host parameter would appear in the state dict twice.
        self.__dict__["host"] = host
        for name, child in host.named_children():
            self.add_module(name, child)
        self.adapter = adapter
        self.grid = grid
        self.num_heads = num_heads
        self.head_dim = head_dim
        self.scale = scale
        self.predictor = ConnectivityPredictor(num_heads, config.n_down, grid.size, grid.num_prefix)
        reference = next(host.parameters())
        self.predictor.to(reference.device, reference.dtype)
        self.always_dense = False
        self.observers: list[Callable[[Observation], None]] = []
        self.costs = cost.Decisions()
        self._groups: tuple[tuple, Tensor] | None = None  # of the last grid and tile
        self._pattern: tuple[tuple, Tensor] | None = None  # of the last grid, pattern and budget
        # Whether a block that drops tokens wants to know how much attention each token gets from the class token, or
        # from the mean patch where there is no class token; see `take_class_attention`.
        self.ranks: Literal["class", "pooled"] | None = None
        self._class_attention: Tensor | None = None
        self.core: Core | None = None  # stands in for predict-and-attend: oracles and baselines to compare with
        self.configure(config, keep)
        self.train(host.training)

    def configure(self, config: configuration.SparseConfig, keep: float) -> None:
        """Takes new settings; only ``n_down`` is fixed, by the shape of the parameters."""
        if config.n_down != self.predictor.n_down:
            raise ConfigError(
                f"n_down is {self.predictor.n_down} in this model's predictors and cannot become {config.n_down}: "
                "sparsify the dense model anew"
            )
        self.config, self.keep = config, keep

    def budget(self) -> int:
        """``B``: how many keys a patch query selects; a share of the whole grid, however many tokens are left."""
        return configuration.budget(self.keep, self.grid.num_tokens)

    def is_dense(self, num_tokens: int | None = None) -> bool:
        """Whether attention over so many tokens, or over all of the grid, is dense."""
        n = self.grid.num_tokens if num_tokens is None else num_tokens
        covers = self.core is None and self.config.pattern != "linformer" and self.budget() >= n
        return self.always_dense or covers

    def train(self, mode: bool = True) -> SparseAttention:
        """Sets the mode of the host module too: it stands beside the module tree."""
        super().train(mode)
        self.host.train(mode)
        return self

    def forward(self, *arguments: Any, **settings: Any) -> Any:
        """Takes and returns what the host module does; a mask is only possible where the layer is dense."""
        x, refusal = self.adapter.arguments(self.host, *arguments, **settings)
        dense = self.is_dense(x.shape[1])
        # Nothing is asked of this layer that the host's own attention does not do.
        ranks = self.ranks if self.grid.prunes else None
        plain = dense and ranks is None and self.grid.presence is None
        if refusal and not plain:
            raise ConfigError(refusal)
        if plain and not self.observers:
            return self.host(*arguments, **settings)
        free = not dense and self._may_go_dense(x)
        decision = self.costs.known(self._shape(x)) if free else None
        if decision is not None and not decision.pays:
            dense = True
            if ranks is None:
                return self.host(*arguments, **settings)
        q, k, v = self.adapter.qkv(self.host, x)
        if ranks is not None:
            self._class_attention = class_attention(q, k, self.grid.prefix, self.scale, pooled=ranks == "pooled")
        if dense and self.observers:
            self._show(Observation(self, q, k, v, None, None))
        if plain:
            return self.host(*arguments, **settings)
        if free and decision is None:
            self._measure(x, q, k, v)
        heads = self._dense(q, k, v) if dense else self.attend(q, k, v)
        return self.adapter.project(self.host, heads, x)

    def take_class_attention(self) -> Tensor:
        """What each token got from the class token in the last pass, ``[batch, n]``; it is not kept."""
        found, self._class_attention = self._class_attention, None
        if found is None:
            raise ConfigError("the layer was not asked to rank tokens, or has not run")
        return found

    def _may_go_dense(self, x: Tensor) -> bool:
        """Whether ``backend="auto"`` is free to take dense attention: in inference, with nobody looking."""
        return (
            self.config.backend == "auto"
            and self.config.pattern == "learned"
            and self.grid.presence is None
            and x.device.type == "cpu"
            and self.core is None
            and not self.observers
            and not torch.is_grad_enabled()
            and not torch.compiler.is_compiling()
        )

    def _shape(self, x: Tensor) -> tuple:
        """All that the cost depends on, but for what is in the images."""
        batch, n, _ = x.shape
        own = (
            self.num_heads,
            self.head_dim,
            self.budget(),
            self.config.tile,
            self.config.residual,
            self.config.narrow,
        )
        return (batch, n, *own, self.config.n_down, x.dtype, torch.get_num_threads())

    def _measure(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> None:
        def dense() -> Tensor:
            return functional.scaled_dot_product_attention(q, k, v, scale=self.scale)

        self.costs.decide(self._shape(x), lambda: self.attend(q, k, v), dense)

    def _dense(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention to all tokens that are there."""
        bias = None
        if self.grid.presence is not None:
            bias = log_presence(self.grid.presence)[:, None, None].to(q.dtype)
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=self.scale)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The attention core: what the FLOPs are counted of."""
        if torch.is_autocast_enabled(q.device.type):
            # Inputs come in the lower precision; what is computed from them has its own, in the kernels as in eager.
            with torch.autocast(q.device.type, enabled=False):
                return self.attend(q, k, v)
        if self.core is not None:
            return self.core(self, q, k, v)
        if self.config.pattern == "linformer":
            return self._low_rank(q, k, v)
        backend = dispatch.resolve(self.config.backend, q, self.config.n_down)
        if hasattr(backend, "fused") and self._can_fuse(q, k, v):
            return self._fused(backend, q, k, v)
        connectivity, residual = self.predict(q, k)
        if self.observers:
            self._show(Observation(self, q, k, v, connectivity, residual))
        width = q.shape[-1]
        if self.grid.presence is not None:
            q, k, v = with_presence(q, k, v, self.grid.presence, self.scale)
        return sparse_attention(
            q,
            k,
            v,
            connectivity,
            residual=residual if self.config.residual else None,
            scale=self.scale,
            backend=self.config.backend,
        )[..., :width]

    def _low_rank(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Linformer: the low-rank attention is all there is; prefix rows stay exact, as in every form."""
        prefix = self.grid.prefix
        w_down, w_up = map(self.grid.pick, self.predictor.at(self.grid.size))
        a_down = low_rank_attention(q, k, w_down, prefix, self.scale)
        if self.observers:
            self._show(Observation(self, q, k, v, None, Residual(a_down, w_up)))
        rows = (a_down @ (w_up.to(a_down.dtype) @ v.to(a_down.dtype))).to(q.dtype)
        return torch.cat([self._dense(q[:, :, :prefix], k, v), rows], dim=2)

    def _can_fuse(self, *inputs: Tensor) -> bool:
        """Whether nothing is wanted but the output."""
        learned = self.config.pattern == "learned" and self.grid.presence is None
        return learned and not self.observers and not self._needs_gradient(*inputs)

    def _needs_gradient(self, *inputs: Tensor) -> bool:
        return torch.is_grad_enabled() and any(x.requires_grad for x in (*inputs, *self.predictor.parameters()))

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
        key = (self.grid.size, self.grid.prefix, self.config.tile, device)
        if torch.compiler.is_compiling():
            return query_groups(*key).int()
        if self._groups is None or self._groups[0] != key:
            self._groups = (key, query_groups(*key).int())
        return self._groups[1]

    def _check_grid(self, n: int) -> None:
        if n != self.grid.tokens_left:
            raise ConfigError(
                f"{n} tokens came in but the {self.grid.size[0]} x {self.grid.size[1]} grid and "
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
            tile=self.config.tile,
            scale=self.scale,
            backend=self.config.backend,
            positions=positions,
        )

    def _mask(self, device: torch.device) -> Tensor:
        """The fixed pattern on the whole grid."""
        key = (self.config.pattern, self.grid.size, self.grid.prefix, self.budget())
        if self._pattern is None or self._pattern[0] != (*key, device):
            self._pattern = ((*key, device), pattern_mask(*key).to(device))
        return self._pattern[1]

    @property
    def basis_threshold(self) -> float:
        """The threshold at the current grid: resampling spreads w_up's mass, so it scales alike."""
        own, now = self.predictor.grid, self.grid.size
        return self.config.basis_threshold * (own[0] * own[1]) / (now[0] * now[1])

    def _show(self, observation: Observation) -> None:
        with torch.no_grad():
            for observer in self.observers:
                observer(observation)

    def extra_repr(self) -> str:
        """Shown by print(model)."""
        return f"keep={self.keep}, residual={self.config.residual}, tile={self.config.tile}"
