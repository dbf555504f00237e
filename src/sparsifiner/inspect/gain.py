"""What sparsity gains at one number of tokens: time and accuracy of a converted model and its dense self."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sparsifiner.convert import dense_mode
from sparsifiner.inspect.compare import agreement, predict_all
from sparsifiner.inspect.speed import model_runs, take_turns
from sparsifiner.inspect.tuning import time_layers

EQUAL = 1.0  # points of accuracy within which two models are called equal
MANY = 1000  # tokens from which on sparse attention should pay


@dataclasses.dataclass(frozen=True)
class Gain:
    """Times are the least of many in milliseconds an image, ``batch`` images a call; accuracies in percent.

    ``dense`` and ``sparse`` are the whole model, ``dense_attention`` and ``sparse_attention`` the attention of all its
    layers, without the projections around it.
    """

    tokens: int
    images: int
    batch: int
    threads: int
    dense: float
    sparse: float
    dense_attention: float
    sparse_attention: float
    dense_top1: float | None
    sparse_top1: float | None
    agreement: float

    @property
    def speed_up(self) -> float:
        """Of the whole model."""
        return self.dense / self.sparse

    @property
    def attention_speed_up(self) -> float:
        """Of the attention alone."""
        return self.dense_attention / self.sparse_attention if self.sparse_attention else 1.0  # all layers dense

    @property
    def ceiling(self) -> float:
        """How fast the whole model would be if attention took no time at all."""
        return self.dense / max(self.dense - self.dense_attention, 1e-9)

    @property
    def is_equal(self) -> bool:
        """Whether the sparse model is as accurate as the dense one, or agrees with it where nothing is labelled."""
        if self.dense_top1 is None or self.sparse_top1 is None:
            return self.agreement >= 100 - EQUAL
        return self.sparse_top1 >= self.dense_top1 - EQUAL

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        ratios = {name: getattr(self, name) for name in ("speed_up", "attention_speed_up", "ceiling")}
        return dataclasses.asdict(self) | ratios


def gain_of(student: nn.Module, batches: Sequence[tuple[Tensor, Tensor]], seconds: float) -> Gain:
    """Measures a converted model at its own size.

    Args:
        student: a converted model.
        batches: ``(images, labels)``; the first of them is timed.
        seconds: for each of dense and sparse; by turns.
    """
    with dense_mode(student):
        dense = predict_all(student, batches)
    sparse = predict_all(student, batches)
    images = batches[0][0]
    layers = time_layers(student, images, seconds=seconds / 8)
    times = take_turns(model_runs(student, images, {"sparse": {}}), seconds)
    return Gain(
        tokens=layers.tokens,
        images=dense.images,
        batch=len(images),
        threads=torch.get_num_threads(),
        dense=times["dense"].minimum / len(images),
        sparse=times["sparse"].minimum / len(images),
        dense_attention=sum(layer.dense or 0.0 for layer in layers.layers) / len(images),
        sparse_attention=sum(layer.sparse or 0.0 for layer in layers.layers) / len(images),
        dense_top1=dense.top1,
        sparse_top1=sparse.top1,
        agreement=agreement(sparse.logits, dense.logits),
    )


def in_words(gains: Sequence[Gain]) -> str:
    """What was gained where tokens are many, and where it was not."""
    many = [gain for gain in gains if gain.tokens >= MANY] or list(gains[-1:])
    good = [gain for gain in many if gain.is_equal and gain.speed_up > 1]
    bad = [gain for gain in many if gain not in good]
    words = []
    if good:
        words.append(f"Faster at equal accuracy: the whole model is {_list(good)}.")
    if bad:
        words.append(f"{'But not' if good else 'Not'} faster at equal accuracy: {_list(bad)}.")
    return " ".join(words)


def _list(gains: Sequence[Gain]) -> str:
    told = (f"{gain.speed_up:.1f}x as fast as dense at {gain.tokens:,} tokens ({_accuracy(gain)})" for gain in gains)
    return ", ".join(told)


def _accuracy(gain: Gain) -> str:
    if gain.dense_top1 is None or gain.sparse_top1 is None:
        return f"{gain.agreement:.1f} % as dense"
    return f"{gain.sparse_top1:.1f} % right, dense {gain.dense_top1:.1f} %"
