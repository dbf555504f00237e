"""What can go wrong, as types a caller can catch.

Every message is one line that says what was wrong, what was expected and what to do. The command
line prints it and exits with code 2.
"""

from __future__ import annotations

import re

# Of a message. What a file says may be in it, and a file can say anything.
LONGEST = 800


class SparsifinerError(Exception):
    """The base of all errors this library raises on purpose."""

    def __str__(self) -> str:
        return one_line(super().__str__(), LONGEST)


def one_line(text: str, longest: int | None = None) -> str:
    """Text of an unknown hand as a terminal can show it: no breaks, no control characters, and its middle left out.

    Args:
        text: whatever it is.
        longest: characters that are left at most; None for all.
    """
    if longest is not None and len(text) > longest:
        text = f"{text[: longest * 2 // 3]} … {text[-longest // 4 :]}"
    if text.isprintable():
        return text
    text = re.sub(r"\s*\n\s*", " ", text.strip())
    shown = (part if part.isprintable() else part.encode("unicode_escape").decode() for part in text)
    return "".join(shown)


def reason_of(error: BaseException) -> str:
    """What an error of another library says, short enough to stand in one of ours."""
    return one_line((str(error).splitlines() or [""])[0], 200) or type(error).__name__


class ConfigError(SparsifinerError, ValueError):
    """A setting is impossible in itself or for this model."""


class UnsupportedModelError(SparsifinerError, TypeError):
    """A model cannot be converted; the message names the reason and what is supported."""


class BackendError(SparsifinerError, RuntimeError):
    """The backend asked for cannot run here; the message gives its reason."""


class CheckpointError(SparsifinerError, RuntimeError):
    """A file is not what it should be: truncated, foreign, for another host or another size."""


class DataError(SparsifinerError, ValueError):
    """Images or labels are unusable: unreadable, empty, not finite, of the wrong size or class."""


class TrainingError(SparsifinerError, RuntimeError):
    """Training cannot go on: a loss that is not finite, or an interruption; the last checkpoint is whole."""
