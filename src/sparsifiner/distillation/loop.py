"""The loop: steps, checkpoints, interruptions. Everything a step depends on is its number and what is saved."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from sparsifiner.convert import conversion_of, reconfigure
from sparsifiner.distillation import phases, state
from sparsifiner.distillation.data import MIX, STEP, Batch, TrainingSet, mixing, number_from, seed_generators
from sparsifiner.distillation.log import Log
from sparsifiner.distillation.processes import Processes
from sparsifiner.distillation.recipe import Recipe
from sparsifiner.distillation.state import RunState
from sparsifiner.distillation.teacher import CachedTeacher, LiveTeacher, Predict, own_predictions
from sparsifiner.errors import CheckpointError, DataError, TrainingError


class Average:
    """A moving average of weights."""

    def __init__(self, student: nn.Module, decay: float) -> None:
        self.decay = decay
        self.weights = {name: tensor.detach().clone() for name, tensor in student.state_dict().items()}

    @torch.no_grad()
    def update(self, student: nn.Module, step: int) -> None:
        """Early on the average is over few steps, or it would stay near the start."""
        decay = min(self.decay, (1 + step) / (10 + step))
        for name, tensor in student.state_dict().items():
            own = self.weights[name]
            own.lerp_(tensor, 1 - decay) if own.is_floating_point() else own.copy_(tensor)

    @contextlib.contextmanager
    def inside(self, student: nn.Module) -> Iterator[None]:
        """Within it the model has the averaged weights."""
        own = {name: tensor.detach().clone() for name, tensor in student.state_dict().items()}
        try:
            _copy(student, self.weights)
            yield
        finally:
            _copy(student, own)


@torch.no_grad()
def _copy(student: nn.Module, weights: dict[str, Tensor]) -> None:
    for name, tensor in student.state_dict().items():
        tensor.copy_(weights[name])


class Interruption:
    """Ctrl-C and SIGTERM end the step, not the process."""

    def __init__(self) -> None:
        self.signal: int | None = None

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Within it the signals are only noted; a second Ctrl-C ends at once."""
        if threading.current_thread() is not threading.main_thread():
            yield  # only the main thread may set handlers
            return
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

        def note(number: int, _: Any) -> None:
            if self.signal == signal.SIGINT == number:
                raise KeyboardInterrupt
            self.signal = number

        try:
            for number in before:
                signal.signal(number, note)
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


class Trainer:
    """One run of a recipe.

    Args:
        student: a converted model; trained in place.
        data: the training images.
        recipe: the settings.
        teacher: gives the targets of phase 2; None where there is no phase 2.
        predict: from the student and images to its predictions.
        loss: from predictions and labels to the loss that takes the place of cross-entropy, if any does.
        processes: this process among those that train together.
        folder: for checkpoints and the log; None to write nothing.
        workers: processes that read images.
        evaluate: from the student to its score, called after each epoch of phase 2; the best is kept.
        log: told of every few steps.
    """

    def __init__(
        self,
        student: nn.Module,
        data: TrainingSet,
        recipe: Recipe,
        *,
        teacher: LiveTeacher | CachedTeacher | None,
        predict: Predict,
        loss: Callable[[Tensor, Tensor], Tensor] | None,
        processes: Processes,
        folder: Path | None,
        workers: int,
        evaluate: Callable[[nn.Module], float] | None,
        log: Log,
    ) -> None:
        self.student, self.data, self.recipe, self.teacher = student, data, recipe, teacher
        self.predict, self.loss = predict, loss
        self.processes, self.folder, self.workers = processes, folder, workers
        self.evaluate, self.log = evaluate, log
        self.together = recipe.batch_size * recipe.accumulate * processes.world
        self.steps_per_epoch = len(data) // self.together
        if self.steps_per_epoch == 0:
            raise DataError(
                f"{len(data)} images are fewer than the {self.together} of a step: lower batch_size or accumulate"
            )
        self.state = RunState(
            1 if recipe.phase1_epochs else 2, 0, dataclasses.asdict(recipe), processes.world, len(data)
        )
        self.mix = mixing(recipe, conversion_of(student).host.num_classes(student))
        self.interruption = Interruption()
        self._saved: Path | None = None
        self._optimiser_state: dict[str, Tensor] | None = None
        self._average_state: dict[str, Tensor] | None = None

    # Checkpoints

    def resume(self, path: Path) -> None:
        """Goes on from a checkpoint of the same recipe on the same images."""
        saved = state.read_state(path)
        own = self.state
        free = {"log_every", "save_every", "keep_last"}  # change nothing that is computed
        changed = [key for key in own.recipe if key not in free and saved.recipe.get(key) != own.recipe[key]]
        if changed:
            key = changed[0]
            raise CheckpointError(
                f"{path} was made with {key} = {saved.recipe.get(key)!r}, not {own.recipe[key]!r}: resume with the "
                "same recipe, or start anew in another folder"
            )
        if (saved.world, saved.images) != (own.world, own.images):
            raise CheckpointError(
                f"{path} was made by {saved.world} processes on {saved.images} images, this run has {own.world} and "
                f"{own.images}"
            )
        state.fill(self.student, state.read_tensors(path / state.STUDENT), path)
        self._optimiser_state = state.read_tensors(path / state.OPTIMISER)
        if (path / state.AVERAGE).exists():
            self._average_state = state.read_tensors(path / state.AVERAGE)
        saved.recipe = own.recipe
        self.state, self._saved = saved, path
        self.log.rewind(saved.phase, saved.step)

    def save(self, name: str | None = None) -> None:
        """Writes a checkpoint; the first process does."""
        if self.folder is None or (name is None and self._saved is not None and self._saved.name == self.state.name):
            return
        if self.processes.first:
            optimiser = _optimiser_tensors(self.optimiser, self.groups) if self.state.step else {}
            average = self.average.weights if self.average and self.state.step else None
            with self._at_own_keep():
                state.save(self.folder, self.state, self.student, optimiser, average, name=name)
            if name is None:
                state.prune(self.folder, self.recipe.keep_last)
        if name is None:
            self._saved = self.folder / self.state.name
        self.processes.wait()

    @contextlib.contextmanager
    def _at_own_keep(self) -> Iterator[None]:
        """Within it the student has the recipe's keep rate, not the one that was drawn for a step."""
        before = conversion_of(self.student).config.keep
        reconfigure(self.student, keep=self.recipe.keep)
        try:
            yield
        finally:
            reconfigure(self.student, keep=before)

    # The run

    def run(self) -> None:
        """From where the state is to the end of the recipe."""
        trainable = {name for name, parameter in self.student.named_parameters() if parameter.requires_grad}
        generators = torch.get_rng_state(), np.random.get_state(), random.getstate()  # noqa: NPY002
        mode = self.student.training
        try:
            with self.interruption.watched():
                for phase in (1, 2):
                    if phase >= self.state.phase and getattr(self.recipe, f"phase{phase}_epochs"):
                        self._run_phase(phase, trainable)
        finally:
            self.student.train(mode)
            for name, parameter in self.student.named_parameters():
                parameter.requires_grad_(name in trainable)
                parameter.grad = None
            torch.set_rng_state(generators[0])
            np.random.set_state(generators[1])  # noqa: NPY002
            random.setstate(generators[2])

    def _run_phase(self, phase: int, trainable: set[str]) -> None:
        if phase != self.state.phase:
            self.state.phase, self.state.step = phase, 0
            self._optimiser_state = self._average_state = None
        self._enter(phase, trainable)
        if self.state.step == 0:
            self.save()  # where a phase begins: an early interruption loses nothing of the one before
        self.log.begin(phase, self.schedule.steps, self.state.step, self.together)
        self.ended = time.perf_counter()
        while self.state.step < self.schedule.steps:
            epoch, first = divmod(self.state.step, self.steps_per_epoch)
            for batches in self._batches(epoch, first):
                self._step(batches)
                self._after_step()
                if self.state.step >= self.schedule.steps:
                    break
            if phase == 2 and self.evaluate and self.state.step % self.steps_per_epoch == 0:
                self._evaluate()
        self._leave(phase)

    def _enter(self, phase: int, trainable: set[str]) -> None:
        self.schedule = phases.schedule(self.recipe, phase, self.steps_per_epoch)
        if self.recipe.elastic and phase == 2:
            reconfigure(self.student, keep=max(self.recipe.elastic_range() or ()))  # to know which layers are dense
        names = phases.learns(self.student, self.recipe, phase, trainable)
        for name, parameter in self.student.named_parameters():
            parameter.requires_grad_(name in names)
        self.groups = phases.parameter_groups(self.student, self.recipe, phase, names)
        self.optimiser = torch.optim.AdamW(
            [{key: value for key, value in group.items() if key != "names"} for group in self.groups], lr=0.0
        )
        self.average = Average(self.student, self.recipe.ema) if self.recipe.ema else None
        if self._optimiser_state is not None and self.state.step:
            _fill_optimiser(self.optimiser, self.groups, self._optimiser_state)
        if self.average and self._average_state is not None:
            self.average.weights = self._average_state
        self.student.train(phase == 2)
        self.joint: nn.Module = phases.Joint(self.student, self.recipe, self.predict)
        self.processes.share(self.student.state_dict().values())
        if phase == 2 and self.processes.world > 1:
            devices = [self.processes.device.index] if self.processes.device.type == "cuda" else None
            # A task of one's own may leave weights unused: the model's classifier, for one.
            unused = self.predict is not own_predictions
            self.joint = DistributedDataParallel(self.joint, device_ids=devices, find_unused_parameters=unused)

    def _leave(self, phase: int) -> None:
        if self.recipe.elastic:
            reconfigure(self.student, keep=self.recipe.keep)
        if self.average:
            _copy(self.student, self.average.weights)
        self.log.end(phase)

    def _batches(self, epoch: int, first: int) -> Iterator[list[Batch]]:
        """The passes of each step."""
        r, p = self.recipe, self.processes
        # Every epoch of both phases has its own order.
        number = epoch + (math.ceil(r.phase1_epochs) if self.state.phase == 2 else 0)
        passes = self.data.passes(number, first * r.accumulate, r.batch_size, p.rank, p.world, self.workers)
        group: list[Batch] = []
        for batch in passes:
            group.append(batch)
            if len(group) == r.accumulate:
                yield group
                group = []

    def _step(self, batches: list[Batch]) -> None:
        """One step of the optimiser."""
        phase, step, r = self.state.phase, self.state.step, self.recipe
        rate = self.schedule.at(step)
        for group in self.optimiser.param_groups:
            group["lr"] = rate * group["rate"]
        keep = phases.draw_keep(self.student, r, step) if phase == 2 else None
        seed_generators(r.seed, STEP, phase, step, self.processes.rank)
        self.optimiser.zero_grad(set_to_none=True)
        logged = (step + 1) % r.log_every == 0 or step in (0, self.schedule.steps - 1)
        sums: dict[str, Tensor] = {}
        for number, batch in enumerate(batches):
            last = number == len(batches) - 1
            for name, value in self._pass(batch, 1 / len(batches), number, last, logged).items():
                sums[name] = sums.get(name, 0) + value.detach().float() / len(batches)
        trained = [p for group in self.optimiser.param_groups for p in group["params"]]
        if phase == 1:
            self.processes.average(p.grad for p in trained if p.grad is not None)
        norm = torch.nn.utils.get_total_norm([p.grad for p in trained if p.grad is not None])
        if self.processes.any(not bool(torch.isfinite(sums["loss"]) & torch.isfinite(norm))):
            kept = f"; the last good checkpoint is {self._saved}" if self._saved else ""
            raise TrainingError(
                f"the loss is not finite in step {step + 1} of phase {phase}: lower the learning rate, or clip{kept}"
            )
        if r.clip is not None:
            torch.nn.utils.clip_grads_with_norm_(trained, r.clip, norm)
        self.optimiser.step()
        self.state.step += 1
        if self.average:
            self.average.update(self.student, self.state.step)
        self.losses, self.extra = sums, {"learning_rate": rate, "gradient": norm} | ({"keep": keep} if keep else {})
        self.images = sum(len(batch.images) for batch in batches) * self.processes.world

    def _pass(self, batch: Batch, share: float, number: int, last: bool, logged: bool) -> dict[str, Tensor]:
        r, phase, device = self.recipe, self.state.phase, self.processes.device
        cast = torch.autocast(device.type, torch.bfloat16, enabled=r.autocast)
        if phase == 1:
            with cast:
                return phases.predictor_pass(self.student, r, batch.to(device), share, exact=logged)
        if self.teacher is None:
            raise TrainingError("phase 2 needs a teacher")
        batch = self.mix(batch, number_from(r.seed, MIX, self.state.step, self.processes.rank, number)).to(device)
        numbers = batch.labels.ndim == 1 and not batch.labels.is_floating_point()
        if r.label_weight and numbers and bool((batch.labels < 0).any()):
            raise DataError("there are images without labels: set label_weight to 0 to train without")
        waits = contextlib.nullcontext()
        if isinstance(self.joint, DistributedDataParallel) and not last:
            waits = self.joint.no_sync()
        with waits:
            with cast:
                targets = self.teacher(batch)
                passed = self.joint(batch.images)
            parts = phases.joint_losses(r, batch, targets, passed, self.loss)
            (parts["loss"] * share).backward()
        return parts

    def _after_step(self) -> None:
        phase, step, r = self.state.phase, self.state.step, self.recipe
        now = time.perf_counter()
        self.log.step(self.images, now - self.ended)  # reading the images included
        self.ended = now
        if step % r.log_every == 0 or step in (1, self.schedule.steps):
            values = list(self.losses.values())
            self.processes.average(values)
            figures = {name: float(value) for name, value in self.losses.items()}
            figures |= {name: float(value) for name, value in self.extra.items()}
            self.log.write(phase, step, step / self.steps_per_epoch, figures)
        if self.processes.any(self.interruption.signal is not None):
            self.save()
            where = f": saved as {self._saved}, go on with --resume auto" if self.folder else ""
            raise TrainingInterrupted(f"stopped after step {step} of phase {phase}{where}", self.interruption.signal)
        if step % r.save_every == 0 or step == self.schedule.steps:
            self.save()

    def _evaluate(self) -> None:
        assert self.evaluate is not None
        with self._at_own_keep(), self.average.inside(self.student) if self.average else contextlib.nullcontext():
            score = torch.tensor([self.evaluate(self.student) if self.processes.first else 0.0], dtype=torch.float64)
            score = score.to(self.processes.device)
            self.processes.share([score])  # all must agree on whether this is the best
            top1 = score.item()
            self.log.write(2, self.state.step, self.state.step / self.steps_per_epoch, {"top1": top1})
            if self.state.best is None or top1 > self.state.best:
                self.state.best = top1
                self.save("best")
        self.student.train()
        self.ended = time.perf_counter()


class TrainingInterrupted(TrainingError):
    """Somebody asked the run to stop, and it did after saving."""

    def __init__(self, message: str, number: int | None) -> None:
        super().__init__(message)
        self.exit_code = 128 + (number or signal.SIGTERM)


def _optimiser_tensors(optimiser: torch.optim.Optimizer, groups: list[dict]) -> dict[str, Tensor]:
    found = {}
    for group in groups:
        for name, parameter in zip(group["names"], group["params"], strict=True):
            for key, value in optimiser.state.get(parameter, {}).items():
                found[f"{name}/{key}"] = value.detach().contiguous()
    return found


def _fill_optimiser(optimiser: torch.optim.Optimizer, groups: list[dict], tensors: dict[str, Tensor]) -> None:
    expected = {name for group in groups for name in group["names"]}
    if not {key.rpartition("/")[0] for key in tensors} <= expected:  # what got no gradient has no state
        raise CheckpointError("the checkpoint's optimiser is of other weights than this run's")
    for group in groups:
        for name, parameter in zip(group["names"], group["params"], strict=True):
            own = {key.rpartition("/")[2]: value for key, value in tensors.items() if key.rpartition("/")[0] == name}
            if own:
                optimiser.state[parameter] = {
                    key: value.clone() if key == "step" else value.to(parameter.device) for key, value in own.items()
                }
