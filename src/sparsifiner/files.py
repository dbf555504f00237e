"""Writing files so that nothing is lost, where caches go, and reading JSON that anybody may have written."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Lists in lists in JSON: ours have five at most, and what has a thousand cannot even be shown.
DEEPEST = 50


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yields a temporary path beside ``path`` that takes its place if the block ends well.

    On any error (a full disk, Ctrl-C) the temporary file goes and what was at ``path`` stays as it was.
    """
    target = Path(path)
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".part")
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)  # mkstemp makes it private; the result should be as open would make it
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def cache_folder() -> Path:
    """Where this user's caches go, by the XDG convention."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base and Path(base).is_absolute() else Path.home() / ".cache") / "sparsifiner"


def parse_json(text: str | bytes) -> Any:
    """JSON of an unknown hand; all that is wrong with it is a ValueError, also what Python itself gives up on."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    level, depth = [value], 0
    while level:
        if depth > DEEPEST:
            raise ValueError("it is nested too deeply")
        holders = (
            list(one.values()) if isinstance(one, dict) else one for one in level if isinstance(one, dict | list)
        )
        level, depth = [inner for holder in holders for inner in holder], depth + 1
    return value
