"""`sparsifiner tables`: the paper's four tables with its numbers, ours by formula and ours measured."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from sparsifiner.cli import common
from sparsifiner.progress import show_progress


def tables(
    checkpoints: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[checkpoint]...",
            help="Calibrated or trained models to measure in the tables' settings, each in columns of its own.",
        ),
    ] = None,
    data: Annotated[str | None, typer.Option(help="Labelled images to measure them on. " + common.DATA)] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for tables.md, tables.csv and tables.png; and for measured.jsonl, from which a run that was "
            "stopped goes on."
        ),
    ] = None,
    limit: common.Limit = None,
    seed: common.Seed = 0,
    preprocess: Annotated[
        str,
        typer.Option(
            help="'model' resizes and crops as the model expects; 'crop' only crops resized images. One for all, or "
            "one for each checkpoint, between commas."
        ),
    ] = "model",
    class_map: common.ClassMap = None,
    split: common.Split = "validation",
    batch_size: common.BatchSize = 32,
    workers: common.Workers = 0,
    skip_unreadable: common.SkipUnreadable = False,
    threads: common.Threads = None,
    as_json: common.AsJson = False,
) -> None:
    """Remakes the paper's tables: every row with its number, the formula's and the difference.

    With checkpoints and images, each model is run in the settings it is for: one of 577 tokens or more in the third
    table's, one that was trained to drop tokens in those that drop them its way, any other in all but DynamicViT's.
    What is measured stands in columns of its own, and is of that model, not of the paper's.

    Example: `sparsifiner tables --out tables`, or `sparsifiner tables deit-t.safetensors runs/evit --data imagenet/val`
    """
    from sparsifiner.errors import ConfigError
    from sparsifiner.report import paper, reproduction

    if bool(checkpoints) != (data is not None):
        raise ConfigError("give both checkpoints and --data to measure, or neither")
    common.use_threads(threads)
    rows = paper.paper_rows()
    measured: list[reproduction.Measured] = []
    if checkpoints and data is not None:
        import sparsifiner as sp
        from sparsifiner.inspect.compare import Evaluation

        modes = preprocess.split(",")
        if len(modes) not in (1, len(checkpoints)):
            raise ConfigError(
                f"--preprocess: give one, or one for each of {len(checkpoints)} checkpoints, got {len(modes)}"
            )
        names = common.names_of(checkpoints)
        choice: dict[str, Any] = {"class_map": class_map, "split": split, "seed": seed, "limit": limit}
        choice |= {"batch_size": batch_size} | ({"skip_unreadable": True} if skip_unreadable else {})
        students = [sp.load(checkpoint) for checkpoint in checkpoints]  # all first: the last may be one that cannot be
        with show_progress() as bars:
            for number, (student, name) in enumerate(zip(students, names, strict=True)):
                own: dict[str, Any] = choice | {"preprocess": modes[number % len(modes)]}
                images = common.loader(student, data, workers=workers, **own)
                journal = common.journal(out, checkpoints[number], data, images, own)
                evaluation = Evaluation(student, images, _named(name, bars.start), journal)
                measured.append(reproduction.measure_rows(student, name, evaluation, rows))
                common.say_skipped(images)
    if out is not None:
        reproduction.write(rows, measured, out)
    if as_json:
        common.print_json(reproduction.records(rows, measured))
        return
    for table in reproduction.terminal(rows, measured):
        common.print_table(table)
    for note in reproduction.notes(rows, measured):
        typer.echo(note)
    if out is not None:
        typer.echo(f"tables.md, tables.csv and tables.png written to {out}")


def _named(name: str, start: Any) -> Any:
    return lambda title, total: start(f"{name}: {title}", total)
