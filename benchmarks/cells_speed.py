"""Time of attention at several resolutions against dense attention and against predictor and residual.

The attention of all layers of DeiT-Tiny one after another, each with its part of the mean budget, on real queries, keys
and values at four sizes of photos, by turns in one process; forward, and forward with backward at 1,025 tokens. Writes
results/cells-speed.csv.

    python benchmarks/cells_speed.py
    python benchmarks/cells_speed.py --pixels 512 --threads 1 --seconds 2
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from common import RESULTS, environment, write_csv
from sparsifiner.config import budget, spread_over_depth
from sparsifiner.convert import sparse_layers
from sparsifiner.inspect.speed import Problem, fused, problem_from, take_turns
from sparsifiner.ops import cells
from speed import resized, student_and_images

HALF, ONE, TWO, THREE = ((1, 2),), ((2, 2),), ((2, 2), (4, 4)), ((2, 2), (4, 4), (8, 8))
BACKWARD_AT = 1025
KEEPS = (0.25, 0.1)
# Name, whether tiles share, levels, breadth.
FORMS = (
    ("per query, cells 2x2", False, ONE, 3.0),
    ("tile, cells 2x2", True, ONE, 3.0),
    ("tile, cells 2x2 and 4x4", True, TWO, 3.0),
    ("tile, cells 2x2 to 8x8", True, THREE, 3.0),
    ("tile, cells 2x2 to 8x8, breadth 2.5", True, THREE, 2.5),
    ("tile, cells 1x2 and 2x4", True, ((1, 2), (2, 4)), 3.0),
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


def forward_runs(layers: list[Problem]) -> Runs:
    found: Runs = {
        ("dense", 1.0): lambda: [functional.scaled_dot_product_attention(p.q, p.k, p.v, scale=p.scale) for p in layers]
    }
    n = layers[0].q.shape[2]
    for keep in KEEPS:
        for name, shared in (("per query", None), ("tile", (4, 4))):
            each = [fused(p, budget(keep, n), shared, True) for p in layers]
            found[f"{name}, predictor and residual", keep] = lambda each=each: [run() for run in each]
    for key, settings in openings(layers).items():
        found[key] = lambda settings=settings: [
            cells.fused(p.q, p.k, p.v, opening, scale=p.scale) for p, opening in zip(layers, settings, strict=True)
        ]
    return found


def training_runs(layers: list[Problem]) -> Runs:
    """Forward with backward; of cells, the choice too."""
    inputs = [[x.detach().clone().requires_grad_() for x in (p.q, p.k, p.v)] for p in layers]
    direction = torch.randn_like(layers[0].q)
    scale = layers[0].scale

    def dense() -> None:
        for q, k, v in inputs:
            out = functional.scaled_dot_product_attention(q, k, v, scale=scale)
            torch.autograd.grad(out, (q, k, v), direction)

    def opened(settings: list[cells.Opening]) -> None:
        for (q, k, v), opening in zip(inputs, settings, strict=True):
            lists = cells.connect(q, k, v, opening, scale=scale)
            torch.autograd.grad(cells.cell_attention(q, k, v, lists, scale=scale), (q, k, v), direction)

    found: Runs = {("training, dense", 1.0): dense}
    for (name, keep), settings in openings(layers).items():
        found[f"training, {name}", keep] = lambda settings=settings: opened(settings)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pixels", default="224,384,512,1024", help="sides of the photos, between commas")
    parser.add_argument("--threads", default="1,2", help="thread counts, between commas")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each candidate")
    arguments = parser.parse_args()
    student, images = student_and_images(49, 1 / 49)
    rows: list[dict[str, Any]] = []
    for pixels in map(int, arguments.pixels.split(",")):
        batch = 8 if pixels < 300 else 2 if pixels < 1000 else 1
        shown = resized(student, images[:batch], pixels)
        depth = len(sparse_layers(student))
        layers = [problem_from(student, shown, (layer,)).to(torch.float32) for layer in range(depth)]
        n, heads = layers[0].q.shape[2], layers[0].q.shape[1]
        lengths = {
            key: sum(opening.levels().longest for opening in settings) / depth
            for key, settings in openings(layers).items()
        }
        for threads in map(int, arguments.threads.split(",")):
            torch.set_num_threads(threads)
            for make in (forward_runs, training_runs) if n == BACKWARD_AT else (forward_runs,):
                with torch.inference_mode(make is forward_runs):
                    runs = make(layers)
                    times = take_turns({str(key): run for key, run in runs.items()}, arguments.seconds)
                dense = times[str(next(iter(runs)))]
                for name, keep in runs:
                    timing = times[str((name, keep))]
                    row = {"n": n, "batch": batch, "heads": heads, "layers": depth, "form": name, "keep": keep}
                    row["list"] = round(lengths.get((name.removeprefix("training, "), keep), 0)) or ""
                    row |= {"minimum_ms": timing.minimum, "median_ms": timing.p50}
                    row |= {"speed_up": dense.minimum / timing.minimum, "speed_up_median": dense.p50 / timing.p50}
                    rows.append(row | {"threads": threads, "load": environment()["load"]})
                    print(
                        f"{threads} threads, n={n} {name:45s} keep {keep} (list {row['list']}): "
                        f"{timing.minimum:8.2f} ms, {row['speed_up']:.2f}x ({row['speed_up_median']:.2f}x)",
                        flush=True,
                    )
                write_csv(rows, RESULTS / "cells-speed.csv")


if __name__ == "__main__":
    main()
