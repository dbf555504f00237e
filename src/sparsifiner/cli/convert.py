"""`sparsifiner convert`: a dense model to a sparse checkpoint that needs no images."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from sparsifiner.cli import common
from sparsifiner.progress import show_progress


def convert(
    out: Annotated[Path, typer.Option(help="Where to write the checkpoint (.safetensors).")],
    model: common.ModelName = None,
    weights: common.Weights = None,
    image_size: common.ImageSize = None,
    keep: common.Keep = "0.25",
    tile: common.Tile = None,
    cells: common.Cells = None,
    breadth: common.Breadth = None,
    tolerance: common.Tolerance = None,
    residual: Annotated[bool, typer.Option(help="Cells that are not opened stand for their keys.")] = True,
    tune: common.Tune = False,
    batch_size: Annotated[int, typer.Option(min=1, help="Images a batch while --tune measures; of noise.")] = 16,
    threads: common.Threads = None,
    as_json: common.AsJson = False,
) -> None:
    """Makes a model sparse and writes it: attention at several resolutions, no calibration and no images.

    What is not given is chosen for the model's grid. `sparsifiner calibrate` makes the paper's form, which learns what
    to keep from images.

    Example: `sparsifiner convert --model deit_tiny_patch16_224 --weights hub --keep 0.1 --cells 2x2,4x4 --breadth 3
    --out student.safetensors`
    """
    import sparsifiner as sp

    common.use_threads(threads)
    chosen = common.given_form(tile, cells, breadth, tolerance)
    host = common.host_model(model, weights, image_size)
    config = sp.suggest_config(host, common.parse_keep(keep), residual=residual, **chosen)
    student = sp.sparsify(host, config).eval()
    images = common.noise(student, batch_size if tune else 1)
    timing = None
    if tune:
        with show_progress() as bars:
            timing = sp.tune(student, images, progress=bars.start)
    else:
        import torch

        with torch.inference_mode():
            student(images)  # says what does not fit this grid before anything is written
    sp.save(student, out)
    if as_json:
        about = {"checkpoint": str(out), "config": dataclasses.asdict(sp.config_of(student)), "tuned": tune}
        common.print_json(about | {"timing": timing and timing.to_dict()})
        return
    if timing is not None:
        typer.echo(str(timing))
    typer.echo(common.describe_form(sp.config_of(student)))
    typer.echo(f"wrote {out}")
