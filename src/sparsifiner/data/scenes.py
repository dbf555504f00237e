"""Images with a class for every pixel, in a folder or a tar.

A class map is a PNG whose pixels are class numbers (grey, or a palette's indices). It lies beside its image
(``name.jpg`` and ``name.png``), or images are in a folder ``images`` and maps under the same names in a folder ``maps``
beside it.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import torch
from PIL import Image
from timm.utils.misc import natural_key
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset
from torchvision.transforms import functional as pictures

from sparsifiner.data.folders import Source, files
from sparsifiner.data.images import Failure, data_config, decode
from sparsifiner.data.tars import members
from sparsifiner.errors import DataError, reason_of

IMAGES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff"})
IGNORED = -100  # the class that torch's cross-entropy leaves out
NUMBERS = ("L", "P", "1", "I", "I;16")  # Pillow's modes whose pixels are numbers, not colours


class Scenes(Dataset):
    """Scenes by number: the image ready for a model and its class map, or a `Failure`.

    Args:
        data: a folder or a tar.
        model: whose input size and normalisation are used. Images are resized to its size, whatever their own shape.
        num_classes: classes are counted from 0.
        void: a number in the maps for what is not counted, which becomes `IGNORED`; None for none.
        part: a folder in ``data`` to take the scenes from, such as ``train``; empty for all.
        map_size: height and width that maps are brought to, by the nearest pixel; None leaves them as they are.
        limit: only so many scenes, evenly spread.
    """

    def __init__(
        self,
        data: str | os.PathLike[str],
        model: nn.Module,
        num_classes: int,
        *,
        void: int | None = None,
        part: str = "",
        map_size: tuple[int, int] | None = None,
        limit: int | None = None,
    ) -> None:
        self.num_classes, self.void, self.map_size = num_classes, void, map_size
        config = data_config(model)
        self.size, self.mean, self.std = config["input_size"][1:], config["mean"], config["std"]
        pairs = _pairs(_sources(str(data), part), f"{data}{f', {part}/' if part else ''}")
        if limit is not None and limit < len(pairs):
            pairs = [pairs[number * len(pairs) // limit] for number in range(limit)]
        self.pairs = pairs

    def __len__(self) -> int:
        return len(self.pairs)

    def name(self, number: int) -> str:
        """Of a scene's image."""
        return self.pairs[number][0].name

    def picture(self, number: int) -> Image.Image:
        """A scene's image as it is."""
        return decode(io.BytesIO(self.pairs[number][0].read())).convert("RGB")

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor] | Failure:
        # Returned, not raised: as `sparsifiner.data.images.Images` does.
        image_source, map_source = self.pairs[number]
        try:
            picture = self.picture(number)
        except Exception as error:  # decoders raise whatever they stumble over in a damaged file
            return Failure(image_source.name, reason_of(error))
        try:
            drawn = decode(io.BytesIO(map_source.read()))
            numbers = np.array(drawn)
        except Exception as error:
            return Failure(map_source.name, reason_of(error))
        if reason := self._wrong(drawn, numbers, picture):
            return Failure(image_source.name, f"has a class map {map_source.name} {reason}", unreadable=False)
        labels = torch.from_numpy(numbers.astype(np.int64))
        if self.void is not None:
            labels[labels == self.void] = IGNORED
        if self.map_size is not None:
            labels = functional.interpolate(labels[None, None].double(), self.map_size, mode="nearest-exact")
            labels = labels[0, 0].long()
        height, width = self.size
        resized = pictures.to_tensor(picture.resize((width, height), Image.Resampling.BICUBIC))
        return pictures.normalize(resized, self.mean, self.std), labels

    def _wrong(self, drawn: Image.Image, numbers: np.ndarray, picture: Image.Image) -> str | None:
        """Why this is no class map of the picture, or None if it is."""
        if drawn.mode not in NUMBERS:
            return f"in colours ({drawn.mode}): its pixels must be class numbers, grey or indices of a palette"
        if drawn.size != picture.size:
            sizes = f"{drawn.height} x {drawn.width} pixels and {picture.height} x {picture.width} itself"
            return f"of another size: {sizes}"
        outside = (numbers < 0) | (numbers >= self.num_classes)
        if self.void is not None:
            outside &= numbers != self.void
        if outside.any():
            uncounted = "" if self.void is None else f", and {self.void} for what is not counted"
            return f"with class {numbers[outside][0]}: expected 0 to {self.num_classes - 1}{uncounted}"
        return None


def _sources(data: str, part: str) -> Iterable[Source]:
    path = Path(data)
    if not path.exists():
        raise DataError(f"{data} does not exist: give a folder or a .tar of images and class maps")
    if not path.is_dir() and path.suffix.lower() != ".tar":
        raise DataError(f"{data} is a file but not a .tar: give a folder or a .tar of images and class maps")
    try:
        found: list[Any] = list(files(path) if path.is_dir() else members(data))
    except OSError as error:
        raise DataError(f"{data} cannot be read: {reason_of(error)}") from None
    start = f"{part.strip('/')}/" if part else ""
    return [source for source in found if source.name.removeprefix("./").startswith(start)]


def _pairs(sources: Iterable[Source], where: str) -> list[tuple[Source, Source]]:
    """Each image with its class map, in the order of names."""
    images: dict[tuple[str, ...], Source] = {}
    maps: dict[tuple[str, ...], Source] = {}
    for source in sources:
        path = PurePosixPath(source.name)
        if path.suffix.lower() not in IMAGES:
            continue
        folders = path.parts[:-1]
        is_map = "maps" in folders or ("images" not in folders and path.suffix.lower() == ".png")
        key = (*(folder for folder in folders if folder not in ("images", "maps")), path.stem)
        (maps if is_map else images)[key] = source
    if not images:
        raise DataError(
            f"{where}: no images with class maps: expected name.jpg beside name.png, or folders images/ and maps/"
        )
    if lonely := sorted(set(images) - set(maps)):
        raise DataError(f"{where}: image {images[lonely[0]].name} has no class map {lonely[0][-1]}.png")
    return [(images[key], maps[key]) for key in sorted(images, key=lambda key: natural_key("/".join(key)))]
