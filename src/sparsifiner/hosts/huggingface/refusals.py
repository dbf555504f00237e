"""Why models of transformers that no family covers cannot be converted."""

from __future__ import annotations

from torch import nn

from sparsifiner.hosts import obstacle

RAGGED = "it packs images of many sizes into one sequence or pads them, with a mask: its tokens are on no one grid"
FEWER_KEYS = "its keys are those of an image made smaller: they are few already"

# By what is in the class name of a model; read in transformers' sources.
REASONS = {
    "Swin": "its attention already works inside shifted windows, not over all tokens",
    "Siglip2": f"{RAGGED} (SigLIP 2 of fixed size is a SiglipModel, and can be converted)",
    "ViTMAE": "it shuffles the patches and leaves most of them out, at random, for its own training: load its weights "
    "into a ViTModel, which can be converted",
    "Pixtral": RAGGED,
    "Idefics": RAGGED,
    "SmolVLM": RAGGED,
    "Segformer": FEWER_KEYS,
    "Pvt": FEWER_KEYS,
    "GLPN": FEWER_KEYS,
    "Cvt": "its queries and keys come out of convolutions, the keys of an image made smaller",
    "MobileViT": "its attention is over pixels of the same place in different patches",
    "Dinat": "its attention already works in neighbourhoods",
    "Hiera": "its attention works inside units of the image, and pools its queries",
    "EfficientFormer": "it adds a bias for each pair of places to the attention logits",
}


def why_not(model: nn.Module) -> str:
    """In one line."""
    name = type(model).__name__
    known = next((reason for mark, reason in REASONS.items() if mark in name), None)
    return known or obstacle(model) or "it is not one of the models of transformers that are known"
