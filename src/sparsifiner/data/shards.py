"""WebDataset shards on disk: tars of `key.jpg` and `key.cls` side by side.

The reader indexes the shards once and then reads any sample by number. A stream, as the format is mostly read, could
not be shuffled whole, nor taken up again after an interruption at the very image where it stopped.
"""

from __future__ import annotations

import dataclasses
import glob
import io
import re
from pathlib import Path
from typing import Any

from timm.data.readers.img_extensions import get_img_extensions

from sparsifiner.data.tars import Member, members
from sparsifiner.errors import DataError
from sparsifiner.files import parse_json

PREFIX = "wds/"


# A label is a number, or JSON that says a little more.
LARGEST_LABEL_FILE = 1 << 20


@dataclasses.dataclass
class _Sample:
    image: Member
    label: int | None = None


class ShardReader:
    """Samples of all shards in order, with the interface of timm's readers."""

    def __init__(self, pattern: str) -> None:
        self.paths = expand(pattern)
        if not self.paths:
            raise DataError(
                f"{pattern}: no such shards; give a path, a glob, or numbers such as shard-{{000..012}}.tar"
            )
        self.samples: list[_Sample] = []
        for path in self.paths:
            self._index(path)
        if not self.samples:
            raise DataError(f"{pattern} holds no images: expected tars of key.jpg and key.cls")

    def _index(self, path: str) -> None:
        images: dict[str, Member] = {}
        labels: dict[str, int] = {}
        for member in members(path):
            folder, _, file = member.name.rpartition("/")
            stem, _, extension = file.partition(".")
            key = f"{folder}/{stem}"
            if f".{extension.lower()}" in get_img_extensions(as_set=True):
                images[key] = member
            elif extension in ("cls", "json"):
                labels[key] = _label(member, extension)
        self.samples += [_Sample(image, labels.get(key)) for key, image in images.items()]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[io.BytesIO, int | None]:
        sample = self.samples[index]
        return io.BytesIO(sample.image.read()), sample.label

    def filename(self, index: int, *_: Any, **__: Any) -> str:
        """Where a sample is, for messages."""
        image = self.samples[index].image
        return f"{image.path}: {image.name}"


def expand(pattern: str) -> list[str]:
    """Paths of a glob, or of a range of numbers in braces: ``shard-{000..012}.tar``."""
    if found := re.search(r"\{(\d+)\.\.(\d+)\}", pattern):
        first, last = found.groups()
        paths = []
        for number in range(int(first), int(last) + 1):
            paths.append(pattern[: found.start()] + str(number).zfill(len(first)) + pattern[found.end() :])
            if not Path(paths[-1]).is_file():  # at once: a range can be any
                raise DataError(f"{pattern}: shard {paths[-1]} does not exist")
        return paths
    return sorted(glob.glob(pattern))


def _label(member: Member, extension: str) -> int:
    try:
        if member.size > LARGEST_LABEL_FILE:
            raise ValueError("too large")
        content = member.read()
        if extension == "json":
            described = parse_json(content)
            content = described["label"] if "label" in described else described["cls"]
        label = int(content)
        if isinstance(content, float) or not 0 <= label < 2**31:
            raise ValueError("no class number")
        return label
    except (ValueError, KeyError, TypeError, OverflowError):
        raise DataError(
            f"{member.path}: {member.name}: expected a class number, or JSON with a class number as 'label'"
        ) from None
