"""WebDataset shards on disk: tars of `key.jpg` and `key.cls` side by side.

The reader indexes the shards once and then reads any sample by number. A stream, as the format is mostly read, could
not be shuffled whole, nor taken up again after an interruption at the very image where it stopped.
"""

from __future__ import annotations

import dataclasses
import glob
import io
import json
import re
import tarfile
from pathlib import Path
from typing import Any

from timm.data.readers.img_extensions import get_img_extensions

from sparsifiner.errors import DataError

PREFIX = "wds/"


@dataclasses.dataclass
class _Sample:
    shard: int
    name: str
    offset: int
    size: int
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
        for shard, path in enumerate(self.paths):
            self._index(shard, path)
        if not self.samples:
            raise DataError(f"{pattern} holds no images: expected tars of key.jpg and key.cls")

    def _index(self, shard: int, path: str) -> None:
        images: dict[str, _Sample] = {}
        labels: dict[str, int] = {}
        try:
            with tarfile.open(path) as tar:
                for member in tar:
                    if not member.isfile():
                        continue
                    folder, _, file = member.name.rpartition("/")
                    stem, _, extension = file.partition(".")
                    key = f"{folder}/{stem}"
                    if f".{extension.lower()}" in get_img_extensions(as_set=True):
                        images[key] = _Sample(shard, member.name, member.offset_data, member.size)
                    elif extension in ("cls", "json") and (file := tar.extractfile(member)):
                        labels[key] = _label(file.read(), extension, f"{path}: {member.name}")
        except (tarfile.TarError, OSError, EOFError) as error:
            raise DataError(f"cannot read shard {path}: {error}") from None
        for key, sample in images.items():
            sample.label = labels.get(key)
            self.samples.append(sample)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[io.BytesIO, int | None]:
        sample = self.samples[index]
        # Opened for each sample: worker processes must not share a file's position.
        with open(self.paths[sample.shard], "rb") as file:
            file.seek(sample.offset)
            return io.BytesIO(file.read(sample.size)), sample.label

    def filename(self, index: int, *_: Any, **__: Any) -> str:
        """Where a sample is, for messages."""
        sample = self.samples[index]
        return f"{self.paths[sample.shard]}: {sample.name}"


def expand(pattern: str) -> list[str]:
    """Paths of a glob, or of a range of numbers in braces: ``shard-{000..012}.tar``."""
    if found := re.search(r"\{(\d+)\.\.(\d+)\}", pattern):
        first, last = found.groups()
        numbers = [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
        paths = [pattern[: found.start()] + number + pattern[found.end() :] for number in numbers]
        if missing := next((path for path in paths if not Path(path).is_file()), None):
            raise DataError(f"{pattern}: shard {missing} does not exist")
        return paths
    return sorted(glob.glob(pattern))


def _label(content: bytes, extension: str, where: str) -> int:
    try:
        if extension == "cls":
            return int(content)
        described = json.loads(content)
        return int(described["label"] if "label" in described else described["cls"])
    except (ValueError, KeyError, TypeError):
        raise DataError(f"{where}: expected a class number, or JSON with 'label'") from None
