"""A photo as a model takes it, and as people look at it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from sparsifiner.data.images import Preprocess, data_config, preprocessing
from sparsifiner.errors import DataError


def read_photo(model: nn.Module, path: Path, how: Preprocess = "model") -> tuple[Tensor, np.ndarray]:
    """An image file preprocessed for a model, ``[channels, height, width]``, and the same to look at."""
    try:
        with Image.open(path) as image:
            pixels = preprocessing(model, how)(image.convert("RGB"))
    except FileNotFoundError:
        raise DataError(f"{path} does not exist") from None
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise DataError(f"{path} cannot be read as an image: {error}") from None
    config = data_config(model)
    return pixels, visible(pixels, config["mean"], config["std"])


def visible(pixels: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> np.ndarray:
    """What a model saw, ``[height, width, 3]`` in [0, 1]."""
    shape = (-1, 1, 1)
    colours = pixels * torch.tensor(std).view(shape) + torch.tensor(mean).view(shape)
    return colours.clamp(0, 1).expand(3, -1, -1).permute(1, 2, 0).numpy()
