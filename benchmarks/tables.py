"""The paper's tables with measured columns, and a sweep of budgets, for DeiT-Tiny on imagenet-eval.tar.

Calibrates DeiT-Tiny at 224 and 384 pixels on 256 images of imagenet-distill.tar, takes what elastic.py and
distillation.py have trained in the same folder, and runs `sparsifiner tables` and `sparsifiner sweep` on them: about an
hour of two cores, and it goes on where it was stopped. Writes docs/tables.md, results/tables.csv, results/sweep.csv
and their figures.

    python benchmarks/tables.py [--folder runs]
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import sparsifiner as sp
from common import RESULTS, assets, write_csv
from elastic import NAME, between, result, split
from sparsifiner.files import replacing
from sparsifiner.models import create_host

DOCS = Path(__file__).parents[1] / "docs"
TRAINED = ("evit-0.7", "dynamicvit-0.7", "linformer")
HEAD = """# The paper's tables

Every row of the paper's four tables: its number, ours by formula, and ours measured with DeiT-Tiny on 2,000 images of
ImageNet's validation set. Made by `benchmarks/tables.py`, which prints the commands; `sparsifiner tables` is the one
that writes this. [What the measurements say](tokens.md#the-papers-tables).

![The trade-off](figures/tables.png)

"""
# Of the way from the dense weights to the trained ones: what elastic.py chose.
SHARE = 0.75


def run(text: str) -> None:
    """A verb of the command line, printed so that it can be given by hand."""
    print("sparsifiner", text, flush=True)
    subprocess.run([sys.executable, "-m", "sparsifiner", *shlex.split(text)], check=True)


def checkpoints(folder: Path, images: Path) -> dict[Path, str]:
    """The models to measure, and how images are made ready for each."""
    weights = assets() / f"{NAME}.safetensors"
    source = f"--model {NAME} --weights {weights} --data {images} --keep 0.1"
    small, large = folder / "calibrated.safetensors", folder / "calibrated-384.safetensors"
    if not small.exists():
        run(f"calibrate {source} --preprocess crop --out {small}")
    if not large.exists():
        run(f"calibrate {source} --image-size 384 --preprocess model --out {large}")
    found = {small: "crop"}
    elastic = folder / "elastic.safetensors"
    if not elastic.exists() and result("crops", folder).exists():
        sp.save(between(sp.load(result("crops", folder)), create_host(NAME, str(weights)), SHARE), elastic)
    if elastic.exists():
        found[elastic] = "crop"
    found |= {folder / name: "crop" for name in TRAINED if (folder / name / "student.safetensors").exists()}
    return found | {large: "model"}  # the images are smaller than 384 pixels: enlarged as the model expects


def keep_csv(source: Path, target: Path) -> None:
    """A table with the machine it was measured on, numbers to five places."""
    with source.open(newline="") as file:
        rows: list[dict[str, Any]] = list(csv.DictReader(file))
    for row in rows:
        for column, text in row.items():
            with contextlib.suppress(ValueError):
                row[column] = float(text) if "." in text else text
    write_csv(rows, target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs"))
    folder = parser.parse_args().folder
    folder.mkdir(exist_ok=True)
    images, held = split(folder)
    models = checkpoints(folder, images)
    evaluation = assets() / "imagenet-eval.tar"
    run(
        f"tables {' '.join(map(str, models))} --data {evaluation} --preprocess {','.join(models.values())} "
        f"--out {folder / 'tables'}"
    )
    with replacing(DOCS / "tables.md") as path:
        path.write_text(HEAD + (folder / "tables" / "tables.md").read_text())
    shutil.copy(folder / "tables" / "tables.png", DOCS / "figures" / "tables.png")
    keep_csv(folder / "tables" / "tables.csv", RESULTS / "tables.csv")
    run(
        f"sweep {folder / 'calibrated.safetensors'} --data {evaluation} --preprocess crop --token-keeps 1,0.7 "
        f"--search-data {held} --out {folder / 'sweep'}"
    )
    shutil.copy(folder / "sweep" / "sweep.png", DOCS / "figures" / "sweep.png")
    keep_csv(folder / "sweep" / "sweep.csv", RESULTS / "sweep.csv")


if __name__ == "__main__":
    main()
