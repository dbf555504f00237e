"""The paper's figures of any converted model and photo: what a patch attends to, and how that was predicted.

Each function draws one figure from numbers it is given, and returns it; `figures` makes all of them, and with them the
trade-off (e) of `sparsifiner.report.plots` where a sweep was made.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sparsifiner.config import TokenConfig
from sparsifiner.convert import config_of, conversion_of, reconfigure, sparse_layers
from sparsifiner.errors import ConfigError
from sparsifiner.inspect.capture import LayerCapture, capture, seen_cells
from sparsifiner.inspect.compare import Form, Row, running_as
from sparsifiner.inspect.observe import observing
from sparsifiner.inspect.statistics import LayerStatistics, measure
from sparsifiner.inspect.sweep import Point
from sparsifiner.nn.attention import Observation
from sparsifiner.nn.patterns import pattern_mask
from sparsifiner.report.plots import pyplot, save, trade_off
from sparsifiner.sides import Sides, spelled

# Told apart by colour-blind readers, and in print.
MAP = "viridis"
DROPPED = 0.25  # what is still seen of patches that were dropped
SHADE = 0.4  # the grey that is over them: black would hide what is kept of a dark picture


@dataclasses.dataclass(frozen=True)
class Scene:
    """One photo in one converted model, and all that the figures show of it.

    Of a clip some frames of its patches are shown, beside each other; numbers in captions are of all of it.

    Attributes:
        photo: ``[height, width, 3]`` in [0, 1], as the model saw it; of a clip ``[pictures, height, width, 3]``.
        grid: rows and columns of patches, of a clip frames before them.
        query: the patch whose attention is shown: its row and column, of a clip its frame before them.
        num_prefix: tokens before the patches.
        maps: each layer's attention of that patch, all heads.
        coefficients: each sparse layer's low-rank attention of all patches, ``[heads, patches, m]``.
        statistics: recall, connections and densities of each layer.
        student: the model.
        frames: of a clip those that are shown.
    """

    photo: np.ndarray
    grid: Sides
    query: Sides
    num_prefix: int
    maps: dict[int, LayerCapture]
    coefficients: dict[int, Tensor]
    statistics: list[LayerStatistics]
    student: nn.Module
    frames: tuple[int, ...] = ()

    def on_grid(self, row: Tensor) -> np.ndarray:
        """A row over all tokens ``[n]`` as a picture ``[rows, columns]`` of the patches, frames beside each other."""
        return self.beside(row[self.num_prefix :].float().cpu().numpy())

    def beside(self, patches: np.ndarray) -> np.ndarray:
        """Values of all patches, of whatever kind, as such a picture."""
        values = patches.reshape(self.grid)
        return np.concatenate([values[frame] for frame in self.frames], 1) if self.frames else values

    @property
    def background(self) -> np.ndarray:
        """The photo, or of a clip the first of the pictures that each frame shown is made of."""
        pictures = [self.photo[frame * len(self.photo) // self.grid[0]] for frame in self.frames]
        return np.concatenate(pictures, 1) if pictures else self.photo

    @property
    def sides(self) -> tuple[int, int]:
        """Rows and columns of patches in a picture."""
        rows, columns = self.grid[-2:]
        return rows, columns * self.wide

    @property
    def wide(self) -> int:
        """How many frames wide a picture is."""
        return max(1, len(self.frames))

    @property
    def place(self) -> tuple[int, int] | None:
        """Row and column of the query in a picture; None where its frame is not shown."""
        row, column = self.query[-2:]
        if not self.frames:
            return row, column
        if self.query[0] not in self.frames:
            return None
        return row, column + self.frames.index(self.query[0]) * self.grid[2]

    @property
    def token(self) -> int:
        """The query among all tokens."""
        return self.num_prefix + int(np.ravel_multi_index(self.query, self.grid))

    def patches_kept(self, mask: Tensor) -> str:
        """How many patches a row of a mask over all tokens ``[n]`` keeps, for a caption."""
        return f"{int(mask[self.num_prefix :].sum())} of {math.prod(self.grid)} patches"


def look(
    student: nn.Module,
    image: Tensor,
    photo: np.ndarray,
    query: Sides | None = None,
    frames: Sequence[int] | None = None,
) -> Scene:
    """Runs a converted model on one image ``[channels, height, width]``, or a clip, with all its tokens.

    Args:
        student: a converted model; as it was afterwards.
        image: preprocessed; of a clip ``[frames, channels, height, width]``.
        photo: the same to look at.
        query: row and column of the patch to follow, of a clip frame, row and column; the middle if not given.
        frames: of a clip the frames of patches to show beside each other; the query's if not given.
    """
    record = conversion_of(student)
    found: dict[int, Tensor] = {}
    numbers = {layer: number for number, layer in enumerate(sparse_layers(student))}

    def note(seen: Observation) -> None:
        if seen.residual is not None:
            found[numbers[seen.layer]] = seen.residual.a_down[0].float().cpu()

    with running_as(student, Form("figures", {"tokens": None}), None), torch.inference_mode():
        student(image[None])  # so that the grid is the image's
        size = record.grid.latest.size
        maps: dict[int, LayerCapture] = {}
        query = tuple(side // 2 for side in size) if query is None else tuple(query)
        scene = Scene(
            photo, size, query, record.grid.num_prefix, maps, found, [], student, _chosen(size, query, frames)
        )
        if photo.ndim != len(size) + 1:
            raise ConfigError(f"the photo of {spelled(size)} patches has {photo.ndim} dimensions, not {len(size) + 1}")
        with capture(student, queries=[scene.token]) as seen, observing(sparse_layers(student), note):
            student(image[None])
        maps |= seen
        return dataclasses.replace(scene, statistics=measure(student, image[None]))


def _chosen(size: Sides, query: Sides, frames: Sequence[int] | None) -> tuple[int, ...]:
    """The frames to show, or an error if the query or one of them does not exist."""
    if len(query) != len(size) or not all(0 <= at < side for at, side in zip(query, size, strict=True)):
        raise ConfigError(f"patch {query} does not exist: there are {spelled(size)} patches")
    if len(size) == 2:
        if frames is not None:
            raise ConfigError("an image has no frames: leave them out")
        return ()
    chosen = tuple(query[:1] if frames is None else frames)
    if wrong := [frame for frame in chosen if not 0 <= frame < size[0]]:
        raise ConfigError(f"frame {wrong[0]} does not exist: the clip has frames of patches 0 to {size[0] - 1}")
    return chosen


def _show(axes: Any, values: np.ndarray | None, scene: Scene) -> None:
    """The photo, with values of the patches over it and the query framed."""
    rows, columns = scene.sides
    extent = (0, columns, rows, 0)
    axes.imshow(scene.background, extent=extent, interpolation="bilinear")
    if values is not None:
        top = float(values.max())
        # What has no attention lets the photo through, so that both can be seen.
        strength = np.clip(values / top, 0, 1) if top > 0 else values
        axes.imshow(values, extent=extent, cmap=MAP, vmin=0, vmax=top or 1, alpha=0.25 + 0.7 * strength)
    _mark(axes, scene)
    _bare(axes)


def _mark(axes: Any, scene: Scene) -> None:
    """Frames the query, in light on dark, so that it is seen on any photo; lines are between frames of a clip."""
    for frame in range(1, scene.wide):
        axes.axvline(frame * scene.grid[-1], color="white", linewidth=1.5)
    if scene.place is None:
        return
    row, column = scene.place
    for colour, width in (("black", 3.0), ("white", 1.4)):
        axes.add_patch(pyplot().Rectangle((column, row), 1, 1, fill=False, edgecolor=colour, linewidth=width))


def _bare(axes: Any) -> None:
    axes.set_xticks([])
    axes.set_yticks([])
    for side in axes.spines.values():
        side.set_visible(False)


def _kept(axes: Any, mask: np.ndarray, scene: Scene) -> None:
    """The patches that are connected, as they are; the others under grey."""
    rows, columns = scene.sides
    axes.imshow(scene.background, extent=(0, columns, rows, 0), interpolation="bilinear")
    shade = np.full((rows, columns, 4), SHADE)
    shade[..., 3] = np.where(mask, 0.0, 1 - DROPPED)
    axes.imshow(shade, extent=(0, columns, rows, 0), interpolation="nearest")
    _mark(axes, scene)
    _bare(axes)


def connections(scene: Scene, layers: Sequence[int], heads: Sequence[int]) -> Any:
    """(a) The query, the keys it is connected to, its sparse attention and its full attention, by layer and head."""
    titles = ("query", "connected keys", "sparse attention", "full attention")
    cases = [(layer, head) for layer in layers for head in heads]
    figure, panels = pyplot().subplots(
        len(cases), 4, figsize=(8 * scene.wide, 2.05 * len(cases)), dpi=150, squeeze=False, layout="constrained"
    )
    for (layer, head), row in zip(cases, panels, strict=True):
        seen = scene.maps[layer]
        mask = seen.mask[0, head, 0]
        _show(row[0], None, scene)
        _kept(row[1], scene.on_grid(mask) > 0, scene)
        _show(row[2], scene.on_grid(seen.sparse_map[0, head, 0]), scene)
        _show(row[3], scene.on_grid(seen.full_map[0, head, 0]), scene)
        row[0].set_ylabel(f"layer {layer}, head {head}", fontsize=8)
        row[1].set_xlabel(scene.patches_kept(mask), fontsize=7)
    for axes, title in zip(panels[0], titles, strict=True):
        axes.set_title(title, fontsize=9)
    return figure


def three_attentions(scene: Scene, layers: Sequence[int], head: int) -> Any:
    """(b) Full and sparse attention of the query and the estimate of the rest, on one scale a layer."""
    estimated = "low-rank estimate" if config_of(scene.student).asks_predictor else "through standing cells"
    titles = ("query", "full attention", estimated, "sparse attention")
    figure, panels = pyplot().subplots(
        len(layers), 4, figsize=(8 * scene.wide, 2.05 * len(layers)), dpi=150, squeeze=False, layout="constrained"
    )
    for layer, row in zip(layers, panels, strict=True):
        seen = scene.maps[layer]
        estimate = torch.zeros_like(seen.full_map) if seen.estimate is None else seen.estimate
        pictures = [scene.on_grid(x[0, head, 0]) for x in (seen.full_map, estimate, seen.sparse_map)]
        top = max(float(picture.max()) for picture in pictures)
        _show(row[0], None, scene)
        for axes, picture in zip(row[1:], pictures, strict=True):
            axes.imshow(picture, cmap=MAP, vmin=0, vmax=top, interpolation="nearest")
            _bare(axes)
        figure.colorbar(row[-1].get_images()[0], ax=row[-1], shrink=0.8)
        row[0].set_ylabel(f"layer {layer}, head {head}", fontsize=8)
    for axes, title in zip(panels[0], titles, strict=True):
        axes.set_title(title, fontsize=9)
    return figure


def opened_cells(scene: Scene, layers: Sequence[int], head: int) -> Any:
    """(i) The cells that the query opens, those that stand for their keys dimmed, and what it attends to with both."""
    found = [layer for layer in layers if scene.maps[layer].opened is not None]
    if not found:
        raise ConfigError("every layer shown is dense: it opens no cells")
    titles = ("query", "opened cells", "attention through both", "full attention")
    figure, panels = pyplot().subplots(
        len(found), 4, figsize=(8 * scene.wide, 2.05 * len(found)), dpi=150, squeeze=False, layout="constrained"
    )
    for layer, row in zip(found, panels, strict=True):
        seen = scene.maps[layer]
        assert seen.opened is not None
        assert seen.estimate is not None
        rest = seen.estimate[0, head, 0]  # the kept keys share what it leaves them
        used = seen.sparse_map[0, head, 0] * (1 - rest.sum()) + rest
        mask = seen.mask[0, head, 0]
        opened = scene.on_grid(mask) > 0
        numbers = seen_cells(seen.opened, seen.queries)[0, head, 0]
        _show(row[0], None, scene)
        _kept(row[1], opened, scene)
        _outline(row[1], scene.beside(numbers.cpu().numpy()), opened)
        standing = len(numbers[~mask[scene.num_prefix :]].unique())
        kind = "standing cells" if config_of(scene.student).residual else "cells left out"
        row[1].set_xlabel(f"{scene.patches_kept(mask)}, {standing} {kind}", fontsize=7)
        _show(row[2], scene.on_grid(used), scene)
        _show(row[3], scene.on_grid(seen.full_map[0, head, 0]), scene)
        row[0].set_ylabel(f"layer {layer}, head {head}", fontsize=8)
    for axes, title in zip(panels[0], titles, strict=True):
        axes.set_title(title, fontsize=9)
    return figure


def _outline(axes: Any, numbers: np.ndarray, opened: np.ndarray) -> None:
    """Draws the borders of cells, bright around opened ones."""
    from matplotlib.collections import LineCollection

    cells, bright = np.pad(numbers, 1, constant_values=-1), np.pad(opened, 1)
    lines: dict[bool, list[Any]] = {False: [], True: []}
    for row, column in np.ndindex(cells.shape):
        for down, right in ((0, 1), (1, 0)):
            other = min(row + down, cells.shape[0] - 1), min(column + right, cells.shape[1] - 1)
            if cells[row, column] != cells[other]:  # the border between the two, in patches
                end = (column + right - 1, row + down - 1)
                lines[bool(bright[row, column] or bright[other])].append([end, (column, row)])
    axes.add_collection(LineCollection(lines[False], colors="white", alpha=0.3, linewidths=0.4))
    axes.add_collection(LineCollection(lines[True], colors="#fde725", linewidths=1.0))


def basis(scene: Scene, layers: Sequence[int], head: int, most: int = 16) -> Any:
    """(c) The sparse basis: rows of w_up as pictures of the patches, with what lies below the threshold left white."""
    found = [layer for layer in layers if layer in scene.coefficients]
    if not found:
        raise ConfigError("every layer shown is dense: there is no basis to draw")
    count = min(most, config_of(scene.student).n_down)
    figure, panels = pyplot().subplots(
        len(found),
        count,
        figsize=(0.75 * count * scene.wide, 0.95 * len(found)),
        dpi=200,
        squeeze=False,
        layout="constrained",
    )
    for number, row in zip(found, panels, strict=True):
        layer = sparse_layers(scene.student)[number]
        w_up = layer.predictor.at(scene.grid)[1][head].detach()
        chosen = torch.linspace(0, len(w_up) - 1, count).round().long().tolist()
        for axes, landmark in zip(row, chosen, strict=True):
            picture = scene.on_grid(w_up[landmark])
            drawn = np.ma.masked_less_equal(picture, layer.basis_threshold)
            axes.imshow(drawn, cmap=MAP, vmin=0, vmax=max(float(picture.max()), 1e-9), interpolation="nearest")
            axes.set_xticks([])
            axes.set_yticks([])
            axes.spines[:].set_color("#bbbbbb")
        kept = float((w_up > layer.basis_threshold).float().mean())
        row[0].set_ylabel(f"layer {number}\n{kept:.0%} kept", fontsize=6)
    return figure


def coefficients(scene: Scene, head: int, layers: Sequence[int]) -> Any:
    """(d) The basis coefficients of a head, layer by layer: patches down, landmarks across; white is below tau."""
    found = [layer for layer in layers if layer in scene.coefficients]
    if not found:
        raise ConfigError("every layer shown is dense: it has no coefficients")
    columns = min(6, len(found))
    rows = -(-len(found) // columns)
    figure, panels = pyplot().subplots(
        rows, columns, figsize=(1.7 * columns, 3.0 * rows), dpi=150, squeeze=False, layout="constrained"
    )
    from matplotlib.colors import LogNorm

    tau = config_of(scene.student).tau
    scale = LogNorm(max(tau, 1e-3), 1.0)  # a few are near 1, most are hardly above tau
    for axes in panels.flatten():
        axes.set_visible(False)
    for layer, axes in zip(found, panels.flatten(), strict=False):
        values = scene.coefficients[layer][head].numpy()
        axes.set_visible(True)
        drawn = np.ma.masked_less_equal(values, tau)
        axes.imshow(drawn, cmap=MAP, norm=scale, aspect="auto", interpolation="nearest")
        axes.set_title(f"layer {layer}: {(values > tau).mean():.0%}", fontsize=8)
        axes.tick_params(labelsize=6)
    bar = figure.colorbar(pyplot().cm.ScalarMappable(scale, MAP), ax=panels, shrink=0.6, aspect=30)
    bar.ax.tick_params(labelsize=6)
    bar.set_label("coefficient", fontsize=7)
    figure.supxlabel("landmark", fontsize=8)
    figure.supylabel("query patch", fontsize=8)
    return figure


def patterns(scene: Scene, layers: Sequence[int], head: int) -> Any:
    """(f) Fixed patterns beside the model's own, at the same number of keys."""
    fixed = ("window", "axial", "strided", "bigbird")
    figure, panels = pyplot().subplots(
        len(layers),
        len(fixed) + 1,
        figsize=(9 * scene.wide, 1.95 * len(layers)),
        dpi=150,
        squeeze=False,
        layout="constrained",
    )
    for number, line in zip(layers, panels, strict=True):
        layer = sparse_layers(scene.student)[number]
        for name, axes in zip(fixed, line, strict=False):
            mask = pattern_mask(name, scene.grid, scene.num_prefix, layer.budget())
            _kept(axes, scene.on_grid(mask[scene.token]) > 0, scene)
            if number == layers[0]:
                axes.set_title(name, fontsize=9)
        _kept(line[-1], scene.on_grid(scene.maps[number].mask[0, head, 0]) > 0, scene)
        line[0].set_ylabel(f"layer {number}, head {head}", fontsize=8)
    panels[0][-1].set_title(config_of(scene.student).pattern, fontsize=9)
    return figure


def recalls(statistics: Sequence[LayerStatistics], images: int) -> Any:
    """(g) The share of the true attention that lies on kept keys, by layer and head."""
    values = np.array([layer.recall_per_head for layer in statistics])
    figure, axes = pyplot().subplots(
        figsize=(1.4 + 0.55 * values.shape[1], 0.9 + 0.32 * len(values)), dpi=150, layout="constrained"
    )
    drawn = axes.imshow(values, cmap=MAP, vmin=0, vmax=1, aspect="auto")
    for (layer, head), value in np.ndenumerate(values):
        axes.text(
            head, layer, f"{value:.2f}", ha="center", va="center", fontsize=7, color="white" if value < 0.6 else "black"
        )
    axes.set_xticks(range(values.shape[1]))
    axes.set_yticks(range(len(values)))
    axes.set_xlabel("head")
    axes.set_ylabel("layer")
    axes.set_title(f"recall, {images} image{'s' if images > 1 else ''}", fontsize=9)
    figure.colorbar(drawn, ax=axes)
    return figure


def kept_tokens(scene: Scene, stages: Sequence[tuple[int, Tensor]], method: str) -> Any:
    """(h) What is left of the photo after each pruning.

    Args:
        scene: the photo and its patches.
        stages: numbers of the blocks that drop tokens, and the cells they leave.
        method: its name.
    """
    rows, columns = scene.sides
    extent, patches, width = (0, columns, rows, 0), math.prod(scene.grid), 2.1 * scene.wide * (len(stages) + 1)
    figure, panels = pyplot().subplots(
        1, len(stages) + 1, figsize=(width, 2.4), dpi=150, squeeze=False, layout="constrained"
    )
    panels[0][0].imshow(scene.background, extent=extent)
    panels[0][0].set_title("photo", fontsize=9)
    for axes, (block, cells) in zip(panels[0][1:], stages, strict=True):
        gone = np.ones(patches)
        gone[cells.cpu().numpy()] = 0
        shade = np.zeros((rows, columns, 4))
        shade[..., :3], shade[..., 3] = 1.0, 0.85 * scene.beside(gone)
        axes.imshow(scene.background, extent=extent)
        axes.imshow(shade, extent=extent, interpolation="nearest")
        axes.set_title(f"{method}, block {block}: {len(cells)} of {patches}", fontsize=8)
    for axes in panels[0]:
        _bare(axes)
    return figure


def left_tokens(student: nn.Module, image: Tensor, tokens: TokenConfig) -> list[tuple[int, Tensor]]:
    """The cells that each pruning leaves of one image ``[channels, height, width]``: for `kept_tokens`."""
    from sparsifiner.tokens.install import pruning_blocks

    before = config_of(student).tokens
    found: list[tuple[int, Tensor]] = []
    grid = conversion_of(student).grid
    reconfigure(student, tokens=tokens)

    def note(block: Any, *_: Any) -> None:
        if grid.cells is not None:
            found.append((block.number, grid.cells[0]))

    handles = [block.register_forward_hook(note) for block in pruning_blocks(student)]
    try:
        with torch.inference_mode():
            student(image[None])
    finally:
        for handle in handles:
            handle.remove()
        reconfigure(student, tokens=before)
    return found


def figures(
    scene: Scene,
    image: Tensor,
    folder: Path,
    *,
    layers: Sequence[int],
    heads: Sequence[int],
    tokens: TokenConfig,
    only: Sequence[str] | None = None,
    swept: Callable[[], tuple[Row, list[Point]]] | None = None,
) -> list[Path]:
    """Draws the figures to PNG and PDF files and returns their paths.

    Args:
        scene: from `look`.
        image: what it was made of.
        folder: where to.
        layers: which layers are shown.
        heads: which heads; figures of one head show the first.
        tokens: how tokens are dropped in the last figure.
        only: names of the figures wanted; None for all.
        swept: gives what `sparsifiner.inspect.sweep.sweep` finds, for the trade-off; without, there is none. Asked only
            once all else is known to be right: it takes long.
    """
    numbers = {
        "layer": (layers, len(sparse_layers(scene.student))),
        "head": (heads, sparse_layers(scene.student)[0].num_heads),
    }
    for what, (chosen, count) in numbers.items():
        if wrong := [number for number in chosen if not 0 <= number < count]:
            raise ConfigError(f"{what} {wrong[0]} does not exist: the model has 0 to {count - 1}")
    every = list(range(len(sparse_layers(scene.student))))
    of_predictor: dict[str, Callable[[], Any]] = {
        "basis": lambda: basis(scene, layers, heads[0]),
        "coefficients": lambda: coefficients(scene, heads[0], every),
    }
    of_cells: dict[str, Callable[[], Any]] = {"cells": lambda: opened_cells(scene, layers, heads[0])}
    makers: dict[str, Callable[[], Any]] = {
        "connections": lambda: connections(scene, layers, heads),
        "attentions": lambda: three_attentions(scene, layers, heads[0]),
        **(of_predictor if config_of(scene.student).asks_predictor else of_cells),
        "patterns": lambda: patterns(scene, layers, heads[0]),
        "recall": lambda: recalls(scene.statistics, 1),
        "tokens": lambda: kept_tokens(
            scene, left_tokens(scene.student, image, tokens), f"{tokens.method} {tokens.keep:g}"
        ),
    }
    if swept is not None:
        makers["trade-off"] = lambda: trade_off(*swept())
    if unknown := [name for name in only or () if name not in makers]:
        raise ConfigError(f"unknown figure {unknown[0]!r}: choose from {', '.join(makers)}")
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, make in makers.items():
        if only is None or name in only:
            figure = make()
            for kind in ("png", "pdf"):
                paths.append(folder / f"{name}.{kind}")
                save(figure, paths[-1], close=kind == "pdf")
    return paths
