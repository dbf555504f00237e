"""Images in class folders, on disk or in a tar: labels are the names of the folders they are in."""

from __future__ import annotations

import dataclasses
import io
import os
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

from timm.data.readers.img_extensions import get_img_extensions
from timm.utils.misc import natural_key

from sparsifiner.errors import DataError


class Source(Protocol):
    """A file somewhere."""

    @property
    def name(self) -> str:
        """Its name, with those of its folders."""
        ...

    def read(self) -> bytes:
        """Its content."""
        ...


@dataclasses.dataclass(frozen=True)
class File:
    """A file on disk, named as seen from the folder that was asked for."""

    path: Path
    name: str

    def read(self) -> bytes:
        """Its content; an error if it is a pipe or a device, which would be read for ever."""
        if not self.path.is_file():
            raise DataError("is not a file")
        return self.path.read_bytes()


def files(folder: str | os.PathLike[str]) -> Iterator[File]:
    """All files under a folder, links followed, but for links to folders that they are in."""
    top = Path(folder)
    waiting = [(top, "", {_identity(place) for place in (top, *top.resolve().parents)})]
    while waiting:
        here, name, above = waiting.pop()
        for path in here.iterdir():
            if not path.is_dir():
                yield File(path, f"{name}{path.name}")
            elif (own := _identity(path)) not in above:
                waiting.append((path, f"{name}{path.name}/", above | {own}))


def _identity(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_dev, found.st_ino


class ClassFolders:
    """Images by number, with the interface of timm's readers and in their order."""

    def __init__(self, sources: Iterable[Source]) -> None:
        known = get_img_extensions(as_set=True)
        found = [source for source in sources if PurePosixPath(source.name).suffix.lower() in known]
        self.samples = sorted(found, key=lambda source: natural_key(source.name))
        folders = [PurePosixPath(source.name).parent.name for source in self.samples]
        self.class_to_idx = {name: number for number, name in enumerate(sorted(set(folders), key=natural_key))}
        self.labels = [self.class_to_idx[name] for name in folders]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[io.BytesIO, int]:
        return io.BytesIO(self.samples[index].read()), self.labels[index]

    def filename(self, index: int, *_: Any, **__: Any) -> str:
        """Where a sample is, for messages."""
        return self.samples[index].name
