"""How far long work is, on standard error: bars on a terminal, a line now and then in a log."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

# Between two lines about the same work, where there is no terminal to draw bars on.
SECONDS = 30.0


# Work of a title and so many parts, 0 if unknown, begins; returns a function that is told how many more are done.
Progress = Callable[[str, int], Callable[[int], None]]


class Bar(Protocol):
    """A line that shows how far a phase of training is."""

    def begin(self, title: str, steps: int, done: int) -> None:
        """A phase begins, or goes on."""

    def update(self, done: int, text: str) -> None:
        """So many steps are done."""


class Display(Bar, Protocol):
    """A line for the phases, and others for other work."""

    def start(self, title: str, total: int) -> Callable[[int], None]:
        """As `Progress`."""
        ...


@contextlib.contextmanager
def show_progress() -> Iterator[Display]:
    """Bars with the time left; where standard error is a file or a pipe, lines."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as RichBars

    console = Console(stderr=True)
    if not console.is_terminal:
        yield _Lines()
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[text]}"),
    )
    with RichBars(*columns, console=console) as bars:
        yield _Bars(bars)


class _Bars:
    def __init__(self, bars: Any) -> None:
        self.bars = bars
        self.phase: Any = None

    def start(self, title: str, total: int) -> Callable[[int], None]:
        task = self.bars.add_task(title, total=total or None, text="")
        return lambda done: self.bars.advance(task, done)

    def begin(self, title: str, steps: int, done: int) -> None:
        self.phase = self.bars.add_task(title, total=steps, completed=done, text="")

    def update(self, done: int, text: str) -> None:
        self.bars.update(self.phase, completed=done, text=text)


class _Lines:
    def start(self, title: str, total: int) -> Callable[[int], None]:
        line = _Line(title, total, 0)
        return lambda done: line.to(line.done + done)

    def begin(self, title: str, steps: int, done: int) -> None:
        self.phase = _Line(title, steps, done)

    def update(self, done: int, text: str) -> None:
        self.phase.to(done, text)


class _Line:
    def __init__(self, title: str, total: int, done: int) -> None:
        self.title, self.total, self.first, self.done = title, total, done, done
        self.began = self.said = time.monotonic()

    def to(self, done: int, text: str = "") -> None:
        self.done, now = done, time.monotonic()
        if now - self.said < SECONDS and done != self.total:
            return
        self.said = now
        share = f"{done}/{self.total}" if self.total else str(done)
        parts = [f"{self.title}: {share}", f"{now - self.began:.0f} s"]
        if self.first < done < self.total:  # at the pace so far
            parts.append(f"{(now - self.began) * (self.total - done) / (done - self.first):.0f} s left")
        print(", ".join([*parts, *([text] if text else [])]), file=sys.stderr, flush=True)
