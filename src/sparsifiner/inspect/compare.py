"""What sparsity costs and saves: forms of a converted model against its dense self on the same images."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sparsifiner.config import SparseConfig, name_tile
from sparsifiner.convert import config_of, dense_mode, host_of, reconfigure, sparse_layers
from sparsifiner.errors import DataError
from sparsifiner.inspect.flops import count_flops
from sparsifiner.inspect.journal import Journal
from sparsifiner.inspect.speed import model_runs, take_turns
from sparsifiner.inspect.statistics import measure
from sparsifiner.nn.attention import Core, SparseAttention
from sparsifiner.ops import reference
from sparsifiner.progress import Progress
from sparsifiner.sides import Sides, short

# Images on which connections and densities are counted; they vary little from image to image.
STATISTICS_IMAGES = 32


@dataclasses.dataclass(frozen=True)
class Form:
    """A way to run a converted model: settings to change, or another attention core in their place."""

    name: str
    changes: dict[str, Any] = dataclasses.field(default_factory=dict)
    core: Core | None = None
    needs_keep: bool = True
    counted: bool = True  # whether the model's own count of connections and multiply-adds is this form's


def _exact_top(layer: SparseAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The oracle: the exact top-B of the true attention, which costs as much as what it saves."""
    prefix = layer.grid.prefix
    true = reference.full_attention(q, k, layer.scale)
    mask = reference.top_budget(true, min(layer.budget(), q.shape[2]))
    mask[..., :prefix] = True
    mask[:, :, :prefix] = True
    mask.diagonal(dim1=2, dim2=3).fill_(True)
    return reference.masked_attention(q, k, v, mask, layer.scale)


DENSE = Form("dense", needs_keep=False)
PAPER = Form("paper form", {"residual": False, "tile": None})
RESIDUAL = Form("residual", {"residual": True, "tile": None})
WINDOW = Form("fixed window", {"pattern": "window", "residual": False, "tile": None})
ORACLE = Form("exact top-B", core=_exact_top, counted=False)
LOW_RANK = Form("low-rank only", {"pattern": "linformer", "tile": None}, needs_keep=False, counted=False)


def tiled(tile: Sides) -> Form:
    """Residual with lists shared in a tile."""
    return Form(f"residual + tile {short(tile)}", {"residual": True, "tile": tile})


def opening(config: SparseConfig) -> Form:
    """Attention at several resolutions, as these settings have it; with a predictor or without."""
    tiles = ", ".join(map(name_tile, config.tiles))
    shared = f" + tile {tiles}" if tiles else ""
    own = {"tile": config.tile, "cells": config.cells, "breadth": config.breadth, "tolerance": config.tolerance}
    return Form(f"cells{shared}", {"pattern": "cells", "residual": True, **own})


@dataclasses.dataclass(frozen=True)
class Row:
    """One form at one keep rate, on ``images`` images.

    ``top1`` and ``agreement`` are in percent; agreement and ``divergence`` (mean KL of the predictions) are to
    the dense model; ``recall`` is the mean over layers; multiply-adds are per image, measured; ``milliseconds`` is the
    median per image. ``keep`` is a list where layers differ, and None where there is no such share: in the dense model
    and with low-rank attention alone.
    """

    form: str
    keep: float | list[float] | None
    images: int
    top1: float | None
    agreement: float
    divergence: float
    kept_share: float | None
    recall: float | None
    attention_macs: float | None
    total_macs: float | None
    milliseconds: float

    def to_dict(self) -> dict[str, Any]:
        """For JSON and CSV."""
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True)
class Predictions:
    """The logits ``[answers, classes]`` of a run over labelled images, and its median time per image.

    There is an answer for each image, or, where labels are of patches ``[images, rows, columns]``, for each patch that
    has one.
    """

    logits: Tensor
    labels: Tensor
    milliseconds: float
    images: int

    @property
    def top1(self) -> float | None:
        """Percent of labelled images, or patches, whose class is right; None without labels."""
        labelled = self.labels >= 0
        if not bool(labelled.any()):
            return None
        right = self.logits.argmax(1)[labelled] == self.labels[labelled]
        return 100 * right.double().mean().item()


def predict_all(model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]], advance=None) -> Predictions:
    """Runs a model in evaluation mode over ``(images, labels)`` batches."""
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    logits, labels, times = [], [], []
    try:
        with torch.inference_mode():
            for images, targets in batches:
                images = images.to(device)
                start = time.perf_counter()
                out = model(images)
                out = out if isinstance(out, Tensor) else host_of(model).logits(model, out)
                times.append((time.perf_counter() - start) * 1000 / len(images))
                if not bool(torch.isfinite(out).all()):
                    raise DataError("the model's output is not finite: are the images?")
                logits.append(out.float().cpu())
                labels.append(targets)
                if advance:
                    advance(len(images))
    finally:
        model.train(was_training)
    if not logits:
        raise DataError("no images: the data is empty")
    times.sort()
    answers, truth = torch.cat(logits), torch.cat(labels)
    if truth.ndim > 1:  # of patches
        answers, truth = answers.movedim(1, -1)[truth >= 0], truth[truth >= 0]
    return Predictions(answers, truth, times[len(times) // 2], sum(map(len, labels)))


@contextlib.contextmanager
def running_as(student: nn.Module, form: Form, keep: float | None) -> Iterator[None]:
    """Within it, a converted model runs in the given form; afterwards it is as it was."""
    before = config_of(student)
    layers = sparse_layers(student)
    with contextlib.ExitStack() as stack:
        if form.name == DENSE.name:
            stack.enter_context(dense_mode(student))
        try:
            reconfigure(student, **form.changes, **({} if keep is None else {"keep": keep}))
            for layer in layers:
                layer.core = form.core
            yield
        finally:
            for layer in layers:
                layer.core = None
            reconfigure(student, **{field: getattr(before, field) for field in ("keep", *form.changes)})


class Evaluation:
    """Forms of a converted model, all on the same images and against the same dense model.

    Args:
        student: a converted, calibrated model.
        batches: ``(images, labels)``; gone through once per row, so a list or a loader, not a generator.
        progress: called with a title and a number of images; returns a function that takes images done.
        journal: rows that it holds are not run again, and those that are run are added to it.
        dense: another converted model whose dense self is the one to compare with.
    """

    def __init__(
        self,
        student: nn.Module,
        batches: Iterable[tuple[Tensor, Tensor]],
        progress: Progress | None = None,
        journal: Journal | None = None,
        dense: nn.Module | None = None,
    ) -> None:
        self.student, self.batches, self.progress, self.journal = student, batches, progress, journal
        self.teacher = student if dense is None else dense
        self.logits: Tensor | None = None
        self.rows: dict[str, Row] = {}

    def row(self, form: Form, keep: float | None = None) -> Row:
        """One row; each is run once."""
        key = f"{form.name} {sorted(form.changes.items())} {keep}"
        if key not in self.rows:
            known = None if self.journal is None else self.journal.get(key)
            self.rows[key] = self._run(form, keep, key) if known is None else Row(**known)
        return self.rows[key]

    def _run(self, form: Form, keep: float | None, key: str) -> Row:
        is_dense = form.name == DENSE.name and self.teacher is self.student
        if self.logits is None and not is_dense:
            with running_as(self.teacher, DENSE, None):
                self.logits = predict_all(self.teacher, self.batches, self._advance("dense, to compare with")).logits
        title = form.name if keep is None else f"{form.name}, keep {keep:g}"
        found, logits = evaluate(self.student, self.batches, form, keep, self.logits, self._advance(title))
        if is_dense:
            self.logits = logits
        if self.journal is not None:
            self.journal.put(key, found.to_dict())
        return found

    def _advance(self, title: str) -> Callable[[int], None] | None:
        if self.progress is None:
            return None
        count = getattr(self.batches, "num_images", None)
        if count is None:
            count = sum(len(images) for images, _ in self.batches) if isinstance(self.batches, Sequence) else 0
        return self.progress(title, count)


def compare(
    student: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    forms: Sequence[Form],
    keeps: Sequence[float],
    progress: Progress | None = None,
) -> list[Row]:
    """Runs every form at every keep rate on the same images; the dense model comes first.

    Rates whose budget holds not one cell are left out where cells are opened.

    Args:
        student: a converted, calibrated model.
        batches: as `Evaluation` takes them.
        forms: what to run beside dense.
        keeps: the keep rates for forms that have one.
        progress: as `Evaluation` takes it.
    """
    evaluation = Evaluation(student, batches, progress)
    tokens = host_of(student).grid(student).num_tokens
    rows = [evaluation.row(DENSE)]
    for form in forms:
        config = config_of(student).replace(**form.changes)
        possible = [keep for keep in keeps if config.can_keep(keep, tokens)] if form.needs_keep else [None]
        rows += [evaluation.row(form, keep) for keep in possible]
    return rows


def timed_by_turns(
    student: nn.Module, images: Tensor, rows: Sequence[Row], forms: Sequence[Form], seconds: float
) -> list[Row]:
    """The same rows with times of forms that took turns on a batch: the least of many, per image.

    Args:
        student: the model whose rows they are.
        images: the batch.
        rows: from `compare`, the dense model's first, each of one keep rate.
        forms: as they were given to `compare`.
        seconds: for each row.
    """
    changes = {form.name: form.changes for form in forms}
    settings = {
        f"{row.form} {row.keep}": changes[row.form] | ({} if row.keep is None else {"keep": row.keep})
        for row in rows[1:]
    }
    times = take_turns(model_runs(student, images, settings), seconds)
    found = zip(rows, ("dense", *settings), strict=True)
    return [dataclasses.replace(row, milliseconds=times[name].minimum / len(images)) for row, name in found]


def evaluate(
    student: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    form: Form,
    keep: float | None,
    dense: Tensor | None,
    advance: Callable[[int], None] | None = None,
) -> tuple[Row, Tensor]:
    """One row, and the logits it rests on; ``dense`` are the dense model's, None if this is it."""
    with running_as(student, form, keep):
        own = None if form.name == DENSE.name else _keep(student)
        result = predict_all(student, batches, advance)
    kept_share = recall = counts = None
    if form.counted:  # by the model itself, whatever computes the form
        with running_as(student, dataclasses.replace(form, core=None), keep):
            statistics = measure(student, _first_images(batches, STATISTICS_IMAGES))
            kept_share = sum(layer.kept_share for layer in statistics) / len(statistics)
            recall = sum(layer.recall for layer in statistics) / len(statistics)
            counts = count_flops(student, convention="measured", statistics=statistics)
    dense = result.logits if dense is None else dense
    row = Row(
        form=form.name,
        keep=own,
        images=result.images,
        top1=result.top1,
        agreement=agreement(result.logits, dense),
        divergence=divergence(result.logits, dense),
        kept_share=kept_share,
        recall=recall,
        attention_macs=counts and counts.mhsa,
        total_macs=counts and counts.total,
        milliseconds=result.milliseconds,
    )
    return row, result.logits


def _keep(student: nn.Module) -> float | list[float] | None:
    """What a model keeps now, as a row has it."""
    config = config_of(student)
    if config.pattern == "linformer":
        return None
    return list(config.keep) if isinstance(config.keep, Sequence) else config.keep


def agreement(logits: Tensor, dense: Tensor) -> float:
    """Percent of images on which two sets of logits choose the same class."""
    return 100 * (logits.argmax(1) == dense.argmax(1)).double().mean().item()


def divergence(logits: Tensor, dense: Tensor) -> float:
    """Mean ``KL(dense || other)`` of the predicted distributions, in nats."""
    ours, theirs = logits.double().log_softmax(1), dense.double().log_softmax(1)
    return (theirs.exp() * (theirs - ours)).sum(1).mean().item()


def _first_images(batches: Iterable[tuple[Tensor, Tensor]], count: int) -> Tensor:
    taken, parts = 0, []
    for images, _ in batches:
        parts.append(images[: count - taken])
        taken += len(parts[-1])
        if taken == count:
            break
    if not parts:
        raise DataError("no images: the data is empty")
    return torch.cat(parts)
