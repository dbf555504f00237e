"""Distillation at 512 pixels, of a model that opens cells or of predictors: what it adds to no training at all.

DeiT-Tiny, 300 calibration photos of imagenet-hires.tar (and their mirror images), with --more also photos of
imagenet-distill.tar, enlarged; its dense self as the teacher, no labels; measured before and after on the 400
evaluation photos. Writes results/cells-distillation.csv.

    python benchmarks/cells_distillation.py --epochs 3
    python benchmarks/cells_distillation.py --epochs 10 --tile 4x4 --cells 2x2,4x4
    python benchmarks/cells_distillation.py --epochs 1 --more 900 --tile 4x4 --cells 1x2
    python benchmarks/cells_distillation.py --epochs 4 --predictors --tile 4x4  # alone: the host stays as it is
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch

import sparsifiner as sp
from cells import CALIBRATION, NAME, photos
from common import RESULTS, assets, environment, read_csv, write_csv
from sparsifiner.config import parse_cells, parse_tile
from sparsifiner.data.images import open_images, preprocessing
from sparsifiner.inspect import compare
from sparsifiner.models import create_host

PIXELS = 512


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=float, default=3)
    parser.add_argument("--keep", type=float, default=0.1)
    parser.add_argument("--tolerance", type=float, default=0.0)
    parser.add_argument("--tile", default="none")
    parser.add_argument("--cells", default="2x2")
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    parser.add_argument("--predictors", action="store_true", help="calibrated, then trained on a frozen host")
    parser.add_argument("--images", type=int, default=300, help="to train on")
    parser.add_argument("--more", type=int, default=0, help="photos of imagenet-distill.tar to train on, beside those")
    parser.add_argument("--out", default=None, help="a folder for checkpoints, from which a run goes on")
    arguments = parser.parse_args()
    host = create_host(NAME, str(assets() / f"{NAME}.safetensors"), img_size=PIXELS)
    data: dict[str, Any] = host.pretrained_cfg  # pyright: ignore[reportAssignmentType]
    tile = parse_tile(arguments.tile)
    if arguments.predictors:
        config = sp.suggest_config(host, arguments.keep, pattern="learned", tile=tile)
        recipe = sp.Recipe.read("large-predictors").replace(keep=arguments.keep, phase2_epochs=arguments.epochs)
    else:
        cells = parse_cells(arguments.cells)
        config = sp.suggest_config(host, arguments.keep, tolerance=arguments.tolerance, tile=tile, cells=cells)
        recipe = sp.Recipe(
            keep=arguments.keep, phase1_epochs=0, phase2_epochs=arguments.epochs, phase2_warmup_epochs=0.2,
            phase2_learning_rate=arguments.learning_rate, phase2_final_learning_rate=1e-6, weight_decay=0.0,
            label_weight=0.0, token_weight=1.0, prediction_weight=1.0, batch_size=4, mixup=0.0, cutmix=0.0,
            erase=0.0, log_every=10, clip=1.0,
        )  # fmt: skip
    student = sp.sparsify(host, config)
    images = torch.cat([x for x, _ in photos("calibrate", PIXELS, arguments.images, data)])
    if arguments.more:
        read = open_images(assets() / "imagenet-distill.tar", preprocessing(host), limit=arguments.more)
        images = torch.cat([images, *(x for x, _ in read)])
    # Dense is the model before training: what the student is to agree with.
    plain = sp.sparsify(host, config)
    if arguments.predictors:
        sp.calibrate(plain, images[:CALIBRATION])
        student.load_state_dict(plain.state_dict())
        recipe = recipe.replace(start="given")
    start = time.perf_counter()
    sp.distill(student, images, recipe, out=arguments.out, on_log=lambda line: print(line, flush=True))
    seconds = time.perf_counter() - start
    form = "predictors" if arguments.predictors else f"cells {arguments.cells}"
    about = {"form": f"{form}, tile {arguments.tile}", "keep": arguments.keep}
    about |= {"tolerance": arguments.tolerance, "epochs": arguments.epochs, "train_images": len(images)}
    about |= {"learning_rate": recipe.predictor_learning_rate if arguments.predictors else arguments.learning_rate}
    evaluation = compare.Evaluation(plain, photos("eval", PIXELS, 400, data))
    before = evaluation.row(compare.Form("before", counted=False), arguments.keep).to_dict()
    plain.load_state_dict(student.state_dict())
    after = evaluation.row(compare.Form("distilled", counted=False), arguments.keep).to_dict()
    path = RESULTS / "cells-distillation.csv"
    rows = read_csv(path)
    for row, spent in ((before, 0.0), (after, seconds)):
        figures = {key: row[key] for key in ("images", "top1", "agreement", "divergence")}
        rows.append(about | {"model": row["form"], "train_seconds": spent} | figures | {"load": environment()["load"]})
        print(rows[-1], flush=True)
    write_csv(rows, path)


if __name__ == "__main__":
    main()
