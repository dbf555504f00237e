"""timm's blocks: the two halves of each, between which tokens can be dropped."""

from __future__ import annotations

from typing import Any

from timm.models import eva, vision_transformer
from torch import Tensor

from sparsifiner.hosts import BlockAdapter


def _attend(block: Any, x: Tensor, **settings: Any) -> Tensor:
    return x + block.drop_path1(block.ls1(block.attn(block.norm1(x), **settings)))


def _feed(block: Any, x: Tensor) -> Tensor:
    return x + block.drop_path2(block.ls2(block.mlp(block.norm2(x))))


def _attend_normed(block: Any, x: Tensor, **settings: Any) -> Tensor:
    return x + block.drop_path1(block.norm1(block.attn(x, **settings)))


def _feed_normed(block: Any, x: Tensor) -> Tensor:
    return x + block.drop_path2(block.norm2(block.mlp(x)))


def _attend_eva(block: Any, x: Tensor, **settings: Any) -> Tensor:
    added = block.attn(block.norm1(x), **settings)
    return x + block.drop_path1(added if block.gamma_1 is None else block.gamma_1 * added)


def _feed_eva(block: Any, x: Tensor) -> Tensor:
    added = block.mlp(block.norm2(x))
    return x + block.drop_path2(added if block.gamma_2 is None else block.gamma_2 * added)


def _width(block: Any) -> int:
    return block.attn.proj.out_features


# By exact type: a subclass may compute something else. Blocks that do both halves at once have nothing in between.
BLOCKS = {
    vision_transformer.Block: BlockAdapter(attend=_attend, feed=_feed, dim=_width),
    vision_transformer.ResPostBlock: BlockAdapter(attend=_attend_normed, feed=_feed_normed, dim=_width),
    eva.EvaBlock: BlockAdapter(attend=_attend_eva, feed=_feed_eva, dim=_width),
    eva.EvaBlockPostNorm: BlockAdapter(attend=_attend_normed, feed=_feed_normed, dim=_width),
}
