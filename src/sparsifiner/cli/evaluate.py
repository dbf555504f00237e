"""`sparsifiner eval`: a checkpoint against its dense self on labelled images."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer

from sparsifiner.cli import common
from sparsifiner.progress import show_progress


def evaluate(
    checkpoint: Annotated[Path, typer.Argument(help=common.CHECKPOINT)],
    data: Annotated[str, typer.Option(help="Labelled images. " + common.DATA)],
    keep: Annotated[str | None, typer.Option(help="Another keep rate than the checkpoint's.")] = None,
    residual: Annotated[bool | None, typer.Option(help="With or without the residual, whatever the file says.")] = None,
    tile: common.Tile = None,
    pattern: common.Pattern = None,
    cells: common.Cells = None,
    breadth: common.Breadth = None,
    tolerance: common.Tolerance = None,
    token_keep: Annotated[
        float | None, typer.Option(help="Drop tokens too: share of the patches that a block keeps; 1 for all.")
    ] = None,
    token_method: common.TokenMethod = "evit",
    token_fuse: common.TokenFuse = False,
    token_fuse_official: common.TokenFuseOfficial = False,
    limit: common.Limit = None,
    seed: common.Seed = 0,
    preprocess: common.Preprocess = "model",
    class_map: common.ClassMap = None,
    split: common.Split = "validation",
    batch_size: common.BatchSize = 32,
    workers: common.Workers = 0,
    skip_unreadable: common.SkipUnreadable = False,
    threads: common.Threads = None,
    as_json: common.AsJson = False,
) -> None:
    """Measures top-1, agreement with dense, connections, multiply-adds and time.

    Example: `sparsifiner eval student.safetensors --data imagenet/val --keep 0.1`, or with attention at several
    resolutions, whatever it was made for: `... --pattern cells --cells 2x2,4x4 --breadth 3 --tile 4x4`
    """
    import sparsifiner as sp
    from sparsifiner.inspect.compare import Form, compare
    from sparsifiner.inspect.tuning import time_layers
    from sparsifiner.report.tables import comparison

    common.use_threads(threads)
    student = sp.load(checkpoint)
    changes: dict[str, Any] = common.given_form(tile, cells, breadth, tolerance)
    if keep is not None:
        changes["keep"] = common.parse_keep(keep)
    if residual is not None:
        changes["residual"] = residual
    if pattern is not None:
        changes["pattern"] = pattern
    if token_keep is not None:
        changes["tokens"] = common.parse_tokens(token_keep, token_method, token_fuse, token_fuse_official)
    sp.reconfigure(student, **changes)
    images = common.loader(
        student,
        data,
        preprocess=preprocess,
        class_map=class_map,
        split=split,
        limit=limit,
        seed=seed,
        batch_size=batch_size,
        workers=workers,
        skip_unreadable=skip_unreadable,
    )
    with show_progress() as bars:
        form = Form("sparse", needs_keep=False)
        rows = compare(student, images, [form], [], bars.start)
        timing = time_layers(student, images, progress=bars.start)
    common.say_skipped(images)
    common.say_where_dense_is_faster(timing, sp.config_of(student).dense)
    if as_json:
        common.print_json(
            {"config": dataclasses.asdict(sp.config_of(student)), "rows": [row.to_dict() for row in rows]}
        )
    else:
        common.print_table(comparison(rows))
