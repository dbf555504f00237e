"""Host models by name, with weights from a file or from timm's hub; helpful where a name or file is wrong."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib.util
import logging
import mmap
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import timm
import torch
from safetensors.torch import load_file
from torch import nn

import sparsifiner.hosts.lvvit  # noqa: F401 - registers LV-ViT with timm, so that it is found by name
from sparsifiner.errors import CheckpointError, ConfigError, reason_of

# What to say for --weights where random ones are meant.
RANDOM = "random"


def create_host(name: str, weights: str | None = None, **arguments: Any) -> nn.Module:
    """Makes a timm model in evaluation mode.

    Args:
        name: a name timm knows.
        weights: a file (``.safetensors``, or an official ``.pth`` read with ``weights_only``, a training script's
            checkpoint too), ``"hub"`` for timm's pretrained weights over the network, ``"random"`` or
            None for random weights.
        **arguments: for ``timm.create_model``, such as ``img_size``.
    """
    if not timm.is_model(name.split(".")[0]):
        raise ConfigError(f"timm has no model {name!r}{_near(name)}")
    if weights == "hub":
        try:
            with _quiet():
                return timm.create_model(name, pretrained=True, **arguments).eval()
        except Exception as error:  # whatever the hub client raises without a network
            raise CheckpointError(
                f"cannot fetch the weights of {name} from timm's hub ({type(error).__name__}): without a network, "
                "give a file with --weights"
            ) from error
    tensors = None if weights in (None, RANDOM) else read_weights(weights)
    if tensors is not None and "head.weight" in tensors and tensors["head.weight"].ndim:
        arguments.setdefault("num_classes", tensors["head.weight"].shape[0])
    model = timm.create_model(name, pretrained=False, **arguments)
    if tensors is not None:
        _fill(model, tensors, name, weights)
    return model.eval()


def outline(name: str, image_size: int | None = None) -> nn.Module:
    """A model without weights, on the meta device, where it takes no memory: to be looked at.

    Args:
        name: one that timm knows, or a folder with the config of a model of transformers, or that file.
        image_size: of the images, if not the model's own.
    """
    path = Path(name)
    config = path / "config.json" if path.is_dir() else path
    with torch.device("meta"):
        if config.suffix == ".json" and config.is_file():
            return _of_transformers(config, image_size)
        if not timm.is_model(name.split(".")[0]):
            raise ConfigError(
                f"{name} is no file, no folder with a config.json, and timm has no such model{_near(name)}"
            )
        arguments: dict[str, Any] = {} if image_size is None else {"img_size": image_size}
        try:
            return timm.create_model(name, pretrained=False, **arguments)
        except TypeError as error:  # not every model has a size
            raise ConfigError(f"timm cannot make {name} for images of {image_size}: {reason_of(error)}") from None


def _of_transformers(file: Path, image_size: int | None) -> nn.Module:
    if importlib.util.find_spec("transformers") is None:
        raise ConfigError(f"{file} is read with transformers: pip install 'sparsifiner[huggingface]'")
    import transformers

    try:
        config: Any = transformers.AutoConfig.from_pretrained(file, local_files_only=True, trust_remote_code=False)
        own = next((part for part in ("vision_config", "backbone_config") if hasattr(config, part)), None)
        if image_size is not None:
            (config if own is None else getattr(config, own)).image_size = image_size
        kind: Any = getattr(transformers, (config.architectures or ["AutoModel"])[0], None)
        if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
            return transformers.AutoModel.from_config(config, trust_remote_code=False)
        return kind(config)
    except Exception as error:  # a config's own checks raise what they like
        raise ConfigError(f"transformers cannot make a model of {file}: {reason_of(error)}") from None


def _near(name: str) -> str:
    near = difflib.get_close_matches(name, timm.list_models(), n=3)
    return f": did you mean {', '.join(near)}?" if near else ": `timm.list_models()` lists the names"


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The hub's client logs every attempt to reach it; one line at the end says more. Its progress bars stay."""
    loggers = [logging.getLogger(name) for name in ("huggingface_hub", "timm")]
    before = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        try:
            yield
        finally:
            for logger, level in zip(loggers, before, strict=True):
                logger.setLevel(level)


def read_weights(path: str) -> dict[str, torch.Tensor]:
    """Tensors from a safetensors file or a ``.pth``; a pickle that holds more than plain data is refused."""
    file = Path(path)
    if not file.is_file():
        raise CheckpointError(f"{path} does not exist or is not a file")
    try:
        content = load_file(file) if file.suffix == ".safetensors" else _read_pickle(file)
    except Exception as error:  # in a damaged file, torch's reader stumbles over anything
        raise CheckpointError(
            f"{path} is not a whole file of weights ({reason_of(error)}): truncated, damaged, or more than tensors, "
            "which is never loaded"
        ) from None
    tensors = _unwrapped(content)
    if not isinstance(tensors, dict) or not all(_is_whole(*item) for item in tensors.items()):
        where = " or ".join(map(repr, WRAPPERS))
        raise CheckpointError(f"{path} is not a state dict: expected whole tensors by name, or those under {where}")
    return tensors


# Where training scripts put the weights in a checkpoint: DeiT's, EViT's and DynamicViT's, and timm's and LV-ViT's.
WRAPPERS = ("model", "state_dict")


def _unwrapped(content: Any) -> Any:
    """The weights in what a training script saved, by the names they have in the model."""
    if not isinstance(content, dict):
        return content
    tensors = next((content[key] for key in WRAPPERS if isinstance(content.get(key), dict)), content)
    parallel = "module."  # as DataParallel calls the model
    if tensors and all(isinstance(name, str) and name.startswith(parallel) for name in tensors):
        return {name.removeprefix(parallel): value for name, value in tensors.items()}
    return tensors


def _read_pickle(file: Path) -> Any:
    """What torch saved, if it is tensors and plain values, and no larger than the file."""
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as archive:
            unpacked = sum(part.file_size for part in archive.infolist())
        if unpacked > file.stat().st_size:  # torch packs nothing
            raise CheckpointError("it would be larger unpacked")
    # Not the file itself: asked for more than is left, that makes room for all of it first.
    with (
        file.open("rb") as opened,
        mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
        torch.serialization.safe_globals([argparse.Namespace]),  # how trainers keep their settings: plain data
    ):
        return torch.load(cast(Any, mapped), map_location="cpu", weights_only=True)


def _is_whole(name: Any, value: Any) -> bool:
    """Whether it is a named tensor with memory for each of its numbers: else a small file could hold a huge one."""
    return (
        isinstance(name, str)
        and isinstance(value, torch.Tensor)
        and value.layout == torch.strided
        and value.device.type == "cpu"
        and not value.is_quantized
        and value.numel() * value.element_size() <= value.untyped_storage().nbytes()
    )


def _fill(model: nn.Module, tensors: dict[str, torch.Tensor], name: str, weights: Any) -> None:
    expected = model.state_dict()
    if (
        isinstance(model, timm.models.VisionTransformer)
        and "pos_embed" in tensors
        and tensors["pos_embed"].shape != expected["pos_embed"].shape
    ):
        from timm.models.vision_transformer import checkpoint_filter_fn

        try:
            tensors = checkpoint_filter_fn(tensors, model)  # resamples position embeddings, as timm does
        except Exception as error:  # of shapes that are none of its own
            raise CheckpointError(f"{weights} does not fit {name}: {reason_of(error)}") from None
    wrong = [key for key in expected if key in tensors and tensors[key].shape != expected[key].shape]
    missing, foreign = sorted(set(expected) - set(tensors)), sorted(set(tensors) - set(expected))
    if wrong:
        key = wrong[0]
        raise CheckpointError(
            f"{weights} does not fit {name}: {key} is {tuple(tensors[key].shape)} in the file and "
            f"{tuple(expected[key].shape)} in the model"
        )
    if missing or foreign:
        example = f"lacks {missing[0]}" if missing else f"has {foreign[0]}, which the model has not"
        raise CheckpointError(f"{weights} does not fit {name}: it {example}")
    model.load_state_dict(tensors)
