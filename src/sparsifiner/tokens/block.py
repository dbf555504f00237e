"""A host's block that drops tokens: the same parameters under the same names, and fewer tokens out than in."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from sparsifiner.config import TokenConfig
from sparsifiner.hosts import BlockSite
from sparsifiner.nn.grid import TokenGrid
from sparsifiner.nn.standin import StandIn
from sparsifiner.tokens import evit
from sparsifiner.tokens.dynamicvit import TokenScorer


class PruningBlock(StandIn):
    """Stands in the place of a block of the host and drops tokens as `TokenConfig` says.

    The host's submodules are its own, so its parameters keep their keys; DynamicViT's network is added under
    ``scorer``.

    Args:
        site: the block, whose attention is converted.
        grid: the places of the tokens.
        config: how many are dropped, and how.
        number: of the block.
        class_token: whether the first token stands for the class.
        scorer: DynamicViT's network, if there is one already.
    """

    ADDED = ("scorer",)

    def __init__(
        self,
        site: BlockSite,
        grid: TokenGrid,
        config: TokenConfig,
        number: int,
        class_token: bool,
        scorer: TokenScorer | None = None,
    ) -> None:
        assert site.adapter is not None
        host = site.module
        super().__init__(host)
        self.adapter, self.grid, self.number = site.adapter, grid, number
        self.class_token = class_token
        self.scorer: TokenScorer | None = None
        if config.method == "dynamicvit":
            reference = next(host.parameters())
            self.scorer = scorer or TokenScorer(site.adapter.dim(host))
            self.scorer.to(reference.device, reference.dtype)
        self.configure(config)
        self.complete()

    def configure(self, config: TokenConfig) -> None:
        """Takes new settings of the same method."""
        self.config = config

    def forward(self, x: Tensor, *arguments: Any, **settings: Any) -> Any:
        """Tokens ``[batch, n, D]`` to fewer tokens, returned as the host's block does."""
        if self.grid.dense or self.config.keep == 1:
            return self.host.forward(x, *arguments, **settings)
        call = self.grid.call
        if self.scorer is not None:
            x = self.scorer.prune(x, self.grid, self.config)
        else:
            call.ranks = "class" if self.class_token else "pooled"
        x = self.adapter.attend(self.host, x, *arguments, **settings)
        if self.scorer is None:
            assert call.class_attention is not None  # `install_pruning` has seen that a layer is there to tell it
            x = evit.prune(x, call.class_attention, self.grid, self.config)
        call.ranks = call.class_attention = None
        return self.adapter.wrap(self.adapter.feed(self.host, x))

    def extra_repr(self) -> str:
        """Shown by print(model)."""
        return f"tokens={self.config}"
