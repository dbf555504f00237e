"""`sparsifiner figures`: the paper's figures of a converted model and a photo."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from sparsifiner.cli import common
from sparsifiner.errors import ConfigError
from sparsifiner.progress import show_progress


def figures(
    checkpoint: Annotated[Path, typer.Argument(help=common.CHECKPOINT)],
    image: Annotated[Path, typer.Option(help="A photo.")],
    out: Annotated[Path, typer.Option(help="Folder for the figures, as PNG and PDF.")] = Path("figures"),
    model: common.ModelName = None,
    weights: common.Weights = None,
    layers: Annotated[
        str | None, typer.Option(help="Layers shown, between commas; early, middle and late ones if not given.")
    ] = None,
    heads: Annotated[str | None, typer.Option(help="Heads shown, between commas; all if not given.")] = None,
    query: Annotated[
        str | None, typer.Option(help="ROW,COLUMN of the patch to follow; the middle if not given.")
    ] = None,
    keep: Annotated[str | None, typer.Option(help="Another keep rate than the checkpoint's.")] = None,
    token_keep: Annotated[float, typer.Option(help="Share of the tokens each pruning keeps in the last figure.")] = 0.7,
    token_method: common.TokenMethod = "evit",
    only: Annotated[str | None, typer.Option(help="Names of the figures wanted, between commas.")] = None,
    data: Annotated[
        str | None, typer.Option(help="Labelled images to measure the trade-off figure on. " + common.DATA)
    ] = None,
    keeps: Annotated[str, typer.Option(help="Shares of keys kept in the trade-off.")] = "0.5,0.25,0.1,0.05",
    token_keeps: Annotated[str, typer.Option(help="Shares of tokens kept in the trade-off.")] = "1",
    limit: common.Limit = None,
    seed: common.Seed = 0,
    class_map: common.ClassMap = None,
    split: common.Split = "validation",
    preprocess: common.Preprocess = "model",
    skip_unreadable: common.SkipUnreadable = False,
    threads: common.Threads = None,
) -> None:
    """Draws what a patch attends to: connections, full, low-rank and sparse attention, basis, coefficients, patterns.

    A model that opens cells has those drawn in the place of basis and coefficients. With --data, what the budgets cost
    against what they keep, too.

    Example: `sparsifiner figures student.safetensors --image dog.jpg --layers 2,5,9 --query 6,7`
    """
    import sparsifiner as sp
    from sparsifiner.config import TokenConfig
    from sparsifiner.convert import sparse_layers
    from sparsifiner.inspect import compare
    from sparsifiner.inspect import sweep as sweeping
    from sparsifiner.report import figures as drawing
    from sparsifiner.report.photo import read_photo

    wanted = None if only is None else only.split(",")
    if wanted and "trade-off" in wanted and data is None:
        raise ConfigError("the trade-off is measured: give labelled images with --data")
    common.use_threads(threads)
    student = sp.load(checkpoint, model=None if model is None else common.host_model(model, weights, None))
    if keep is not None:
        sp.reconfigure(student, keep=common.parse_keep(keep))
    pixels, photo = read_photo(student, image, preprocess)  # pyright: ignore[reportArgumentType]
    depth = len(sparse_layers(student))
    chosen = _whole(layers, "--layers") if layers else sorted({depth // 6, depth // 2, depth - 2} & set(range(depth)))
    shown = _whole(heads, "--heads") if heads else list(range(sparse_layers(student)[0].num_heads))
    place = None
    if query is not None:
        found = _whole(query, "--query")
        if len(found) != 2:
            raise ConfigError(f"--query: expected ROW,COLUMN, such as 6,7, got {query!r}")
        place = (found[0], found[1])
    swept = None
    if data is not None:
        choice: dict[str, Any] = {"preprocess": preprocess, "split": split, "seed": seed, "class_map": class_map}
        images = common.loader(student, data, limit=limit, skip_unreadable=skip_unreadable, **choice)
        droppings = [
            common.parse_tokens(share, token_method, False)
            for share in common.parse_numbers(token_keeps, "--token-keeps")
        ]
        rates = common.parse_numbers(keeps, "--keeps")
        settings = [sweeping.Setting(rate, None, tokens) for tokens in droppings for rate in rates]

        def sweep() -> tuple[compare.Row, list[sweeping.Point]]:
            with show_progress() as bars:
                found = sweeping.sweep(compare.Evaluation(student, images, bars.start), settings)
            common.say_skipped(images)
            return found

        swept = sweep
    scene = drawing.look(student, pixels, photo, place)
    paths = drawing.figures(
        scene,
        pixels,
        out,
        layers=chosen,
        heads=shown,
        tokens=TokenConfig(token_keep, token_method),
        only=wanted,
        swept=swept,
    )
    for path in paths:
        typer.echo(path)


def _whole(text: str, option: str) -> list[int]:
    numbers = common.parse_numbers(text, option)
    if any(number != int(number) for number in numbers):
        raise ConfigError(f"{option}: expected whole numbers between commas, got {text!r}")
    return [int(number) for number in numbers]
