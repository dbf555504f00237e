"""What a family of transformers' models is to us, and the form that most of them have.

A family is a tower of blocks behind an embedding of patches. Most attention classes differ in what they call their
parts, and most blocks in what their norms are called; both are said in one line each.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from sparsifiner.hosts import BlockAdapter
from sparsifiner.nn.attention import NO_MASK, AttentionAdapter

NO_WEIGHTS = "sparse attention has no weights to output: look at it with sparsifiner.capture, or set keep=1.0"


def refused(attention: Any, attention_mask: Tensor | None, settings: dict[str, Any]) -> str | None:
    """Why sparse attention cannot do what a module is asked for; None if it can."""
    if attention_mask is not None or settings.get("is_causal"):
        return NO_MASK
    # As transformers decides whether to record them.
    weights = settings.get("output_attentions", getattr(attention.config, "output_attentions", False))
    return NO_WEIGHTS if weights else None


def split_heads(x: Tensor, width: int) -> Tensor:
    """``[batch, n, heads * d]``, or a grid of tokens, to ``[batch, heads, n, d]``."""
    return x.view(len(x), -1, x.shape[-1] // width, width).transpose(1, 2)


def common_qkv(attention: Any, x: Tensor, context: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Three projections and nothing else."""
    parts = (attention.q_proj, attention.k_proj, attention.v_proj)
    q, k, v = (split_heads(part(x), attention.head_dim) for part in parts)
    return q, k, v


def common_arguments(
    attention: Any, hidden_states: Tensor, attention_mask: Tensor | None = None, **settings: Any
) -> tuple[Tensor, None, str | None]:
    """Tokens, perhaps a mask."""
    return hidden_states, None, refused(attention, attention_mask, settings)


def _project(attention: Any, heads: Tensor, x: Tensor, context: Any, *, name: str) -> tuple[Tensor, None]:
    joined = heads.transpose(1, 2).reshape(*x.shape[:-1], -1)
    return getattr(attention, name)(joined), None  # no weights, as with torch's own attention


def _mixing(attention: Any, *, name: str) -> Tensor:
    return getattr(attention, name).weight


def _scale(attention: Any, *, name: str) -> float:
    return getattr(attention, name)


def adapter(projection: str, scale: str, **others: Any) -> AttentionAdapter:
    """For attention whose output projection and scale have these names; ``others`` take the place of the common."""
    parts: dict[str, Any] = {
        "qkv": common_qkv,
        "project": functools.partial(_project, name=projection),
        "mixing": functools.partial(_mixing, name=projection),
        "scale": functools.partial(_scale, name=scale),
        "arguments": common_arguments,
    }
    return AttentionAdapter(**(parts | others))


O_PROJ, OUT_PROJ = adapter("o_proj", "scaling"), adapter("out_proj", "scale")


@dataclasses.dataclass(frozen=True)
class Attention:
    """One attention class. By exact type: a subclass may compute something else.

    Attributes:
        kind: its name.
        adapter: how it gives its queries, keys and values, and takes the result.
        heads: what it calls the number of its heads.
        width: what it calls the features of a head.
        dropout: what it calls its dropout.
        setting: the dropout in the config.
    """

    kind: str
    adapter: AttentionAdapter = O_PROJ
    heads: str = "num_attention_heads"
    width: str = "head_dim"
    dropout: str = "attention_dropout"
    setting: str = "attention_probs_dropout_prob"


def clip_like(kind: str) -> Attention:
    """An attention class with the names of CLIP's."""
    return Attention(kind, OUT_PROJ, "num_heads", "head_dim", "dropout", "attention_dropout")


def _attend(block: Any, x: Tensor, *arguments: Any, place: str, norm: str, after: tuple[str, ...], **settings: Any):
    added = getattr(block, place)(getattr(block, norm)(x), *arguments, **settings)
    added = added[0] if isinstance(added, tuple) else added
    for name in after:
        added = getattr(block, name)(added)
    return x + added


def _feed(block: Any, x: Tensor, *, mlp: str, norm: str, after: tuple[str, ...]) -> Tensor:
    added = getattr(block, mlp)(getattr(block, norm)(x))
    for name in after:
        added = getattr(block, name)(added)
    return x + added


def _width(block: Any, *, norm: str) -> int:
    return getattr(block, norm).weight.shape[0]


def halves(
    place: str,
    norms: tuple[str, str],
    after: tuple[tuple[str, ...], tuple[str, ...]] = ((), ()),
    mlp: str = "mlp",
) -> BlockAdapter:
    """For blocks with these norms before attention and feed-forward part, and these modules after each."""
    return BlockAdapter(
        attend=functools.partial(_attend, place=place, norm=norms[0], after=after[0]),
        feed=functools.partial(_feed, mlp=mlp, norm=norms[1], after=after[1]),
        dim=functools.partial(_width, norm=norms[0]),
    )


def pair(size: Any) -> tuple[int, int]:
    """Height and width, of which a config says one where both are the same."""
    height, width = size if isinstance(size, list | tuple) else (size, size)
    return int(height), int(width)


def built_size(tower: Any) -> tuple[int, int]:
    """The size of images that the position embeddings are for, where the embeddings tell it."""
    embeddings = tower.embeddings
    return pair((embeddings if hasattr(embeddings, "image_size") else embeddings.patch_embeddings).image_size)


def config_size(tower: Any) -> tuple[int, int]:
    """The same, where only the config tells it."""
    return pair(tower.config.image_size)


@dataclasses.dataclass(frozen=True)
class Family:
    """One architecture: a tower of blocks behind ``embeddings``, as transformers builds it.

    Attributes:
        attention: its attention class.
        since: the first version of transformers that is known to build it like this.
        halves: how to run the two halves of a block; None where they cannot be told apart.
        blocks: where in the tower the blocks are.
        place: where in a block the attention is.
        recorder: where in the tower the module is that records outputs such as attention weights.
        num_prefix: from the tower's config to the number of tokens before the patches, as the attention has them.
        behind: from the tower's config to how many of these are behind the patches outside of the attention.
        class_token: whether the first token stands for the class.
        size: from the tower to the size of images that it was built for.
        any_size: from the tower to whether it takes images of every size; else of its own, or when told.
        told: whether it can be told, with ``interpolate_pos_encoding=True``.
        dense: from a block to why its attention stays as it is, or None if it is converted.
        deaf: whether its blocks do not hear that attention weights are wanted.
        every_token: why no token can be dropped, or None if some can.
        obstacle: from the tower to why this one cannot be converted, or None if it can.
    """

    attention: Attention
    since: tuple[int, int]
    halves: BlockAdapter | None
    blocks: str = "layers"
    place: str = "attention"
    recorder: str = ""
    num_prefix: Callable[[Any], int] = lambda config: 1
    behind: Callable[[Any], int] = lambda config: 0
    class_token: bool = True
    size: Callable[[Any], tuple[int, int]] = built_size
    any_size: Callable[[Any], bool] = lambda tower: False
    told: bool = True
    dense: Callable[[Any], str | None] = lambda block: None
    deaf: bool = False
    every_token: str | None = None
    obstacle: Callable[[Any], str | None] = lambda tower: None


FEATURE_MAPS = "its feature maps are made of all tokens"


@dataclasses.dataclass(frozen=True)
class Member:
    """A model class.

    Attributes:
        family: the architecture.
        tower: where in the model that is.
        unused: what of the tower its predictions do not depend on.
        options: what it was made with beside the config.
    """

    family: Family
    tower: str = ""
    unused: tuple[str, ...] = ()
    options: Callable[[Any], dict[str, Any]] = lambda model: {}


def backbone(family: Family) -> Member:
    """A class that gives feature maps, which need every token."""
    return Member(dataclasses.replace(family, every_token=FEATURE_MAPS))


def pooling_options(model: Any) -> dict[str, Any]:
    """What models are made with that may have a pooler and a mask token."""
    return {"add_pooling_layer": model.pooler is not None, "use_mask_token": model.embeddings.mask_token is not None}


def only_pooling(model: Any) -> dict[str, Any]:
    """What models are made with that may have a pooler."""
    return {"add_pooling_layer": model.pooler is not None}
