"""Image files: class folders, tars of them, WebDataset shards, Hugging Face datasets through timm's reader."""

from __future__ import annotations

import dataclasses
import io
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast

import torch
from PIL import Image
from timm.data.config import resolve_model_data_config
from timm.data.imagenet_info import ImageNetInfo
from timm.data.readers.img_extensions import add_img_extensions
from timm.data.readers.reader_factory import create_reader
from timm.data.transforms_factory import create_transform
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms

from sparsifiner.convert import host_of
from sparsifiner.data.folders import ClassFolders, files
from sparsifiner.data.shards import PREFIX, ShardReader
from sparsifiner.data.tars import members
from sparsifiner.errors import DataError, reason_of

Preprocess = Literal["model", "crop"]

# Decoders of what the names promise; Pillow knows others, some of which start programs.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
# Decoding takes up to 20 bytes a pixel for a moment. ImageNet's largest image has 61 million.
MAX_PIXELS = 80_000_000
# Resizing the shorter side to a model's blows the longer one up as much.
MAX_ASPECT = 100


# How to go on without images that cannot be read.
SKIP = "to pass over such images: skip_unreadable=True, on the command line --skip-unreadable"


@dataclasses.dataclass(frozen=True)
class Failure:
    """An image that could not be used, in the place of the image."""

    name: str
    reason: str
    unreadable: bool = True


class ImageLoader:
    """Batches of ``(images, labels)`` in a fixed order; labels are -1 where the data has none.

    Attributes:
        dataset: the images one by one.
        skipped: ``(name, reason)`` of unreadable images passed over so far in this iteration.
    """

    def __init__(self, dataset: Images, batch_size: int, workers: int, skip_unreadable: bool) -> None:
        self.dataset = dataset
        self._loader = DataLoader(dataset, batch_size, num_workers=workers, collate_fn=collate)
        self._skip = skip_unreadable
        self.skipped: list[tuple[str, str]] = []

    def __len__(self) -> int:
        """The number of batches."""
        return len(self._loader)

    @property
    def num_images(self) -> int:
        """How many images will be read, unreadable ones included."""
        return len(self.dataset)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        self.skipped = []
        yielded = False
        for images, labels, failures in self._loader:
            self.skipped += accept(failures, self._skip)
            if images is not None:
                yielded = True
                yield images, labels
        if not yielded:
            raise DataError(f"none of the {self.num_images} images could be read; the first: {self.skipped[0][0]}")


def open_images(
    data: str | os.PathLike[str],
    transform: Callable[[Any], Tensor],
    *,
    num_classes: int | None = None,
    class_map: str | os.PathLike[str] | None = None,
    split: str = "validation",
    limit: int | None = None,
    offset: int = 0,
    seed: int = 0,
    batch_size: int = 32,
    workers: int = 0,
    skip_unreadable: bool = False,
) -> ImageLoader:
    """Opens a set of labelled images.

    Args:
        data: a folder of class folders, a tar of class folders, ``wds/SHARDS`` for WebDataset shards on disk
            (``wds/train-{000..127}.tar``), or ``hfds/NAME`` for a Hugging Face dataset.
        transform: from a PIL image to a tensor; see `preprocessing`.
        num_classes: classes of the model, to check and map the labels; None where labels do not matter.
        class_map: a text file with one class (folder) name per line, in the model's order.
        split: of a Hugging Face dataset.
        limit: read this many images: a random sample, the same for the same seed.
        offset: leave out that many at the start of the sample, so that two samples need not overlap.
        seed: of the sample.
        batch_size: images per batch.
        workers: processes that decode beside the model; 0 decodes in this one.
        skip_unreadable: pass over images that cannot be read, and count them, instead of stopping.
    """
    reader = _open_reader(str(data), split)
    order = range(len(reader))
    if limit is not None or offset:
        if limit is not None and limit < 1:
            raise DataError(f"limit must be at least 1, got {limit}")
        end = None if limit is None else offset + limit
        shuffled = torch.randperm(len(reader), generator=torch.Generator().manual_seed(seed)).tolist()
        order = sorted(shuffled[offset:end])
    if not len(order):
        raise DataError(f"{data}: no images left after leaving out {offset} of {len(reader)}")
    mapping = None if num_classes is None else _label_mapping(reader, num_classes, class_map, str(data))
    dataset = Images(reader, order, transform, mapping, num_classes)
    return ImageLoader(dataset, batch_size, workers, skip_unreadable)


def data_config(model: nn.Module) -> dict[str, Any]:
    """How images are made ready for a model, in timm's words: ``input_size``, ``mean``, ``std``, ``crop_pct`` ..."""
    host = host_of(model)
    if (frames := host.frames(model)) is not None:
        raise DataError(
            f"{type(model).__name__} takes clips of {frames} frames, which are not read from image files: make tensors "
            "of them with the video processor that belongs to it, and call sparsifiner from Python"
        )
    if host.name != "timm" and not getattr(model, "pretrained_cfg", None):
        raise DataError(
            f"{type(model).__name__} does not say how its images are made ready: before it is converted, set "
            "model.pretrained_cfg = sparsifiner.hosts.huggingface.data_config(processor), of the image processor that "
            "belongs to it; checkpoints keep it"
        )
    config = resolve_model_data_config(model)
    return config | {"input_size": (config["input_size"][0], *host.image_size(model))}


def preprocessing(model: nn.Module, how: Preprocess = "model") -> Callable[[Any], Tensor]:
    """The evaluation transform of a model.

    Args:
        model: whose input size, mean and standard deviation are used.
        how: ``"model"`` resizes and crops as the model was evaluated; ``"crop"`` only crops the centre, for
            images that were resized before.
    """
    config = data_config(model)
    if how == "crop":
        return transforms.Compose(
            [
                _CenterCrop(config["input_size"][1:]),
                transforms.ToTensor(),
                transforms.Normalize(config["mean"], config["std"]),
            ]
        )
    if how != "model":
        raise DataError(f"unknown preprocessing {how!r}: choose 'model' or 'crop'")
    return cast(Callable[[Any], Tensor], create_transform(**config, is_training=False))


class _CenterCrop:
    def __init__(self, size: tuple[int, int]) -> None:
        self.size = size

    def __call__(self, image: Image.Image) -> Image.Image:
        height, width = self.size
        if image.height < height or image.width < width:
            raise DataError(f"is {image.height} x {image.width}, smaller than the {height} x {width} crop")
        top, left = round((image.height - height) / 2), round((image.width - width) / 2)
        return image.crop((left, top, left + width, top + height))


def decode(source: BinaryIO) -> Image.Image:
    """An image of an unknown hand, once it is known that it and what is made of it stay within bounds.

    Raises:
        DataError: it has too many pixels, or is far too long and thin.
        Exception: whatever Pillow's decoders stumble over.
    """
    with source:
        # All of it: asked for more than is left, as by a part that lies about its length, a file makes room first.
        content = io.BytesIO(source.read())
    image = Image.open(content, formats=FORMATS)
    width, height = image.size  # known from the header, before anything is unpacked
    if width * height > MAX_PIXELS:
        raise DataError(f"is {height} x {width}, more than {MAX_PIXELS / 1e6:g} million pixels")
    if max(image.size) > MAX_ASPECT * min(image.size):
        raise DataError(f"is {height} x {width}, one side more than {MAX_ASPECT} times the other")
    return image


class Images(Dataset):
    """Images and class numbers by position; a `Failure` where there is none to be had."""

    def __init__(self, reader: Any, order: Any, transform: Any, mapping: Any, num_classes: int | None) -> None:
        self.reader, self.order, self.transform = reader, order, transform
        self.mapping, self.num_classes = mapping, num_classes

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, position: int) -> tuple[Tensor, int] | Failure:
        # Returned, not raised: a worker's exception would reach the user as a traceback in a traceback.
        index = self.order[position]
        try:
            source, label = self.reader[index]
            image = source if isinstance(source, Image.Image) else decode(source)
            image = image.convert("RGB")
        except Exception as error:  # decoders raise whatever they stumble over in a damaged file
            return Failure(self.reader.filename(index), reason_of(error))
        try:
            tensor = self.transform(image)
        except (OSError, ValueError) as error:
            return Failure(self.reader.filename(index), reason_of(error))
        label = -1 if label is None else int(label)
        if self.num_classes is not None:
            if self.mapping is not None:
                label = self.mapping[label]
            if not 0 <= label < self.num_classes:
                reason = f"has label {label}, outside the model's {self.num_classes} classes"
                return Failure(self.reader.filename(index), reason, unreadable=False)
        return tensor, label


def accept(failures: list[Failure], skip: bool) -> list[tuple[str, str]]:
    """Names and reasons of images that may be passed over; an error where one may not."""
    for failure in failures:
        if not failure.unreadable:
            raise DataError(f"image {failure.name} {failure.reason}")
        if not skip:
            raise DataError(f"cannot read image {failure.name}: {failure.reason} ({SKIP})")
    return [(failure.name, failure.reason) for failure in failures]


def collate(samples: list[Any]) -> tuple[Tensor | None, Tensor | None, list[Failure]]:
    """Images and labels of a batch, None where none could be read, and what failed."""
    failures = [sample for sample in samples if isinstance(sample, Failure)]
    read = [sample for sample in samples if not isinstance(sample, Failure)]
    if not read:
        return None, None, failures
    images, labels = zip(*read, strict=True)
    return torch.stack(images), torch.tensor(labels), failures


def _open_reader(data: str, split: str) -> Any:
    add_img_extensions((".webp", ".bmp", ".tif", ".tiff"))
    if data.startswith(PREFIX):
        return ShardReader(data.removeprefix(PREFIX))
    if data.startswith("hfds/"):
        try:
            return create_reader(data, split=split)
        except ImportError:
            raise DataError(f"{data}: Hugging Face datasets need `pip install sparsifiner[train]`") from None
        except Exception as error:  # the hub client has no error of its own to catch
            raise DataError(f"cannot open {data} (split {split!r}): {error}") from None
    path = Path(data)
    if not path.exists():
        raise DataError(
            f"{data} does not exist: give a folder of class folders, a .tar of them, wds/SHARDS or hfds/NAME"
        )
    if not path.is_dir() and path.suffix.lower() != ".tar":
        raise DataError(f"{data} is a file but not a .tar: give a folder of class folders, a .tar, or hfds/NAME")
    try:
        reader = ClassFolders(files(path) if path.is_dir() else members(data))
    except OSError as error:
        raise DataError(f"{data} cannot be read: {reason_of(error)}") from None
    if len(reader) == 0:
        raise DataError(f"{data} holds no images in class folders")
    return reader


def _label_mapping(reader: Any, num_classes: int, class_map: Any, data: str) -> dict[int, int] | None:
    """From the reader's class numbers (sorted names) to the model's."""
    numbers = getattr(reader, "class_to_idx", None)
    if not numbers:
        return None
    if class_map is not None:
        try:
            names = Path(class_map).read_text(encoding="utf-8").split()
        except (OSError, ValueError) as error:
            raise DataError(f"the class map {class_map} cannot be read: {reason_of(error)}") from None
        if unknown := sorted(set(numbers) - set(names)):
            raise DataError(f"{data} has class {unknown[0]!r}, which {class_map} does not list")
        return {number: names.index(name) for name, number in numbers.items()}
    if len(numbers) == num_classes:
        return None
    imagenet = ImageNetInfo("imagenet-1k").label_names() if num_classes == 1000 else []
    if set(numbers) <= set(imagenet):
        return {number: imagenet.index(name) for name, number in numbers.items()}
    raise DataError(
        f"{data} has {len(numbers)} classes and the model {num_classes}: labels outside the model's classes "
        "cannot be scored; give a class map (a text file with one class name per line, in the model's order)"
    )
