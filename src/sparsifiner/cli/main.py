"""The `sparsifiner` command."""

from __future__ import annotations

import shutil
import sys
from typing import Any

import typer
from typer.core import TyperCommand

from sparsifiner import __version__, processor
from sparsifiner.cli import (
    bench,
    calibrate,
    convert,
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

# Panels have room for the names of all options from here on; where there is less they would be cut.
PANELS = 120


class Verb(TyperCommand):
    """A verb whose help shows every option's name whole, however narrow the terminal."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """In panels where these fit, in plain lines elsewhere."""
        markup = self.rich_markup_mode
        if shutil.get_terminal_size().columns < PANELS:
            self.rich_markup_mode = None
        try:
            super().format_help(ctx, formatter)
        finally:
            self.rich_markup_mode = markup


app = typer.Typer(
    name="sparsifiner",
    help="Make the attention of a Vision Transformer sparse, and see what it costs and what it saves.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("demo", cls=Verb)(demo.demo)
app.command("convert", cls=Verb)(convert.convert)
app.command("calibrate", cls=Verb)(calibrate.calibrate)
app.command("train", cls=Verb)(train.command)
app.command("eval", cls=Verb)(evaluate.evaluate)
app.command("flops", cls=Verb)(flops.flops)
app.command("bench", cls=Verb)(bench.bench)
app.command("sweep", cls=Verb)(sweep.sweep)
app.command("tables", cls=Verb)(tables.tables)
app.command("figures", cls=Verb)(figures.figures)
app.command("report", cls=Verb)(report.report)
app.command("explore", cls=Verb)(explore.explore)
app.command("info", cls=Verb)(info.info)


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
