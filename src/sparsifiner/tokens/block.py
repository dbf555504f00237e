"""A host's block that drops tokens: the same parameters under the same names, and fewer tokens out than in."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from sparsifiner.config import TokenConfig
from sparsifiner.hosts import BlockSite
from sparsifiner.nn.attention import SparseAttention
from sparsifiner.nn.grid import TokenGrid
from sparsifiner.tokens import evit
from sparsifiner.tokens.dynamicvit import TokenScorer


class PruningBlock(nn.Module):
    """Stands in the place of a block of the host and drops tokens as `TokenConfig` says.

    The host's submodules are registered under their own names, so its parameters keep their keys; DynamicViT's
    network is added under ``scorer``.

    Args:
        site: the block, whose attention is converted.
        grid: the places of the tokens.
        config: how many are dropped, and how.
        number: of the block.
        class_token: whether the first token stands for the class.
        scorer: DynamicViT's network, if there is one already.
    """

    host: nn.Module

    def __init__(
        self,
        site: BlockSite,
        grid: TokenGrid,
        config: TokenConfig,
        number: int,
        class_token: bool,
        scorer: TokenScorer | None = None,
    ) -> None:
        super().__init__()
        assert site.adapter is not None
        host = site.module
        self.__dict__["host"] = host  # beside the module tree, as in SparseAttention
        for name, child in host.named_children():
            self.add_module(name, child)
        self.adapter, self.grid, self.number = site.adapter, grid, number
        self.class_token = class_token
        self.scorer: TokenScorer | None = None
        if config.method == "dynamicvit":
            reference = next(host.parameters())
            self.scorer = scorer or TokenScorer(site.adapter.dim(host))
            self.scorer.to(reference.device, reference.dtype)
        self.configure(config)
        self.train(host.training)

    def configure(self, config: TokenConfig) -> None:
        """Takes new settings of the same method."""
        self.config = config
        if config.method == "evit" and config.keep < 1:
            self.find_attention().ranks = "class" if self.class_token else "pooled"
        else:
            self.find_attention().ranks = None

    def find_attention(self) -> SparseAttention:
        """The block's attention layer; a method, because hosts call submodules ``attention``."""
        return next(module for module in self.modules() if isinstance(module, SparseAttention))

    def train(self, mode: bool = True) -> PruningBlock:
        """Sets the mode of the host block too: it stands beside the module tree."""
        super().train(mode)
        self.host.train(mode)
        return self

    def forward(self, x: Tensor, *arguments: Any, **settings: Any) -> Tensor:
        """Tokens ``[batch, n, D]`` to fewer tokens."""
        if not self.grid.prunes or self.config.keep == 1:
            return self.host(x, *arguments, **settings)
        if self.scorer is not None:
            x = self.scorer.prune(x, self.grid, self.config)
        x = self.adapter.attend(self.host, x, *arguments, **settings)
        if self.scorer is None:
            x = evit.prune(x, self.find_attention().take_class_attention(), self.grid, self.config)
        return self.adapter.feed(self.host, x)

    def extra_repr(self) -> str:
        """Shown by print(model)."""
        return f"tokens={self.config}"
