"""`sparsifiner demo`: the whole story on one screen, on scenes of digits or on a real model."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparsifiner.cli import common
from sparsifiner.progress import show_progress
from sparsifiner.sides import Sides

if TYPE_CHECKING:
    from torch import nn

    from sparsifiner.config import SparseConfig
    from sparsifiner.data.images import ImageLoader
    from sparsifiner.inspect.compare import Form

# Scenes that are evaluated, by the side of their canvas in patches.
CANVASES = {8: 96, 16: 48, 32: 32, 64: 12}
SIDE = 32  # where all forms are compared and pictures are made: 1,025 tokens
BATCH = 4
SECONDS = 1.0  # for each candidate that is timed
TITLE = "Sparse attention: the demo"


def demo(
    model: common.ModelName = None,
    weights: common.Weights = None,
    image_size: common.ImageSize = None,
    data: Annotated[str | None, typer.Option(help="Labelled images to evaluate on. " + common.DATA)] = None,
    calibration_data: Annotated[
        str | None, typer.Option(help="Images to calibrate on; never the ones evaluated on.")
    ] = None,
    keep: Annotated[
        str | None, typer.Option(help="Keep rates to compare, between commas; 0.1, of a real model 0.5,0.25,0.1.")
    ] = None,
    tile: Annotated[str, typer.Option(help="The tile to compare, rows x columns.")] = "2x2",
    n_down: common.LandmarkCount = None,
    tau: common.Tau = None,
    images: Annotated[
        int | None, typer.Option(min=1, help="How many images to calibrate on; 32 scenes, or 256 for a real model.")
    ] = None,
    limit: common.Limit = None,
    preprocess: common.Preprocess = "model",
    workers: common.Workers = 0,
    skip_unreadable: common.SkipUnreadable = False,
    threads: common.Threads = None,
    report: Annotated[Path, typer.Option(help="Where the HTML report goes.")] = Path("demo-report.html"),
    as_json: common.AsJson = False,
) -> None:
    """Makes a small ViT sparse, at ever more tokens, and says what is gained; or compares all forms of a real model.

    Without a model it trains one: scenes of handwritten digits, in which every patch says whether its digit is the same
    as the orange one. About two minutes, nothing is downloaded. Cells are opened as they are; the predictor of the
    paper's form is calibrated. Ends by writing a report.

    Example: `sparsifiner demo`, or
    `sparsifiner demo --model deit_tiny_patch16_224 --weights hub --data val/ --calibration-data train/`
    """
    from sparsifiner.errors import ConfigError

    common.use_threads(threads)
    of_predictor = {"pattern": "learned"} | common.given(n_down=n_down, tau=tau)
    tiles = common.parse_tile(tile)
    if tiles is None:
        raise ConfigError("--tile: the demo compares a tile; give one, such as 2x2")
    if model is None and weights is None and data is None:
        _scenes(common.parse_numbers(keep or "0.1", "--keep"), tiles, of_predictor, images or 32, report, as_json)
        return
    if data is None or calibration_data is None:
        raise ConfigError("a real model needs --data to evaluate on and other --calibration-data")
    host = common.host_model(model, weights, image_size)
    options: dict[str, Any] = {"preprocess": preprocess, "workers": workers, "skip_unreadable": skip_unreadable}
    source = common.loader(host, calibration_data, labels=False, limit=images or 256, batch_size=16, **options)
    batches = common.loader(host, data, limit=limit, **options)
    keeps = common.parse_numbers(keep or "0.5,0.25,0.1", "--keep")
    _real(host, source, batches, keeps, tiles, of_predictor, report, as_json)


def _scenes(
    keeps: Sequence[float],
    tile: Sides,
    of_predictor: dict[str, Any],
    images: int,
    report: Path,
    as_json: bool,
) -> None:
    """Trains on scenes, measures canvas by canvas, and compares all forms on one."""
    import sparsifiner as sp
    from sparsifiner import digits, scenes
    from sparsifiner.inspect import compare
    from sparsifiner.inspect.gain import gain_of, in_words
    from sparsifiner.inspect.statistics import measure
    from sparsifiner.report import html, tables
    from sparsifiner.report.scenes import pictures

    train, test = digits.load_digits()
    with show_progress() as bars:
        host, origin = scenes.trained(bars.start)
        gains = []
        advance = bars.start("measuring ever larger scenes", len(CANVASES))
        for side, count in CANVASES.items():
            grown = scenes.at_size(host, side)
            student = sp.sparsify(grown, scenes.settings(grown, min(keeps)))
            gains.append(gain_of(student, scenes.draw(test, count, side, seed=0).batches(BATCH), SECONDS))
            advance(1)
        # Calibrated once, at the smallest keep: where most is dropped, the residual has most to learn.
        host = scenes.at_size(host, SIDE)
        student = sp.sparsify(host, sp.suggest_config(host, min(keeps), **of_predictor))
        sp.calibrate(student, scenes.draw(train, images, SIDE, seed=0).images, progress=bars.start)
        seen = scenes.draw(test, CANVASES[SIDE], SIDE, seed=0)
        forms = [*_forms(scenes.settings(host, min(keeps)), tile), compare.WINDOW]
        rows = compare.compare(student, seen.batches(BATCH), forms, keeps, bars.start)
        rows = compare.timed_by_turns(student, seen.images[:BATCH], rows, forms, SECONDS)
        student = sp.sparsify(host, scenes.settings(host, min(keeps)))
        html.write_report(
            report,
            student,
            title=TITLE,
            command=shlex.join(["sparsifiner", *sys.argv[1:]]),
            gains=gains,
            highlights=pictures(student, seen, gains),
            rows=rows,
            statistics=measure(student, seen.images[:BATCH]),
            statistics_images=BATCH,
        )
    if as_json:
        found = {"summary": in_words(gains), "gains": [gain.to_dict() for gain in gains]}
        common.print_json(found | {"forms": [row.to_dict() for row in rows]})
        return
    typer.echo(in_words(gains))
    typer.echo(
        "\nScenes of handwritten digits: every patch says whether its digit is the same as the orange one, which may "
        f"be anywhere.\nA ViT of 4 layers, dense and with {min(keeps):.0%} of the keys, untrained for it. {origin}"
    )
    common.print_table(tables.growth(gains))
    typer.echo(tables.gain_note(gains))
    typer.echo(f"\nEvery form at {SIDE**2 + 1:,} tokens:")
    common.print_table(tables.comparison(rows))
    typer.echo(
        "Cells are as suggested, but none is larger than a digit; they need no calibration, the predictor of the other "
        "forms had it. A fixed window cannot know where the orange digit is."
    )
    typer.echo(f"Look at {report.resolve()}, or at every patch: sparsifiner explore")


def _forms(cells: SparseConfig, tile: Sides) -> list[Form]:
    """What a model with predictors is compared in, first with cells opened as these settings have it."""
    from sparsifiner.inspect import compare

    return [compare.opening(cells), compare.PAPER, compare.RESIDUAL, compare.tiled(tile)]


def _real(
    host: nn.Module,
    source: ImageLoader,
    batches: ImageLoader,
    keeps: Sequence[float],
    tile: Sides,
    of_predictor: dict[str, Any],
    report: Path,
    as_json: bool,
) -> None:
    """Compares all forms of a model on its own images."""
    from timm.data.config import resolve_model_data_config

    import sparsifiner as sp
    from sparsifiner.inspect import compare
    from sparsifiner.inspect.statistics import measure
    from sparsifiner.report import html, tables
    from sparsifiner.report.photo import visible

    with show_progress() as bars:
        # Calibrated once, at the smallest keep: where most is dropped, the residual has most to learn.
        student = sp.sparsify(host, sp.suggest_config(host, min(keeps), **of_predictor))
        sp.calibrate(student, source, progress=bars.start)
        common.say_skipped(source)
        rows = compare.compare(
            student, batches, _forms(sp.suggest_config(student, min(keeps)), tile), keeps, bars.start
        )
    common.say_skipped(batches)
    sp.reconfigure(student, keep=min(keeps))
    images, config = next(iter(batches))[0], resolve_model_data_config(student)
    html.write_report(
        report,
        student,
        title=TITLE,
        command=shlex.join(["sparsifiner", *sys.argv[1:]]),
        rows=rows,
        statistics=measure(student, images),
        statistics_images=len(images),
        pictures=html.pictures_of(
            student, images[0], visible(images[0], config["mean"], config["std"]), "the first image"
        ),
    )
    if as_json:
        common.print_json([row.to_dict() for row in rows])
        return
    common.print_table(tables.comparison(rows))
    typer.echo(
        "Cells need no calibration; the predictor of the other forms had it. Attention and model are million "
        "multiply-adds per image, as counted on these images. Time is this machine's, "
        "with the backend `sparsifiner info` names."
    )
    typer.echo(f"Look at {report.resolve()}")
