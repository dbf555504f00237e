"""SAM 3's vision encoder: tokens on a grid, rotary embedding, and most layers in windows, which stay as they are."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparsifiner.hosts.huggingface.family import (
    FEATURE_MAPS,
    Attention,
    Family,
    Member,
    adapter,
    common_qkv,
    config_size,
    refused,
)
from sparsifiner.nn.rotary import Rotary


def _turn_pairs(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Each feature of an even number with the next."""
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return x.float() * cosines + torch.stack([-odd, even], dim=-1).flatten(-2) * sines


def _qkv(attention: Any, x: Tensor, context: Rotary) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = common_qkv(attention, x, None)
    return context(q), context(k), v


def _arguments(
    attention: Any, hidden_states: Tensor, position_embeddings: Any, **settings: Any
) -> tuple[Tensor, Rotary, str | None]:
    return hidden_states, Rotary(_turn_pairs, tuple(position_embeddings)), refused(attention, None, settings)


def _in_windows(block: Any) -> str | None:
    side = block.window_size
    return f"its attention works inside windows of {side} x {side} tokens" if side > 0 else None


SAM3 = Family(
    Attention(
        "Sam3ViTRoPEAttention",
        adapter("o_proj", "scaling", qkv=_qkv, arguments=_arguments),
        setting="attention_dropout",
    ),
    since=(5, 22),
    halves=None,
    num_prefix=lambda config: 0,
    class_token=False,
    size=config_size,
    told=False,
    dense=_in_windows,
    every_token=FEATURE_MAPS,
)

MEMBERS = {"Sam3ViTModel": Member(SAM3)}
