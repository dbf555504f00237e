"""How image processors of transformers make images ready, in timm's words."""

from __future__ import annotations

from typing import Any

from sparsifiner.errors import CheckpointError, ConfigError, reason_of

# By the numbers of PIL.
INTERPOLATIONS = ("nearest", "lanczos", "bilinear", "bicubic")


def checked(data: Any) -> dict[str, Any] | None:
    """How images are made ready, as a file has it: what cannot be done should be known before the first image."""
    from timm.data.config import resolve_data_config
    from timm.data.transforms_factory import create_transform

    if data is None:
        return None
    try:
        create_transform(**resolve_data_config(pretrained_cfg=dict(data)), is_training=False)
    except Exception as error:  # whatever nonsense makes it raise
        raise CheckpointError(f"images cannot be made ready as the file says, {data!r}: {reason_of(error)}") from None
    return data


def data_config(processor: Any) -> dict[str, Any]:
    """What an image processor of transformers does, in timm's words.

    Set as ``pretrained_cfg`` of the model it belongs to before that is converted, it travels with the model, and image
    files are read as the processor would make them ready.

    Args:
        processor: such as `transformers.AutoImageProcessor.from_pretrained` gives.
    """
    name = type(processor).__name__
    for step in ("do_resize", "do_rescale", "do_normalize"):
        if not getattr(processor, step, False):
            raise ConfigError(f"{name} does not do all that is needed ({step} is off): make images ready yourself")
    if abs(processor.rescale_factor * 255 - 1) > 1e-6:
        raise ConfigError(f"{name} rescales by {processor.rescale_factor:g}, not to [0, 1]: make images ready yourself")
    if processor.resample not in range(len(INTERPOLATIONS)):
        raise ConfigError(f"{name} resizes by {processor.resample!r}, not one of {', '.join(INTERPOLATIONS)}")
    size = _sides(processor.size)
    crop = _sides(processor.crop_size) if getattr(processor, "do_center_crop", False) else size
    if size is None or crop is None or (len(crop) == 1 and crop is size):
        raise ConfigError(f"{name} leaves images of many sizes ({processor.size}): make them ready yourself")
    height, width = crop if len(crop) == 2 else crop * 2
    return {
        "input_size": [3, height, width],
        "mean": list(processor.image_mean),
        "std": list(processor.image_std),
        "interpolation": INTERPOLATIONS[int(processor.resample)],
        "crop_pct": min(height, width) / min(size),
        # A side of its own for height and width squashes the picture; one side keeps its shape.
        "crop_mode": "squash" if len(size) == 2 else "center",
    }


def _sides(size: Any) -> tuple[int, ...] | None:
    """``(height, width)``, ``(shortest edge,)``, or None for what is neither."""
    if isinstance(size, int):
        return (size,)
    if size.get("height") and size.get("width"):
        return size["height"], size["width"]
    return (size["shortest_edge"],) if size.get("shortest_edge") and not size.get("longest_edge") else None
