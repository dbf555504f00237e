"""Whatever a caller has at hand, as a stream of checked image batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from sparsifiner.errors import DataError

BATCH_SIZE = 32


def as_batches(images: Tensor | Iterable[Any], batch_size: int = BATCH_SIZE) -> Iterator[Tensor]:
    """Yields float batches ``[batch, channels, height, width]``, and refuses what cannot be images.

    Clips are ``[batch, frames, channels, height, width]``.

    Args:
        images: a tensor of images, or an iterable of batches, each a tensor or a tuple whose first item is
            one (labels and the like are ignored).
        batch_size: into how many images a tensor is cut; batches of an iterable stay as they are.
    """
    if isinstance(images, Tensor):
        stream: Iterable[Any] = images.split(batch_size) if images.ndim in (4, 5) and len(images) else (images,)
    else:
        stream = images
    seen = 0
    for number, item in enumerate(stream):
        batch = item[0] if isinstance(item, tuple | list) else item
        if not isinstance(batch, Tensor) or batch.ndim not in (4, 5):
            found = f"shape {tuple(batch.shape)}" if isinstance(batch, Tensor) else type(batch).__name__
            raise DataError(f"batch {number}: expected a tensor [batch, channels, height, width], got {found}")
        if not batch.is_floating_point():
            raise DataError(
                f"batch {number}: images are {batch.dtype}; normalise them to floating point as the model expects"
            )
        if len(batch) == 0:
            continue
        finite = torch.isfinite(batch).flatten(1).all(1)
        if not bool(finite.all()):
            bad = seen + int((~finite).nonzero()[0])
            raise DataError(f"image {bad} holds NaN or infinite values")
        seen += len(batch)
        yield batch
    if seen == 0:
        raise DataError("no images: the data is empty")
