"""Images from anywhere, decoded with care, as a model takes them and as people look at them."""

from __future__ import annotations

import dataclasses
import io
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from timm.data.transforms_factory import create_transform
from torch import Tensor, nn
from torchvision.transforms.functional import to_pil_image, to_tensor

from sparsifiner import digits
from sparsifiner.convert import conversion_of
from sparsifiner.data.images import data_config, preprocessing
from sparsifiner.errors import ConfigError
from sparsifiner.explorer.refusal import Refusal

# Decoders that are widely used on hostile files; Pillow knows others, some of which start programs.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp"})
MAX_BYTES = 12 << 20
MAX_PIXELS = 36_000_000
# Beyond this ratio of sides only the middle is used: resizing the shorter side would blow the longer one up.
MAX_ASPECT = 4
# Pixels of the longer side of what is shown, about; and of its small copy.
SHOWN, SMALL = 672, 96

# Decoding takes some 20 bytes a pixel for a moment: one image at a time, however many are sent.
_decoding = threading.Lock()


@dataclasses.dataclass(eq=False)
class Picture:
    """An image for one model.

    Attributes:
        key: its name in requests.
        name: its name for people.
        tensor: what the model takes, ``[1, channels, height, width]``.
        shown: the same part of the image to look at, as a file.
        small: a small copy of it.
        media: the type of both files.
        notes: what was done to the image that its owner may not expect.
        dense: the dense model's logits, once they are known.
        gone: whether nothing about it may be kept any longer.
    """

    key: str
    name: str
    tensor: Tensor
    shown: bytes
    small: bytes
    media: str
    notes: tuple[str, ...] = ()
    dense: Tensor | None = None
    gone: bool = False


@dataclasses.dataclass(frozen=True)
class Lens:
    """How a model takes an image, and how people see what it takes.

    Attributes:
        take: from an RGB image to ``[channels, height, width]``.
        show: from an RGB image to the part of it that the model takes, larger.
        crisp: single pixels are to be told apart: files are PNG, and enlarged without smoothing.
    """

    take: Callable[[Image.Image], Tensor]
    show: Callable[[Image.Image], Image.Image]
    crisp: bool = False

    def picture(self, image: Image.Image, key: str, name: str, notes: tuple[str, ...] = ()) -> Picture:
        """An RGB image for the model."""
        return self.framed(self.take(image), self.show(image), key, name, notes)

    def framed(self, tensor: Tensor, shown: Image.Image, key: str, name: str, notes: tuple[str, ...] = ()) -> Picture:
        """A picture of what the model takes and what is shown of it."""
        size = (max(1, SMALL * shown.width // max(shown.size)), max(1, SMALL * shown.height // max(shown.size)))
        small = shown.resize(size, Image.Resampling.NEAREST if self.crisp else Image.Resampling.LANCZOS)
        media = "image/png" if self.crisp else "image/jpeg"
        return Picture(key, name, tensor[None], self._file(shown), self._file(small), media, notes)

    def _file(self, image: Image.Image) -> bytes:
        buffer = io.BytesIO()
        image.save(buffer, "PNG") if self.crisp else image.save(buffer, "JPEG", quality=90)
        return buffer.getvalue()


def lens_of(student: nn.Module) -> Lens:
    """The lens of a converted model."""
    host = conversion_of(student).host
    if host.name != "timm":
        raise ConfigError(f"the page shows timm's models only, not {type(student).__name__} of {host.name}")
    if host.describe(student)["architecture"] == digits.NAME:
        return Lens(_take_digit, _show_digit, crisp=True)
    channels = next(p for p in student.parameters() if p.ndim == 4).shape[1]
    if channels != 3:
        raise ConfigError(f"the page shows models of colour images, this one takes {channels} channels")
    config = data_config(student)
    _, height, width = config["input_size"]
    # The model's own way to resize and crop at a multiple of its size shows the same part, sharper.
    times = max(1, round(SHOWN / max(height, width)))
    enlarged: dict[str, Any] = config | {"input_size": (3, times * height, times * width)}
    larger: Any = create_transform(**enlarged, is_training=False)
    mean, std = (torch.tensor(config[name]).view(3, 1, 1) for name in ("mean", "std"))

    def show(image: Image.Image) -> Image.Image:
        return to_pil_image((larger(image) * std + mean).clamp(0, 1))

    return Lens(preprocessing(student), show)


def _digit(image: Image.Image) -> Image.Image:
    """8 x 8 grey pixels, bright ink on dark ground as in the digits data."""
    grey = ImageOps.fit(image.convert("L"), (8, 8), Image.Resampling.BOX)
    pixels = np.asarray(grey)
    border = np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]])
    return ImageOps.invert(grey) if border.mean() > 127 else grey


def _take_digit(image: Image.Image) -> Tensor:
    return (to_tensor(_digit(image)) - digits.MEAN) / digits.STD


def _show_digit(image: Image.Image) -> Image.Image:
    return enlarged(_digit(image))


def enlarged(image: Image.Image) -> Image.Image:
    """A tiny image whose every pixel can be seen."""
    times = max(1, SHOWN // max(image.size))
    return image.resize((times * image.width, times * image.height), Image.Resampling.NEAREST)


def decode(content: bytes) -> tuple[Image.Image, tuple[str, ...]]:
    """An image file of an unknown hand: RGB, upright, and what was done to it.

    Raises:
        Refusal: 413 where it is too large, 415 where it is no image of a known kind, 422 where it is damaged.
    """
    if len(content) > MAX_BYTES:
        raise too_large()
    if not content:
        raise Refusal(422, "the file is empty")
    try:
        with _decoding:
            return _decode(content)
    except Refusal:
        raise
    except UnidentifiedImageError:
        kinds = ", ".join(FORMATS)
        raise Refusal(415, f"this is no image the page can read ({kinds}), or its beginning is damaged") from None
    except Image.DecompressionBombError:
        raise _too_many_pixels("far too many") from None
    except Exception as error:  # decoders raise whatever they stumble over in a damaged file
        reason = str(error) or type(error).__name__
        raise Refusal(422, f"the image is damaged or cut short: {reason}") from None


def too_large() -> Refusal:
    """Said of a file before it is read to its end."""
    return Refusal(413, f"the file is larger than {MAX_BYTES >> 20} MiB: make it smaller first")


def _too_many_pixels(count: str) -> Refusal:
    return Refusal(413, f"the image has {count} pixels, more than {MAX_PIXELS / 1e6:g} million: make it smaller first")


def _decode(content: bytes) -> tuple[Image.Image, tuple[str, ...]]:
    with Image.open(io.BytesIO(content), formats=FORMATS) as probe:
        if probe.width * probe.height > MAX_PIXELS:  # known from the header, before anything is unpacked
            raise _too_many_pixels(f"{probe.width} x {probe.height}")
        probe.verify()
    notes = []
    with Image.open(io.BytesIO(content), formats=FORMATS) as opened:  # verify() leaves nothing to read
        if getattr(opened, "is_animated", False):
            notes.append("It is animated: only the first frame is used.")
        opened.load()
        image = _rgb(ImageOps.exif_transpose(opened))
    short = min(image.size)
    if max(image.size) > MAX_ASPECT * short:
        notes.append(f"It is longer than {MAX_ASPECT} times its width: only the middle is used.")
        width, height = (min(side, MAX_ASPECT * short) for side in image.size)
        left, top = (image.width - width) // 2, (image.height - height) // 2
        image = image.crop((left, top, left + width, top + height))
    return image, tuple(notes)


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode == "I" or image.mode.startswith("I;16"):  # 16 bits, which Pillow would clip, not scale
        scaled = np.asarray(image, dtype=np.float32) / 257
        image = Image.fromarray(scaled.clip(0, 255).round().astype(np.uint8))
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        ground = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(ground, image.convert("RGBA")).convert("RGB")
    return image.convert("RGB")
