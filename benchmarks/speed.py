"""Speed on this machine against torch's dense attention: the operator forward and backward at ViT sizes; whole models.

Inputs are those of DeiT-Tiny on real images, calibrated; heads of two layers stand side by side where six are wanted.
Writes speed-operator.csv, speed-backward.csv, speed-model.csv, speed-tuned.csv and speed.md
to results/MACHINE, and draws docs/figures/speed.png.

    python benchmarks/speed.py [--seconds 0.5] [--only operator|backward|model|tuned]
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path
from typing import Any

import torch

import sparsifiner as sp
from common import assets, machine_results
from sparsifiner.cli.bench import backward_rows, model_rows, operator_rows, write_csv
from sparsifiner.config import SparseConfig
from sparsifiner.convert import conversion_of
from sparsifiner.data.images import open_images, preprocessing
from sparsifiner.files import replacing
from sparsifiner.inspect.machine import environment
from sparsifiner.inspect.speed import Problem, problem_from
from sparsifiner.models import create_host
from sparsifiner.report.plots import speed_ups

NAME = "deit_tiny_patch16_224"
FIGURE = Path(__file__).parents[1] / "docs" / "figures" / "speed.png"
KEEPS = (0.25, 0.1, 0.05)
# Pixels, batch, layers whose heads are used, tile of about 16 queries.
SIZES = (
    (224, 8, (3,), (2, 7)),
    (224, 8, (3, 6), (2, 7)),
    (384, 8, (3,), (4, 4)),
    (512, 2, (3, 6), (4, 4)),
    (1024, 1, (3, 6), (4, 4)),
)


def student_and_images(n_down: int, tau: float) -> tuple[torch.nn.Module, torch.Tensor]:
    """DeiT-Tiny calibrated at its own size, and images of the distillation set."""
    source = assets()
    host = create_host(NAME, str(source / f"{NAME}.safetensors"))
    loader = open_images(source / "imagenet-distill.tar", preprocessing(host, "crop"), limit=64, batch_size=16)
    images = torch.cat([batch for batch, _ in loader])
    student = sp.sparsify(host, SparseConfig(0.1, n_down=n_down, tau=tau))
    sp.calibrate(student, images, refine=False)
    return student.eval(), images


def doubled(student: torch.nn.Module, images: torch.Tensor) -> torch.nn.Module:
    """DeiT-S, whose weights are not at hand, as two DeiT-Tiny side by side: six heads of real attention."""

    def twice(name: str, x: torch.Tensor) -> torch.Tensor:
        if name == "head.bias":
            return x
        if name == "head.weight":
            return torch.cat([x, x], 1) / 2
        if x.ndim == 2:  # qkv holds the rows of queries, keys and values one after another
            parts = x.chunk(3) if "qkv" in name else (x,)
            return torch.cat([torch.block_diag(part, part) for part in parts])
        if "qkv" in name:
            return torch.cat([torch.cat([part, part]) for part in x.chunk(3)])
        return torch.cat([x, x], -1 if x.ndim == 3 else 0)

    state = {k: twice(k, v) for k, v in student.state_dict().items() if ".predictor." not in k}
    host = create_host("deit_small_patch16_224", None)
    host.load_state_dict(state)
    small = sp.sparsify(host, conversion_of(student).config).eval()
    with sp.dense_mode(small), sp.dense_mode(student), torch.inference_mode():
        torch.testing.assert_close(small(images[:2]), student(images[:2]), rtol=1e-3, atol=1e-3)
    sp.calibrate(small, images, refine=False)
    return small


def resized(student: torch.nn.Module, images: torch.Tensor, pixels: int) -> torch.Tensor:
    """Sets the model to an image size, and scales the images."""
    student.set_input_size((pixels, pixels))  # pyright: ignore[reportCallIssue]
    return torch.nn.functional.interpolate(images, size=(pixels, pixels), mode="bicubic")


def problems(student: torch.nn.Module, images: torch.Tensor) -> list[tuple[Problem, tuple[int, int]]]:
    """The operator's inputs at every size."""
    found = []
    for pixels, batch, layers, tile in SIZES:
        scaled = resized(student, images[:batch], pixels)
        found.append((problem_from(student, scaled, layers).to(torch.float32), tile))
    return found


def add(rows: list[dict[str, Any]], found: list[dict[str, Any]]) -> None:
    """Each row with the threads and load of its own moment."""
    now = environment()
    for row in found:
        rows.append(row | {"threads": now["threads"], "load": now["load"]})
        if row["keep"] is not None:
            about = f"{now['threads']} threads, n={row['n']} ({row['batch']}, {row['heads']})"
            about += ", residual" if row["residual"] else ""
            print(f"{about:40s} {row['name']:42s} {row['minimum']:9.3f} ms  {row['speed_up']:.2f}x", flush=True)


def operator(inputs: list[tuple[Problem, tuple[int, int]]], seconds: float) -> None:
    rows: list[dict[str, Any]] = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for p, tile in inputs:
            for residual in (False, True):
                add(rows, operator_rows(p, KEEPS, [None, tile], residual, seconds, narrow=not residual))
                write_csv(rows, machine_results() / "speed-operator.csv")
            if (
                threads == 1 and p.q.shape[2] < 2000
            ):  # by themselves: their turns are long, and would leave few to the others
                add(rows, operator_rows(p, KEEPS, [], False, seconds, baselines=True))
                write_csv(rows, machine_results() / "speed-operator.csv")
    one_thread = [row for row in rows if row["threads"] == 1 and row["residual"] is False]
    one_thread = [row for row in one_thread if (row["batch"], row["heads"]) != (8, 3) or row["n"] > 197]
    for row in one_thread:  # tiles differ in shape, not in kind
        row["name"] = row["name"].replace("tile 2x7", "tiles").replace("tile 4x4", "tiles")
    speed_ups([row for row in one_thread if "sparse" in row["name"] and not row["narrow"]], FIGURE)


def backward(inputs: list[tuple[Problem, tuple[int, int]]], seconds: float) -> None:
    rows: list[dict[str, Any]] = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for p, tile in inputs:
            for residual in (False, True):
                add(rows, backward_rows(p, KEEPS[:2], [None, tile], residual, seconds))
                write_csv(rows, machine_results() / "speed-backward.csv")


def model(student: torch.nn.Module, small: torch.nn.Module, images: torch.Tensor, seconds: float) -> None:
    rows: list[dict[str, Any]] = []
    for name, net, pixels, batch, tile, keeps in (
        ("DeiT-T", student, 224, 8, (2, 7), (0.25, 0.1)),
        ("DeiT-T", student, 384, 8, (4, 4), (0.25, 0.1)),
        ("DeiT-S", small, 1024, 1, (4, 4), (0.1,)),
    ):
        scaled = resized(net, images[:batch], pixels)
        for residual in (False, True):
            found = model_rows(net, scaled, keeps, [None, tile], residual, seconds)
            for row in found:
                row["name"] = f"{name}, {pixels} px, {row['name'].removeprefix('model, ')}"
            print(f"{name} {pixels} px: ceiling {found[0]['ceiling']:.2f}x", flush=True)
            add(rows, found)
            write_csv(rows, machine_results() / "speed-model.csv")


def tuned(student: torch.nn.Module, images: torch.Tensor, seconds: float) -> None:
    """Whole models after `tune`, where sparse attention does not pay, or barely: it must cost nothing."""
    rows: list[dict[str, Any]] = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for pixels, batch in ((224, 1), (224, 8), (384, 1), (384, 8)):
            scaled = resized(student, images[:batch], pixels)
            # At keep 1.0 the host's own attention runs: how far that is from 1 is the noise of the measurement.
            found = model_rows(student, scaled, (1.0, 0.5, 0.25, 0.1), [None], True, seconds, tuned=True)
            for row in found:
                row["name"] = f"DeiT-T, {pixels} px, tuned, {row['name'].removeprefix('model, ')}"
            add(rows, found)
            write_csv(rows, machine_results() / "speed-tuned.csv")


def tables() -> None:
    """The CSV files as Markdown, speed.md: speed-ups, per query / with tiles."""
    lines = []
    kinds = {"operator": "Forward", "backward": "Backward", "model": "Whole model", "tuned": "Whole model, tuned"}
    for kind, title in kinds.items():
        path = machine_results() / f"speed-{kind}.csv"
        if not path.exists():
            continue
        with path.open(newline="") as file:
            rows = [row for row in csv.DictReader(file) if row["keep"] and row["narrow"] != "True" and row["residual"]]
        rows = [row for row in rows if "gather" not in row["name"]]
        keeps = list(dict.fromkeys(row["keep"] for row in rows))
        lines += [f"## {title}", "", "| | threads | residual | " + " | ".join(f"keep {keep}" for keep in keeps) + " |"]
        lines += ["|---|---|---|" + "---:|" * len(keeps)]
        cases: dict[tuple[str, ...], dict[str, list[str]]] = {}
        for row in rows:
            what = row["name"].split(", sparse")[0] if kind in ("model", "tuned") else f"n = {row['n']}"
            case = (
                f"{what} ({row['batch']}, {row['heads']})",
                row["threads"],
                "yes" if row["residual"] == "True" else "",
            )
            cases.setdefault(case, {}).setdefault(row["keep"], []).append(f"{float(row['speed_up']):.2f}")
            if row.get("ceiling"):
                cases[case]["ceiling"] = [f"{float(row['ceiling']):.2f}"]
        for (what, threads, residual), found in cases.items():
            ceiling = f", ceiling {found['ceiling'][0]}" if "ceiling" in found else ""
            cells = " | ".join(" / ".join(found.get(keep, [])) for keep in keeps)
            lines.append(f"| {what}{ceiling} | {threads} | {residual} | {cells} |")
        lines.append("")
    with replacing(machine_results() / "speed.md") as path:
        path.write_text("\n".join(lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=0.5, help="for each candidate")
    parser.add_argument("--only", choices=("operator", "backward", "model", "tuned"))
    parser.add_argument("--n-down", type=int, default=32)
    parser.add_argument("--tau", type=float, default=0.05)
    arguments = parser.parse_args()
    student, images = student_and_images(arguments.n_down, arguments.tau)
    small = doubled(student, images)  # before anything resizes the student
    if arguments.only in (None, "operator", "backward"):
        inputs = problems(student, images)
        if arguments.only != "backward":
            operator(inputs, arguments.seconds)
        if arguments.only != "operator":
            backward(inputs, arguments.seconds)
    if arguments.only in (None, "model"):
        model(student, small, images, max(1.0, 2 * arguments.seconds))
    if arguments.only in (None, "tuned"):
        tuned(student, images, max(2.0, 4 * arguments.seconds))
    tables()


if __name__ == "__main__":
    main()
