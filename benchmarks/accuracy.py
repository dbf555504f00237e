"""Accuracy without training: DeiT-Tiny on 2,000 ImageNet validation images, every form at every keep rate.

Calibrated on images of the distillation set only. Writes results/accuracy.csv and results/accuracy.md.

    python benchmarks/accuracy.py [--images 200] [--resume]

So that it ends in half an hour on two cores, two processes of one thread share the rows, and the sparse layers are
computed with dense products and masks, which at 197 tokens is faster than gathering in eager PyTorch; the first batch
is checked against the library. Times would mean nothing and are left out. With ``--resume`` the rows that an
interrupted run has written are kept.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import multiprocessing
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import sparsifiner as sp
from common import RESULTS, assets, environment
from sparsifiner.calibration import fit_attention
from sparsifiner.config import SparseConfig
from sparsifiner.data.images import open_images, preprocessing
from sparsifiner.files import replacing
from sparsifiner.inspect import compare
from sparsifiner.models import create_host
from sparsifiner.nn.attention import SparseAttention
from sparsifiner.ops import reference
from sparsifiner.ops.connectivity import low_rank_attention, query_groups
from sparsifiner.ops.eager import top_budget
from sparsifiner.report.tables import TITLES, cells

KEEPS = (0.5, 0.25, 0.1, 0.05)
NAME = "deit_tiny_patch16_224"
PAPER = SparseConfig(0.1)
OURS = SparseConfig(0.1, n_down=49, tau=0.02)

Job = tuple[str, compare.Form, float | None]
Key = tuple[str, str, float | None]


def masked(layer: SparseAttention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The layer's own mathematics with n x n masks."""
    config, prefix = layer.config, layer.grid.num_prefix
    w_down, w_up = layer.predictor.at(layer.grid.size)
    a_down = low_rank_attention(q, k, w_down, prefix, layer.scale)
    scores = reference.scores(a_down, w_up, config.tau, layer.basis_threshold)
    members = query_groups(layer.grid.size, prefix, layer.tile, q.device)
    if layer.tile is not None:
        scores = scores[:, :, members - prefix].mean(3)  # these tiles divide the grid
    mask = top_budget(scores, layer.budget())
    mask = mask.repeat_interleave(members.shape[1], 2)[:, :, members.flatten().argsort()]
    mask[..., :prefix] = True
    mask.diagonal(prefix, 2, 3).fill_(True)
    weights = torch.softmax((q[:, :, prefix:] @ k.mT * layer.scale).masked_fill_(~mask, -torch.inf), dim=-1)
    if config.residual:
        estimate = (a_down @ w_up).masked_fill_(mask, 0)
        weights = weights.mul_(1 - estimate.sum(-1, keepdim=True).clamp(0, 1)).add_(estimate)
    exact = torch.nn.functional.scaled_dot_product_attention(q[:, :, :prefix], k, v, scale=layer.scale)
    return torch.cat([exact, weights @ v], dim=2)


def check(student: torch.nn.Module, images: torch.Tensor) -> None:
    """`masked` against the library, in every form.

    Loosely: a score within rounding of the cut may fall on either side of it, which moves logits in the third digit.
    """
    for form in (compare.PAPER, compare.RESIDUAL, compare.tiled((2, 2)), compare.tiled((2, 7))):
        with torch.inference_mode(), compare.running_as(student, form, 0.1):
            expected = student(images)
        with torch.inference_mode(), compare.running_as(student, dataclasses.replace(form, core=masked), 0.1):
            torch.testing.assert_close(student(images), expected, rtol=0, atol=0.02)


def last_layer_spared(keep: float, layers: int = 12, tokens: int = 197) -> tuple[float, ...]:
    """The same average budget, with none of it spent where nobody looks.

    The head reads the class token alone, whose row is dense, so the patch rows of the last layer are not used.
    """
    smallest = 1 / tokens
    return (*[(layers * keep - smallest) / (layers - 1)] * (layers - 1), smallest)


def jobs() -> list[Job]:
    """What is asked for first, what explains it after."""
    rows: list[Job] = [("", compare.DENSE, None)]
    rows += [(f"refined at {keep:g}", compare.RESIDUAL, keep) for keep in (0.25, 0.1)]
    for keep in (0.25, 0.1):
        spared = compare.Form(
            f"residual, last layer spared, average {keep:g}", {"keep": last_layer_spared(keep)}, None, False
        )
        rows.append((f"refined at {keep:g}", spared, None))
    rows += [(f"refined at {keep:g}", compare.RESIDUAL, keep) for keep in (0.5, 0.05)]
    rows += [("ridge", compare.PAPER, keep) for keep in KEEPS]
    rows += [("ridge", compare.ORACLE, keep) for keep in KEEPS]
    rows += [("ridge, prefix kept", compare.LOW_RANK, None)]
    for tile in ((2, 2), (2, 7)):
        rows += [(f"refined at {keep:g}", compare.tiled(tile), keep) for keep in KEEPS]
    rows += [("ridge", compare.RESIDUAL, keep) for keep in (0.25, 0.1)]
    rows += [("paper's settings", form, keep) for form in (compare.PAPER, compare.RESIDUAL) for keep in (0.25, 0.1)]
    return rows


def calibrated(host: torch.nn.Module, images: torch.Tensor, folder: Path) -> None:
    """Writes the students to files, from which each process takes its own copy."""
    for keep in KEEPS:
        student = sp.sparsify(host, OURS.replace(keep=keep))
        print(sp.calibrate(student, images), flush=True)
        sp.save(student, folder / f"refined at {keep:g}")
    student = sp.sparsify(host, OURS)
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
        student = self.students[settings or "ridge"]
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
    parser.add_argument("--resume", action="store_true", help="keep the rows already in results/")
    parser.add_argument("--workers", type=int, default=2, help="processes of one thread that share the rows")
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
        check(sp.load(folder / "ridge"), torch.load(folder / "batches")[0][0][:2])
        first, *others = jobs()
        row, logits = Worker(folder).run(first)
        torch.save(logits, folder / "dense")
        done = earlier(arguments.out, row.images) if arguments.resume else {}
        done[key(first)] = dataclasses.replace(row, milliseconds=float("nan"))
        missing = [job for job in others if key(job) not in done]
        with multiprocessing.get_context("spawn").Pool(arguments.workers, _start, (folder,)) as pool:
            for job, row in zip(missing, pool.imap(_run, missing), strict=True):
                done[key(job)] = row
                print(f"{time.monotonic() - started:6.0f} s  {job[0]}: {' '.join(cells(row))}", flush=True)
                write([(job[0], done[key(job)]) for job in jobs() if key(job) in done], arguments.out)


def key(job: Job) -> Key:
    """What tells the rows of the table apart."""
    settings, form, keep = job
    return settings, form.name, keep


def earlier(name: str, images: int) -> dict[Key, compare.Row]:
    """The rows of an interrupted run on as many images."""
    path = RESULTS / f"{name}.csv"
    if not path.exists():
        return {}
    rows = {}
    names = [field.name for field in dataclasses.fields(compare.Row) if field.name not in ("form", "milliseconds")]
    with path.open(newline="") as file:
        for entry in csv.DictReader(file):
            numbers: dict[str, Any] = {column: float(entry[column]) if entry.get(column) else None for column in names}
            if numbers["images"] == images:
                numbers["images"] = images
                row = compare.Row(form=entry["form"], milliseconds=float("nan"), **numbers)
                rows[entry["settings"], row.form, row.keep] = row
    return rows


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
