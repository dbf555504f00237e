"""Scenes of handwritten digits and a small ViT that searches them: the demo, at as many tokens as wanted.

A scene is a dark canvas of scikit-learn's digits in many sizes, one of them orange: that is the question. Every patch
with ink answers whether it is part of the same digit. To do so it must see the digit it is part of, which lies around
it, and the orange one, which may lie anywhere: attention is needed, near and far, and where to look is in the image. No
fixed pattern can know it.

A larger canvas holds more digits. Positions are sines of rows and columns and no weights, so that one model, trained on
small canvases for speed, takes large ones.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import timm
import torch
from timm.layers.hybrid_embed import HybridEmbed
from timm.models import register_model
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.nn import functional

from sparsifiner import __version__, checkpoint, digits
from sparsifiner.config import SparseConfig
from sparsifiner.convert import restore_in_place, sparsify, suggest_config
from sparsifiner.errors import SparsifinerError
from sparsifiner.files import cache_folder
from sparsifiner.progress import Progress

NAME = "vit_scenes_sparsifiner"
PATCH = 8  # pixels
BLOCK = 4  # patches: each block of the canvas holds a digit
SMALLEST = 20  # pixels of a digit, which a block bounds from above
SIDES = (8, 16, 32, 64)  # of canvases, in patches
ANSWERS = ("another digit", "the same digit as the orange one")
ORANGE = (1.0, 0.55, 0.1)
INK = 0.4  # from this brightness on
MEAN, STD = 0.2, 0.35  # of pixels, about
FARTHEST = 64  # patches: the canvas on which the longest wave of the positions does not repeat
# Training: first on the smallest canvases, then on several by turns; of about as many tokens a step.
STEPS = 320
MIXTURE = (16, 32, 8, 16, 32, 8, 16, 32, 64)
TOKENS = 3072
KEEP = 0.1  # of the keys, in the demo and on the page
CREDIT = "scikit-learn's digits, from UCI's Optical Recognition of Handwritten Digits"


class SceneTransformer(VisionTransformer):
    """timm's, with an answer for every patch ``[batch, answers, rows, columns]``, on canvases of any size."""

    def _pos_embed(self, x: Tensor) -> Tensor:
        _, rows, columns, dim = x.shape
        # In training the canvas lies anywhere on a larger one: then no place is special, and new ones are no surprise.
        reach = FARTHEST - max(rows, columns) + 1
        first = torch.randint(reach, (2,)).tolist() if self.training and reach > 0 else (0, 0)
        return super()._pos_embed(x + _positions(rows, columns, dim, first).to(x))

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """From tokens to the answers of the patches."""
        patches = x[:, self.num_prefix_tokens :]
        if pre_logits:
            return patches
        return self.head(patches).mT.unflatten(2, self._grid_of(patches))

    def _grid_of(self, patches: Tensor) -> tuple[int, int]:
        rows, columns = self.patch_embed.grid_size
        times = (patches.shape[1] / (rows * columns)) ** 0.5  # canvases are square
        return round(times * rows), round(times * columns)


def _positions(rows: int, columns: int, dim: int, first: tuple[int, int] | list[int]) -> Tensor:
    """Sines and cosines ``[rows, columns, dim]`` of each patch's row and column, counted from ``first``."""
    waves = FARTHEST ** -(torch.arange(dim // 4) / (dim // 4))
    angles = [
        (torch.arange(start, start + size)[:, None]) * waves for size, start in ((rows, first[0]), (columns, first[1]))
    ]
    down, right = (torch.cat([angle.sin(), angle.cos()], 1) for angle in angles)
    return torch.cat([down[:, None].expand(-1, columns, -1), right[None].expand(rows, -1, -1)], 2)


@register_model
def vit_scenes_sparsifiner(pretrained: bool = False, **arguments) -> VisionTransformer:
    """The demo's architecture, known to timm by name so that its checkpoints load."""
    known = {"cache_dir", "pretrained_cfg", "pretrained_cfg_overlay"}
    arguments = {key: value for key, value in arguments.items() if key not in known}
    widths = (3, 16, 32, 64, 64)
    # Each patch sees a little more than itself; a ViT of bare patches takes far longer to learn anything.
    stem = [
        part
        for here, there, stride in zip(widths, widths[1:], (2, 2, 2, 1), strict=False)
        for part in (nn.Conv2d(here, there, 3, stride, padding=1), nn.BatchNorm2d(there), nn.GELU())
    ]
    defaults = {
        "img_size": 32 * PATCH,
        "patch_size": 1,  # of what the stem leaves
        "num_classes": len(ANSWERS),
        "embed_dim": 96,
        "depth": 4,
        "num_heads": 3,
        "mlp_ratio": 2,
        "pos_embed": "none",
        "dynamic_img_size": True,
        "embed_layer": partial(HybridEmbed, backbone=nn.Sequential(*stem)),
    }
    model = SceneTransformer(**(defaults | arguments))
    for block in model.blocks:
        # Queries that equal keys look at like positions, so at their neighbourhood, before anything is learned.
        weight: Tensor = block.attn.qkv.weight  # pyright: ignore
        dim = weight.shape[1]
        with torch.no_grad():
            weight[:dim] = weight[dim : 2 * dim] = torch.randn(dim, dim) / dim**0.5
    seen = {"mean": (MEAN,) * 3, "std": (STD,) * 3, "crop_pct": 1.0, "interpolation": "bilinear"}
    size = (3, *model.patch_embed.img_size)
    vars(model)["pretrained_cfg"] = {"architecture": NAME, "input_size": size, **seen}  # where timm keeps all this
    return model


class Scenes(NamedTuple):
    """Canvases and what is true of their patches, -1 where there is no ink.

    Attributes:
        images: ``[count, 3, height, width]``, about zero mean and unit variance.
        answers: ``[count, rows, columns]``, numbers of `ANSWERS`.
        digits: ``[count, rows, columns]``, which digit it is.
        questions: ``[count, rows, columns]``, True in the block of the orange digit.
    """

    images: Tensor
    answers: Tensor
    digits: Tensor
    questions: Tensor

    def batches(self, size: int) -> list[tuple[Tensor, Tensor]]:
        """Images and answers, so many at a time."""
        return list(zip(self.images.split(size), self.answers.split(size), strict=True))


def draw(source: tuple[Tensor, Tensor], count: int, side: int, seed: int) -> Scenes:
    """Draws scenes; the same for the same seed.

    Args:
        source: digits ``[number, 1, 8, 8]`` and their labels, as `digits.load_digits` has them.
        count: how many.
        side: rows and columns of patches, a multiple of `BLOCK`.
        seed: of all that is drawn.
    """
    generator = torch.Generator().manual_seed(seed)
    shapes, labels = source[0] * digits.STD + digits.MEAN, source[1]
    of_kind = [(labels == kind).nonzero().flatten().tolist() for kind in range(10)]
    largest, blocks = BLOCK * PATCH, side // BLOCK

    def number(end: int) -> int:
        return int(torch.randint(end, (1,), generator=generator))

    canvas = 0.05 * torch.randn(count, 3, side * PATCH, side * PATCH, generator=generator)
    truth = torch.full((count, 2, side * PATCH, side * PATCH), -1.0)  # answer and digit of each pixel
    questions = torch.zeros(count, blocks**2, dtype=torch.bool)
    for scene in range(count):
        asked, orange = number(10), number(blocks**2)
        questions[scene, orange] = True
        for block in range(blocks**2):
            same = block == orange or number(2) == 0
            kind = asked if same else (asked + 1 + number(9)) % 10
            size = SMALLEST + number(largest - SMALLEST + 1)
            shape = shapes[of_kind[kind][number(len(of_kind[kind]))]]
            shape = functional.interpolate(shape[None], size=(size, size), mode="bilinear")[0]  # [1, size, size]
            top, left = (place * largest + number(largest - size + 1) for place in divmod(block, blocks))
            here = (scene, slice(None), slice(top, top + size), slice(left, left + size))
            canvas[here] += shape * torch.tensor(ORANGE if block == orange else (1.0,) * 3).view(3, 1, 1)
            truth[here] = torch.where(shape > INK, torch.tensor([float(same), kind]).view(2, 1, 1), -1.0)
    inked = functional.avg_pool2d((truth[:, :1] >= 0).float(), PATCH) >= 0.2  # of the patch
    answers, kinds = torch.where(inked, functional.max_pool2d(truth, PATCH), -1.0).long().unbind(1)
    questions = questions.view(count, blocks, blocks).repeat_interleave(BLOCK, 1).repeat_interleave(BLOCK, 2)
    return Scenes((canvas - MEAN) / STD, answers, kinds, questions)


def train_scenes(
    source: tuple[Tensor, Tensor], *, steps: int = STEPS, seed: int = 0, on_step: Callable[[int], None] | None = None
) -> nn.Module:
    """Trains the dense model from nothing, the same way for the same seed; about a minute on two cores.

    First on the smallest canvases, whose steps say most for their time, then on several by turns.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = timm.create_model(NAME).train()
        # To tell which digit a patch is part of is a lesson on the way, which the model itself need not say.
        naming = nn.Linear(model.num_features, 10)
        parameters = [*model.parameters(), *naming.parameters()]
        optimiser = torch.optim.AdamW(parameters, lr=3e-3, weight_decay=0.02)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, max_lr=3e-3, total_steps=steps, pct_start=0.15)
        for step in range(steps):
            side = SIDES[0] if step < 0.6 * steps else MIXTURE[step % len(MIXTURE)]
            scenes = draw(source, -(-TOKENS // side**2), side, seed=seed + 1 + step)
            tokens = model.forward_features(scenes.images)
            named = naming(model.forward_head(tokens, pre_logits=True)).mT
            loss = functional.cross_entropy(model.forward_head(tokens), scenes.answers, ignore_index=-1)
            loss = loss + functional.cross_entropy(named, scenes.digits.flatten(1), ignore_index=-1)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            schedule.step()
            if on_step:
                on_step(1)
    return model.eval()


def trained(progress: Progress | None = None) -> tuple[nn.Module, str]:
    """The trained dense model, from the cache if it is there; and a sentence on where it comes from."""
    path = None
    try:
        path = cache_folder() / f"scenes-{__version__}.safetensors"
        if path.is_file():
            return restore_in_place(checkpoint.load(path)).eval(), f"It was trained on this machine before ({path})."
    except (SparsifinerError, OSError, RuntimeError):
        pass  # damaged, unreadable or of another make, or there is no home: made anew
    source, _ = digits.load_digits()
    advance = progress("training a ViT on scenes of digits", STEPS) if progress else None
    model = train_scenes(source, steps=STEPS, on_step=advance)
    lost = "It was trained on this machine, and could not be kept for the next time: the cache cannot be written."
    try:
        if path is None:
            return model, lost
        path.parent.mkdir(parents=True, exist_ok=True)
        checkpoint.save(sparsify(model, settings(model)), path)
    except (SparsifinerError, OSError):
        return model, lost
    return model, f"It was trained on this machine, and is kept for the next time ({path})."


def settings(model: nn.Module, keep: float = KEEP) -> SparseConfig:
    """What is suggested for a model of scenes, but with no cells larger than a digit.

    In the mean of a larger one the orange digit can be lost among its neighbours: with cells of 8 x 8 patches, as they
    are suggested for 4,097 tokens, that happened in about one scene of sixteen.
    """
    config = suggest_config(model, keep)
    return config.replace(cells=tuple(cell for cell in config.cells if max(cell) <= BLOCK))


def at_size(model: nn.Module, side: int) -> nn.Module:
    """A copy whose own canvas has so many rows and columns of patches."""
    twin: Any = copy.deepcopy(model)
    twin.set_input_size((side * PATCH, side * PATCH))
    return twin
