"""Families of the common form: each is said in a few lines, a class of a known family in one."""

from __future__ import annotations

import dataclasses
from typing import Any

from sparsifiner.hosts.huggingface.family import (
    Attention,
    Family,
    Member,
    backbone,
    clip_like,
    config_size,
    halves,
    pooling_options,
)


def _always(tower: Any) -> bool:
    return True


def _no_prefix(config: Any) -> int:
    return 0


# ViT, and what was made of it

VIT = Family(
    Attention("ViTAttention"),
    since=(5, 9),
    halves=halves("attention", ("layernorm_before", "layernorm_after"), (("dropout",), ("dropout",))),
)
DEIT = dataclasses.replace(VIT, attention=Attention("DeiTAttention"), num_prefix=lambda config: 2)
VIT_MSN = dataclasses.replace(VIT, attention=Attention("ViTMSNAttention"), since=(5, 22))
I_JEPA = dataclasses.replace(
    VIT, attention=Attention("IJepaAttention"), since=(5, 22), num_prefix=_no_prefix, class_token=False
)

# DINOv2: positions are resampled for every image

DINOV2 = Family(
    Attention("Dinov2Attention"),
    since=(5, 18),
    halves=halves("attention", ("norm1", "norm2"), (("layer_scale1", "drop_path"), ("layer_scale2", "drop_path"))),
    blocks="encoder.layer",
    recorder="encoder",
    any_size=_always,
)
DINOV2_WITH_REGISTERS = dataclasses.replace(
    DINOV2,
    attention=Attention("Dinov2WithRegistersAttention"),
    num_prefix=lambda config: 1 + config.num_register_tokens,
)

# CLIP, and towers that are copies of its

CLIP = Family(
    clip_like("CLIPAttention"),
    since=(5, 6),
    halves=halves("self_attn", ("layer_norm1", "layer_norm2")),
    blocks="encoder.layers",
    place="self_attn",
)


def _like_clip(kind: str, **changes: Any) -> Family:
    return dataclasses.replace(CLIP, attention=clip_like(kind), **({"since": (5, 22)} | changes))


SIGLIP = _like_clip("SiglipAttention", num_prefix=_no_prefix, class_token=False)
METACLIP_2 = _like_clip("MetaClip2Attention")
ALTCLIP, CHINESE_CLIP, CLIPSEG = map(_like_clip, ("AltCLIPAttention", "ChineseCLIPVisionAttention", "CLIPSegAttention"))
OWLVIT, OWLV2 = (_like_clip(kind, size=config_size) for kind in ("OwlViTAttention", "Owlv2Attention"))
AIMV2 = _like_clip(
    "Aimv2Attention",
    halves=halves("attention", ("rms_norm1", "rms_norm2"), mlp="ffn"),
    place="attention",
    num_prefix=_no_prefix,
    class_token=False,
    size=config_size,
    any_size=lambda tower: tower.config.is_native,
    told=False,
)

MEMBERS = {
    "ViTModel": Member(VIT, options=pooling_options),
    "ViTForImageClassification": Member(VIT, "vit"),
    "DeiTModel": Member(DEIT, options=pooling_options),
    "DeiTForImageClassification": Member(DEIT, "deit"),
    "DeiTForImageClassificationWithTeacher": Member(DEIT, "deit"),
    "ViTMSNModel": Member(VIT_MSN),
    "ViTMSNForImageClassification": Member(VIT_MSN, "vit"),
    "IJepaModel": Member(I_JEPA, options=pooling_options),
    "IJepaForImageClassification": Member(I_JEPA, "ijepa"),
    "Dinov2Model": Member(DINOV2),
    "Dinov2ForImageClassification": Member(DINOV2, "dinov2"),
    "Dinov2Backbone": backbone(DINOV2),
    "Dinov2WithRegistersModel": Member(DINOV2_WITH_REGISTERS),
    "Dinov2WithRegistersForImageClassification": Member(DINOV2_WITH_REGISTERS, "dinov2_with_registers"),
    "Dinov2WithRegistersBackbone": backbone(DINOV2_WITH_REGISTERS),
    "CLIPVisionModel": Member(CLIP),
    "CLIPVisionModelWithProjection": Member(CLIP, "vision_model"),
    "CLIPForImageClassification": Member(CLIP, "vision_model", unused=("post_layernorm",)),
    "SiglipVisionModel": Member(SIGLIP),
    "SiglipForImageClassification": Member(SIGLIP, "vision_model", unused=("head",)),
    "MetaClip2VisionModel": Member(METACLIP_2),
    "MetaClip2VisionModelWithProjection": Member(METACLIP_2, "vision_model"),
    "MetaClip2ForImageClassification": Member(METACLIP_2, "vision_model", unused=("post_layernorm",)),
    "AltCLIPVisionModel": Member(ALTCLIP),
    "ChineseCLIPVisionModel": Member(CHINESE_CLIP),
    "CLIPSegVisionModel": Member(CLIPSEG),
    "OwlViTVisionModel": Member(OWLVIT, "vision_model"),
    "OwlViTVisionTransformer": Member(OWLVIT),  # as `OwlViTModel` holds it
    "Owlv2VisionModel": Member(OWLV2, "vision_model"),
    "Owlv2VisionTransformer": Member(OWLV2),
    "Aimv2VisionModel": Member(AIMV2),
}
