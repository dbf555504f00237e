"""What is explored: a model, converted and calibrated one way or another, and images to begin with."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from timm.data.imagenet_info import ImageNetInfo
from torch import nn

from sparsifiner import checkpoint, scenes
from sparsifiner.convert import config_of, conversion_of, sparsify, suggest_config
from sparsifiner.errors import CheckpointError, ConfigError
from sparsifiner.explorer.pictures import Lens, lens_of
from sparsifiner.explorer.samples import Gallery, digit_samples, file_samples, photo_samples, scene_samples
from sparsifiner.models import RANDOM, create_host
from sparsifiner.progress import Progress

# Where nothing else says how sparse.
KEEP = 0.25
OPENS_CELLS = (
    "There are no predictors here: a patch opens those cells of the grid whose means say that it pays, and every other "
    "cell stands for its keys."
)
AND_PREDICTORS = "`sparsifiner calibrate` makes a checkpoint of the paper's form, with predictors, to open here."


@dataclasses.dataclass
class Subject:
    """A converted model and all that the page says of it.

    Attributes:
        student: the model.
        name: its name for people.
        lens: how it takes images.
        gallery: images to begin with.
        classes: names of its classes by number; empty if it predicts none.
        notes: what a reader should know: where predictors come from, and the like.
    """

    student: nn.Module
    name: str
    lens: Lens
    gallery: Gallery
    classes: list[str]
    notes: list[str]


def open_subject(
    paths: Sequence[str],
    model: str | None = None,
    weights: str | None = None,
    image_size: int | None = None,
    progress: Progress | None = None,
) -> Subject:
    """What the command line asks for.

    Args:
        paths: a checkpoint, perhaps, then image files and folders.
        model: the name of a timm model, to be converted here, or to which the checkpoint's predictors belong.
        weights: its weights, as in `create_host`.
        image_size: of ``model``, if not its own.
        progress: as in `calibrate`.
    """
    if model is None and weights is not None:
        raise ConfigError("--weights without --model: say which model they belong to")
    if model is None and not paths:
        return _scenes(progress)
    size = {} if image_size is None else {"img_size": image_size}
    host = None if model is None else create_host(model, weights, **size)
    if paths and _is_checkpoint(paths[0]):
        name, student = Path(paths[0]).name, checkpoint.load(paths[0], model=host)
        note = f"Predictors are those of {name}." if config_of(student).asks_predictor else OPENS_CELLS
        return _subject(student, name, paths[1:], [note])
    if model is None or host is None:
        raise ConfigError(
            f"{paths[0]} is not a checkpoint (a .safetensors file, or a folder of a run): give one before the images, "
            "or --model NAME --weights FILE"
        )
    return _converted(host, model, weights, paths)


def _is_checkpoint(path: str) -> bool:
    # By what it is called, not whether it is there: a name that is misspelt should be said to be missing.
    return Path(path).suffix == ".safetensors" or (Path(path) / "student.safetensors").is_file()


def _subject(student: nn.Module, name: str, paths: Sequence[str], notes: list[str]) -> Subject:
    lens = lens_of(student)
    host = conversion_of(student).host
    classes = _classes(host.num_classes(student), "" if lens.crisp else "class ")
    if host.describe(student)["architecture"] == scenes.NAME:
        samples = scene_samples(lens, host.grid(student).size[0])
        classes = []  # it has an answer for each patch, and none for the whole image
    else:
        samples = digit_samples(lens) if lens.crisp else photo_samples(lens)
    own, said = file_samples(paths, lens, [sample.key for sample in samples])
    return Subject(student, name, lens, Gallery([*own, *samples]), classes, notes + said)


def _classes(count: int, word: str) -> list[str]:
    if count == 1000:
        return [name.split(",")[0] for name in ImageNetInfo("imagenet-1k").label_descriptions()]
    return [f"{word}{number}" for number in range(count)]


def _converted(host: nn.Module, name: str, weights: str | None, paths: Sequence[str]) -> Subject:
    """A dense model: with predictors that come with the package, or without any, opening cells."""
    notes = (
        ["The weights are random: give --weights to see what a trained model attends to."]
        if weights in (None, RANDOM)
        else []
    )
    plain = name.split(".")[0]
    if plain in checkpoint.ready():
        try:
            student = checkpoint.load(plain, model=host)
        except CheckpointError:
            pass  # of another image size or number of classes
        else:
            notes.append(f"Predictors for {plain} come with sparsifiner; they were calibrated on other images.")
            return _subject(student, name, paths, notes)
    return _subject(sparsify(host, suggest_config(host, KEEP)), name, paths, [*notes, OPENS_CELLS, AND_PREDICTORS])


def _scenes(progress: Progress | None) -> Subject:
    host, origin = scenes.trained(progress)
    student = sparsify(host, scenes.settings(host))
    notes = [
        "Scenes of handwritten digits, one of them orange. A small ViT of 1,025 tokens says of every patch with ink "
        "whether its digit is the same as the orange one: choose a patch and see how it finds it. It has seen none of "
        f"these digits before. {origin} Start with a checkpoint or --model for photos.",
        OPENS_CELLS,
    ]
    return _subject(student, "scenes of digits", (), notes)
