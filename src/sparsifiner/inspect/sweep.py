"""Choosing a budget: what every setting costs and keeps, which settings are worth having, and budgets per layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from sparsifiner.config import TokenConfig
from sparsifiner.convert import config_of, conversion_of, reconfigure, sparse_layers
from sparsifiner.errors import ConfigError
from sparsifiner.inspect import compare
from sparsifiner.inspect.statistics import measure
from sparsifiner.sides import Sides, short

# The keep rates a layer can get.
LEVELS = (0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.65, 0.8, 1.0)


@dataclasses.dataclass(frozen=True)
class Setting:
    """One point of a sweep.

    Attributes:
        keep: share of keys kept: the average, where layers differ.
        layers: the share of each layer, where they differ.
        tokens: which tokens are dropped.
        tile: the tile whose queries share, ``()`` for none; None is the model's own.
        cells: the levels of cells; None are the model's own.
    """

    keep: float
    layers: tuple[float, ...] | None = None
    tokens: TokenConfig | None = None
    tile: tuple[int, ...] | None = None
    cells: tuple[Sides, ...] | None = None

    def form(self) -> compare.Form:
        """As a way to run a model."""
        changes: dict[str, Any] = {"keep": self.layers or self.keep, "tokens": self.tokens}
        if self.tile is not None:
            changes["tile"] = self.tile or None
        if self.cells is not None:
            changes["cells"] = self.cells
        return compare.Form(self.name, changes, needs_keep=False)

    @property
    def shape(self) -> str:
        """What is shared and what cells there are, where that is not left to the model."""
        parts = [] if self.tile is None else [f"tile {short(self.tile)}" if self.tile else "per query"]
        return ", ".join(parts + ([] if self.cells is None else [f"cells {' '.join(map(short, self.cells))}"]))

    @property
    def name(self) -> str:
        """For tables."""
        parts = [f"keep {self.keep:g}" + (" by layer" if self.layers else "")]
        if self.tokens is not None:
            fused = {False: "", True: " fused", "official": " fused officially"}[self.tokens.fuse]
            parts.append(f"{self.tokens.method} {self.tokens.keep:g}{fused}")
        return ", ".join(parts + [self.shape] * bool(self.shape))


@dataclasses.dataclass(frozen=True)
class Point:
    """A setting and what was measured of it."""

    setting: Setting
    row: compare.Row

    def to_dict(self) -> dict[str, Any]:
        """For JSON and CSV."""
        tokens = self.setting.tokens
        about = {
            "setting": self.setting.name,
            "keep": self.setting.keep,
            "layers": " ".join(f"{keep:g}" for keep in self.setting.layers or ()),
            "token_method": tokens.method if tokens else "",
            "token_keep": tokens.keep if tokens else 1.0,
            "shape": self.setting.shape,
        }
        return about | {key: value for key, value in self.row.to_dict().items() if key not in ("form", "keep")}


def sweep(evaluation: compare.Evaluation, settings: Sequence[Setting]) -> tuple[compare.Row, list[Point]]:
    """Runs every setting on the same images; the dense model's row comes beside. The model is as it was afterwards."""
    dense = evaluation.row(compare.DENSE)
    return dense, [Point(setting, evaluation.row(setting.form())) for setting in settings]


def worth(dense: compare.Row) -> str:
    """What settings are judged by: accuracy, or agreement with the dense model where images have no labels."""
    return "agreement" if dense.top1 is None else "top1"


def frontier(points: Sequence[Point], cost: str = "total_macs", value: str = "top1") -> list[Point]:
    """The points that no other beats: none costs less and is worth as much, or costs as much and is worth more.

    Args:
        points: of a sweep.
        cost: ``"total_macs"``, ``"attention_macs"`` or ``"milliseconds"``.
        value: ``"top1"``, ``"agreement"`` or ``"recall"``.
    """
    best: list[Point] = []
    for point in sorted(points, key=lambda p: (getattr(p.row, cost), -getattr(p.row, value))):
        if not best or getattr(point.row, value) > getattr(best[-1].row, value):
            best.append(point)
    return best


def possible_levels(student: nn.Module) -> tuple[float, ...]:
    """Those of `LEVELS` that a model can take: where cells are opened, a budget must hold one."""
    tokens = conversion_of(student).host.grid(student).num_tokens
    return tuple(level for level in LEVELS if config_of(student).can_keep(level, tokens))


def layer_recalls(
    student: nn.Module,
    images: Tensor | Iterable,
    levels: Sequence[float] = LEVELS,
    advance: Callable[[int], None] | None = None,
) -> list[list[float]]:
    """Each layer's recall at each keep rate, with all layers at the same rate: for `allocate`.

    Args:
        student: a converted, calibrated model; as it was afterwards. All tokens are kept.
        images: held-out calibration images: neither those it was calibrated on nor those it is evaluated on.
        levels: the keep rates.
        advance: told of each level that was measured.
    """
    before = config_of(student)
    found: list[list[float]] = []
    depth = len(sparse_layers(student))
    try:
        for level in levels:
            reconfigure(student, keep=[level] * depth, tokens=None)
            found.append([layer.recall for layer in measure(student, images)])
            if advance:
                advance(1)
    finally:
        reconfigure(student, keep=before.keep, tokens=before.tokens)
    return [list(layer) for layer in zip(*found, strict=True)]


def allocate(recalls: Sequence[Sequence[float]], average: float, levels: Sequence[float] = LEVELS) -> tuple[float, ...]:
    """Keep rates per layer with a given average, by greedy search on recall.

    Every layer starts with the least. Then the layer whose recall gains most for each key it gets is raised, again and
    again, while the average allows it.

    Args:
        recalls: by layer and level, from `layer_recalls`.
        average: of the keep rates, not to be exceeded.
        levels: the rates that a layer can get, ascending.
    """
    if not levels or list(levels) != sorted(set(levels)) or any(len(layer) != len(levels) for layer in recalls):
        raise ConfigError("levels must ascend, and every layer needs a recall for each of them")
    if average < levels[0]:
        raise ConfigError(f"an average of {average:g} is below the least keep rate, {levels[0]:g}")
    chosen = [0] * len(recalls)
    room = len(recalls) * (average - levels[0])
    while True:
        # Over several levels at once too: recall need not be concave.
        moves = [
            ((recall[to] - recall[at]) / (levels[to] - levels[at]), -layer, to)
            for layer, (recall, at) in enumerate(zip(recalls, chosen, strict=True))
            for to in range(at + 1, len(levels))
            if levels[to] - levels[at] <= room + 1e-9
        ]
        if not moves:
            return tuple(levels[at] for at in chosen)
        _, negated, to = max(moves)
        room -= levels[to] - levels[chosen[-negated]]
        chosen[-negated] = to
