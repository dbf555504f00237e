"""Clips: what cells of time and space lose, how fast they are, and how much memory they take.

    python benchmarks/video.py error              # results/video-error.csv: which cells and tiles
    python benchmarks/video.py speed --threads 2  # results/video-speed.csv: VideoMAE-S, a layer of V-JEPA 2 ViT-L
    python benchmarks/video.py memory             # results/video-memory.csv: that layer at 18,432 tokens

**error** needs real queries and keys, and there are no weights of a video model here: DeiT-Tiny's stand in. A clip is
made by moving a window over a photo, so that what is seen shifts and grows; every frame goes through the model alone,
and in each layer the queries, keys and values of all frames are put together and attend to each other. How far the
sparse output is from the dense one, relative to it, is the mean over layers and clips. Of real video this says that
neighbouring frames resemble each other and move; not what a model trained on video makes of time.

**speed** and **memory** take random weights: with cells, what is computed depends on sizes alone.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import io
import math
import resource
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional
from torchvision.transforms.functional import normalize, to_tensor

import sparsifiner as sp
from common import RESULTS, assets, machine_results, write_csv
from sparsifiner.config import budget, name_tile, spread_over_depth
from sparsifiner.convert import dense_mode, sparse_layers
from sparsifiner.inspect.observe import observing
from sparsifiner.inspect.speed import Timing, take_turns
from sparsifiner.models import create_host
from sparsifiner.nn.attention import SparseAttention
from sparsifiner.ops import cells
from sparsifiner.sides import Sides, short

Runs = dict[str, Callable[[], object]]

NAME = "deit_tiny_patch16_224"
KEEPS = (0.25, 0.1, 0.05)
GRIDS = ((8, 14, 14), (32, 16, 16))  # VideoMAE's of 16 frames and 224 pixels, V-JEPA 2's of 64 and 256
# How far the window moves from one frame to the next, in patches.
MOTIONS = {"slow": 0.3, "fast": 1.2}
# Tile, levels, breadth.
FORMS: tuple[tuple[Sides | None, tuple[Sides, ...], float], ...] = (
    ((1, 4, 4), ((1, 2, 2),), 3.0),
    ((1, 4, 4), ((1, 2, 2), (1, 4, 4)), 3.0),
    ((1, 4, 4), ((1, 2, 2), (1, 4, 4), (1, 8, 8)), 2.5),
    ((2, 2, 4), ((1, 2, 2), (2, 4, 4)), 2.0),
    ((2, 2, 4), ((1, 2, 2), (2, 4, 4)), 3.0),
    ((2, 2, 4), ((2, 2, 2), (4, 4, 4)), 3.0),
    ((2, 2, 4), ((1, 1, 2), (2, 2, 2), (4, 4, 4)), 1.7),
    ((2, 2, 4), ((2, 1, 2), (2, 2, 4), (4, 4, 8)), 2.5),
    ((2, 2, 4), ((2, 1, 2), (4, 2, 4), (8, 4, 8)), 2.5),
    ((2, 2, 4), ((2, 1, 2), (4, 2, 4)), 2.0),
    ((1, 4, 4), ((2, 1, 2), (4, 2, 4)), 2.0),
    ((2, 4, 4), ((2, 1, 2), (4, 2, 4)), 2.0),
    ((4, 2, 2), ((2, 1, 2), (4, 2, 4)), 2.0),
    ((2, 2, 4), ((2, 1, 2), (4, 2, 4)), 3.0),
    (None, ((2, 1, 2), (4, 2, 4)), 2.0),
)


# What is lost


def clips(grid: Sides, motion: float, count: int) -> Iterator[Tensor]:
    """``[frames, 3, height, width]`` each: a window that moves over a photo and grows or shrinks."""
    frames, rows, _ = grid
    random = torch.Generator().manual_seed(0)
    with tarfile.open(assets() / "imagenet-hires.tar") as tar:
        names = sorted(m.name for m in tar.getmembers() if m.isfile() and m.name.startswith("calibrate/"))
        for name in names[:: max(1, len(names) // count)][:count]:
            file = tar.extractfile(name)
            assert file is not None
            yield _window(Image.open(io.BytesIO(file.read())).convert("RGB"), frames, 16 * rows, motion, random)


def _window(photo: Image.Image, frames: int, pixels: int, motion: float, random: torch.Generator) -> Tensor:
    whole = min(photo.size)
    side = whole * 0.6
    zoom = float(torch.rand((), generator=random)) * 0.3 - 0.15  # of the side, in all
    angle = float(torch.rand((), generator=random)) * 2 * math.pi
    # Where the window begins; it turns back at the border.
    at = [float(torch.rand((), generator=random)) * (length - side) for length in photo.size]
    step = [16 * motion * side / pixels * part for part in (math.cos(angle), math.sin(angle))]
    shown = []
    for frame in range(frames):
        now = side * (1 + zoom * frame / frames)
        moved = zip(at, step, photo.size, strict=True)
        left, top = (_turned(start + frame * by, length - now) for start, by, length in moved)
        picture = photo.resize((pixels, pixels), Image.Resampling.BICUBIC, box=(left, top, left + now, top + now))
        shown.append(normalize(to_tensor(picture), [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]))
    return torch.stack(shown)


def _turned(place: float, room: float) -> float:
    place %= 2 * room
    return min(place, 2 * room - place)


def joined(student: nn.Module, clip: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Of every layer queries, keys and values of the patches of all frames, ``[1, heads, frames * patches, d]``."""
    layers = sparse_layers(student)
    seen: dict[int, list[Tensor]] = {number: [] for number in range(len(layers))}
    numbers = {id(layer): number for number, layer in enumerate(layers)}

    def note(now: Any) -> None:
        packed = torch.stack([x[:, :, 1:] for x in (now.q, now.k, now.v)])  # [3, frames, heads, patches, d]
        seen[numbers[id(now.layer)]].append(packed)

    with dense_mode(student), observing(layers, note):
        for frames in clip.split(8):
            student(frames)
    whole = [torch.cat(parts, 1).transpose(1, 2).flatten(2, 3)[:, None] for parts in seen.values()]
    return [(q, k, v) for q, k, v in whole]


@torch.inference_mode()
def error(arguments: argparse.Namespace) -> None:
    rows: list[dict[str, Any]] = []
    for grid in GRIDS[: arguments.grids]:
        host = create_host(NAME, str(assets() / f"{NAME}.safetensors"), img_size=16 * grid[1])
        student = sp.sparsify(host, sp.suggest_config(host, 0.1))
        depth, n = len(sparse_layers(student)), grid[0] * grid[1] * grid[2]
        for motion, speed in MOTIONS.items():
            found: dict[tuple[int, float], float] = {}
            count = arguments.clips if n < 4000 else max(1, arguments.clips // 4)
            for clip in clips(grid, speed, count):
                for number, (q, k, v) in enumerate(joined(student, clip)):
                    dense = functional.scaled_dot_product_attention(q, k, v)
                    for index, keep, opening in _openings(grid):
                        part = budget(spread_over_depth(keep, depth)[number], n)
                        now = dataclasses.replace(opening, budget=max(part, opening.budget))
                        off = (cells.fused(q, k, v, now) - dense).norm() / dense.norm()
                        found[index, keep] = found.get((index, keep), 0.0) + float(off) / depth / count
            for index, keep, opening in _openings(grid):
                lengths = [
                    dataclasses.replace(opening, budget=max(budget(part, n), opening.budget)).levels().longest
                    for part in spread_over_depth(keep, depth)
                ]
                tile, levels, breadth = FORMS[index]
                row = {"grid": short(grid), "motion": motion, "keep": keep, "tile": short(tile or (1,))}
                row |= {"cells": " ".join(map(short, levels)), "breadth": breadth}
                rows.append(row | {"list": round(sum(lengths) / depth), "error": found[index, keep], "clips": count})
                print(*rows[-1].values(), flush=True)
            write_csv(rows, RESULTS / "video-error.csv")


def _openings(grid: Sides) -> Iterator[tuple[int, float, cells.Opening]]:
    """Number of the form, keep, and what is opened, with the least budget that it can have."""
    for index, (tile, levels, breadth) in enumerate(FORMS):
        least = levels[0][0] * levels[0][1] * levels[0][2]
        for keep in KEEPS:
            yield index, keep, cells.Opening(grid, least, levels, breadth, num_prefix=0, tile=tile)


# How fast, and how much memory


def videomae_small() -> nn.Module:
    """Of 16 frames: 1,568 tokens."""
    import transformers

    config = transformers.VideoMAEConfig(hidden_size=384, num_attention_heads=6, intermediate_size=1536)
    return transformers.VideoMAEModel(config).eval()


def vjepa_layer(pixels: int) -> nn.Module:
    """V-JEPA 2 ViT-L with one layer, and as small a predictor as can be: 64 frames."""
    import transformers

    config = transformers.VJEPA2Config(
        num_hidden_layers=1,
        crop_size=pixels,
        frames_per_clip=64,
        pred_num_hidden_layers=1,
        pred_hidden_size=12,
        pred_num_attention_heads=1,
    )
    return transformers.VJEPA2Model(config).eval()


def attention_of(student: nn.Module, run: Callable[[], object], *, dense: bool) -> Callable[[], object]:
    """The attention of all layers of a run one after the other, on the queries, keys and values they have there."""
    found: list[Callable[[], object]] = []

    def take(layer: SparseAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.clone() for x in (q, k, v))
        whole = functools.partial(functional.scaled_dot_product_attention, q, k, v, scale=layer.scale)
        found.append(whole if dense else functools.partial(layer.attend, q, k, v))
        return whole()

    for layer in sparse_layers(student):
        layer.core = take
    run()
    for layer in sparse_layers(student):
        layer.core = None
    return lambda: [attend() for attend in found]


@torch.inference_mode()
def speed(arguments: argparse.Namespace) -> None:
    torch.manual_seed(0)
    rows: list[dict[str, Any]] = []
    for name, model, part, inputs in (
        ("VideoMAE-S, 16 frames", videomae_small(), "", torch.randn(1, 16, 3, 224, 224)),
        ("V-JEPA 2 ViT-L, one layer", vjepa_layer(256), "encoder.layer.0", torch.randn(1, 8192, 1024)),
    ):
        configs = {f"keep {keep:g}": sp.suggest_config(model, keep) for keep in (0.25, 0.1)}
        students = {form: sp.sparsify(model, config) for form, config in configs.items()}
        runs: Runs = {form: functools.partial(one.get_submodule(part), inputs) for form, one in students.items()}
        some = next(iter(runs))
        candidates: Runs = {"dense": functools.partial(model.get_submodule(part), inputs), **runs}
        candidates["dense, attention"] = attention_of(students[some], runs[some], dense=True)
        for form, run in runs.items():
            candidates[f"{form}, attention"] = attention_of(students[form], run, dense=False)
        for threads in map(int, arguments.threads.split(",")):
            torch.set_num_threads(threads)
            times = take_turns(candidates, arguments.seconds, least=arguments.least)
            rows += _rows({"model": name, "threads": threads}, times, configs)
            write_csv(rows, machine_results() / "video-speed.csv")


def _rows(
    about: dict[str, Any], times: dict[str, Timing], configs: dict[str, sp.SparseConfig]
) -> Iterator[dict[str, Any]]:
    whole, attention = times["dense"], times["dense, attention"]
    for form, timing in times.items():
        dense = attention if form.endswith("attention") else whole
        row = about | {"form": form, "minimum_ms": timing.minimum, "p20_ms": timing.p20, "median_ms": timing.p50}
        row |= {"p80_ms": timing.p80, "runs": timing.runs}
        row |= {"speed_up": dense.minimum / timing.minimum, "speed_up_median": dense.p50 / timing.p50}
        # What attention that takes no time would give.
        row["ceiling"] = whole.minimum / (whole.minimum - attention.minimum) if dense is whole else ""
        config = configs.get(form.removesuffix(", attention"))
        row["cells"] = "" if config is None else " ".join(map(short, config.cells))
        row["tile"] = "" if config is None else name_tile(config.tile)
        print(*(f"{value:.4g}" if isinstance(value, float) else value for value in row.values()), sep="  ", flush=True)
        yield row


def memory(arguments: argparse.Namespace) -> None:
    """Each figure is from a process of its own: the growth of its peak resident size while it runs once."""
    rows: list[dict[str, Any]] = []
    for what in ("layer", "attention"):
        for form in ("dense", "keep 0.1"):
            child = subprocess.run(
                [sys.executable, __file__, "child", "--what", what, "--form", form],
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            )
            rows.append({"n": 18432, "what": what, "form": form, "mib": float(child.stdout.split()[-1])})
            print(*rows[-1].values(), flush=True)
    write_csv(rows, machine_results() / "video-memory.csv")


@torch.inference_mode()
def child(arguments: argparse.Namespace) -> None:
    """Prints MiB."""
    torch.manual_seed(0)
    torch.set_num_threads(2)
    model = vjepa_layer(384)
    student = sp.sparsify(model, sp.suggest_config(model, 0.1))
    if arguments.form == "dense":
        sp.reconfigure(student, keep=1.0)
    layer: Any = student.get_submodule("encoder.layer.0")
    core = sparse_layers(student)[0]
    x = torch.randn(1, 18432, 1024)
    q, k, v = torch.randn(3, 1, 16, 18432, 64).unbind(0)

    def attend() -> object:
        if arguments.form == "dense":
            return functional.scaled_dot_product_attention(q, k, v)
        return core.attend(q, k, v)

    small = torch.randn(1, 16, 64, 64)
    functional.scaled_dot_product_attention(small, small, small)  # libraries, thread pools
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = layer(x) if arguments.what == "layer" else attend()
    print(type(found).__name__, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=("error", "speed", "memory", "child"))
    parser.add_argument("--clips", type=int, default=16, help="error: of each motion; a quarter of it at 8,192 tokens")
    parser.add_argument("--grids", type=int, default=len(GRIDS), help="error: how many of the grids")
    parser.add_argument("--threads", default="2", help="speed: thread counts, between commas")
    parser.add_argument("--seconds", type=float, default=20.0, help="speed: for each candidate")
    parser.add_argument("--least", type=int, default=5, help="speed: turns at least")
    parser.add_argument("--what", default="layer")
    parser.add_argument("--form", default="dense")
    arguments = parser.parse_args()
    {"error": error, "speed": speed, "memory": memory, "child": child}[arguments.verb](arguments)


if __name__ == "__main__":
    main()
