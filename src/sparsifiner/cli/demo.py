"""`sparsifiner demo`: the whole story on one screen, on digits or on a real model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sparsifiner.cli import common
from sparsifiner.progress import show_progress


def demo(
    model: common.ModelName = None,
    weights: common.Weights = None,
    image_size: common.ImageSize = None,
    data: Annotated[str | None, typer.Option(help="Labelled images to evaluate on. " + common.DATA)] = None,
    calibration_data: Annotated[
        str | None, typer.Option(help="Images to calibrate on; never the ones evaluated on.")
    ] = None,
    keep: Annotated[str, typer.Option(help="Keep rates to compare, between commas.")] = "0.5,0.25,0.1",
    tile: Annotated[str, typer.Option(help="The tile to compare, rows x columns.")] = "2x2",
    n_down: common.LandmarkCount = None,
    tau: common.Tau = None,
    images: Annotated[int, typer.Option(min=1, help="How many images to calibrate on.")] = 256,
    limit: common.Limit = None,
    preprocess: common.Preprocess = "model",
    workers: common.Workers = 0,
    skip_unreadable: common.SkipUnreadable = False,
    threads: common.Threads = None,
    report: Annotated[Path, typer.Option(help="Where the HTML report goes.")] = Path("demo-report.html"),
    as_json: common.AsJson = False,
) -> None:
    """Trains a small ViT on digits, makes it sparse in every form, and compares; or takes a real model.

    Cells are opened as they are; the predictor is calibrated, and the paper's form on digits distilled. `sparsifiner
    train` distils a real model. Ends by writing a report.

    Example: `sparsifiner demo`, or
    `sparsifiner demo --model deit_tiny_patch16_224 --weights hub --data val/ --calibration-data train/`
    """
    import sparsifiner as sp
    from sparsifiner.data.images import ImageLoader
    from sparsifiner.errors import ConfigError
    from sparsifiner.inspect import compare
    from sparsifiner.report.tables import comparison

    common.use_threads(threads)
    chosen = {"pattern": "learned"} | common.given(n_down=n_down, tau=tau)
    keeps = common.parse_numbers(keep, "--keep")
    shared = common.parse_tile(tile)
    if shared is None:
        raise ConfigError("--tile: the demo compares a tile; give one, such as 2x2")
    forms = [compare.PAPER, compare.RESIDUAL, compare.tiled(shared)]
    distilled = None
    with show_progress() as bars:
        # Calibrated once, at the smallest keep: where most is dropped, the residual has most to learn.
        if model is None and weights is None and data is None:
            student, distilled, batches = _digits(keeps, chosen, images, bars)
        else:
            if data is None or calibration_data is None:
                raise ConfigError("a real model needs --data to evaluate on and other --calibration-data")
            student, batches = _real(
                common.host_model(model, weights, image_size),
                data,
                calibration_data,
                min(keeps),
                chosen,
                images,
                limit,
                bars,
                {"preprocess": preprocess, "workers": workers, "skip_unreadable": skip_unreadable},
            )
        forms = [compare.opening(sp.suggest_config(student, min(keeps))), *forms]
        rows = compare.compare(student, batches, forms, keeps, bars.start)
        if distilled is not None:
            form = compare.Form("paper form, distilled", compare.PAPER.changes)
            other = compare.Evaluation(distilled, batches, bars.start, dense=student)
            rows += [other.row(form, rate) for rate in keeps]
    if isinstance(batches, ImageLoader):
        common.say_skipped(batches)
    _report(report, student, min(keeps), rows, next(iter(batches))[0])
    if as_json:
        common.print_json([row.to_dict() for row in rows])
        return
    common.print_table(comparison(rows))
    typer.echo(
        "Cells need no calibration; the predictor of the other forms had it. Attention and model are million "
        "multiply-adds per image, as counted on these images. Time is this machine's, "
        "with the backend `sparsifiner info` names."
    )
    typer.echo(f"Look at {report.resolve()}")


def _report(path: Path, student, keep: float, rows, images) -> None:
    """The comparison, the layers, and what the first image's patches attend to."""
    import shlex
    import sys

    from timm.data.config import resolve_model_data_config

    import sparsifiner as sp
    from sparsifiner import digits
    from sparsifiner.inspect.statistics import measure
    from sparsifiner.report import html
    from sparsifiner.report.photo import visible

    sp.reconfigure(student, keep=keep)
    config = resolve_model_data_config(student)
    mean, std = (config["mean"], config["std"]) if images.shape[1] == 3 else ((digits.MEAN,), (digits.STD,))
    pictures = html.pictures_of(student, images[0], visible(images[0], mean, std), "the first image")
    html.write_report(
        path,
        student,
        title="Sparse attention: the demo",
        command=shlex.join(["sparsifiner", *sys.argv[1:]]),
        rows=rows,
        statistics=measure(student, images),
        statistics_images=len(images),
        pictures=pictures,
    )


def _digits(keeps, chosen, images, bars):
    import copy

    import sparsifiner as sp
    from sparsifiner import digits

    (train_images, train_labels), (test_images, test_labels) = digits.load_digits()
    epochs = 20
    advance = bars.start("training a ViT on digits", epochs)
    host = digits.train_digits(train_images, train_labels, epochs=epochs, on_epoch=lambda epoch, loss: advance(1))
    student = sp.sparsify(host, sp.suggest_config(host, min(keeps), **chosen))
    sp.calibrate(student, train_images[:images], progress=bars.start)
    distilled = copy.deepcopy(student)
    recipe = sp.Recipe.read("digits").replace(keep=min(keeps), **chosen)
    if min(keeps) < max(keeps) < 1:
        recipe = recipe.replace(elastic=f"{min(keeps)}:{max(keeps)}")  # one model for all rates
    sp.distill(distilled, (train_images, train_labels), recipe.replace(start="given"), bar=bars)
    batches = list(zip(test_images.split(64), test_labels.split(64), strict=True))
    return student, distilled, batches


def _real(host, data, calibration_data, keep, chosen, images, limit, bars, options):
    import sparsifiner as sp

    student = sp.sparsify(host, sp.suggest_config(host, keep, **chosen))
    source = common.loader(host, calibration_data, labels=False, limit=images, batch_size=16, **options)
    sp.calibrate(student, source, progress=bars.start)
    common.say_skipped(source)
    batches = common.loader(host, data, limit=limit, **options)
    return student, batches
