"""`sparsifiner report`: one HTML file of a model, with nothing fetched from anywhere."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from sparsifiner.cli import common
from sparsifiner.progress import show_progress


def report(
    checkpoint: Annotated[Path, typer.Argument(help=common.CHECKPOINT)],
    data: Annotated[str | None, typer.Option(help="Labelled images to measure on. " + common.DATA)] = None,
    image: Annotated[list[Path] | None, typer.Option(help="A photo to look at; can be given several times.")] = None,
    out: Annotated[Path, typer.Option(help="The file.")] = Path("report.html"),
    model: common.ModelName = None,
    weights: common.Weights = None,
    keeps: Annotated[str | None, typer.Option(help="Also at these keep rates, between commas.")] = None,
    limit: common.Limit = None,
    seed: common.Seed = 0,
    preprocess: common.Preprocess = "model",
    class_map: common.ClassMap = None,
    split: common.Split = "validation",
    batch_size: common.BatchSize = 32,
    workers: common.Workers = 0,
    skip_unreadable: common.SkipUnreadable = False,
    threads: common.Threads = None,
) -> None:
    """Writes what a model is, what it costs and keeps, its layers, and figures of photos, to one HTML file.

    Example: `sparsifiner report run --data imagenet/val --limit 500 --image dog.jpg`
    """
    import sparsifiner as sp
    from sparsifiner.inspect import compare
    from sparsifiner.inspect.statistics import measure
    from sparsifiner.report import html
    from sparsifiner.report.photo import read_photo

    common.use_threads(threads)
    student = sp.load(checkpoint, model=None if model is None else common.host_model(model, weights, None))
    rows: list[Any] = []
    statistics: list[Any] = []
    pictures: list[html.Picture] = []
    seen = 0
    if data is not None:
        choice: dict[str, Any] = {"preprocess": preprocess, "class_map": class_map, "split": split, "seed": seed}
        choice |= {"skip_unreadable": skip_unreadable}
        images = common.loader(student, data, limit=limit, batch_size=batch_size, workers=workers, **choice)
        rates = common.parse_numbers(keeps, "--keeps") if keeps else ()
        forms = [compare.Form("as saved", needs_keep=False)] + ([compare.Form("at keep")] if rates else [])
        with show_progress() as bars:
            rows = compare.compare(student, images, forms, rates, bars.start)
        common.say_skipped(images)
        first = next(iter(images))[0]
        statistics, seen = measure(student, first), len(first)
    for path in image or ():
        pixels, photo = read_photo(student, path, preprocess)  # pyright: ignore[reportArgumentType]
        pictures += html.pictures_of(student, pixels, photo, path.name)
        if not statistics:
            statistics, seen = measure(student, pixels[None]), 1
    log = []
    if checkpoint.is_dir() and (lines := checkpoint / "log.jsonl").is_file():
        log = [json.loads(line) for line in lines.read_text().splitlines()]
    html.write_report(
        out,
        student,
        title=f"{checkpoint.stem if checkpoint.is_file() else checkpoint.name}: sparse attention",
        command=shlex.join(["sparsifiner", *sys.argv[1:]]),
        rows=rows,
        statistics=statistics,
        statistics_images=seen,
        pictures=pictures,
        log=log,
    )
    typer.echo(f"{out} written")
