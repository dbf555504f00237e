"""What makes a model again: its config in a file, and the model of a config from a file, which may say anything."""

from __future__ import annotations

import json
from typing import Any

from torch import nn

from sparsifiner.errors import CheckpointError, reason_of
from sparsifiner.hosts.huggingface import images
from sparsifiner.hosts.huggingface.table import MEMBERS, image_size, member_of, tower_of

# Classes that hold a tower known here and are made of a config alone. Others, such as those with a language model, have
# to be made by whoever loads their weights.
HOLDERS = frozenset(
    {
        "Aimv2Model",
        "CLIPModel",
        "DPTForDepthEstimation",
        "DPTForSemanticSegmentation",
        "DepthAnythingForDepthEstimation",
        "MetaClip2Model",
        "OwlViTForObjectDetection",
        "OwlViTModel",
        "Owlv2ForObjectDetection",
        "Owlv2Model",
        "SiglipModel",
        "ViTForMaskedImageModeling",
        "VitPoseForPoseEstimation",
        "YolosForObjectDetection",
    }
)


def _setting(size: Any, before: Any) -> Any:
    """As a config has it: CLIP's takes one number, where one will do, and YOLOS's always two."""
    height, width = size
    return height if height == width and isinstance(before, int) else [height, width]


def _plain(config: Any) -> dict[str, Any]:
    """A config with all that it says, but for the type of the weights, which is the weights' own."""
    plain = json.loads(config.to_json_string(use_diff=False))
    for part in (plain, *filter(None, (plain.get(name) for name in ENCODERS))):
        part.pop("dtype", None)
    return plain


# Where the config of a tower is in that of a model.
ENCODERS = ("vision_config", "backbone_config")


def describe(model: Any) -> dict[str, Any]:
    """What `build` needs."""
    member, config = member_of(model), _plain(model.config)
    own = config.get("vision_config", config)
    own["image_size"] = _setting(member.family.size(tower_of(model)), own["image_size"])
    return {
        "architecture": type(model).__name__,
        "img_size": list(image_size(model)),
        "config": config,
        "options": member.options(model),
        "data": getattr(model, "pretrained_cfg", None),
    }


def describe_holder(model: Any) -> dict[str, Any]:
    """The same of a model that holds a tower."""
    name = type(model).__name__
    known = name in HOLDERS and type(model).__module__.startswith("transformers.models.")
    return {"architecture": name, "config": _plain(model.config) if known else {}}


def build(description: dict[str, Any], layers: int) -> nn.Module:
    """The model that `describe` or `describe_holder` told of."""
    import transformers

    name: Any = description.get("architecture")
    holds = "part" in description
    known = isinstance(name, str) and name in (HOLDERS if holds else MEMBERS)
    kind: Any = getattr(transformers, name, None) if known else None
    if kind is None:
        raise CheckpointError(
            f"{name!r} is no class of transformers {transformers.__version__} that is known here: make the model "
            "yourself and pass it as load(path, model=...)"
        )
    check_config(description.get("config"), layers)
    try:
        model = kind(kind.config_class.from_dict(description["config"]), **description.get("options", {}))
        if not holds and MEMBERS[name].family.any_size(tower_of(model)):
            config = tower_of(model).config
            config.image_size = _setting(description["img_size"], config.image_size)
    except Exception as error:  # a config's own checks raise what they like
        raise CheckpointError(
            f"transformers {transformers.__version__} cannot make a {name} of the config in the file: "
            f"{reason_of(error)}"
        ) from None
    model.pretrained_cfg = images.checked(description.get("data"))
    return model


# Larger numbers are no sizes of a model, and transformers makes a label for each class before anybody can look.
LARGEST = 2**20
# Layers of a model for each of its attention layers that are converted: others work in windows, or on words.
MOST_LAYERS = 64


def check_config(config: Any, layers: int) -> None:
    """An error if a config asks for what no file of weights can hold, or for code or weights from elsewhere."""
    encoders = [config.get(name) for name in ENCODERS] if isinstance(config, dict) else []
    own = next((part for part in encoders if part), config)
    if not isinstance(own, dict) or not _fits(own.get("num_hidden_layers"), layers, layers):
        raise CheckpointError(f"the config in the file is not of a model of {layers} layers: the file is damaged")
    waiting: list[Any] = [config]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            # transformers would fetch attention of that name from its hub, and run it.
            if foreign := sorted(key for key in value if "attn_implementation" in key):
                raise CheckpointError(
                    f"the config in the file chooses how to compute: {foreign[0]} is not taken from files"
                )
            if fetched := [key for key in ("backbone", "use_pretrained_backbone") if value.get(key)]:
                raise CheckpointError(f"the config in the file asks for weights from elsewhere: {fetched[0]}")
            if not _fits(value.get("num_hidden_layers", layers), 1, layers):
                raise CheckpointError(f"the config in the file is not of a model of {layers} layers: it is damaged")
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value
        elif isinstance(value, int | float) and not abs(value) <= LARGEST:
            raise CheckpointError(f"the config in the file has a number that cannot be, {value!r}: the file is damaged")


def _fits(count: Any, least: int, layers: int) -> bool:
    return isinstance(count, int) and least <= count <= MOST_LAYERS * layers
