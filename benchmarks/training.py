"""What a training step costs in time and memory: ours, dense with a mask as published code does it, dense fine-tuning.

Each figure is from a process of its own. Phase 2 is a step of the whole model without its optimiser; phase 1 is one
layer's attention loss after another, beside dense inference, also at 1024 pixels. Writes results/MACHINE/training.csv.

    python benchmarks/training.py [--seconds 20]
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import sparsifiner as sp
from common import environment, machine_results
from sparsifiner.convert import sparse_layers
from sparsifiner.distillation import phases
from sparsifiner.distillation.data import Batch
from sparsifiner.files import replacing
from sparsifiner.inspect.speed import Problem, masked_dense
from sparsifiner.models import create_host
from sparsifiner.nn.attention import SparseAttention

NAME = "deit_tiny_patch16_224"
# Pixels and batch; phase 2 in every form, phase 1 against dense inference.
JOINT = ((224, 16), (384, 4))
FIRST = ((224, 16), (384, 4), (1024, 1))
FORMS = ("dense fine-tuning", "dense + mask", "sparse", "sparse, residual", "sparse, residual, straight through")
KEEP = 0.1


def masked(layer: SparseAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Everything is computed, and most of it masked."""
    weights, grid = layer.predictor.at(layer.grid.size), layer.grid
    about = (grid.size, grid.num_prefix, layer.config.tau, layer.basis_threshold, "training")
    return masked_dense(Problem(q, k, v, *weights, *about), layer.budget())


def model(pixels: int, **changes: Any) -> nn.Module:
    """Random weights: neither time nor memory of these forms depends on them, with thresholds of zero."""
    torch.manual_seed(0)
    host = create_host(NAME, None, img_size=pixels)
    settings = {"n_down": 49 if pixels == 224 else 64, "tau": 0.0, "basis_threshold": 0.0}
    return sp.sparsify(host, sp.SparseConfig(KEEP, **(settings | changes)))


def job(phase: str, form: str, pixels: int, batch: int) -> Any:
    images = Batch(torch.randn(batch, 3, pixels, pixels), torch.zeros(batch), torch.zeros(batch))
    student = model(pixels, residual="residual" in form)
    if phase == "1":
        names = phases.learns(student, sp.Recipe(keep=KEEP), 1, set())
        for name, parameter in student.named_parameters():
            parameter.requires_grad_(name in names)
        if form == "dense inference":
            dense = sp.restore(student).eval()
            return torch.inference_mode()(lambda: dense(images.images))
        return lambda: phases.predictor_pass(student.eval(), sp.Recipe(keep=KEEP), images, 1.0, exact=False)
    joint = phases.Joint(student, sp.Recipe(keep=KEEP, straight_through="straight" in form)).train()
    if form == "dense fine-tuning":
        sp.reconfigure(student, keep=1.0)
    if form == "dense + mask":
        for layer in sparse_layers(student):
            layer.core = masked

    def step() -> None:
        passed = joint(images.images)
        (passed.logits.square().mean() + passed.tokens.square().mean()).backward()
        for parameter in student.parameters():
            parameter.grad = None

    return step


def measure(phase: str, form: str, pixels: int, batch: int, seconds: float) -> None:
    """In the child."""
    run = job(phase, form, pixels, batch)
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak of making the model
    before = memory("VmRSS")
    times, end = [], time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 3:
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    peak = memory("VmHWM") - before
    times.sort()
    print(json.dumps({"minimum": min(times), "p50": times[len(times) // 2], "steps": len(times), "mib": peak}))


def memory(what: str) -> float:
    """MiB of this process, now or at most so far, as Linux counts."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(what)) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20, help="for each figure")
    parser.add_argument("--phase", choices=("1", "2"), help="measure this one only; the other's rows are kept")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        phase, form, pixels, batch = arguments.child
        measure(phase, form, int(pixels), int(batch), arguments.seconds)
        return
    rows: list[dict[str, Any]] = []
    if arguments.phase is not None:
        with (machine_results() / "training.csv").open(newline="") as file:
            rows = [row for row in csv.DictReader(file) if row["phase"] != arguments.phase]
    jobs = [("2", form, *size) for size in JOINT for form in FORMS]
    jobs += [("1", form, *size) for size in FIRST for form in ("dense inference", "attention loss")]
    for phase, form, pixels, batch in jobs:
        if arguments.phase not in (None, phase):
            continue
        command = [sys.executable, __file__, "--seconds", str(arguments.seconds), "--child", phase, form]
        child = subprocess.run([*command, str(pixels), str(batch)], stdout=subprocess.PIPE, text=True, check=True)
        figures = json.loads(child.stdout.splitlines()[-1])
        figures["images_per_second"] = batch / figures["minimum"]
        rows.append({"phase": phase, "form": form, "pixels": pixels, "batch": batch, "keep": KEEP} | figures)
        print(
            f"phase {phase} {pixels:5d} px, batch {batch:2d}  {form:36s} {figures['minimum']:7.2f} s a step "
            f"{figures['images_per_second']:6.1f} images/s {figures['mib']:8.0f} MiB",
            flush=True,
        )
    with replacing(machine_results() / "training.csv") as path, path.open("w", newline="") as file:
        own = ["phase", "form", "pixels", "batch", "keep", "minimum", "p50", "steps", "mib", "images_per_second"]
        writer = csv.DictWriter(file, [*own, *environment()], lineterminator="\n")
        writer.writeheader()
        writer.writerows(
            {key: round(v, 4) if isinstance(v, float) else v for key, v in (environment() | row).items()}
            for row in sorted(rows, key=lambda row: row["phase"])
        )


if __name__ == "__main__":
    main()
