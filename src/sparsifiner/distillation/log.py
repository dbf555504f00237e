"""What a run says while it runs: a live line, a JSONL file, TensorBoard."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sparsifiner.files import replacing
from sparsifiner.progress import Bar

LOG = "log.jsonl"
# Of a step's time in the running mean: slow enough to read, fast enough to see a change.
SMOOTHING = 0.05


class Log:
    """Collects the figures of a run.

    Args:
        folder: where ``log.jsonl`` goes; None for no file.
        bar: the live line, if somebody looks.
        tensorboard: also write event files; needs the package tensorboard.
        on_write: called with each line of the log.
    """

    def __init__(
        self,
        folder: Path | None = None,
        bar: Bar | None = None,
        tensorboard: bool = False,
        on_write: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        self.path = None if folder is None else folder / LOG
        self.bar, self.on_write = bar, on_write
        self.lines: list[dict[str, Any]] = []
        self.seconds: float | None = None  # running mean of a step
        self.images = 0
        self.done = 0
        self.text = ""
        self.board = _board(folder) if tensorboard and folder is not None else None

    def rewind(self, phase: int, step: int) -> None:
        """Forgets what was logged after a checkpoint that the run goes on from."""
        if self.path is None or not self.path.exists():
            return
        self.lines = [line for line in read(self.path) if (line["phase"], line["step"]) <= (phase, step)]
        with replacing(self.path) as temporary:
            temporary.write_text("".join(json.dumps(line) + "\n" for line in self.lines))

    def begin(self, phase: int, steps: int, done: int, images: int) -> None:
        """A phase begins, or goes on."""
        self.seconds, self.done, self.images = None, done, images
        if self.bar:
            self.bar.begin(f"phase {phase}", steps, done)

    def step(self, images: int, seconds: float) -> None:
        """A step is done."""
        self.images = images
        self.seconds = seconds if self.seconds is None else self.seconds + SMOOTHING * (seconds - self.seconds)
        self.done += 1
        if self.bar:
            self.bar.update(self.done, f"{self.text}  {images / self.seconds:.1f} images/s")

    def write(self, phase: int, step: int, epoch: float, figures: dict[str, float]) -> None:
        """A line of the log."""
        speed = {"images_per_second": self.images / self.seconds} if self.seconds else {}
        line = {"phase": phase, "step": step, "epoch": round(epoch, 4), **figures, **speed}
        self.lines.append(line)
        shown = ("loss", "label", "token", "prediction", "attention", "top1")
        self.text = "  ".join(f"{name} {figures[name]:.4g}" for name in shown if name in figures)
        if self.path is not None:
            with self.path.open("a") as file:  # one write a line: a reader never sees half of one
                file.write(json.dumps(line) + "\n")
        if self.board is not None:
            for name, value in figures.items():
                self.board.add_scalar(f"phase{phase}/{name}", value, step)
        if self.on_write:
            self.on_write(line)

    def end(self, phase: int) -> None:
        """A phase is over."""
        if self.board is not None:
            self.board.flush()


def read(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The lines of a log; a last line that was cut off by a crash is left out."""
    lines = []
    for text in Path(path).read_text().splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            lines.append(json.loads(text))
    return lines


def _board(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        from sparsifiner.errors import ConfigError

        raise ConfigError("TensorBoard is not installed: pip install tensorboard, or train without it") from None
    return SummaryWriter(str(folder / "tensorboard"))
