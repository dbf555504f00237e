"""distill(): trains a converted model to do as its dense self does."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sparsifiner import checkpoint
from sparsifiner.calibration import calibrate
from sparsifiner.convert import config_of, conversion_of, reconfigure, restore, sparse_layers
from sparsifiner.distillation import state
from sparsifiner.distillation.data import TrainingSet, from_tensors
from sparsifiner.distillation.log import Log
from sparsifiner.distillation.loop import Trainer
from sparsifiner.distillation.processes import Processes, joined
from sparsifiner.distillation.recipe import Recipe
from sparsifiner.distillation.teacher import LiveTeacher, Predict, cached, own_predictions
from sparsifiner.errors import CheckpointError, ConfigError
from sparsifiner.inspect.tuning import tune as tune_layers
from sparsifiner.progress import Bar, Progress

RESULT = "student.safetensors"
CURVES = "curves.png"
TEACHER = "teacher.safetensors"
TUNING_IMAGES = 8  # timed in one batch


@dataclasses.dataclass(frozen=True)
class DistillReport:
    """What a run did.

    Attributes:
        steps: of each phase that ran, by number.
        resumed: the checkpoint it went on from.
        result: the file the student was saved to.
        skipped: names and reasons of images that were passed over.
        lines: the log.
    """

    steps: dict[int, int]
    resumed: Path | None
    result: Path | None
    skipped: list[tuple[str, str]]
    lines: list[dict[str, Any]]


def distill(
    student: nn.Module,
    data: TrainingSet | Tensor | tuple[Tensor, Tensor],
    recipe: Recipe | None = None,
    *,
    teacher: nn.Module | None = None,
    predict: Callable[[nn.Module, Tensor], Tensor] | None = None,
    loss: Callable[[Tensor, Tensor], Tensor] | None = None,
    out: str | os.PathLike[str] | None = None,
    resume: str | os.PathLike[str] = "auto",
    evaluate: Callable[[nn.Module], float] | None = None,
    teacher_cache: str | os.PathLike[str] | None = None,
    tune: bool = False,
    workers: int = 0,
    device: str | None = None,
    tensorboard: bool = False,
    bar: Bar | None = None,
    progress: Progress | None = None,
    on_log: Callable[[dict[str, Any]], None] | None = None,
) -> DistillReport:
    """Trains a converted model in two phases: its predictors, then all of it (Eq. 7-12).

    A model that opens cells asks no predictors: there is no first phase, and it starts as it is. Under torchrun all
    processes call it alike and train together.

    Args:
        student: a converted model, trained in place; what a recipe says of keep, residual, tile and the like is set.
        data: a `TrainingSet` (see `sparsifiner.distillation.data`), or images in memory, alone or with labels: a number
            for each image, or a map ``[count, ..., rows, columns]``.
        recipe: the settings; the paper's if not given.
        teacher: the dense model; the student's own if not given.
        predict: for a task of your own, from a model (student and teacher alike) and images to what it predicts,
            ``[batch, classes, ...]``, through a head that is not trained here; the model's own classes if not given.
        loss: for a task of your own, from predictions and a batch's labels to a number; cross-entropy if not given.
        out: a folder for checkpoints, the log, curves and the result; None to write nothing.
        resume: ``"auto"`` goes on from the newest checkpoint in ``out`` if there is one, ``"never"`` refuses a folder
            that has some, a path goes on from there.
        evaluate: from the student to its score (top-1, mIoU) on data of your own, after every epoch of phase 2; the
            best is kept.
        teacher_cache: where the teacher's outputs are kept, if the recipe says so; in ``out`` if not given. Runs of the
            same teacher on the same images can share it.
        tune: give each layer the form that is fastest on this machine, before training them (`sparsifiner.tune`); a
            run that is resumed stays as it was.
        workers: processes that read images.
        device: ``"cpu"`` or ``"cuda"``; a GPU if there is one.
        tensorboard: also write event files.
        bar: shows how far the run is.
        progress: shows how far calibration and the teacher's outputs are.
        on_log: called with each line of the log.

    Raises:
        TrainingInterrupted: by Ctrl-C or SIGTERM, after a checkpoint was written.
        TrainingError: a loss that is not finite.
    """
    recipe, predict = recipe or Recipe(), predict or own_predictions
    conversion_of(student)
    with joined(device) as processes:
        student.to(processes.device)
        training = _training_set(data, recipe)
        folder = None if out is None else Path(out)
        resumed = _checkpoint(folder, resume)
        n_down, had = recipe.n_down, config_of(student).n_down
        if n_down is not None and n_down != had and sparse_layers(student)[0].has_predictor:
            raise ConfigError(f"the recipe has n_down = {n_down} and the model's predictors {had} landmarks")
        dense = _teacher_model(student, teacher, recipe)
        changes = {key: value for key, value in recipe.sparsity().items() if key != "n_down"}
        reconfigure(student, keep=recipe.keep, **changes)
        if not config_of(student).asks_predictor:
            recipe = _without_predictors(recipe)
        if folder is not None and processes.first:
            _make(folder)
        if resumed is not None:
            state.read_state(resumed)  # says what is wrong if it is no checkpoint of a run
            before = checkpoint.describe(resumed)["config"]
            reconfigure(student, **{name: before[name] for name in ("dense", "tile") if name in before})
        else:
            _start(student, training, recipe, progress if processes.first else None)
            if tune:
                _tune(student, training, processes)
        targets = None
        if dense is not None:
            dense.to(processes.device)
            targets = LiveTeacher(dense, predict)
            if recipe.cache_teacher:
                targets = _cached(teacher_cache, folder, dense, training, progress, processes, predict)
        first = processes.first
        log = Log(folder if first else None, bar if first else None, tensorboard and first, on_log if first else None)
        trainer = Trainer(
            student,
            training,
            recipe,
            teacher=targets,
            predict=predict,
            loss=loss,
            processes=processes,
            folder=folder,
            workers=workers,
            evaluate=evaluate,
            log=log,
        )
        if resumed is not None:
            trainer.resume(resumed)
        trainer.run()
        result = None
        if folder is not None:
            result = folder / RESULT
            if first:
                checkpoint.save(student, result)
                _draw(log, folder / CURVES)
            processes.wait()
    phases = {line["phase"]: line["step"] for line in log.lines}
    return DistillReport(phases, resumed, result, training.skipped, log.lines)


def _training_set(data: TrainingSet | Tensor | tuple[Tensor, Tensor], recipe: Recipe) -> TrainingSet:
    if isinstance(data, TrainingSet):
        if recipe.cache_teacher and data.varies:
            raise ConfigError("cache_teacher needs images that are the same in every epoch, and these vary")
        if data.recipe != recipe:
            raise ConfigError("the training set was made with another recipe")
        return data
    images, labels = data if isinstance(data, tuple) else (data, None)
    return from_tensors(images, labels, recipe)


def _checkpoint(folder: Path | None, resume: str | os.PathLike[str]) -> Path | None:
    if resume not in ("auto", "never"):
        return Path(resume)
    last = None if folder is None or not folder.is_dir() else state.newest(folder)
    if last is not None and resume == "never":
        raise CheckpointError(f"{folder} holds a run already ({last.name}): resume it, or choose another folder")
    return last


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"cannot make the folder {folder}: {error}") from None


def _teacher_model(student: nn.Module, teacher: nn.Module | None, recipe: Recipe) -> nn.Module | None:
    if not recipe.phase2_epochs:
        return None
    if teacher is None:
        return restore(student)
    if hasattr(teacher, "_sparsifiner"):
        raise ConfigError("the teacher is a converted model: pass the dense one")
    return teacher


def _without_predictors(recipe: Recipe) -> Recipe:
    """What is left of a recipe for a model that opens cells: the second phase."""
    if recipe.straight_through or recipe.attention_weight:
        name = "straight_through" if recipe.straight_through else "attention_weight"
        raise ConfigError(f"{name} trains predictors, and pattern='cells' asks none: leave it out")
    return recipe.replace(phase1_epochs=0)


def _start(student: nn.Module, data: TrainingSet, recipe: Recipe, progress: Progress | None) -> None:
    if not config_of(student).asks_predictor:
        return
    if recipe.start == "random":
        randomise(student, recipe.seed)
    elif recipe.start == "calibrated":
        count = min(recipe.calibration_images, len(data))
        generator = torch.Generator().manual_seed(recipe.seed)
        chosen = sorted(torch.randperm(len(data), generator=generator)[:count].tolist())
        samples = [sample for index in chosen if isinstance(sample := data.images[index], tuple)]
        calibrate(student, torch.stack([image for image, _ in samples]), progress=progress)


def _tune(student: nn.Module, data: TrainingSet, processes: Processes) -> None:
    """What pays on the first process's machine holds for all."""
    layers, tiles = len(sparse_layers(student)), (None, *config_of(student).tiles)
    dense, tile = (torch.zeros(layers, device=processes.device) for _ in range(2))
    if processes.first:
        samples = (data.images[index] for index in range(min(TUNING_IMAGES, len(data))))
        images = torch.stack([sample[0] for sample in samples if isinstance(sample, tuple)])
        tune_layers(student, images)
        for number, settings in enumerate(config_of(student).per_layer(layers)):
            dense[number], tile[number] = settings.dense, tiles.index(settings.tile)
    processes.share([dense, tile])
    if not processes.first:
        chosen = [tiles[number] for number in tile.int().tolist()]
        tile_or_tiles = chosen if len(set(chosen)) > 1 else chosen[0]
        reconfigure(student, dense=dense.nonzero().flatten().tolist(), tile=tile_or_tiles)


@torch.no_grad()
def randomise(student: nn.Module, seed: int) -> None:
    """Gives the predictors random weights, as linear layers start: they know nothing, not even the grid."""
    generator = torch.Generator().manual_seed(seed)
    for layer in sparse_layers(student):
        predictor = layer.predictor
        heads, landmarks, n = predictor.w_down.shape
        for weight, fan in ((predictor.w_down, n), (predictor.w_up, landmarks)):
            drawn = torch.rand(heads, landmarks, n, generator=generator) * 2 - 1
            weight.copy_(drawn / fan**0.5)


def _cached(path, folder: Path | None, dense, training, progress, processes: Processes, predict: Predict):
    if path is None:
        if folder is None:
            raise ConfigError("cache_teacher needs a file: give teacher_cache or out")
        path = folder / TEACHER
    return cached(path, dense, training, progress, processes.first, processes.wait, predict)


def _draw(log: Log, path: Path) -> None:
    if log.lines:
        from sparsifiner.report.plots import training_curves

        training_curves(log.lines, path)
