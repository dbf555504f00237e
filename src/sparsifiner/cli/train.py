"""`sparsifiner train`: two-phase distillation from the command line, alone or under torchrun."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path
from typing import Annotated, Any

import typer

from sparsifiner.cli import common
from sparsifiner.distillation.recipe import Recipe, kind_of, names
from sparsifiner.errors import ConfigError
from sparsifiner.progress import show_progress

RECIPE_HELP = f"One of {', '.join(names())}, or a TOML file of your own."


def train(
    data: Annotated[str, typer.Option(help="Training images. " + common.DATA)],
    out: Annotated[Path, typer.Option(help="Folder for checkpoints, log, curves and the result.")],
    model: common.ModelName = None,
    weights: common.Weights = None,
    image_size: common.ImageSize = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="Start from this converted model instead of --model; it is its own teacher.")
    ] = None,
    recipe: Annotated[str | None, typer.Option(help=RECIPE_HELP)] = None,
    eval_data: Annotated[
        str | None, typer.Option(help="Evaluate on these after each epoch of phase 2, and keep the best.")
    ] = None,
    eval_limit: Annotated[int | None, typer.Option(help="Evaluate on so many of them.")] = None,
    resume: Annotated[
        str, typer.Option(help="'auto' goes on from the newest checkpoint in --out, 'never' does not, a path does.")
    ] = "auto",
    teacher_cache: Annotated[
        Path | None, typer.Option(help="File of the teacher's outputs, for recipes that keep them; runs can share it.")
    ] = None,
    limit: common.Limit = None,
    preprocess: common.Preprocess = "model",
    class_map: common.ClassMap = None,
    no_labels: Annotated[
        bool,
        typer.Option(
            "--no-labels", help="Learn from the dense model alone: any images will do, in folders of any name or none."
        ),
    ] = False,
    split: Annotated[str, typer.Option(help="Split of a Hugging Face dataset.")] = "train",
    workers: common.Workers = 0,
    skip_unreadable: common.SkipUnreadable = False,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; a GPU if there is one.")] = None,
    tune: common.Tune = False,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Also write event files for TensorBoard.")] = False,
    threads: common.Threads = None,
    as_json: common.AsJson = False,
    **settings: Any,
) -> None:
    """Distils a sparse model from its dense self in two phases: the predictors, then all weights.

    Every setting of the recipe is an option; what is not given is the recipe's, and without a recipe the paper's.
    Ctrl-C saves and stops; the same command goes on. With --no-labels the dense model's tokens and predictions are all
    there is to learn from.

    Example: `sparsifiner train --model deit_small_patch16_224 --weights hub --data imagenet/train --out run
    --recipe deit-s-224`, or on 8 GPUs `torchrun --nproc-per-node 8 -m sparsifiner train ... --batch-size 21`
    """
    import sparsifiner as sp
    from sparsifiner.distillation.data import from_files
    from sparsifiner.distillation.recipe import config_for

    common.use_threads(threads)
    if no_labels:
        if settings.get("label_weight"):
            raise ConfigError("--no-labels and --label-weight contradict each other: choose one")
        settings["label_weight"] = 0.0
    chosen = (Recipe.read(recipe) if recipe else Recipe()).replace(**common.given(**settings))
    if checkpoint is not None:
        student = sp.load(checkpoint)
    else:
        host = common.host_model(model, weights, image_size)
        student = sp.sparsify(host, config_for(chosen, host))
    images = from_files(
        data,
        student,
        chosen,
        preprocess=preprocess,  # pyright: ignore[reportArgumentType]
        class_map=class_map,
        split=split,
        limit=limit,
        skip_unreadable=skip_unreadable,
    )
    if chosen.start == "calibrated":
        common.warn_if_fewer(data, len(images), chosen.calibration_images)
    held = None
    if eval_data is not None:
        held = common.loader(student, eval_data, preprocess=preprocess, class_map=class_map, limit=eval_limit)
    with show_progress() as bars:
        report = sp.distill(
            student,
            images,
            chosen,
            out=out,
            resume=resume,
            evaluate=None if held is None else _top1_on(held),
            teacher_cache=teacher_cache,
            tune=tune,
            workers=workers,
            device=device,
            tensorboard=tensorboard,
            bar=bars,
            progress=bars.start,
        )
    for name, reason in report.skipped:
        typer.echo(f"skipped {name}: {reason}", err=True)
    last = report.lines[-1] if report.lines else {}
    if as_json:
        common.print_json(
            {
                "result": str(report.result),
                "resumed": report.resumed and str(report.resumed),
                "steps": report.steps,
                "skipped": len(report.skipped),
                "last": last,
            }
        )
        return
    if report.resumed:
        typer.echo(f"went on from {report.resumed}")
    typer.echo(
        f"{report.result}: look at it with `sparsifiner eval {report.result} --data ...`; log and curves beside it"
    )


def _top1_on(images: Any) -> Any:
    from sparsifiner.inspect.compare import predict_all

    return lambda model: predict_all(model, images).top1 or 0.0


def _with_recipe_options(function: Any) -> Any:
    """The function with an option for each setting of a recipe, in the place of its ``**settings``."""
    signature = inspect.signature(function, eval_str=True)
    parameters = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    for field in dataclasses.fields(Recipe):
        kind, _ = kind_of(field)
        help_text = field.metadata["help"]
        if isinstance(kind, tuple):
            help_text += f" One of {', '.join(kind)}."
            kind = str
        shown = "none" if field.default is None else str(field.default) or "''"
        option = typer.Option(
            help=f"{help_text} [paper: {shown}]" if field.default is not None else help_text,
            rich_help_panel="Recipe",
        )
        parameters.append(
            inspect.Parameter(
                field.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
            )
        )
    keyword_only = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]

    def run(**options: Any) -> None:
        function(**options)

    run.__signature__ = signature.replace(parameters=keyword_only)  # pyright: ignore[reportFunctionMemberAccess]
    run.__annotations__ = {p.name: p.annotation for p in keyword_only}
    run.__doc__ = function.__doc__
    return run


command = _with_recipe_options(train)
