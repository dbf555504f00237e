"""Time of attention at several resolutions against dense attention and against predictor and residual.

The attention of all layers of DeiT-Tiny, each with its part of the mean budget, on real queries, keys and values at
four sizes of photos; forward, and forward with backward at 1,025 tokens. Candidates take turns at one layer before the
next, and what they take is summed: a layer's inputs are then in the cache for all of them, as they are in a model,
where the layer's own projection has just written them. Writes results/MACHINE/cells-speed.csv.

    python benchmarks/cells_speed.py
    python benchmarks/cells_speed.py --pixels 512 --threads 1 --types bfloat16 --seconds 2
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from common import environment, machine_results, write_csv
from sparsifiner.config import budget, spread_over_depth
from sparsifiner.convert import sparse_layers
from sparsifiner.inspect.speed import Problem, fused, problem_from, take_turns
from sparsifiner.ops import cells
from speed import resized, student_and_images

HALF, ONE, TWO, THREE = ((1, 2),), ((2, 2),), ((2, 2), (4, 4)), ((2, 2), (4, 4), (8, 8))
FINE = ((1, 2), (2, 4), (4, 8))
BACKWARD_AT = 1025
KEEPS = (0.25, 0.1)
# Name, whether tiles share, levels, breadth.
FORMS = (
    ("per query, cells 2x2", False, ONE, 3.0),
    ("tile, cells 2x2", True, ONE, 3.0),
    ("tile, cells 2x2 and 4x4", True, TWO, 3.0),
    ("tile, cells 2x2 to 8x8", True, THREE, 3.0),
    ("tile, cells 2x2 to 8x8, breadth 2.5", True, THREE, 2.5),
    ("tile, cells 1x2 to 4x8, breadth 2", True, FINE, 2.0),
    ("tile, cells 1x2 and 2x4", True, FINE[:2], 3.0),
)
SMALL = (("per query, cells 1x2", False, HALF, 3.0), ("tile, cells 1x2", True, HALF, 3.0))  # at 197 tokens

# A candidate: its name, the mean share of keys that it keeps, and what is run.
Runs = dict[tuple[str, float], Callable[[], object]]


def openings(layers: list[Problem]) -> dict[tuple[str, float], list[cells.Opening]]:
    """What is timed at this size: name and keep, and the settings of each layer."""
    first = layers[0]
    n, found = first.q.shape[2], {}
    for keep in KEEPS:
        for name, shared, levels, breadth in FORMS + (SMALL if n < 400 else ()):
            if levels[-1][0] > first.grid[0]:
                continue
            settings: dict[str, Any] = {"cells": levels, "breadth": breadth, "tile": (4, 4) if shared else None}
            settings |= {"grid": first.grid, "num_prefix": first.num_prefix}
            shares = spread_over_depth(keep, len(layers))
            found[name, keep] = [cells.Opening(budget=max(4, budget(part, n)), **settings) for part in shares]
    return found


def forward_runs(problem: Problem, settings: dict[tuple[str, float], cells.Opening]) -> Runs:
    q, k, v, scale = problem.q, problem.k, problem.v, problem.scale
    found: Runs = {("dense", 1.0): lambda: functional.scaled_dot_product_attention(q, k, v, scale=scale)}
    for keep in KEEPS:
        for name, shared in (("per query", None), ("tile", (4, 4))):
            found[f"{name}, predictor and residual", keep] = fused(problem, budget(keep, q.shape[2]), shared, True)
    for key, opening in settings.items():
        found[key] = lambda opening=opening: cells.fused(q, k, v, opening, scale=scale)
    return found


def training_runs(problem: Problem, settings: dict[tuple[str, float], cells.Opening]) -> Runs:
    """Forward with backward; of cells, the choice too."""
    q, k, v = inputs = [x.detach().clone().requires_grad_() for x in (problem.q, problem.k, problem.v)]
    direction = torch.randn_like(problem.q)
    scale = problem.scale

    def dense() -> None:
        torch.autograd.grad(functional.scaled_dot_product_attention(q, k, v, scale=scale), inputs, direction)

    def opened(opening: cells.Opening) -> None:
        lists = cells.connect(q, k, v, opening, scale=scale)
        torch.autograd.grad(cells.cell_attention(q, k, v, lists, scale=scale), inputs, direction)

    found: Runs = {("training, dense", 1.0): dense}
    for (name, keep), opening in settings.items():
        found[f"training, {name}", keep] = lambda opening=opening: opened(opening)
    return found


def summed(layers: list[Problem], make: Callable[..., Runs], seconds: float) -> dict[tuple[str, float], list[float]]:
    """Minimum and median milliseconds of all layers together."""
    settings = openings(layers)
    total: dict[tuple[str, float], list[float]] = {}
    for number, problem in enumerate(layers):
        with torch.inference_mode(make is forward_runs):
            runs = make(problem, {key: each[number] for key, each in settings.items()})
            times = take_turns({str(key): run for key, run in runs.items()}, seconds / len(layers))
        for key in runs:
            so_far, timing = total.get(key, [0.0, 0.0]), times[str(key)]
            total[key] = [so_far[0] + timing.minimum, so_far[1] + timing.p50]
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pixels", default="224,384,512,1024", help="sides of the photos, between commas")
    parser.add_argument("--threads", default="1,2", help="thread counts, between commas")
    parser.add_argument("--types", default="float32,bfloat16", help="of queries, keys and values, between commas")
    parser.add_argument("--seconds", type=float, default=2.0, help="for each candidate, all layers together")
    arguments = parser.parse_args()
    student, images = student_and_images(49, 1 / 49)
    rows: list[dict[str, Any]] = []
    sizes = [int(pixels) for pixels in arguments.pixels.split(",")]
    types: list[str] = arguments.types.split(",")
    for pixels, dtype in itertools.product(sizes, types):
        batch = 8 if pixels < 300 else 2 if pixels < 1000 else 1
        shown = resized(student, images[:batch], pixels)
        depth = range(len(sparse_layers(student)))
        layers = [problem_from(student, shown, (layer,)).to(getattr(torch, dtype)) for layer in depth]
        for threads in map(int, arguments.threads.split(",")):
            torch.set_num_threads(threads)
            measure(rows, layers, dtype, arguments.seconds)


def measure(rows: list[dict[str, Any]], layers: list[Problem], dtype: str, seconds: float) -> None:
    """Adds a row for each candidate at this size, type and number of threads, and writes the table."""
    batch, heads, n = layers[0].q.shape[:3]
    depth, threads = len(layers), torch.get_num_threads()
    lengths = {
        key: sum(opening.levels().longest for opening in settings) / depth for key, settings in openings(layers).items()
    }
    with_training = n == BACKWARD_AT and layers[0].q.dtype == torch.float32
    for make in (forward_runs, training_runs) if with_training else (forward_runs,):
        times = summed(layers, make, seconds)
        dense = next(iter(times.values()))
        for (name, keep), (minimum, median) in times.items():
            row = {"n": n, "batch": batch, "heads": heads, "layers": depth, "type": dtype, "form": name, "keep": keep}
            row["list"] = round(lengths.get((name.removeprefix("training, "), keep), 0)) or ""
            row |= {"minimum_ms": minimum, "median_ms": median}
            row |= {"speed_up": dense[0] / minimum, "speed_up_median": dense[1] / median}
            rows.append(row | {"threads": threads, "load": environment()["load"]})
            print(
                f"{threads} threads, {dtype}, n={n} {name:45s} keep {keep} (list {row['list']}): "
                f"{minimum:8.2f} ms, {row['speed_up']:.2f}x ({row['speed_up_median']:.2f}x)",
                flush=True,
            )
        write_csv(rows, machine_results() / "cells-speed.csv")


if __name__ == "__main__":
    main()
