"""DINOv3: queries and keys of the patches are rotated by tables that each call brings along."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from sparsifiner.hosts.huggingface.family import (
    Attention,
    Family,
    Member,
    adapter,
    backbone,
    common_qkv,
    config_size,
    halves,
    refused,
)
from sparsifiner.nn.rotary import Rotary, turn_halves


def _qkv(attention: Any, x: Tensor, context: Rotary) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = common_qkv(attention, x, None)
    return context(q), context(k), v


def _arguments(
    attention: Any,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    position_embeddings: Any = None,
    **settings: Any,
) -> tuple[Tensor, Rotary, str | None]:
    rotary = Rotary(turn_halves, tuple(position_embeddings))  # cosines and sines, [n, d] each
    return hidden_states, rotary, refused(attention, attention_mask, settings)


DINOV3 = Family(
    Attention(
        "DINOv3ViTAttention",
        adapter("o_proj", "scaling", qkv=_qkv, arguments=_arguments),
        heads="num_heads",
        dropout="dropout",
        setting="attention_dropout",
    ),
    since=(5, 22),
    halves=halves("attention", ("norm1", "norm2"), (("layer_scale1", "drop_path"), ("layer_scale2", "drop_path"))),
    blocks="model.layer",
    recorder="model",
    num_prefix=lambda config: 1 + config.num_register_tokens,
    size=config_size,
    any_size=lambda tower: True,
)

MEMBERS = {"DINOv3ViTModel": Member(DINOV3), "DINOv3ViTBackbone": backbone(DINOV3)}
