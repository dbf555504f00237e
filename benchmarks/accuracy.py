"""Accuracy without training: DeiT-Tiny on 2,000 ImageNet validation images, every form at every keep rate.

Calibrated on images of the distillation set only. Writes results/accuracy.csv and results/accuracy.md.

    python benchmarks/accuracy.py [--images 200]

So that it ends in half an hour on two cores, lists are predicted by the eager backend and attended to by the
reference, and two processes of one thread share the rows; its times mean nothing and are left out.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import multiprocessing
import tempfile
import time
from pathlib import Path

import torch

import sparsifiner as sp
from common import RESULTS, assets, environment
from sparsifiner.calibration import fit_attention
from sparsifiner.data.images import open_images, preprocessing
from sparsifiner.files import replacing
from sparsifiner.inspect import compare
from sparsifiner.models import create_host
from sparsifiner.nn.attention import SparseAttention
from sparsifiner.report.tables import TITLES, cells

KEEPS = (0.5, 0.25, 0.1, 0.05)
NAME = "deit_tiny_patch16_224"
PAPER = sp.SparseConfig(0.1)
OURS = sp.SparseConfig(0.1, n_down=49, tau=0.02)

Job = tuple[str, compare.Form, float | None]


def masked(layer: SparseAttention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The layer's own mathematics with the reference's dense products, faster than gathers at 197 tokens."""
    connectivity, residual = layer.predict(q, k)
    residual = residual if layer.config.residual else None
    return sp.sparse_attention(q, k, v, connectivity, residual=residual, scale=layer.scale, backend="reference")


def last_layer_spared(keep: float, layers: int = 12, tokens: int = 197) -> tuple[float, ...]:
    """The same average budget, with none of it spent where nobody looks.

    The head reads the class token alone, whose row is dense, so the patch rows of the last layer are not used.
    """
    smallest = 1 / tokens
    return (*[(layers * keep - smallest) / (layers - 1)] * (layers - 1), smallest)


def jobs() -> list[Job]:
    rows: list[Job] = [("", compare.DENSE, None)]
    tiles = (compare.tiled((2, 2)), compare.tiled((2, 7)))
    rows += [("refined", form, keep) for form in (compare.RESIDUAL, *tiles) for keep in KEEPS]
    rows += [
        (
            "refined",
            compare.Form(f"residual, last layer spared, average {keep:g}", {"keep": last_layer_spared(keep)}),
            None,
        )
        for keep in KEEPS[1:]
    ]
    rows += [("ridge", form, keep) for form in (compare.PAPER, compare.RESIDUAL) for keep in KEEPS]
    rows += [("ridge", compare.ORACLE, keep) for keep in KEEPS]
    rows += [("ridge, prefix kept", compare.LOW_RANK, None)]
    rows += [("paper's settings", form, keep) for form in (compare.PAPER, compare.RESIDUAL) for keep in KEEPS[1:3]]
    rows += [("paper's settings", compare.LOW_RANK, None)]
    return rows


def calibrated(host: torch.nn.Module, images: torch.Tensor, folder: Path) -> None:
    """Writes the four students to files, from which each process takes its own copy."""
    student = sp.sparsify(host, OURS)
    print(sp.calibrate(student, images), flush=True)
    sp.save(student, folder / "refined")
    sp.calibrate(student, images, refine=False)
    sp.save(student, folder / "ridge")
    fit_attention(student, images)
    sp.save(student, folder / "ridge, prefix kept")
    student = sp.sparsify(host, PAPER)
    sp.calibrate(student, images, refine=False)
    sp.save(student, folder / "paper's settings")


class Worker:
    """What a process holds: images, students, the dense model's logits."""

    def __init__(self, folder: Path) -> None:
        torch.set_num_threads(1)
        self.batches = torch.load(folder / "batches")
        self.dense = torch.load(folder / "dense") if (folder / "dense").exists() else None
        self.students = {path.name: sp.load(path) for path in folder.iterdir() if path.name not in ("batches", "dense")}

    def run(self, job: Job) -> tuple[compare.Row, torch.Tensor]:
        """One row of the table, and the logits it rests on."""
        settings, form, keep = job
        core = form.core if form is compare.DENSE else form.core or masked
        student = self.students[settings or "refined"]
        return compare.evaluate(student, self.batches, dataclasses.replace(form, core=core), keep, self.dense)


_worker: Worker


def _start(folder: Path) -> None:
    global _worker
    _worker = Worker(folder)


def _run(job: Job) -> compare.Row:
    row, _ = _worker.run(job)
    return dataclasses.replace(row, milliseconds=float("nan"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, help="evaluate on a sample of this many images; all 2,000 by default")
    parser.add_argument("--calibration-images", type=int, default=256)
    parser.add_argument("--out", default="accuracy", help="name of the files in results/")
    arguments = parser.parse_args()
    source = assets()
    host = create_host(NAME, str(source / f"{NAME}.safetensors"))
    transform = preprocessing(host, "crop")
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        wanted = arguments.calibration_images
        chosen = open_images(source / "imagenet-distill.tar", transform, limit=wanted, batch_size=16)
        calibrated(host, torch.cat([images for images, _ in chosen]), folder)
        evaluation = open_images(
            source / "imagenet-eval.tar", transform, num_classes=1000, limit=arguments.images, batch_size=25
        )
        torch.save(list(evaluation), folder / "batches")
        first, *others = jobs()
        row, logits = Worker(folder).run(first)
        torch.save(logits, folder / "dense")
        rows = [(first[0], dataclasses.replace(row, milliseconds=float("nan")))]
        with multiprocessing.get_context("spawn").Pool(2, _start, (folder,)) as pool:
            for job, row in zip(others, pool.imap(_run, others), strict=True):
                rows.append((job[0], row))
                print(f"{time.monotonic() - started:6.0f} s  {job[0]}: {' '.join(cells(row))}", flush=True)
                write(rows, arguments.out)


def write(rows: list[tuple[str, compare.Row]], name: str) -> None:
    """After every row, so that an interrupted run keeps what it has."""
    about = environment()
    titles = TITLES[:-1]  # without the time
    with replacing(RESULTS / f"{name}.csv") as path, path.open("w", newline="") as file:
        table = [{"settings": settings} | row.to_dict() | about for settings, row in rows]
        for entry in table:
            del entry["milliseconds"], entry["threads"], entry["load"]
        writer = csv.DictWriter(file, fieldnames=list(table[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(table)
    with replacing(RESULTS / f"{name}.md") as path:
        lines = ["| calibration | " + " | ".join(titles) + " |", "|---|---|" + "---:|" * (len(titles) - 1)]
        lines += [f"| {settings} | " + " | ".join(cells(row)[:-1]) + " |" for settings, row in rows]
        path.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
