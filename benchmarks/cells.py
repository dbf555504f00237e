"""Accuracy at many tokens without training: cells of the grid against the calibrated predictor, both against dense.

DeiT-Tiny on the 400 evaluation photos of imagenet-hires.tar in their own detail; at 224 pixels, on imagenet-eval.tar.
The predictors are calibrated on other photos of that file; cells need nothing. Writes results/cells.csv row by row;
rows that are there are not run again.

    python benchmarks/cells.py --pixels 512 --keep 0.1
    python benchmarks/cells.py --pixels 512,768 --keep 0.25,0.1,0.05 --images 100
    python benchmarks/cells.py --pixels 224 --keep 0.25,0.1 --images 2000 --only "cells 2x2, per"
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import tarfile
import time
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torchvision import transforms

import sparsifiner as sp
from common import RESULTS, assets, read_csv, write_csv
from sparsifiner.data.images import open_images, preprocessing
from sparsifiner.inspect import compare
from sparsifiner.models import create_host

NAME = "deit_tiny_patch16_224"
CALIBRATION = 64
TILES = (None, (2, 2), (4, 4), (8, 8))


def photos(part: str, pixels: int, limit: int, data: dict[str, Any]) -> list[tuple[Tensor, Tensor]]:
    """Batches of photos and classes of a part of the file, spread over it."""
    folder = assets()
    ready = transforms.Compose(
        [
            transforms.Resize(pixels, interpolation=transforms.InterpolationMode.BICUBIC),
            transforms.CenterCrop(pixels),
            transforms.ToTensor(),
            transforms.Normalize(data["mean"], data["std"]),
        ]
    )
    with tarfile.open(folder / "imagenet-eval.tar") as tar:
        wnids = sorted({name.split("/")[-2] for name in tar.getnames() if name.endswith(".webp")})
    images, labels = [], []
    with tarfile.open(folder / "imagenet-hires.tar") as tar:
        members = sorted(m.name for m in tar.getmembers() if m.isfile() and m.name.startswith(f"{part}/"))
        for name in members[:: max(1, len(members) // limit)][:limit]:
            file = tar.extractfile(name)
            assert file is not None
            images.append(ready(Image.open(io.BytesIO(file.read())).convert("RGB")))
            labels.append(wnids.index(name.split("/")[1]))
    stacked = torch.stack(images)
    return list(zip(stacked.split(4), torch.tensor(labels).split(4), strict=True))


def evaluation_photos(
    host: torch.nn.Module, pixels: int, limit: int, data: dict[str, Any]
) -> list[tuple[Tensor, Tensor]]:
    """Photos in their own detail; at the model's own 224 pixels those of imagenet-eval.tar, which are more."""
    if pixels != 224:
        return photos("eval", pixels, limit, data)
    return list(open_images(assets() / "imagenet-eval.tar", preprocessing(host, "crop"), limit=limit, batch_size=16))


def forms() -> list[compare.Form]:
    """Either form, per query and in tiles; cells of one to three levels, and with a tolerance."""
    found = []
    for tile in TILES:
        where = "per query" if tile is None else f"tile {tile[0]}x{tile[1]}"
        levels: list[tuple[tuple[tuple[int, int], ...], float]] = [(((1, 2),), 3.0), (((2, 2),), 3.0)]
        if tile == (4, 4):
            levels += [(((2, 2), (4, 4)), 3.0), (((2, 2), (4, 4), (8, 8)), 3.0), (((2, 2), (4, 4), (8, 8)), 2.5)]
            levels += [(((1, 2), (2, 4), (4, 8)), 2.0)]
        for cells, breadth in levels:
            sizes = " and ".join(f"{rows}x{columns}" for rows, columns in cells)
            name = f"cells {sizes}, {where}{'' if breadth == 3 else f', breadth {breadth:g}'}"
            settings = {"pattern": "cells", "tile": tile, "cells": cells, "breadth": breadth, "tolerance": 0.0}
            found.append(compare.Form(name, settings))
        found.append(compare.Form(f"predictor, {where}", {"pattern": "learned", "tile": tile}))
    settings = {"pattern": "cells", "tile": None, "cells": ((2, 2),), "tolerance": 0.1}
    found.append(compare.Form("tolerance 0.1, cells 2x2, per query", settings))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pixels", default="512", help="sides of the photos, between commas")
    parser.add_argument("--keep", default="0.1", help="keep rates, between commas")
    parser.add_argument("--images", type=int, default=400)
    parser.add_argument("--only", default="", help="forms whose name begins so, between semicolons")
    arguments = parser.parse_args()
    path = RESULTS / "cells.csv"
    rows: list[dict[str, Any]] = list(read_csv(path))
    for pixels in map(int, arguments.pixels.split(",")):
        host = create_host(NAME, str(assets() / f"{NAME}.safetensors"), img_size=pixels)
        data: dict[str, Any] = host.pretrained_cfg  # pyright: ignore[reportAssignmentType]
        student = sp.sparsify(host, sp.suggest_config(host, 0.1, pattern="learned"))
        # Statistics build whole rows of attention: at 1024 pixels they would take longer than all else.
        wanted = [
            dataclasses.replace(form, counted=pixels <= 512)
            for form in forms()
            if form.name.startswith(tuple(arguments.only.split(";")))
        ]
        if any("predictor" in form.name for form in wanted):
            start = time.perf_counter()
            sp.calibrate(student, torch.cat([x for x, _ in photos("calibrate", pixels, CALIBRATION, data)]))
            print(
                f"calibrated on {CALIBRATION} photos of {pixels} pixels in {time.perf_counter() - start:.0f} s",
                flush=True,
            )
        evaluation = compare.Evaluation(student, evaluation_photos(host, pixels, arguments.images, data))
        for form, keep in [(compare.DENSE, None)] + [(f, float(k)) for k in arguments.keep.split(",") for f in wanted]:
            about = {"pixels": str(pixels), "form": form.name, "keep": "" if keep is None else str(keep)}
            about["images"] = str(arguments.images)
            if any(about.items() <= row.items() for row in rows):
                continue
            row = evaluation.row(form, keep).to_dict()
            rows.append(row | about)
            write_csv(rows, path)
            print(
                f"{about}: top-1 {row['top1']:.2f}, agreement {row['agreement']:.2f}, KL {row['divergence']:.4f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
