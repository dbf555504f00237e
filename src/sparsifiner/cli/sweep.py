"""`sparsifiner sweep`: what every budget costs and keeps, and which are worth having."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Annotated, Any

import typer

from sparsifiner import config
from sparsifiner.cli import common
from sparsifiner.errors import ConfigError
from sparsifiner.progress import show_progress


def sweep(
    checkpoint: Annotated[Path, typer.Argument(help=common.CHECKPOINT)],
    data: Annotated[str, typer.Option(help="Labelled images to measure on. " + common.DATA)],
    keeps: Annotated[str, typer.Option(help="Shares of keys kept, between commas.")] = "0.5,0.25,0.1,0.05",
    token_keeps: Annotated[str, typer.Option(help="Shares of tokens that a block keeps, between commas.")] = "1",
    tiles: Annotated[
        str | None,
        typer.Option(help="Tiles of queries that share, such as none,2x2,4x4; the model's own if not given."),
    ] = None,
    levels: Annotated[
        str | None,
        typer.Option(help="Of cells: levels to try, such as 2x2;2x2,4x4 (quoted); the model's own if not given."),
    ] = None,
    token_method: common.TokenMethod = "evit",
    token_fuse: common.TokenFuse = False,
    token_fuse_official: common.TokenFuseOfficial = False,
    search_data: Annotated[
        str | None,
        typer.Option(
            help="Also choose budgets per layer with the same averages, by recall on these images, which should be "
            "neither those of the calibration nor those of --data."
        ),
    ] = None,
    search_limit: Annotated[int, typer.Option(min=1, help="Use so many of --search-data.")] = 128,
    cost: Annotated[
        str, typer.Option(help="What the best are told by: total_macs, attention_macs or milliseconds.")
    ] = "total_macs",
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for sweep.csv, sweep.png, and measured.jsonl, from which a run that was stopped goes on."
        ),
    ] = None,
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
    """Measures recall, accuracy, multiply-adds and time over keep rates, tiles, levels of cells, tokens and layers.

    A star marks settings that no other beats.

    Example: `sparsifiner sweep student.safetensors --data imagenet/val --token-keeps 1,0.7 --out sweep`, or
    `... --tiles none,4x4 --levels "2x2;2x2,4x4" --cost milliseconds`
    """
    import sparsifiner as sp
    from sparsifiner.data.batches import as_batches
    from sparsifiner.files import replacing
    from sparsifiner.inspect import sweep as sweeping
    from sparsifiner.inspect.compare import Evaluation

    if cost not in ("total_macs", "attention_macs", "milliseconds"):
        raise ConfigError(f"--cost must be total_macs, attention_macs or milliseconds, got {cost!r}")
    common.use_threads(threads)
    student = sp.load(checkpoint)
    rates = common.parse_numbers(keeps, "--keeps")
    droppings = [
        common.parse_tokens(keep, token_method, token_fuse, token_fuse_official)
        for keep in common.parse_numbers(token_keeps, "--token-keeps")
    ]
    shapes = [
        {"tile": tile, "cells": cells}
        for tile in (_tiles(tiles) if tiles else [None])
        for cells in ([config.parse_cells(part, "--levels") for part in levels.split(";")] if levels else [None])
    ]
    choice: dict[str, Any] = {"preprocess": preprocess, "split": split, "seed": seed}
    choice |= {"skip_unreadable": skip_unreadable, "batch_size": batch_size}
    own = choice | {"class_map": class_map, "limit": limit}
    images = common.loader(student, data, workers=workers, **own)
    with show_progress() as bars:
        layers: dict[float, tuple[float, ...]] = {}
        if search_data is not None:
            choice |= {"labels": False, "limit": search_limit, "workers": workers}
            held = list(as_batches(common.loader(student, search_data, **choice)))
            possible = sweeping.possible_levels(student)
            recalls = sweeping.layer_recalls(student, held, possible, bars.start("recall by layer", len(possible)))
            layers = {rate: sweeping.allocate(recalls, rate, possible) for rate in rates}
        budgets = [(rate, None) for rate in rates] + list(layers.items())
        settings = [
            sweeping.Setting(rate, found, tokens, **shape)
            for tokens in droppings
            for shape in shapes
            for rate, found in budgets
        ]
        evaluation = Evaluation(student, images, bars.start, common.journal(out, checkpoint, data, images, own))
        dense, points = sweeping.sweep(evaluation, settings)
    common.say_skipped(images)
    best = sweeping.frontier(points, cost, sweeping.worth(dense))
    records = [point.to_dict() | {"best": point in best} for point in points]
    if out is not None:
        from sparsifiner.report import plots

        out.mkdir(parents=True, exist_ok=True)
        with replacing(out / "sweep.csv") as path, path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(records[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(records)
        plots.save(plots.trade_off(dense, points), out / "sweep.png")
    if as_json:
        common.print_json({"dense": dense.to_dict(), "points": records})
        return
    common.print_table(_table(dense, points, best))
    if out is not None:
        typer.echo(f"{out / 'sweep.csv'} and {out / 'sweep.png'} written")


def _tiles(text: str) -> list[tuple[int, ...]]:
    """``none,2x2``; no tile is an empty one."""
    return [config.parse_tile(part, "--tiles") or () for part in text.split(",")]


def _table(dense: Any, points: list[Any], best: list[Any]) -> Any:
    from rich.table import Table

    table = Table(title=f"{dense.images} images; agreement and KL are to the dense model; * is beaten by no other")
    titles = ("setting", "recall", "top-1 %", "agreement %", "KL", "attention", "model", "ms/image", "")
    for number, title in enumerate(titles):
        table.add_column(title, justify="left" if number == 0 else "right")
    for name, row, mark in [
        ("dense", dense, ""),
        *((point.setting.name, point.row, "*" if point in best else "") for point in points),
    ]:
        table.add_row(
            name,
            f"{row.recall:.3f}",
            "" if row.top1 is None else f"{row.top1:.2f}",
            f"{row.agreement:.2f}",
            f"{row.divergence:.4f}",
            f"{row.attention_macs / 1e6:,.1f}",
            f"{row.total_macs / 1e6:,.1f}",
            f"{row.milliseconds:.2f}",
            mark,
        )
    layers = {point.setting.keep: point.setting.layers for point in points if point.setting.layers}
    lines = [f"keep {keep:g} by layer: {', '.join(f'{share:g}' for share in own)}" for keep, own in layers.items()]
    table.caption = "\n".join(lines) or None
    return table
