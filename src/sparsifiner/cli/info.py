"""`sparsifiner info`: what is installed here, what a checkpoint holds, what of a model would be converted."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from sparsifiner.cli import common
from sparsifiner.errors import one_line


def info(
    model: Annotated[
        str | None,
        typer.Argument(help="A checkpoint; or a dense model: a name of timm's, or a folder with transformers' config."),
    ] = None,
    image_size: common.ImageSize = None,
    as_json: common.AsJson = False,
) -> None:
    """Shows versions, the machine and the backends; what a checkpoint holds; or what of a dense model is converted.

    Of a model it tells the tokens, the share of attention in its multiply-adds, how much faster it could be at most,
    what stays as it is, and why it is refused if it is. No weights are needed and no network.

    Example: `sparsifiner info vit_small_patch16_dinov3 --image-size 1024`
    """
    if model is not None and _is_dense(model):
        found = _survey(model, image_size)
        if as_json:
            common.print_json(found.to_dict())
        else:
            typer.echo("\n".join(map(one_line, str(found).splitlines())))
        return
    content = _environment() if model is None else _checkpoint(Path(model))
    if as_json:
        common.print_json(content)
        return
    for key, value in content.items():  # a checkpoint's can be any, also what moves a terminal's cursor
        if key == "tuning":
            _print_tuning(value)
        elif isinstance(value, dict):
            typer.echo(one_line(f"{key}:"))
            for name, item in value.items():
                typer.echo(one_line(f"  {name}: {item}"))
        else:
            typer.echo(one_line(f"{key}: {value}"))


def _print_tuning(measured: dict[str, Any]) -> None:
    """Why layers have the form they have."""
    from sparsifiner.inspect.tuning import TuningReport

    typer.echo("tuning:")
    for line in str(TuningReport.from_dict(measured)).splitlines():
        typer.echo(f"  {one_line(line)}")


def _is_dense(name: str) -> bool:
    """Whether it is a model that is meant, and no checkpoint; a name that is neither is asked for as a checkpoint."""
    path = Path(name)
    if path.exists():
        return path.suffix == ".json" or (path / "config.json").is_file()
    import timm

    import sparsifiner.hosts.lvvit  # noqa: F401 - registers LV-ViT with timm

    return timm.is_model(name.split(".")[0])


def _survey(name: str, image_size: int | None) -> Any:
    from sparsifiner.inspect.survey import survey
    from sparsifiner.models import outline

    return survey(outline(name, image_size))


def _environment() -> dict[str, Any]:
    import platform

    import timm
    import torch

    from sparsifiner import __version__, hosts, processor
    from sparsifiner.ops import cpu, dispatch

    reasons = dispatch.reasons(torch.empty(1, 1, 2, 8))
    kernels = cpu.unavailable() or f"built; using {cpu.instruction_set()}"
    return {
        "sparsifiner": __version__,
        "torch": torch.__version__,
        "timm": timm.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}",
        "threads": torch.get_num_threads(),
        "kernels": kernels,
        "bfloat16 of torch": processor.describe(),
        "hosts": {name: host.supported for name, host in hosts.table().items()},
        "backends": {name: reason or "can run" for name, reason in reasons.items()},
    }


def _checkpoint(path: Path) -> dict[str, Any]:
    from sparsifiner.checkpoint import describe

    return describe(path)
