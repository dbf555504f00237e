"""Writing files so that nothing is lost: to a temporary name beside the target, then renamed; and where caches go."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path


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
