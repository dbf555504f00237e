"""The README's table of speeds, on whatever machine this is: suggested cells against dense, in float32 and bfloat16."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from sparsifiner import processor
from sparsifiner.convert import config_of, sparsify, suggest_config
from sparsifiner.inspect.machine import environment, machine
from sparsifiner.inspect.speed import model_runs, take_turns
from sparsifiner.inspect.tuning import time_layers
from sparsifiner.models import create_host
from sparsifiner.progress import Progress

MODEL = "deit_tiny_patch16_224"
KEEP = 0.1
LATEST = 110.0  # seconds after which no further case is begun: all of it is to take three minutes
DTYPES = (torch.float32, torch.bfloat16)


class Size(NamedTuple):
    """Square images of so many pixels a side, and how many at once."""

    pixels: int
    batch: int


SIZES = (Size(512, 2), Size(1024, 1))  # 1,025 and 4,097 tokens


@dataclasses.dataclass(frozen=True)
class Case:
    """Least times of many in milliseconds a call: the attention of all layers, and the whole model."""

    dtype: str
    pixels: int
    batch: int
    tokens: int
    settings: str
    dense_attention: float
    sparse_attention: float
    dense: float
    sparse: float

    @property
    def attention_speed_up(self) -> float:
        """Of the attention alone."""
        return self.dense_attention / self.sparse_attention

    @property
    def speed_up(self) -> float:
        """Of the whole model."""
        return self.dense / self.sparse

    @property
    def ceiling(self) -> float:
        """How fast the whole model would be if attention took no time at all."""
        return self.dense / max(self.dense - self.dense_attention, 1e-9)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        ratios = {name: getattr(self, name) for name in ("attention_speed_up", "speed_up", "ceiling")}
        return dataclasses.asdict(self) | ratios


@dataclasses.dataclass(frozen=True)
class Overview:
    """What was measured, where, and what was left out and why."""

    model: str
    keep: float
    cases: tuple[Case, ...]
    left_out: tuple[str, ...]
    machine: dict[str, Any]
    environment: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return dataclasses.asdict(self) | {"cases": [case.to_dict() for case in self.cases]}

    def markdown(self) -> str:
        """A table to be pasted, and what it was measured with."""
        dtypes = list(dict.fromkeys(case.dtype for case in self.cases))
        sizes = list(dict.fromkeys((case.pixels, case.tokens) for case in self.cases))
        found = {(case.dtype, case.pixels): case for case in self.cases}
        lines = [f"| {self.model}, keep {self.keep:g}, dense / cells | " + " | ".join(dtypes) + " |"]
        lines.append("|---|" + "---:|" * len(dtypes))
        for pixels, tokens in sizes:
            told = [_attention(found.get((dtype, pixels))) for dtype in dtypes]
            lines.append(f"| the attention itself, {tokens:,} tokens | " + " | ".join(told) + " |")
        for pixels, tokens in sizes:
            told = [_whole(found.get((dtype, pixels))) for dtype in dtypes]
            lines.append(f"| the whole model, {pixels} x {pixels} pixels ({tokens:,} tokens) | {' | '.join(told)} |")
        return "\n".join([*lines, "", self._conditions(), *(f"Left out: {reason}." for reason in self.left_out)])

    def _conditions(self) -> str:
        about, now = self.machine, self.environment
        threads = f"{now['threads']} thread" + "s" * (now["threads"] > 1)
        batches = ", ".join(
            f"{case.batch} of {case.pixels}" for case in self.cases if case.dtype == self.cases[0].dtype
        )
        return (
            f"{about['cpu']} ({about['name']}), {threads}, torch {now['torch']} ({now['capability']}), timm "
            f"{now['timm']}, sparsifiner {now['sparsifiner']} ({now['kernels']} kernels), load {now['load']:g}; random "
            f"weights, images a call {batches} pixels; least times of runs by turns, dense is torch's own in the same "
            "dtype"
        )


def _attention(case: Case | None) -> str:
    if case is None:
        return ""
    return f"{case.attention_speed_up:.1f}x ({case.dense_attention:.1f} / {case.sparse_attention:.1f} ms)"


def _whole(case: Case | None) -> str:
    if case is None:
        return ""
    return f"{case.speed_up:.2f}x of {case.ceiling:.1f}x ({case.dense:.0f} / {case.sparse:.0f} ms)"


def overview(
    *,
    model: str = MODEL,
    keep: float = KEEP,
    sizes: Sequence[Size] = SIZES,
    dtypes: Sequence[torch.dtype] = DTYPES,
    latest: float = LATEST,
    progress: Progress | None = None,
) -> Overview:
    """Measures a model of random weights, as `suggest_config` makes it sparse, at several sizes and in several dtypes.

    What a layer that opens cells costs hardly depends on what is in the image, for as many are opened in any; so no
    weights are needed.

    Args:
        model: a name timm knows.
        keep: share of keys kept.
        sizes: of the images.
        dtypes: bfloat16 is left out where torch's own would end the process.
        latest: no case is begun after so many seconds.
        progress: called with a title and a number of cases; returns a function that is told how many are done.
    """
    start, cases, left_out = time.monotonic(), [], []
    if not processor.is_sound() and torch.bfloat16 in dtypes:
        left_out.append(f"bfloat16, for {processor.describe()}")
        dtypes = [dtype for dtype in dtypes if dtype != torch.bfloat16]
    todo = [(size, dtype) for size in sizes for dtype in dtypes]
    advance = progress("timing, cases", len(todo)) if progress else None
    for size, dtype in todo:
        if cases and time.monotonic() - start > latest:
            left_out.append(f"{_name(dtype)} at {size.pixels} pixels, for want of time")
        else:
            cases.append(_measure(model, keep, size, dtype))
        if advance:
            advance(1)
    return Overview(model, keep, tuple(cases), tuple(left_out), machine(), environment())


def _measure(model: str, keep: float, size: Size, dtype: torch.dtype) -> Case:
    host = create_host(model, None, img_size=size.pixels)
    student = sparsify(host, suggest_config(host, keep)).to(dtype).eval()
    first = next(weight for weight in student.parameters() if weight.ndim == 4)  # of the first convolution
    images = torch.randn(size.batch, first.shape[1], size.pixels, size.pixels, dtype=dtype)
    layers = time_layers(student, images)
    times = take_turns(model_runs(student, images, {"sparse": {}}), 1.0, least=3)
    sparse = (timing.dense if timing.sparse is None else timing.sparse for timing in layers.layers)
    return Case(
        dtype=_name(dtype),
        pixels=size.pixels,
        batch=size.batch,
        tokens=layers.tokens,
        settings=config_of(student).to_json(),
        dense_attention=sum(timing.dense or 0.0 for timing in layers.layers),
        sparse_attention=sum(time or 0.0 for time in sparse),
        dense=times["dense"].minimum,
        sparse=times["sparse"].minimum,
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
