"""A small ViT on scikit-learn's digits: the demo that needs no download.

8 x 8 grey images, one token a pixel and a class token: 65 tokens. A convolutional stem shows each token its
neighbourhood; without it a ViT of single pixels takes far longer to learn anything.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import timm
import torch
from timm.layers.hybrid_embed import HybridEmbed
from timm.models import register_model
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

NAME = "vit_digits_sparsifiner"
# Of scikit-learn's pixels, as shares of its brightest.
BRIGHTEST, MEAN, STD = 16.0, 4.9 / 16, 6.0 / 16


@register_model
def vit_digits_sparsifiner(pretrained: bool = False, **arguments) -> VisionTransformer:
    """The demo's architecture, known to timm by name so that its checkpoints load."""
    known = {"cache_dir", "pretrained_cfg", "pretrained_cfg_overlay"}
    arguments = {key: value for key, value in arguments.items() if key not in known}
    stem = nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.GELU(),
        nn.Conv2d(32, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.GELU(),
    )
    settings = {
        "img_size": 8,
        "patch_size": 1,
        "in_chans": 1,
        "num_classes": 10,
        "embed_dim": 64,
        "depth": 4,
        "num_heads": 4,
        "embed_layer": partial(HybridEmbed, backbone=stem),
    }
    model = VisionTransformer(**(settings | arguments))
    # timm's small start would drown the position in the stem's output.
    assert model.pos_embed is not None
    nn.init.trunc_normal_(model.pos_embed, std=0.2)
    vars(model)["pretrained_cfg"] = {"architecture": NAME}  # where timm keeps a model's name
    return model


def load_digits(test_share: float = 0.25) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Training and test ``(images, labels)``; images are ``[count, 1, 8, 8]``, about zero mean, unit variance."""
    from sklearn import datasets

    images, labels = datasets.load_digits(return_X_y=True)
    pixels = (torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / BRIGHTEST - MEAN) / STD
    targets = torch.tensor(labels)
    order = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(0))
    cut = int(len(pixels) * test_share)
    return (pixels[order[cut:]], targets[order[cut:]]), (pixels[order[:cut]], targets[order[:cut]])


def train_digits(
    images: Tensor,
    labels: Tensor,
    *,
    epochs: int = 20,
    seed: int = 0,
    on_epoch: Callable[[int, float], None] | None = None,
) -> nn.Module:
    """Trains the dense model from nothing, the same way for the same seed; under a minute on two cores."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = timm.create_model(NAME).train()
        optimiser = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05)
        batch = 64
        steps = epochs * -(-len(images) // batch)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, max_lr=2e-3, total_steps=steps, pct_start=0.2)
        for epoch in range(epochs):
            total = 0.0
            for chosen in torch.randperm(len(images)).split(batch):
                loss = nn.functional.cross_entropy(model(_shift(images[chosen])), labels[chosen], label_smoothing=0.1)
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
                schedule.step()
                total += loss.item() * len(chosen)
            if on_epoch:
                on_epoch(epoch + 1, total / len(images))
    return model.eval()


def _shift(images: Tensor) -> Tensor:
    """Moves each image by up to one pixel: the only augmentation these digits need."""
    background = images.amin()
    padded = nn.functional.pad(images, (1, 1, 1, 1), value=float(background))
    down, right = torch.randint(0, 3, (2,)).tolist()
    return padded[..., down : down + 8, right : right + 8]
