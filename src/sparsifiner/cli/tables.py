"""`sparsifiner tables`: the paper's four tables with its numbers, ours by formula and ours measured."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from sparsifiner.cli import common


def tables(
    checkpoint: Annotated[
        Path | None,
        typer.Argument(
            help="A calibrated or trained model to measure in the tables' settings beside the paper's rows."
        ),
    ] = None,
    data: Annotated[str | None, typer.Option(help="Labelled images to measure it on. " + common.DATA)] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for tables.md, tables.csv and tables.png.")] = None,
    limit: common.Limit = None,
    seed: common.Seed = 0,
    preprocess: common.Preprocess = "model",
    class_map: common.ClassMap = None,
    split: common.Split = "validation",
    batch_size: common.BatchSize = 32,
    workers: common.Workers = 0,
    threads: common.Threads = None,
    as_json: common.AsJson = False,
) -> None:
    """Remakes the paper's tables: every row with its number, the formula's and the difference.

    With a checkpoint and images, the model is run in each of the tables' settings: what is measured stands in columns
    of its own, and is of that model, not of the paper's.

    Example: `sparsifiner tables --out tables`, or `sparsifiner tables deit-t.safetensors --data imagenet/val`
    """
    from sparsifiner.errors import ConfigError
    from sparsifiner.report import paper, reproduction

    if (checkpoint is None) != (data is None):
        raise ConfigError("give both a checkpoint and --data to measure, or neither")
    common.use_threads(threads)
    rows = paper.paper_rows()
    measured = None
    if checkpoint is not None and data is not None:
        import sparsifiner as sp

        student = sp.load(checkpoint)
        choice: dict[str, Any] = {"preprocess": preprocess, "class_map": class_map, "split": split, "seed": seed}
        images = common.loader(student, data, limit=limit, batch_size=batch_size, workers=workers, **choice)
        with common.progress() as start:
            measured = reproduction.measure_rows(
                student, images, rows, lambda title, _: start(title, images.num_images)
            )
    if out is not None:
        reproduction.write(rows, measured, out)
    if as_json:
        common.print_json(reproduction.records(rows, measured))
        return
    for table in reproduction.terminal(rows, measured):
        common.print_table(table)
    typer.echo(reproduction.claim(rows))
    if out is not None:
        typer.echo(f"tables.md, tables.csv and tables.png written to {out}")
