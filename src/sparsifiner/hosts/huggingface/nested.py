"""Families whose attention is a module in a module, with the output projection beside it: DPT, ViTPose, YOLOS."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from sparsifiner.hosts.huggingface.family import (
    FEATURE_MAPS,
    Attention,
    Family,
    Member,
    halves,
    only_pooling,
    refused,
    split_heads,
)
from sparsifiner.nn.attention import AttentionAdapter


def _qkv(module: Any, x: Tensor, context: Any) -> tuple[Tensor, Tensor, Tensor]:
    inner = module.attention
    q, k, v = (split_heads(part(x), inner.attention_head_size) for part in (inner.query, inner.key, inner.value))
    return q, k, v


def _project(module: Any, heads: Tensor, x: Tensor, context: Any) -> Tensor:
    return module.output(heads.transpose(1, 2).flatten(2), x)


def _mixing(module: Any) -> Tensor:
    return module.output.dense.weight


def _scale(module: Any) -> float:
    return module.attention.scaling


def _arguments(module: Any, hidden_states: Tensor, **settings: Any) -> tuple[Tensor, None, str | None]:
    return hidden_states, None, refused(module.attention, None, settings)


NESTED = AttentionAdapter(qkv=_qkv, project=_project, mixing=_mixing, scale=_scale, arguments=_arguments)


def _nested(kind: str, how: AttentionAdapter = NESTED) -> Attention:
    inner = "attention."
    return Attention(kind, how, f"{inner}num_attention_heads", f"{inner}attention_head_size", f"{inner}dropout_prob")


def _feed(block: Any, x: Tensor) -> Tensor:
    return block.output(block.intermediate(block.layernorm_after(x)), x)


def _convolved(tower: Any) -> str | None:
    """DPT's hybrid: of its tokens no patches are known."""
    return "its tokens come out of a convolutional network" if tower.config.is_hybrid else None


_HALVES = halves("attention", ("layernorm_before", "layernorm_after"))

VITPOSE = Family(
    _nested("VitPoseBackboneAttention"),
    since=(5, 22),
    halves=_HALVES,
    blocks="encoder.layer",
    recorder="encoder",
    num_prefix=lambda config: 0,
    class_token=False,
    told=False,
    every_token=FEATURE_MAPS,
)

DPT = Family(
    _nested("DPTViTAttention"),
    since=(5, 22),
    halves=dataclasses.replace(_HALVES, feed=_feed),
    blocks="encoder.layer",
    any_size=lambda tower: True,
    deaf=True,
    obstacle=_convolved,
)

# YOLOS has its detection tokens behind the patches. Attention does not ask for an order, so that ours is given them
# with the class token, before the patches, and its output is put back.


def _to_front(module: Any, x: Tensor) -> Tensor:
    count = module.attention.config.num_detection_tokens
    return torch.cat([x[:, :1], x[:, x.shape[1] - count :], x[:, 1 : x.shape[1] - count]], dim=1)


def _yolos_arguments(module: Any, hidden_states: Tensor, **settings: Any) -> tuple[Tensor, None, str | None]:
    return _to_front(module, hidden_states), None, refused(module.attention, None, settings)


def _yolos_project(module: Any, heads: Tensor, x: Tensor, context: Any) -> Tensor:
    out, count = _project(module, heads, x, context), module.attention.config.num_detection_tokens
    return torch.cat([out[:, :1], out[:, 1 + count :], out[:, 1 : 1 + count]], dim=1)


YOLOS = dataclasses.replace(
    DPT,
    attention=_nested(
        "YolosAttention", dataclasses.replace(NESTED, project=_yolos_project, arguments=_yolos_arguments)
    ),
    halves=None,
    obstacle=lambda tower: None,
    num_prefix=lambda config: 1 + config.num_detection_tokens,
    behind=lambda config: config.num_detection_tokens,
    every_token="its detection tokens stand behind the patches",
)

MEMBERS = {
    "VitPoseBackbone": Member(VITPOSE),
    "DPTModel": Member(DPT, options=only_pooling),
    "YolosModel": Member(YOLOS, options=only_pooling),
}
