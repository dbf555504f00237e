"""Models that run in milliseconds. Apart from conftest.py, so that processes which tests start can have them too."""

from __future__ import annotations

import torch
from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer
from torch import nn


def sharpen(model: nn.Module) -> nn.Module:
    """Random weights attend to everything alike; larger ones make attention worth predicting."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "qkv.weight" in name:
                parameter.normal_(std=0.25)
    return model.eval()


def make_vit(**arguments) -> VisionTransformer:
    """A ViT of 26 tokens, 2 layers and 3 heads that runs in milliseconds."""
    settings = {
        "img_size": 20,
        "patch_size": 4,
        "embed_dim": 24,
        "depth": 2,
        "num_heads": 3,
        "num_classes": 7,
    }
    torch.manual_seed(0)
    model = VisionTransformer(**(settings | arguments))
    sharpen(model)
    return model


def make_eva(**arguments) -> Eva:
    """An Eva with rotary embedding, of 26 tokens, 2 layers and 3 heads, in which every weight matters."""
    settings = {
        "img_size": 20,
        "patch_size": 4,
        "embed_dim": 24,
        "depth": 2,
        "num_heads": 3,
        "num_classes": 7,
        "mlp_ratio": 2.0,
        "use_rot_pos_emb": True,
    }
    torch.manual_seed(0)
    model = Eva(**(settings | arguments)).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # biases and layer scale are zero, or nearly
            parameter.add_(0.3 * torch.randn_like(parameter)) if parameter.ndim == 1 else parameter.normal_(std=0.3)
    return model
