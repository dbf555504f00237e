"""`sparsifiner info`: what is installed here, which backends run, what a checkpoint holds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from sparsifiner.cli import common
from sparsifiner.errors import one_line


def info(
    checkpoint: Annotated[Path | None, typer.Argument(help=common.CHECKPOINT)] = None,
    as_json: common.AsJson = False,
) -> None:
    """Shows versions, the machine and the backends, or what a checkpoint holds.

    Example: `sparsifiner info student.safetensors`
    """
    content = _environment() if checkpoint is None else _checkpoint(checkpoint)
    if as_json:
        common.print_json(content)
        return
    for key, value in content.items():  # a checkpoint's can be any, also what moves a terminal's cursor
        if checkpoint is not None and key == "tuning":
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
