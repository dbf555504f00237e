"""timm's attention classes: how each gives its queries, keys and values, and takes the result."""

from __future__ import annotations

import functools
from typing import Any

import torch
from timm.layers import attention as timm_attention
from timm.layers.pos_embed_sincos import apply_rot_embed_cat
from timm.models import eva, vision_transformer
from torch import Tensor
from torch.nn import functional

from sparsifiner.nn.attention import NO_MASK, AttentionAdapter
from sparsifiner.nn.rotary import Rotary


def _heads(x: Tensor, count: int) -> Tensor:
    """``[batch, n, heads * d]`` to ``[batch, heads, n, d]``."""
    return x.unflatten(2, (count, -1)).transpose(1, 2)


def _scale(attention: Any) -> float:
    return attention.scale


def _refused(attn_mask: Tensor | None, is_causal: bool) -> str | None:
    return NO_MASK if attn_mask is not None or is_causal else None


# Attention, and what its relatives do after it


def _qkv(attention: Any, x: Tensor, context: None) -> tuple[Tensor, Tensor, Tensor]:
    batch, n, _ = x.shape
    packed = attention.qkv(x).reshape(batch, n, 3, attention.num_heads, attention.head_dim)
    q, k, v = packed.permute(2, 0, 3, 1, 4).unbind(0)  # views of [batch, heads, n, d]
    return attention.q_norm(q), attention.k_norm(k), v


def _project(attention: Any, heads: Tensor, x: Tensor, context: Any) -> Tensor:
    out = attention.norm(heads.transpose(1, 2).flatten(2))
    if getattr(attention, "gate", None) is not None:
        out = out * attention.gate(x).sigmoid()
    return attention.proj_drop(attention.proj(out))


def _mixing(attention: Any) -> Tensor:
    return attention.proj.weight


def _arguments(
    attention: Any, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False
) -> tuple[Tensor, None, str | None]:
    return x, None, _refused(attn_mask, is_causal)


# EvaAttention and AttentionRope: projections packed or apart, keys for several heads, rotary tables


def _eva_packed(attention: Any, x: Tensor) -> Tensor:
    if getattr(attention, "q_bias", None) is None:
        return attention.qkv(x)
    bias = torch.cat((attention.q_bias, attention.k_bias, attention.v_bias))
    if attention.qkv_bias_separate:
        return attention.qkv(x) + bias
    return functional.linear(x, attention.qkv.weight, bias)


def _rotary_qkv(attention: Any, x: Tensor, context: Rotary | None) -> tuple[Tensor, Tensor, Tensor]:
    count = attention.num_heads
    shared = getattr(attention, "num_kv_groups", 1)  # heads with the same keys and values
    if attention.qkv is not None:
        q, k, v = (_heads(part, count) for part in _eva_packed(attention, x).chunk(3, dim=2))
    else:
        q = _heads(attention.q_proj(x), count)
        k, v = (_heads(part(x), count // shared) for part in (attention.k_proj, attention.v_proj))
    q, k = attention.q_norm(q), attention.k_norm(k)
    if context is not None:
        q, k = context(q).type_as(v), context(k).type_as(v)
    if shared > 1:
        k, v = (part.repeat_interleave(shared, dim=1) for part in (k, v))
    return q, k, v


def _rotary_arguments(
    attention: Any,
    x: Tensor,
    rope: Tensor | None = None,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
) -> tuple[Tensor, Rotary | None, str | None]:
    context = None
    if rope is not None:  # [n, 2 d], or [heads, n, 2 d] of this layer alone
        context = Rotary(functools.partial(apply_rot_embed_cat, half=attention.rotate_half), (rope,))
    return x, context, _refused(attn_mask, is_causal)


# ParallelScalingBlock: one projection for attention and feed-forward part, so that the block itself is the module


class _Projected:
    """What a block projects its tokens to: some of it for the attention, some for what is done after it."""

    def __init__(self, block: Any, x: Tensor) -> None:
        self.block, self.x = block, x
        self.known: tuple[Tensor, ...] | None = None

    def left(self, cells: Tensor) -> _Projected:
        """The tokens are those that are left."""
        return self

    def parts(self) -> tuple[Tensor, ...]:
        """Of the feed-forward part, queries, keys, values; made when first wanted, and once."""
        known = self.known
        if known is None:
            known = self.known = self.block.in_proj(self.block.in_norm(self.x)).split(self.block.in_split, dim=-1)
        return known


def _parallel_qkv(block: Any, x: Tensor, context: _Projected) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (_heads(part, block.num_heads) for part in context.parts()[1:])
    return block.q_norm(q), block.k_norm(k), v


def _parallel_project(block: Any, heads: Tensor, x: Tensor, context: _Projected) -> Tensor:
    attended, hidden = heads.transpose(1, 2).flatten(2), context.parts()[0]
    if block.mlp_bias is not None:
        hidden = hidden + block.mlp_bias
    hidden = block.mlp_drop(block.mlp_act(hidden))
    if block.out_proj is not None:
        out = block.out_proj(torch.cat((attended, hidden), dim=-1))
    else:
        out = block.attn_out_proj(attended) + block.mlp_out_proj(hidden)
    return x + block.drop_path(block.ls(out))


def _parallel_mixing(block: Any) -> Tensor:
    width = block.num_heads * block.head_dim
    return block.attn_out_proj.weight if block.out_proj is None else block.out_proj.weight[:, :width]


def _parallel_arguments(
    block: Any, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False
) -> tuple[Tensor, _Projected, str | None]:
    return x, _Projected(block, x), _refused(attn_mask, is_causal)


_ROTARY = AttentionAdapter(qkv=_rotary_qkv, project=_project, mixing=_mixing, scale=_scale, arguments=_rotary_arguments)

# By exact type: a subclass may compute something else.
ADAPTERS = {
    timm_attention.Attention: AttentionAdapter(
        qkv=_qkv, project=_project, mixing=_mixing, scale=_scale, arguments=_arguments
    ),
    timm_attention.AttentionRope: _ROTARY,
    eva.EvaAttention: _ROTARY,
    vision_transformer.ParallelScalingBlock: AttentionAdapter(
        qkv=_parallel_qkv,
        project=_parallel_project,
        mixing=_parallel_mixing,
        scale=_scale,
        arguments=_parallel_arguments,
    ),
}
