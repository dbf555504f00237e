"""`sparsifiner calibrate`: a dense model to a sparse checkpoint, in seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sparsifiner.cli import common
from sparsifiner.errors import ConfigError
from sparsifiner.progress import show_progress


def calibrate(
    data: Annotated[str, typer.Option(help="Images to calibrate on. " + common.DATA)],
    out: Annotated[Path, typer.Option(help="Where to write the checkpoint (.safetensors).")],
    model: common.ModelName = None,
    weights: common.Weights = None,
    image_size: common.ImageSize = None,
    keep: common.Keep = "0.25",
    n_down: common.LandmarkCount = None,
    tau: common.Tau = None,
    basis_threshold: common.BasisThreshold = None,
    residual: Annotated[bool, typer.Option(help="Add back the low-rank estimate of what is dropped.")] = True,
    tile: common.Tile = None,
    pattern: common.Pattern = "learned",
    images: Annotated[int, typer.Option(min=1, help="How many images to calibrate on.")] = 256,
    seed: common.Seed = 0,
    preprocess: common.Preprocess = "model",
    split: common.Split = "train",
    batch_size: common.BatchSize = 16,
    workers: common.Workers = 0,
    skip_unreadable: common.SkipUnreadable = False,
    predictors_only: Annotated[
        bool, typer.Option("--predictors-only", help="Leave the host's weights out of the file.")
    ] = False,
    tune: common.Tune = False,
    threads: common.Threads = None,
    as_json: common.AsJson = False,
) -> None:
    """Converts a model and fits its predictors to images, without training: the paper's form.

    Attention at several resolutions, pattern cells, needs none of this: `sparsifiner convert` makes it.

    Example: `sparsifiner calibrate --model deit_tiny_patch16_224 --weights hub --data images/ --keep 0.25
    --out student.safetensors`
    """
    import sparsifiner as sp
    from sparsifiner.inspect.tuning import time_layers

    if pattern == "cells":
        raise ConfigError(
            "--pattern cells asks no predictor: there is nothing to calibrate, `sparsifiner convert` writes the "
            "checkpoint without images"
        )
    common.use_threads(threads)
    host = common.host_model(model, weights, image_size)
    chosen = common.given_form(tile, None, None, None)
    chosen |= common.given(n_down=n_down, tau=tau, basis_threshold=basis_threshold)
    config = sp.suggest_config(host, common.parse_keep(keep), pattern=pattern, residual=residual, **chosen)
    student = sp.sparsify(host, config)
    source = common.loader(
        host,
        data,
        preprocess=preprocess,
        labels=False,
        split=split,
        limit=images,
        seed=seed,
        batch_size=batch_size,
        workers=workers,
        skip_unreadable=skip_unreadable,
    )
    with show_progress() as bars:
        report = sp.calibrate(student, source, progress=bars.start)
        timing = (sp.tune if tune else time_layers)(student, source, progress=bars.start)
    common.say_skipped(source)
    sp.save(student, out, host_weights=not predictors_only)
    if not tune:
        common.say_where_dense_is_faster(timing)
    if as_json:
        common.print_json(report.to_dict() | {"checkpoint": str(out), "timing": timing.to_dict(), "tuned": tune})
    else:
        typer.echo(str(report))
        if tune:
            typer.echo(str(timing))
        typer.echo(f"wrote {out}")
