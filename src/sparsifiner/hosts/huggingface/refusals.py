"""Why models of transformers that no family covers cannot be converted."""

from __future__ import annotations

from torch import nn

from sparsifiner.hosts import obstacle

# By the start of the class name of a model or of a part of it; read in transformers' sources.
REASONS = {
    "Swin": "its attention already works inside shifted windows, not over all tokens",
}


def why_not(model: nn.Module) -> str:
    """In one line."""
    name = type(model).__name__
    known = next((reason for start, reason in REASONS.items() if name.startswith(start)), None)
    return known or obstacle(model) or "it is not one of the models of transformers that are known"
