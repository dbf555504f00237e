"""The demo's pictures: what was gained, what dense and sparse models answer, and how a patch finds the question."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sparsifiner import scenes
from sparsifiner.convert import dense_mode, sparse_layers
from sparsifiner.inspect.gain import Gain
from sparsifiner.report import figures, plots
from sparsifiner.report.html import Picture
from sparsifiner.report.photo import visible

# Of another digit, of the same, and of a wrong answer: told apart by colour-blind readers.
COLOURS = {"another digit": "#0072B2", "the same as the orange one": "#009E73", "wrong": "#D55E00"}


def pictures(student: nn.Module, shown: scenes.Scenes, gains: Sequence[Gain]) -> list[Picture]:
    """Of the first of the scenes, in a converted model of their size."""
    image, truth, question = shown.images[0], shown.answers[0], shown.questions[0]
    photo = visible(image, (scenes.MEAN,) * 3, (scenes.STD,) * 3)
    with torch.inference_mode():
        sparse = student(image[None])[0].argmax(0)
        with dense_mode(student):
            dense = student(image[None])[0].argmax(0)
    asker = _farthest(truth, question)
    looked = figures.look(student, image, photo, asker)
    head, layers = _searching(looked, question)
    return [
        Picture(plots.growth(gains), "How many times as fast as dense, by number of tokens: where sparsity pays."),
        Picture(
            answers(photo, truth, {"dense": dense, "sparse": sparse}),
            "A scene: which digits are the same as the orange one? Every patch with ink answers for itself.",
        ),
        Picture(
            figures.opened_cells(looked, layers, head),
            f"A patch of a digit like the orange one, and head {head} of {len(layers)} layers: the cells it opens (the "
            "others stand for their keys as one token each), what it attends to so, and what dense attention is.",
        ),
    ]


def answers(photo: np.ndarray, truth: Tensor, given: dict[str, Tensor]) -> Any:
    """A scene and the answers of models ``[rows, columns]``, wrong ones in a colour of their own."""
    figure, panels = plots.pyplot().subplots(
        1, 1 + len(given), figsize=(3.6 * (1 + len(given)), 4.0), dpi=150, layout="constrained"
    )
    rows, columns = truth.shape
    extent = (0, columns, rows, 0)
    palette = np.array([[int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)] for colour in COLOURS.values()])
    for axes in panels:
        axes.imshow(photo, extent=extent)
        axes.set_xticks([])
        axes.set_yticks([])
    panels[0].set_title("the scene", fontsize=10)
    inked = truth >= 0
    for axes, (name, found) in zip(panels[1:], given.items(), strict=True):
        right = found == truth
        colours = palette[torch.where(right, found, 2).numpy()]
        shade = np.concatenate([colours, 0.8 * inked.numpy()[..., None]], 2)
        axes.imshow(shade, extent=extent, interpolation="nearest")
        axes.set_title(f"{name}: {100 * right[inked].float().mean():.1f} % right", fontsize=10)
    patches = [plots.pyplot().Rectangle((0, 0), 1, 1, color=colour, label=name) for name, colour in COLOURS.items()]
    figure.legend(handles=patches, loc="outside lower center", ncols=3, fontsize=9, frameon=False)
    return figure


def _farthest(truth: Tensor, question: Tensor) -> tuple[int, int]:
    """The patch with the same digit that lies farthest from the orange one."""
    centre = question.nonzero().double().mean(0)
    places = ((truth == 1) & ~question).nonzero()
    if not len(places):  # a scene of few digits may hold no other of the kind
        places = (truth >= 0).nonzero()
    row, column = places[(places - centre).norm(dim=1).argmax()].tolist()
    return row, column


def _searching(looked: figures.Scene, question: Tensor) -> tuple[int, list[int]]:
    """The head that looks at the orange digit most, in any layer, and all layers that choose keys."""
    place = question.flatten()
    layers = [number for number in range(len(sparse_layers(looked.student))) if looked.maps[number].opened is not None]
    shares = torch.stack(
        [looked.maps[layer].full_map[0, :, 0, looked.num_prefix :][:, place].sum(-1) for layer in layers]
    )
    return int(shares.amax(0).argmax()), layers
