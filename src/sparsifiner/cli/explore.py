"""`sparsifiner explore`: a page on this machine that shows what every patch attends to."""

from __future__ import annotations

from typing import Annotated

import typer

from sparsifiner.cli import common
from sparsifiner.errors import ConfigError
from sparsifiner.progress import show_progress


def explore(
    paths: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CHECKPOINT] [IMAGES]...",
            help=f"{common.CHECKPOINT} Then image files and folders. "
            "With --model, images only, or a checkpoint that holds no more than its predictors. "
            "Nothing at all for the demo's scenes.",
        ),
    ] = None,
    model: common.ModelName = None,
    weights: common.Weights = None,
    image_size: common.ImageSize = None,
    host: Annotated[
        str, typer.Option(help="Listen on this address; on 127.0.0.1 only this machine can connect.")
    ] = "127.0.0.1",
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="Port; the first free one from 8765.")] = None,
    browser: Annotated[bool, typer.Option(help="Open the page in a browser.")] = True,
    threads: common.Threads = None,
) -> None:
    """Opens a page: choose an image and a patch, see mask and maps, move the budget, live and without retraining.

    A dense model gets the predictors that come with the package, if there are some, and opens cells if not.

    Example: `sparsifiner explore`, or `sparsifiner explore student.safetensors photos/`, or
    `sparsifiner explore --model deit_tiny_patch16_224 --weights hub dog.jpg`
    """
    try:
        from sparsifiner.explorer import server
        from sparsifiner.explorer.app import create_app
    except ImportError as error:
        raise ConfigError(f"the page needs {error.name}: pip install 'sparsifiner[explore]'") from None
    from sparsifiner.explorer.subject import open_subject

    common.use_threads(threads)
    with server.listen(host, port) as listener:  # first: a port in use should not cost the time to load a model
        with show_progress() as bars:
            subject = open_subject(paths or [], model, weights, image_size, progress=bars.start)
        app = create_app(subject, host)
        for note in subject.notes:
            typer.echo(note)
        if host not in ("127.0.0.1", "::1", "localhost"):
            typer.echo("Whoever can reach this machine can use the page: it asks for no password.", err=True)
        typer.echo(f"{subject.name}: open {server.address_of(listener)} (Ctrl-C ends it)")
        server.serve(app, listener, browser)
