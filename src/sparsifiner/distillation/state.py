"""Checkpoints of a run: folders that appear whole or not at all.

``step-2-000500`` is phase 2 after 500 steps: ``student.safetensors`` (which `sparsifiner eval` reads), the optimiser
and the moving average as safetensors, and ``state.json``. No pickle. Randomness is no state: see
`sparsifiner.distillation.data`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from sparsifiner import checkpoint
from sparsifiner.errors import CheckpointError, reason_of
from sparsifiner.files import parse_json

STUDENT, OPTIMISER, AVERAGE, STATE = "student.safetensors", "optimiser.safetensors", "average.safetensors", "state.json"
_NAME = re.compile(r"step-([12])-(\d{6,})")


@dataclasses.dataclass
class RunState:
    """Where a run is.

    Attributes:
        phase: 1 or 2.
        step: steps of this phase that are done.
        recipe: the settings, as JSON.
        world: processes that train together.
        images: how many there are in the training set.
        best: the best top-1 so far, if anything was evaluated.
    """

    phase: int
    step: int
    recipe: dict[str, Any]
    world: int
    images: int
    best: float | None = None

    @property
    def name(self) -> str:
        """Of the checkpoint's folder."""
        return f"step-{self.phase}-{self.step:06d}"


def save(
    folder: Path,
    state: RunState,
    student: nn.Module,
    optimiser: dict[str, Tensor],
    average: dict[str, Tensor] | None,
    *,
    name: str | None = None,
) -> Path:
    """Writes a checkpoint under ``folder``; on any error nothing of it is left."""
    target = folder / (name or state.name)
    partial = None
    try:
        partial = Path(tempfile.mkdtemp(dir=folder, prefix=".partial-"))
        checkpoint.save(student, partial / STUDENT)
        save_file(optimiser, partial / OPTIMISER)
        if average is not None:
            save_file(average, partial / AVERAGE)
        (partial / STATE).write_text(json.dumps(dataclasses.asdict(state), indent=2))
        partial.chmod(0o755)
        for file in partial.iterdir():
            _flush(file)
        if target.exists():  # a name that is used again, or a run that is repeated: the old one goes last
            stale = Path(tempfile.mkdtemp(dir=folder, prefix=".stale-"))
            target.rename(stale / "old")
            partial.rename(target)
            shutil.rmtree(stale)
        else:
            partial.rename(target)
    except (OSError, SafetensorError, CheckpointError) as error:
        last = newest(folder)
        kept = f"; the last good checkpoint is {last}" if last else ""
        raise CheckpointError(f"cannot save {target}: {error}{kept}") from None
    finally:
        if partial is not None:
            shutil.rmtree(partial, ignore_errors=True)
    return target


def _flush(file: Path) -> None:
    """To the disk itself: a rename may otherwise outlive a crash that what was renamed does not."""
    handle = os.open(file, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def found(folder: Path) -> list[Path]:
    """Whole checkpoints, oldest first."""
    numbered = []
    for path in folder.glob("step-*"):
        if match := _NAME.fullmatch(path.name):
            numbered.append((int(match[1]), int(match[2]), path))
    return [path for _, _, path in sorted(numbered)]


def newest(folder: Path) -> Path | None:
    """The checkpoint to go on from, if there is one."""
    paths = found(folder)
    return paths[-1] if paths else None


def prune(folder: Path, keep: int) -> None:
    """Deletes all but the last checkpoints, and what interrupted writes left."""
    for path in found(folder)[:-keep]:
        shutil.rmtree(path)
    for pattern in (".partial-*", ".stale-*"):
        for path in folder.glob(pattern):
            shutil.rmtree(path, ignore_errors=True)


def read_state(path: Path) -> RunState:
    """What a checkpoint says of itself."""
    try:
        state = RunState(**parse_json((path / STATE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{path} is not a whole checkpoint of a run: {reason_of(error)}") from None
    counts = {"phase": state.phase, "step": state.step, "world": state.world, "images": state.images}
    if wrong := next((name for name, value in counts.items() if type(value) is not int or value < 0), None):
        raise CheckpointError(f"{path} is not a whole checkpoint of a run: {wrong} is {counts[wrong]!r}")
    if (
        not isinstance(state.recipe, dict)
        or not isinstance(state.best, int | float | None)
        or state.phase not in (1, 2)
    ):
        raise CheckpointError(f"{path} is not a whole checkpoint of a run: its phase, recipe or best is none")
    return state


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of one of a checkpoint's files."""
    try:
        return load_file(path)
    except Exception as error:  # of numbers that torch has no type for, it raises what it likes
        raise CheckpointError(f"{path} is damaged ({reason_of(error)}): resume from another checkpoint") from None


def fill(module: nn.Module, tensors: dict[str, Tensor], where: Path) -> None:
    """Copies weights into a module, in place."""
    own = module.state_dict()
    if set(own) != set(tensors) or any(own[name].shape != tensors[name].shape for name in own):
        raise CheckpointError(f"{where} is of another model, or of other settings, than this run's")
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(tensors[name])
