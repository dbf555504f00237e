"""Tars without trust: where their files are, and nothing unpacked.

A tar is indexed once and its files are then read by place, from any process. What a header says is checked against the
file that there is: sizes that lie would have readers skip, or make room, for ever.
"""

from __future__ import annotations

import dataclasses
import io
import os
import tarfile
from collections.abc import Iterator
from typing import Any, BinaryIO

from sparsifiner.errors import DataError, reason_of


@dataclasses.dataclass(frozen=True)
class Member:
    """A file in a tar: its name and where its bytes are."""

    path: str
    name: str
    offset: int
    size: int

    def read(self) -> bytes:
        """Its content."""
        # Opened for each: worker processes must not share a file's position.
        with open(self.path, "rb") as file:
            file.seek(self.offset)
            return file.read(self.size)


def members(path: str) -> Iterator[Member]:
    """Files of a tar in order; those of tars in it too, as if each were a folder of its name.

    Raises:
        DataError: it is damaged, packed, or holds a file that is not all there.
    """
    try:
        with open(path, "rb") as file:
            yield from _members(file, path, "", nested=True)
    except DataError:
        raise
    except (tarfile.TarError, OSError, EOFError, ValueError, OverflowError) as error:
        raise DataError(f"cannot read {path}: {reason_of(error)}: is it a whole tar, not compressed?") from None


def _members(file: BinaryIO, path: str, folder: str, nested: bool, base: int = 0) -> Iterator[Member]:
    end = file.seek(0, os.SEEK_END)
    file.seek(0)
    with tarfile.open(fileobj=file, mode="r:") as tar:
        last = -1
        for info in tar:
            if info.offset_data <= last or info.size < 0:
                raise DataError(f"{path}: the header of {info.name!r} is damaged")
            last = info.offset_data
            if not info.isreg():
                continue
            if info.issparse() or info.offset_data + info.size > end:
                raise DataError(f"{path}: {info.name!r} says that it has {info.size} bytes, which are not there")
            found = Member(path, f"{folder}{info.name}", base + info.offset_data, info.size)
            if nested and info.name.lower().endswith(".tar"):
                inner = io.BufferedReader(_Part(file, info.offset_data, info.size))
                yield from _members(inner, path, f"{found.name[:-4]}/", nested=False, base=found.offset)
            else:
                yield found
        file.seek(tar.offset)
        if any(file.read(tarfile.BLOCKSIZE)):  # tarfile takes a damaged header for the end
            raise DataError(f"{path} is damaged at byte {base + tar.offset}: what follows cannot be read")


class _Part(io.RawIOBase):
    """A part of a file as a file."""

    def __init__(self, file: BinaryIO, start: int, size: int) -> None:
        self.file, self.start, self.size, self.at = file, start, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self.at = max(0, offset + (0, self.at, self.size)[whence])
        return self.at

    def readinto(self, buffer: Any) -> int:
        self.file.seek(self.start + self.at)
        content = self.file.read(min(len(buffer), max(0, self.size - self.at)))
        buffer[: len(content)] = content
        self.at += len(content)
        return len(content)
