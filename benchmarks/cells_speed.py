"""Time of attention at several resolutions against dense attention and against predictor and residual.

One layer's attention on real queries, keys and values of DeiT-Tiny at four sizes of photos, by turns in one process;
forward, and forward with backward at 1,025 tokens. Writes results/cells-speed.csv.

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
from sparsifiner.config import budget
from sparsifiner.inspect.speed import Problem, fused, problem_from, take_turns
from sparsifiner.ops import cells
from speed import resized, student_and_images

LAYERS = (3, 8)
ONE, TWO, THREE = ((2, 2),), ((2, 2), (4, 4)), ((2, 2), (4, 4), (8, 8))
BACKWARD_AT = 1025
# Name, tile, levels, refine, tolerance; with a tolerance, keep is a bound, and the row says what was kept.
FORMS = (
    ("per query, cells 2x2", None, ONE, 0.5, 0.0),
    ("tile, cells 2x2", (4, 4), ONE, 0.5, 0.0),
    ("tile, cells 2x2 and 4x4", (4, 4), TWO, 0.5, 0.0),
    ("tile, cells 2x2 to 8x8", (4, 4), THREE, 0.5, 0.0),
)
TOLERANT = (
    ("per query, cells 2x2, tolerance 0.1", None, ONE, 0.5, 0.1),
    ("tile, cells 2x2 and 4x4, tolerance 0.13", (4, 4), TWO, 0.6, 0.13),
)


def openings(p: Problem) -> list[tuple[str, float, cells.Opening]]:
    """What is timed at this size: name, keep, settings."""
    found = []
    for keep, forms in ((0.25, FORMS), (0.1, FORMS), (0.3, TOLERANT)):
        for name, tile, levels, refine, tolerance in forms:
            shared = tile if tile is None or p.grid[0] % 4 == 0 else (2, 7)
            if levels[-1][0] > p.grid[0]:
                continue
            settings: dict[str, Any] = {"cells": levels, "refine": refine, "tolerance": tolerance, "tile": shared}
            opening = cells.Opening(grid=p.grid, budget=budget(keep, p.q.shape[2]), num_prefix=p.num_prefix, **settings)
            found.append((name, keep, opening))
    return found


def forward_runs(p: Problem) -> dict[tuple[str, float], tuple[Callable[[], object], float]]:
    """Each candidate and the share of keys it opens."""
    found: dict[tuple[str, float], tuple[Callable[[], object], float]] = {}
    found["dense", 1.0] = (lambda: functional.scaled_dot_product_attention(p.q, p.k, p.v, scale=p.scale)), 1.0
    n = p.q.shape[2]
    tile = (4, 4) if p.grid[0] % 4 == 0 else (2, 7)
    for keep in (0.25, 0.1):
        for name, shared in (("per query", None), ("tile", tile)):
            found[f"{name}, predictor and residual", keep] = fused(p, budget(keep, n), shared, True), keep
    for name, keep, opening in openings(p):
        opened = cells.connect(p.q, p.k, p.v, opening, scale=p.scale).keys.counts.double().mean().item() / n

        def run(opening: cells.Opening = opening) -> object:
            return cells.fused(p.q, p.k, p.v, opening, scale=p.scale)

        found[name, keep] = run, opened
    return found


def training_runs(p: Problem) -> dict[tuple[str, float], tuple[Callable[[], object], float]]:
    """Forward with backward; of cells, the choice too."""
    q, k, v = inputs = [x.detach().clone().requires_grad_() for x in (p.q, p.k, p.v)]
    direction = torch.randn_like(p.q)

    def dense() -> object:
        out = functional.scaled_dot_product_attention(q, k, v, scale=p.scale)
        return torch.autograd.grad(out, inputs, direction)

    found: dict[tuple[str, float], tuple[Callable[[], object], float]] = {("training, dense", 1.0): (dense, 1.0)}
    for name, keep, opening in openings(p):

        def run(opening: cells.Opening = opening) -> object:
            opened = cells.connect(q, k, v, opening, scale=p.scale)
            return torch.autograd.grad(cells.cell_attention(q, k, v, opened, scale=p.scale), inputs, direction)

        found[f"training, {name}", keep] = run, keep
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
        p = problem_from(student, resized(student, images[:batch], pixels), LAYERS).to(torch.float32)
        n = p.q.shape[2]
        for threads in map(int, arguments.threads.split(",")):
            torch.set_num_threads(threads)
            for make in (forward_runs, training_runs) if n == BACKWARD_AT else (forward_runs,):
                with torch.inference_mode(make is forward_runs):
                    runs = make(p)
                    times = take_turns({str(key): run for key, (run, _) in runs.items()}, arguments.seconds)
                dense = times[str(next(iter(runs)))]
                for (name, keep), (_, opened) in runs.items():
                    timing = times[str((name, keep))]
                    row = {"n": n, "batch": batch, "heads": p.q.shape[1], "form": name, "keep": keep, "opened": opened}
                    row |= {"minimum_ms": timing.minimum, "median_ms": timing.p50}
                    row |= {"speed_up": dense.minimum / timing.minimum, "speed_up_median": dense.p50 / timing.p50}
                    rows.append(row | {"threads": threads, "load": environment()["load"]})
                    print(
                        f"{threads} threads, n={n} {name:45s} keep {keep} ({opened:.3f}): {timing.minimum:8.2f} ms, "
                        f"{row['speed_up']:.2f}x ({row['speed_up_median']:.2f}x)",
                        flush=True,
                    )
                write_csv(rows, RESULTS / "cells-speed.csv")


if __name__ == "__main__":
    main()
