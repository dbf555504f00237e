"""SparseAttention: the module that takes the place of a host's attention."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from sparsifiner import config as configuration
from sparsifiner.errors import ConfigError
from sparsifiner.nn.grid import TokenGrid
from sparsifiner.nn.predictor import ConnectivityPredictor
from sparsifiner.ops import cost, dispatch
from sparsifiner.ops.attention import Residual, predict, sparse_attention
from sparsifiner.ops.connectivity import Connectivity, query_groups


@dataclasses.dataclass(frozen=True)
class AttentionAdapter:
    """How one attention class of a host gives its queries, keys and values, and takes the result.

    Attributes:
        qkv: from the host module and tokens ``[batch, n, D]`` to q, k, v ``[batch, heads, n, d]``.
        project: from the host module, heads' output ``[batch, heads, n, d]`` and the tokens to ``[batch, n, D]``.
        mixing: the matrix ``[D, heads * d]`` in `project` that mixes the heads.
    """

    qkv: Callable[[Any, Tensor], tuple[Tensor, Tensor, Tensor]]
    project: Callable[[Any, Tensor, Tensor], Tensor]
    mixing: Callable[[Any], Tensor]


@dataclasses.dataclass(frozen=True)
class Observation:
    """What a layer shows its observers: inputs of the attention and, where it ran sparse, the connectivity."""

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

    def budget(self, num_tokens: int) -> int:
        """``B``: how many keys a patch query selects among ``num_tokens``."""
        return configuration.budget(self.keep, num_tokens)

    def is_dense(self, num_tokens: int) -> bool:
        """Whether the host's own attention runs on inputs of this length."""
        return self.always_dense or (self.core is None and self.budget(num_tokens) >= num_tokens)

    def train(self, mode: bool = True) -> SparseAttention:
        """Sets the mode of the host module too: it stands beside the module tree."""
        super().train(mode)
        self.host.train(mode)
        return self

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """Tokens ``[batch, n, D]`` to tokens; a mask is only possible where the layer is dense."""
        if self.is_dense(x.shape[1]):
            if self.observers:
                q, k, v = self.adapter.qkv(self.host, x)
                self._show(Observation(self, q, k, v, None, None))
            masked = {"attn_mask": attn_mask, "is_causal": is_causal} if attn_mask is not None or is_causal else {}
            return self.host(x, **masked)
        if attn_mask is not None or is_causal:
            raise ConfigError("sparse attention takes no attention mask: set keep=1.0, or call it without one")
        free = self._may_go_dense(x)
        decision = self.costs.known(self._shape(x)) if free else None
        if decision is not None and not decision.pays:
            return self.host(x)
        q, k, v = self.adapter.qkv(self.host, x)
        if free and decision is None:
            self._measure(x, q, k, v)
        return self.adapter.project(self.host, self.attend(q, k, v), x)

    def _may_go_dense(self, x: Tensor) -> bool:
        """Whether ``backend="auto"`` is free to take dense attention: in inference, with nobody looking."""
        return (
            self.config.backend == "auto"
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
            self.budget(n),
            self.config.tile,
            self.config.residual,
            self.config.narrow,
        )
        return (batch, n, *own, self.config.n_down, x.dtype, torch.get_num_threads())

    def _measure(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> None:
        def dense() -> Tensor:
            return functional.scaled_dot_product_attention(q, k, v, scale=self.scale)

        self.costs.decide(self._shape(x), lambda: self.attend(q, k, v), dense)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The attention core: what the FLOPs are counted of."""
        if torch.is_autocast_enabled(q.device.type):
            # Inputs come in the lower precision; what is computed from them has its own, in the kernels as in eager.
            with torch.autocast(q.device.type, enabled=False):
                return self.attend(q, k, v)
        if self.core is not None:
            return self.core(self, q, k, v)
        backend = dispatch.resolve(self.config.backend, q, self.config.n_down)
        if hasattr(backend, "fused") and not self.observers and not self._needs_gradient(q, k, v):
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
        )

    def _needs_gradient(self, *inputs: Tensor) -> bool:
        return torch.is_grad_enabled() and any(x.requires_grad for x in (*inputs, *self.predictor.parameters()))

    def _fused(self, backend: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        n = q.shape[2]
        self._check_grid(n)
        return backend.fused(
            q,
            k,
            v,
            self.predictor.packed(self.grid.size, self.basis_threshold),
            self._query_groups(q.device),
            budget=self.budget(n),
            tau=self.config.tau,
            scale=self.scale,
            num_prefix=self.grid.num_prefix,
            residual=self.config.residual,
            narrow=self.config.narrow,
        )

    def _query_groups(self, device: torch.device) -> Tensor:
        key = (self.grid.size, self.grid.num_prefix, self.config.tile, device)
        if torch.compiler.is_compiling():
            return query_groups(*key).int()
        if self._groups is None or self._groups[0] != key:
            self._groups = (key, query_groups(*key).int())
        return self._groups[1]

    def _check_grid(self, n: int) -> None:
        if n != self.grid.num_tokens:
            raise ConfigError(
                f"{n} tokens came in but the {self.grid.size[0]} x {self.grid.size[1]} grid and "
                f"{self.grid.num_prefix} prefix tokens make {self.grid.num_tokens}"
            )

    def predict(self, q: Tensor, k: Tensor) -> tuple[Connectivity, Residual]:
        """Eq. 1-3 with this layer's predictor, at the grid of the current input."""
        n = q.shape[2]
        self._check_grid(n)
        w_down, w_up = self.predictor.at(self.grid.size)
        return predict(
            q,
            k,
            w_down,
            w_up,
            budget=self.budget(n),
            grid=self.grid.size,
            num_prefix=self.grid.num_prefix,
            tau=self.config.tau,
            basis_threshold=self.basis_threshold,
            tile=self.config.tile,
            scale=self.scale,
            backend=self.config.backend,
        )

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
