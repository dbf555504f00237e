"""A head of two convolutions on a Vision Transformer's patches: how it predicts, learns and is judged."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from sparsifiner.data.images import Failure, accept
from sparsifiner.data.scenes import IGNORED, Scenes
from sparsifiner.errors import CheckpointError, reason_of
from sparsifiner.files import replacing

FINER = 4  # predictions have so many rows and columns for each of the patches'
HIDDEN = 128  # channels between the two convolutions
CHUNK = 16  # images whose features are kept in one file
LEARNING_RATE = 2e-3
BATCH = 8


class Head(nn.Module):
    """From features ``[batch, D, rows, columns]`` to classes ``[batch, classes, 4 rows, 4 columns]``."""

    def __init__(self, width: int, num_classes: int) -> None:
        super().__init__()
        self.mix = nn.Conv2d(width, HIDDEN, 3, padding=1)
        self.classify = nn.Conv2d(HIDDEN, num_classes, 3, padding=1)

    def forward(self, features: Tensor) -> Tensor:
        """Finer than the patches by interpolation."""
        logits = self.classify(functional.gelu(self.mix(features)))
        return functional.interpolate(logits, scale_factor=FINER, mode="bilinear")


def features(backbone: Any, images: Tensor) -> Tensor:
    """The last patch tokens on their grid, ``[batch, D, rows, columns]``, of a timm model, dense or sparse."""
    tokens = backbone.forward_features(images)[:, backbone.num_prefix_tokens :]
    return tokens.mT.unflatten(2, backbone.patch_embed.grid_size)


def predictor(head: Head) -> Callable[[nn.Module, Tensor], Tensor]:
    """What `sparsifiner.distill` calls ``predict``: from backbone and images to the classes of every place."""
    return lambda backbone, images: head(features(backbone, images))


def prediction_size(backbone: Any) -> tuple[int, int]:
    """Rows and columns of predictions."""
    rows, columns = backbone.patch_embed.grid_size
    return FINER * rows, FINER * columns


def read(scenes: Scenes, number: int) -> tuple[Tensor, Tensor]:
    """A scene; an error in one line if it cannot be used."""
    sample = scenes[number]
    if isinstance(sample, Failure):
        accept([sample], skip=False)
    assert not isinstance(sample, Failure)
    return sample


@torch.inference_mode()
def cache_features(backbone: nn.Module, scenes: Scenes, folder: Path, say: Callable[[str], None]) -> Iterable[Path]:
    """Files of features and class maps, a few scenes in each; those that are there already are not made again."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for start in range(0, len(scenes), CHUNK):
        path = folder / f"{start:05d}.safetensors"
        paths.append(path)
        if path.exists():
            continue
        samples = [read(scenes, number) for number in range(start, min(start + CHUNK, len(scenes)))]
        found = [features(backbone, image[None]) for image, _ in samples]
        tensors = {"features": torch.cat(found).half(), "maps": torch.stack([labels for _, labels in samples])}
        with replacing(path) as temporary:
            save_file(tensors, temporary)
        say(f"features of {start + len(samples)} of {len(scenes)} scenes")
    return paths


def train_head(paths: Iterable[Path], num_classes: int, epochs: int, say: Callable[[str], None]) -> Head:
    """A head that has learnt from cached features; the same files give the same head."""
    try:
        parts = [load_file(path) for path in paths]
        inputs = torch.cat([part["features"] for part in parts])
        maps = torch.cat([part["maps"] for part in parts])
    except Exception as error:  # of numbers that torch has no type for, safetensors raises what it likes
        raise CheckpointError(f"the features kept in a file are damaged ({reason_of(error)}): delete them") from None
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        head = Head(inputs.shape[1], num_classes)
    steps = epochs * (len(inputs) // BATCH)
    optimiser = torch.optim.AdamW(head.parameters(), LEARNING_RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, LEARNING_RATE, total_steps=max(1, steps))
    for epoch in range(epochs):
        total = 0.0
        batches = torch.randperm(len(inputs), generator=generator).split(BATCH)[: len(inputs) // BATCH]
        for chosen in batches:
            loss = functional.cross_entropy(head(inputs[chosen].float()), maps[chosen], ignore_index=IGNORED)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            schedule.step()
            total += loss.item()
        say(f"epoch {epoch + 1} of {epochs}: loss {total / max(1, len(batches)):.4f}")
    return head.eval().requires_grad_(False)


def save_head(head: Head, path: Path) -> None:
    """Writes its weights."""
    with replacing(path) as temporary:
        save_file(head.state_dict(), temporary)


def load_head(path: Path, width: int, num_classes: int) -> Head:
    """Reads what `save_head` wrote."""
    head = Head(width, num_classes)
    try:
        head.load_state_dict(load_file(path))
    except FileNotFoundError:
        raise CheckpointError(f"there is no head {path}: run `segment.py train` first, with the same --size") from None
    except Exception as error:
        raise CheckpointError(f"{path} is no head of {num_classes} classes: {reason_of(error)}") from None
    return head.eval().requires_grad_(False)


@dataclasses.dataclass
class Score:
    """How predictions compare with the truth: counts of pixels by true and predicted class."""

    counts: Tensor

    @classmethod
    def of(cls, num_classes: int) -> Score:
        """Nothing counted yet."""
        return cls(torch.zeros(num_classes, num_classes, dtype=torch.int64))

    def add(self, predicted: Tensor, labels: Tensor) -> None:
        """Counts the pixels of a scene that have a class."""
        counted = labels != IGNORED
        classes = len(self.counts)
        pairs = labels[counted] * classes + predicted[counted]
        self.counts += torch.bincount(pairs, minlength=classes**2).view(classes, classes)

    @property
    def ious(self) -> Tensor:
        """Intersection over union of each class in per cent; NaN for a class that is nowhere."""
        both = self.counts.diagonal().double()
        return 100 * both / (self.counts.sum(0) + self.counts.sum(1) - both)

    @property
    def miou(self) -> float:
        """Their mean."""
        return float(self.ious.nanmean())

    @property
    def accuracy(self) -> float:
        """Pixels of the right class, in per cent."""
        return float(100 * self.counts.diagonal().sum() / self.counts.sum())


@torch.inference_mode()
def predict_maps(backbone: nn.Module, head: Head, scenes: Scenes, say: Callable[[str], None]) -> list[Tensor]:
    """The predicted class of every pixel of every scene, at the size of its class map."""
    found = []
    for number in range(len(scenes)):
        image, labels = read(scenes, number)
        logits = head(features(backbone, image[None]))
        whole = functional.interpolate(logits, labels.shape, mode="bilinear")
        found.append(whole[0].argmax(0).to(torch.uint8))
        if (number + 1) % 20 == 0:
            say(f"{number + 1} of {len(scenes)} scenes")
    return found
