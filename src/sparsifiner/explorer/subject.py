"""What is explored: a model, converted and calibrated one way or another, and images to begin with."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from timm.data.imagenet_info import ImageNetInfo
from torch import nn

from sparsifiner import __version__, checkpoint, digits
from sparsifiner.calibration import calibrate
from sparsifiner.convert import config_of, conversion_of, sparsify, suggest_config
from sparsifiner.errors import CheckpointError, ConfigError, SparsifinerError
from sparsifiner.explorer.pictures import Lens, lens_of
from sparsifiner.explorer.samples import Gallery, digit_samples, file_samples, photo_samples
from sparsifiner.files import cache_folder
from sparsifiner.models import RANDOM, create_host
from sparsifiner.progress import Progress

# Where nothing else says how sparse.
KEEP = 0.25
CALIBRATION_IMAGES = 256
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
        return _digits(progress)
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
    samples = digit_samples(lens) if lens.crisp else photo_samples(lens)
    own, said = file_samples(paths, lens, [sample.key for sample in samples])
    host = conversion_of(student).host
    classes = _classes(host.num_classes(student), "" if lens.crisp else "class ")
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


def _digits(progress: Progress | None) -> Subject:
    student, kept = _digits_student(progress)
    notes = [
        "A small ViT of 65 tokens, one for each pixel, trained on this machine on scikit-learn's digits. It has seen "
        "none of the digits offered here. Start with a checkpoint or --model for photos."
    ]
    if not kept:
        notes.append("It could not be kept for the next time: the cache folder cannot be written.")
    return _subject(student, "digits demo", (), notes)


def _digits_student(progress: Progress | None) -> tuple[nn.Module, bool]:
    """The demo's model, from the cache if it is there; and whether it is there now."""
    path = None
    try:
        path = cache_folder() / f"digits-{__version__}.safetensors"
        if path.is_file():
            return checkpoint.load(path), True
    except (SparsifinerError, OSError, RuntimeError):
        pass  # damaged, unreadable or of another make, or there is no home: made anew
    epochs = 20
    advance = progress("training a ViT on digits", epochs) if progress else None
    (images, labels), _ = digits.load_digits()
    host = digits.train_digits(
        images, labels, epochs=epochs, on_epoch=lambda epoch, loss: advance(1) if advance else None
    )
    student = sparsify(host, suggest_config(host, KEEP, pattern="learned"))
    calibrate(student, images[:CALIBRATION_IMAGES], progress=progress)
    try:
        if path is None:
            return student, False
        path.parent.mkdir(parents=True, exist_ok=True)
        checkpoint.save(student, path)
    except (SparsifinerError, OSError):
        return student, False
    return student, True
