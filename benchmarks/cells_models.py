"""Whole models that open cells, as suggested, against the dense model by turns, each with its ceiling.

DeiT-Tiny at 384, 512 and 1024 pixels and DeiT-S (two DeiT-Tiny side by side: its weights are not at hand) at 1024,
in float32 and bfloat16; and a training step (forward, backward) of DeiT-Tiny at 512 pixels. The ceiling is what the
model would be without its attention cores. Writes cells-models.csv in the machine's folder.

    python benchmarks/cells_models.py
    python benchmarks/cells_models.py --threads 2 --types bfloat16 --keep 0.1 --seconds 5
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import sparsifiner as sp
from common import environment, machine_results, read_csv, write_csv
from sparsifiner.convert import sparse_layers
from sparsifiner.inspect.speed import Timing, problem_from, take_turns
from speed import doubled, resized, student_and_images

CASES = (("DeiT-T", 384, 8), ("DeiT-T", 512, 2), ("DeiT-T", 1024, 1), ("DeiT-S", 1024, 1))
STEP = ("DeiT-T", 512, 2)  # also trained


def runs_of(dense: nn.Module, images: torch.Tensor, keeps: list[float], train: bool) -> dict[str, Callable[[], object]]:
    """The dense model and the sparse ones, which share its weights: where these lie matters."""

    def forward(model: nn.Module) -> Callable[[], object]:
        def run() -> None:
            with torch.inference_mode():
                model(images)

        return run

    def step(model: nn.Module) -> Callable[[], object]:
        def run() -> None:
            model.zero_grad(set_to_none=True)
            model(images).square().mean().backward()

        return run

    make, found = step if train else forward, {}
    found["dense"] = make(dense)
    for keep in keeps:
        sparse = sp.sparsify(dense, sp.suggest_config(dense, keep))
        sparse.load_state_dict(dense.state_dict(), assign=True)
        if train:
            sparse.requires_grad_(True)
        found[str(keep)] = make(sparse)
    return found


def core(dense: nn.Module, images: torch.Tensor, train: bool) -> Callable[[], object]:
    """One layer's dense attention, and its gradients."""
    layer = problem_from(sp.sparsify(dense, sp.suggest_config(dense, 0.1)), images, (0,)).to(images.dtype)
    q, k, v = (x.detach().clone().requires_grad_(train) for x in (layer.q, layer.k, layer.v))

    def run() -> None:
        with torch.set_grad_enabled(train):
            out = functional.scaled_dot_product_attention(q, k, v, scale=layer.scale)
            if train:
                torch.autograd.grad(out, (q, k, v), out)

    return run


def rows_of(times: dict[str, Timing], layers: int) -> list[dict[str, Any]]:
    attention, dense = times.pop("core").minimum * layers, times["dense"]
    return [
        {"keep": keep, "minimum_ms": timing.minimum, "median_ms": timing.p50}
        | {"speed_up": dense.minimum / timing.minimum, "speed_up_median": dense.p50 / timing.p50}
        | {"ceiling": dense.minimum / (dense.minimum - attention), "threads": torch.get_num_threads()}
        for keep, timing in times.items()
    ]


def _case(row: dict[str, Any]) -> str:
    return f"{row['model']} {row['pixels']}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", default="1,2", help="thread counts, between commas")
    parser.add_argument("--types", default="float32,bfloat16", help="of weights and images, between commas")
    parser.add_argument("--keep", default="0.25,0.1", help="keep rates, between commas")
    parser.add_argument("--only", default="", help="cases that begin so, such as 'DeiT-T 1024'; others keep their rows")
    parser.add_argument("--seconds", type=float, default=5.0, help="for each candidate")
    arguments = parser.parse_args()
    keeps = [float(keep) for keep in arguments.keep.split(",")]
    student, images = student_and_images(49, 1 / 49)
    models = {"DeiT-T": student, "DeiT-S": doubled(student, images)}
    path = machine_results() / "cells-models.csv"
    rows: list[dict[str, Any]] = [row for row in read_csv(path) if not _case(row).startswith(arguments.only)]
    types: list[str] = arguments.types.split(",")
    for (name, pixels, batch), dtype in itertools.product(CASES, types):
        if not f"{name} {pixels}".startswith(arguments.only):
            continue
        shown = resized(models[name], images[:batch], pixels).to(getattr(torch, dtype))
        dense = sp.restore(models[name]).to(getattr(torch, dtype))
        for threads, train in itertools.product(map(int, arguments.threads.split(",")), (False, True)):
            if train and ((name, pixels, batch) != STEP or dtype != "float32"):
                continue
            torch.set_num_threads(threads)
            runs = runs_of(dense.train(train), shown, keeps, train) | {"core": core(dense, shown, train)}
            for row in rows_of(take_turns(runs, arguments.seconds), len(sparse_layers(models[name]))):
                about: dict[str, Any] = {"model": name, "pixels": pixels, "batch": batch, "type": dtype}
                about["what"] = "step" if train else "forward"
                rows.append(about | row | {"load": environment()["load"]})
                case = " ".join(str(part) for part in about.values())
                print(
                    f"{case}, {threads} threads, keep {row['keep']}: {row['minimum_ms']:.0f} ms, "
                    f"{row['speed_up']:.2f}x ({row['speed_up_median']:.2f}x) of {row['ceiling']:.2f}x at most",
                    flush=True,
                )
            write_csv(rows, path)


if __name__ == "__main__":
    main()
