"""Fails a run of the tests that leaves anything in the checkout: what they write belongs in temporary folders.

Hooks of pytest, which conftest.py takes over. The process that started the run looks, before the first test and after
the last; its workers, if it has any, do not.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# What pytest, Python, ruff, hypothesis and the build keep beside the sources.
CACHES = {".git", "__pycache__", ".pytest_cache", ".ruff_cache", ".hypothesis", "build", "dist"}

_BEFORE = pytest.StashKey[dict[str, tuple[int, int]]]()
_FOUND = pytest.StashKey[list[str]]()


def listing(root: Path) -> dict[str, tuple[int, int]]:
    """Size and time of every file, by path; but for caches and virtual environments."""
    found = {}
    for folder, folders, files in os.walk(root):
        here = Path(folder)
        folders[:] = [
            name for name in folders if name not in CACHES and not (here / name / "pyvenv.cfg").exists()
        ]  # in place: os.walk goes by it
        for name in files:
            state = (here / name).lstat()
            found[str((here / name).relative_to(root))] = (state.st_size, state.st_mtime_ns)
    return found


def differences(before: dict[str, tuple[int, int]], after: dict[str, tuple[int, int]]) -> list[str]:
    """One line for each file that is new, gone or changed."""
    words = dict.fromkeys(after.keys() - before.keys(), "was written")
    words |= dict.fromkeys(before.keys() - after.keys(), "is gone")
    words |= {path: "was changed" for path in before.keys() & after.keys() if before[path] != after[path]}
    return [f"{path} {word}" for path, word in sorted(words.items())]


def pytest_sessionstart(session: pytest.Session) -> None:
    """Looks at the checkout."""
    if not hasattr(session.config, "workerinput"):
        session.config.stash[_BEFORE] = listing(session.config.rootpath)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Looks again."""
    if (before := session.config.stash.get(_BEFORE, None)) is None:
        return
    if found := differences(before, listing(session.config.rootpath)):
        session.config.stash[_FOUND] = found
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter) -> None:
    """Says what it found."""
    for line in terminalreporter.config.stash.get(_FOUND, ()):
        terminalreporter.write_line(f"the tests must leave nothing in the checkout, but {line}", red=True)
