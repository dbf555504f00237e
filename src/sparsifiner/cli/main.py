"""The `sparsifiner` command."""

from __future__ import annotations

import sys

import typer

from sparsifiner import __version__, processor
from sparsifiner.cli import (
    bench,
    calibrate,
    demo,
    evaluate,
    explore,
    figures,
    flops,
    info,
    report,
    sweep,
    tables,
    train,
)
from sparsifiner.errors import SparsifinerError

app = typer.Typer(
    name="sparsifiner",
    help="Make the attention of a Vision Transformer sparse, and see what it costs and what it saves.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("demo")(demo.demo)
app.command("calibrate")(calibrate.calibrate)
app.command("train")(train.command)
app.command("eval")(evaluate.evaluate)
app.command("flops")(flops.flops)
app.command("bench")(bench.bench)
app.command("sweep")(sweep.sweep)
app.command("tables")(tables.tables)
app.command("figures")(figures.figures)
app.command("report")(report.report)
app.command("explore")(explore.explore)
app.command("info")(info.info)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"sparsifiner {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    if not {"-h", "--help"} & set(sys.argv):  # which is answered at once
        processor.limit()  # before a verb imports torch


def run() -> None:
    """Runs the command; what is wrong with the input ends in one clear line and exit code 2."""
    try:
        app()
    except SparsifinerError as error:
        code = getattr(error, "exit_code", None)  # of a run that was asked to stop, and did
        typer.echo(str(error) if code else f"error: {error}", err=True)
        sys.exit(code or 2)
    except KeyboardInterrupt:
        typer.echo("stopped; files written so far are whole", err=True)
        sys.exit(130)
