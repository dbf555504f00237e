"""`sparsifiner flops`: multiply-adds by the paper's count and as measured."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from sparsifiner.cli import common


def flops(
    checkpoint: Annotated[Path | None, typer.Argument(help=f"{common.CHECKPOINT} Or use --model.")] = None,
    model: common.ModelName = None,
    image_size: common.ImageSize = None,
    keep: common.Keep = "0.25",
    n_down: Annotated[int, typer.Option("--n-down", help="Landmarks; the paper's 32 by default.")] = 32,
    density: Annotated[
        float | None, typer.Option(help="Density of the score product that the paper's count assumes.")
    ] = None,
    data: Annotated[str | None, typer.Option(help="Count connections on these images. " + common.DATA)] = None,
    limit: common.Limit = 64,
    preprocess: common.Preprocess = "model",
    skip_unreadable: common.SkipUnreadable = False,
    paper: Annotated[bool, typer.Option("--paper", help="Remake the paper's rows and show the differences.")] = False,
    as_json: common.AsJson = False,
) -> None:
    """Counts multiply-adds (one is two FLOPs) of one image.

    Example: `sparsifiner flops --model deit_small_patch16_224 --keep 0.25`
    """
    if paper:
        _paper_rows(as_json)
        return
    reading = {"preprocess": preprocess, "limit": limit, "skip_unreadable": skip_unreadable}
    counts = _count(checkpoint, model, image_size, keep, n_down, density, data, reading)
    if as_json:
        common.print_json(counts)
        return
    _print(counts)


def _count(checkpoint, model, image_size, keep, n_down, density, data, reading) -> list[dict[str, Any]]:
    import sparsifiner as sp
    from sparsifiner.inspect.flops import DEIT_S_DENSITY

    if checkpoint is not None:
        student = sp.load(checkpoint)
    else:
        host = common.host_model(model, "random", image_size)
        if data is not None:  # otherwise weights do not matter
            common.say_random(str(model))
        student = sp.sparsify(host, sp.SparseConfig(common.parse_keep(keep), n_down=n_down))
    assumed = DEIT_S_DENSITY if density is None else density
    counts = [sp.count_flops(student, convention="paper", density=assumed).to_dict()]
    if data is not None:
        images = common.loader(student, data, labels=False, **reading)
        counts.append(sp.count_flops(student, images, convention="measured").to_dict())
        common.say_skipped(images)
    return counts


def _print(counts: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("million multiply-adds, one image", title=None)
    for count in counts:
        table.add_column(f"convention: {count['convention']}", justify="right")
    parts = ("attention", "predictor", "residual", "mhsa", "dense_attention", "projections", "mlp", "other")
    for part in (*parts, "total", "dense_total"):
        table.add_row(part.replace("_", " "), *(f"{count[part] / 1e6:,.1f}" for count in counts))
    Console().print(table)


def _paper_rows(as_json: bool) -> None:
    from sparsifiner.report.paper import flops_rows

    rows = flops_rows()
    if as_json:
        common.print_json([row.to_dict() for row in rows])
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("model", "setting", title="million multiply-adds of attention core and predictor")
    for title in ("paper", "formula", "difference"):
        table.add_column(title, justify="right")
    for row in rows:
        table.add_row(row.model, row.setting, f"{row.paper:.1f}", f"{row.formula:.1f}", f"{row.difference:+.2%}")
    Console().print(table)
