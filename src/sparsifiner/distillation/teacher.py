"""What the student is to learn from: the dense model's last tokens and predictions, live or from a file."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from sparsifiner.convert import find_host, host_of
from sparsifiner.distillation.data import Batch, TrainingSet
from sparsifiner.errors import CheckpointError, DataError, reason_of
from sparsifiner.files import parse_json, replacing
from sparsifiner.hosts import tokens_of
from sparsifiner.progress import Progress

# From a model, dense or sparse, and images to what it predicts of them.
Predict = Callable[[nn.Module, Tensor], Tensor]

FILL_BATCH = 32  # fixed, so that the file is the same whatever the training's batch is


@dataclasses.dataclass
class Targets:
    """Of one batch: logits ``[batch, classes, ...]`` and the last block's tokens ``[batch, n, D]``."""

    logits: Tensor
    tokens: Tensor


def own_predictions(model: nn.Module, images: Tensor) -> Tensor:
    """The model's own: a class for each image."""
    return host_of(model).logits(model, model(images))


@contextlib.contextmanager
def watching(module: nn.Module) -> Iterator[list[Tensor]]:
    """Within it, the tokens that a block returns are added to the list it yields."""
    seen: list[Any] = []
    handle = module.register_forward_hook(lambda _, __, out: seen.append(tokens_of(out)))
    try:
        yield seen
    finally:
        handle.remove()


class LiveTeacher:
    """The dense model itself, run on every batch."""

    def __init__(self, model: nn.Module, predict: Predict = own_predictions) -> None:
        self.model, self.predict = model.eval().requires_grad_(False), predict
        self.last_block = find_host(model).last_block(model)

    @torch.no_grad()
    def __call__(self, batch: Batch) -> Targets:
        """Runs it."""
        with watching(self.last_block) as tokens:
            logits = self.predict(self.model, batch.images)
        return Targets(logits, tokens[-1])


class CachedTeacher:
    """The dense model's outputs on every training image, as it is and mirrored, from a file made once.

    Tokens are held in bfloat16.
    """

    def __init__(self, path: Path, about: dict[str, Any]) -> None:
        self.path = path
        try:
            with safe_open(path, framework="pt") as file:
                written = parse_json((file.metadata() or {}).get("teacher", "{}"))
                self.logits, self.tokens = file.get_tensor("logits"), file.get_tensor("tokens")
        except Exception as error:  # of numbers that torch has no type for, it raises what it likes
            raise CheckpointError(f"{path} is damaged ({reason_of(error)}): delete it") from None
        if written != about:
            held = written if isinstance(written, dict) else {}
            what = next((key for key in about if held.get(key) != about[key]), "format")
            raise CheckpointError(f"{path} is of another teacher or other images (its {what} differs): delete it")
        if not len(self.logits) == len(self.tokens) == 2 * about["images"]:
            raise CheckpointError(f"{path} is damaged (outputs of some images are missing): delete it")

    def __call__(self, batch: Batch) -> Targets:
        """Looks it up."""
        device = batch.images.device
        return Targets(self.logits[batch.keys].to(device), self.tokens[batch.keys].to(device))

    @staticmethod
    def describe(model: nn.Module, data: TrainingSet) -> dict[str, Any]:
        """What a file of outputs belongs to."""
        digest = hashlib.sha256()
        for name, tensor in model.state_dict().items():
            digest.update(name.encode())
            digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
        first = data.images[0]
        if isinstance(first, tuple):
            digest.update(first[0].contiguous().view(-1).view(torch.uint8).numpy())
        return {"digest": digest.hexdigest(), "images": len(data), "mirrored": data.recipe.flip > 0}

    def check(self, model: nn.Module, data: TrainingSet, predict: Predict) -> None:
        """Compares the first image's predictions: a head that is no part of the model is in no description of it."""
        first = data.images[0]
        if not isinstance(first, tuple):
            return
        number = torch.zeros(1, dtype=torch.int64)
        images = first[0][None].to(next(model.parameters()).device)
        now = LiveTeacher(model, predict)(Batch(images, number, number)).logits.float().cpu()
        held = self.logits[:1]
        if now.shape != held.shape or (now - held).norm() > 0.01 * now.norm():  # rounding is far below
            raise CheckpointError(f"{self.path} is of another teacher (its predictions differ): delete it")

    @classmethod
    def fill(
        cls,
        path: Path,
        model: nn.Module,
        data: TrainingSet,
        progress: Progress | None = None,
        predict: Predict = own_predictions,
    ) -> None:
        """Runs the model over all images and writes the file."""
        teacher, about = LiveTeacher(model, predict), cls.describe(model, data)
        device = next(model.parameters()).device
        advance = progress("teacher", len(data)) if progress else None
        logits = tokens = None
        for start in range(0, len(data), FILL_BATCH):
            indices = range(start, min(start + FILL_BATCH, len(data)))
            samples = [data.images[index] for index in indices]
            good = [(i, s) for i, s in zip(indices, samples, strict=True) if isinstance(s, tuple)]
            if not good:
                continue
            images = torch.stack([sample[0] for _, sample in good]).to(device)
            for mirrored in (0, 1) if about["mirrored"] else (0,):
                keys = torch.tensor([2 * i + mirrored for i, _ in good])
                out = teacher(Batch(images.flip(-1) if mirrored else images, keys, keys))
                if logits is None or tokens is None:
                    logits = torch.zeros(2 * len(data), *out.logits.shape[1:])
                    tokens = torch.zeros(2 * len(data), *out.tokens.shape[1:], dtype=torch.bfloat16)
                logits[keys], tokens[keys] = out.logits.float().cpu(), out.tokens.bfloat16().cpu()
            if advance:
                advance(len(samples))
        if logits is None or tokens is None:
            raise DataError("none of the training images could be read")
        try:
            with replacing(path) as temporary:
                save_file({"logits": logits, "tokens": tokens}, temporary, metadata={"teacher": json.dumps(about)})
        except (OSError, SafetensorError) as error:
            size = (logits.nbytes + tokens.nbytes) / 2**20
            raise CheckpointError(f"cannot write the teacher's outputs to {path} ({size:.0f} MiB): {error}") from None


def cached(
    path: str | os.PathLike[str],
    model: nn.Module,
    data: TrainingSet,
    progress: Progress | None,
    first_process: bool,
    wait: Callable[[], None],
    predict: Predict = own_predictions,
) -> CachedTeacher:
    """The file's teacher; the first process makes the file where there is none."""
    target = Path(path)
    if first_process and not target.exists():
        CachedTeacher.fill(target, model, data, progress, predict)
    wait()
    teacher = CachedTeacher(target, CachedTeacher.describe(model, data))
    if predict is not own_predictions:
        teacher.check(model, data, predict)
    return teacher
