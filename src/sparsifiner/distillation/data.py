"""Training images, in an order and with augmentation that seed, epoch and number alone decide.

Nothing is drawn from a generator that goes on from batch to batch. So a run that is taken up again needs no state of
any generator, and neither the number of workers nor that of processes changes what is trained on.
"""

from __future__ import annotations

import dataclasses
import os
import random
from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np
import torch
from timm.data.mixup import Mixup
from timm.data.transforms_factory import create_transform
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from sparsifiner.convert import host_of
from sparsifiner.data.images import Failure, Preprocess, accept, data_config, open_images, preprocessing
from sparsifiner.distillation.recipe import Recipe
from sparsifiner.errors import ConfigError, DataError, reason_of

# What a random number is for; each purpose has its own.
SAMPLE, ORDER, MIX, STEP, KEEP = range(5)


@dataclasses.dataclass
class Batch:
    """Images with labels and numbers that name image and mirroring.

    Labels are class numbers ``[batch]`` (-1 without), shares of classes after mixup, or maps ``[batch, ..., rows,
    columns]`` of whatever a task asks for each pixel.
    """

    images: Tensor
    labels: Tensor
    keys: Tensor

    def to(self, device: torch.device) -> Batch:
        """On a device."""
        return Batch(self.images.to(device), self.labels.to(device), self.keys)


def number_from(*parts: int) -> int:
    """A random number of 32 bits that is the same for the same parts."""
    return int(np.random.SeedSequence(parts).generate_state(1)[0])


def seed_generators(*parts: int) -> None:
    """Sets every generator that augmentation, dropout and the like draw from."""
    number = number_from(*parts)
    random.seed(number)
    np.random.seed(number)  # noqa: NPY002 (timm draws from it)
    torch.manual_seed(number)


class _Tensors(Dataset):
    def __init__(self, images: Tensor, labels: Tensor | None, transform: Callable[[Tensor], Tensor] | None) -> None:
        self.images, self.labels, self.transform = images, labels, transform

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor | int]:
        image = self.images[index]
        label = -1 if self.labels is None else self.labels[index]
        return (image if self.transform is None else self.transform(image)), label


class TrainingSet(Dataset):
    """Samples by ``(epoch, number, copy)``.

    Args:
        images: ``(image, label)`` by number, or a `Failure`; a label that is a map is mirrored with its image.
        recipe: what is drawn is of its seed.
        varies: whether a number is not the same image in every epoch, but for being mirrored.
        skip_unreadable: pass over images that cannot be read, and count them, instead of stopping.
    """

    def __init__(self, images: Any, recipe: Recipe, *, varies: bool, skip_unreadable: bool = False) -> None:
        self.images, self.recipe, self.varies = images, recipe, varies
        self.skip_unreadable = skip_unreadable
        self.skipped: list[tuple[str, str]] = []

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, item: tuple[int, int, int]) -> tuple[Tensor, Tensor, int] | Failure:
        epoch, index, copy = item
        seed_generators(self.recipe.seed, SAMPLE, epoch, index, copy)
        mirrored = random.random() < self.recipe.flip
        sample = self.images[index]
        if isinstance(sample, Failure):
            return sample
        image, label = sample[0], torch.as_tensor(sample[1])
        if mirrored:
            image, label = image.flip(-1), label.flip(-1) if label.ndim >= 2 else label
        return image, label, 2 * index + mirrored

    def order(self, epoch: int) -> list[tuple[int, int, int]]:
        """All samples of an epoch."""
        generator = torch.Generator().manual_seed(number_from(self.recipe.seed, ORDER, epoch))
        shuffled = torch.randperm(len(self), generator=generator).tolist()
        copies = self.recipe.repeats
        return [(epoch, shuffled[i // copies], i % copies) for i in range(len(self))]

    def passes(self, epoch: int, first: int, size: int, rank: int, world: int, workers: int) -> Iterator[Batch]:
        """The batches of one process from number ``first`` of an epoch on.

        Number i of all processes together is a stretch of the order, so that their number changes nothing but who
        computes what.
        """
        order, together = self.order(epoch), size * world
        chosen = [
            order[start + rank * size : start + (rank + 1) * size]
            for start in range(first * together, len(order) - together + 1, together)
        ]
        loader = DataLoader(cast(Any, self), batch_sampler=chosen, num_workers=workers, collate_fn=_collate)
        for batch, failures in loader:
            self.skipped += accept(failures, self.skip_unreadable)
            if batch is None:
                raise DataError(f"none of the images of a batch could be read; the last: {failures[-1].name}")
            yield batch


def _collate(samples: list[Any]) -> tuple[Batch | None, list[Failure]]:
    failures = [sample for sample in samples if isinstance(sample, Failure)]
    read = [sample for sample in samples if not isinstance(sample, Failure)]
    if not read:
        return None, failures
    images, labels, keys = zip(*read, strict=True)
    return Batch(torch.stack(images), torch.stack(labels), torch.tensor(keys)), failures


def from_tensors(
    images: Tensor, labels: Tensor | None, recipe: Recipe, transform: Callable[[Tensor], Tensor] | None = None
) -> TrainingSet:
    """Images in memory, normalised; a recipe's flips and mixup apply, and ``transform`` in the place of the rest.

    Labels are a number for each image, or a map ``[count, ..., rows, columns]``, which ``transform`` does not see: it
    must leave pixels where they are.
    """
    if images.ndim not in (4, 5) or not images.is_floating_point() or not len(images):
        raise DataError(f"images must be floating point [count, channels, height, width], got {tuple(images.shape)}")
    if not bool(torch.isfinite(images).all()):
        raise DataError("images hold NaN or infinite values")
    if labels is not None and (labels.ndim in (0, 2) or len(labels) != len(images)):
        raise DataError(f"{len(images)} images need as many labels, or maps of labels, got {tuple(labels.shape)}")
    return TrainingSet(_Tensors(images, labels, transform), recipe, varies=transform is not None)


def from_files(
    data: str | os.PathLike[str],
    model: nn.Module,
    recipe: Recipe,
    *,
    preprocess: Preprocess = "model",
    class_map: str | os.PathLike[str] | None = None,
    split: str = "train",
    limit: int | None = None,
    skip_unreadable: bool = False,
) -> TrainingSet:
    """Image files, augmented as the recipe says; arguments as in `sparsifiner.data.images.open_images`."""
    labels = host_of(model).num_classes(model) or None if recipe.label_weight and recipe.phase2_epochs else None
    images = open_images(
        data,
        augmentation(model, recipe, preprocess),
        num_classes=labels,
        class_map=class_map,
        split=split,
        limit=limit,
        seed=recipe.seed,
    ).dataset
    return TrainingSet(images, recipe, varies=recipe.varies() is not None, skip_unreadable=skip_unreadable)


def augmentation(model: nn.Module, recipe: Recipe, preprocess: Preprocess = "model") -> Callable[[Any], Tensor]:
    """Timm's training transform without the flip, which `TrainingSet` does; for centre crops the evaluation's."""
    if recipe.crop == "centre":
        if recipe.auto_augment or recipe.erase:
            raise ConfigError("crop = centre takes images as they are: set auto_augment to '' and erase to 0")
        return preprocessing(model, preprocess)
    config = data_config(model)
    try:
        transform = create_transform(
            input_size=config["input_size"],
            is_training=True,
            scale=(recipe.smallest_crop, 1.0),
            hflip=0.0,
            color_jitter=cast(Any, recipe.colour_jitter or None),  # timm takes None, but does not say so
            auto_augment=recipe.auto_augment or None,
            interpolation=config["interpolation"],
            mean=config["mean"],
            std=config["std"],
            re_prob=recipe.erase,
            re_mode="pixel",
        )
    except Exception as error:  # timm asserts, or fails to read the policy's name as a number
        raise ConfigError(
            f"timm cannot augment images as the recipe says (auto_augment {recipe.auto_augment!r}, colour_jitter "
            f"{recipe.colour_jitter:g}): {reason_of(error)}"
        ) from None
    return cast(Callable[[Any], Tensor], transform)


def mixing(recipe: Recipe, num_classes: int) -> Callable[[Batch, int], Batch]:
    """Timm's mixup and cutmix; ``(batch, number)`` to a batch whose labels are shares of classes."""
    if not recipe.mixup and not recipe.cutmix:
        return lambda batch, number: batch
    if recipe.batch_size % 2:
        raise ConfigError(f"mixup and cutmix need an even batch_size, got {recipe.batch_size}")
    mixup = Mixup(
        mixup_alpha=recipe.mixup,
        cutmix_alpha=recipe.cutmix,
        label_smoothing=recipe.label_smoothing,
        num_classes=max(1, num_classes),  # also of a model without classes, whose images have no labels
    )

    def mix(batch: Batch, number: int) -> Batch:
        if batch.images.ndim > 4:
            raise ConfigError("mixup and cutmix mix images: set both to 0 for clips")
        if batch.labels.ndim > 1:
            raise ConfigError("mixup and cutmix mix the classes of whole images: set both to 0 for labels per pixel")
        if len(batch.images) % 2:  # an image was skipped: its partner goes too
            batch = Batch(batch.images[:-1], batch.labels[:-1], batch.keys[:-1])
        np.random.seed(number)  # noqa: NPY002 (timm draws from it)
        known = batch.labels.clamp(min=0)  # where labels do not matter there are none
        images, labels = mixup(batch.images.clone(), known)
        return Batch(images, labels, batch.keys)

    return mix
