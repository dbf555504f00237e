"""Vision Transformers of Hugging Face's transformers: ViT, DeiT, DINOv2 and CLIP's vision tower.

transformers is optional and slow to import. So its classes are known here by name, and only `_build` imports it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from sparsifiner.errors import CheckpointError, ConfigError, DataError, reason_of
from sparsifiner.hosts import BlockAdapter, BlockSite, Host, Site, obstacle, refuse_tracing
from sparsifiner.nn.attention import NO_MASK, AttentionAdapter
from sparsifiner.nn.grid import TokenGrid

SUPPORTED = (
    "Hugging Face's ViT, DeiT (distilled too), DINOv2 (with registers too) and CLIP's vision tower, with a classifier "
    "or without"
)

# By the numbers of PIL.
INTERPOLATIONS = ("nearest", "lanczos", "bilinear", "bicubic")

NO_WEIGHTS = "sparse attention has no weights to output: look at it with sparsifiner.capture, or set keep=1.0"


def _qkv(attention: Any, x: Tensor, context: None) -> tuple[Tensor, Tensor, Tensor]:
    shape = (*x.shape[:-1], -1, attention.head_dim)
    q, k, v = (part(x).view(shape).transpose(1, 2) for part in (attention.q_proj, attention.k_proj, attention.v_proj))
    return q, k, v


def _arguments(
    attention: Any, hidden_states: Tensor, attention_mask: Tensor | None = None, **settings: Any
) -> tuple[Tensor, None, str | None]:
    if attention_mask is not None or settings.get("is_causal"):
        return hidden_states, None, NO_MASK
    # As transformers decides whether to record them.
    weights = settings.get("output_attentions", getattr(attention.config, "output_attentions", False))
    return hidden_states, None, NO_WEIGHTS if weights else None


def _project(attention: Any, heads: Tensor, x: Tensor, context: None, *, name: str) -> tuple[Tensor, None]:
    return getattr(attention, name)(heads.transpose(1, 2).flatten(2)), None  # no weights, as with torch's own attention


def _mixing(attention: Any, *, name: str) -> Tensor:
    return getattr(attention, name).weight


def _scale(attention: Any, *, name: str) -> float:
    return getattr(attention, name)


def _adapter(projection: str, scale: str) -> AttentionAdapter:
    """For attention whose output projection and scale have these names."""
    return AttentionAdapter(
        qkv=_qkv,
        project=functools.partial(_project, name=projection),
        mixing=functools.partial(_mixing, name=projection),
        scale=functools.partial(_scale, name=scale),
        arguments=_arguments,
    )


O_PROJ, OUT_PROJ = _adapter("o_proj", "scaling"), _adapter("out_proj", "scale")


def _attend(block: Any, x: Tensor, *arguments: Any, place: str, norm: str, after: tuple[str, ...], **settings: Any):
    added, _ = getattr(block, place)(getattr(block, norm)(x), *arguments, **settings)
    for name in after:
        added = getattr(block, name)(added)
    return x + added


def _feed(block: Any, x: Tensor, *, norm: str, after: tuple[str, ...]) -> Tensor:
    added = block.mlp(getattr(block, norm)(x))
    for name in after:
        added = getattr(block, name)(added)
    return x + added


def _width(block: Any, *, norm: str) -> int:
    return getattr(block, norm).normalized_shape[0]


def _halves(
    place: str, norms: tuple[str, str], after: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
) -> BlockAdapter:
    """For blocks with these norms before attention and feed-forward part, and these modules after each."""
    return BlockAdapter(
        attend=functools.partial(_attend, place=place, norm=norms[0], after=after[0]),
        feed=functools.partial(_feed, norm=norms[1], after=after[1]),
        dim=functools.partial(_width, norm=norms[0]),
    )


@dataclasses.dataclass(frozen=True)
class _Attention:
    """What one attention class calls its parts. By exact type: a subclass may compute something else."""

    kind: str
    adapter: AttentionAdapter = O_PROJ
    heads: str = "num_attention_heads"
    dropout: str = "attention_dropout"
    setting: str = "attention_probs_dropout_prob"  # the dropout in the config


@dataclasses.dataclass(frozen=True)
class _Family:
    """One architecture: a tower of blocks behind ``embeddings``, as transformers builds it.

    Attributes:
        attention: its attention class.
        since: the first version of transformers that builds it like this.
        blocks: where in the tower the blocks are.
        place: where in a block the attention is.
        halves: how to run the two halves of a block.
        recorder: where in the tower the module is that records outputs such as attention weights.
        num_prefix: from the tower's config to the number of tokens before the patches.
        any_size: whether it resamples its position embeddings for every image, or only when told.
    """

    attention: _Attention
    since: tuple[int, int]
    halves: BlockAdapter
    blocks: str = "layers"
    place: str = "attention"
    recorder: str = ""
    num_prefix: Callable[[Any], int] = lambda config: 1
    any_size: bool = False


@dataclasses.dataclass(frozen=True)
class _Member:
    """A model class.

    Attributes:
        family: the architecture.
        tower: where in the model that is.
        unused: what of the tower its predictions do not depend on.
        options: what it was made with beside the config.
    """

    family: _Family
    tower: str = ""
    unused: tuple[str, ...] = ()
    options: Callable[[Any], dict[str, Any]] = lambda model: {}


VIT = _Family(
    _Attention("ViTAttention"),
    since=(5, 9),
    halves=_halves("attention", ("layernorm_before", "layernorm_after"), (("dropout",), ("dropout",))),
)
DEIT = dataclasses.replace(VIT, attention=_Attention("DeiTAttention"), num_prefix=lambda config: 2)
DINOV2 = _Family(
    _Attention("Dinov2Attention"),
    since=(5, 18),
    halves=_halves("attention", ("norm1", "norm2"), (("layer_scale1", "drop_path"), ("layer_scale2", "drop_path"))),
    blocks="encoder.layer",
    recorder="encoder",
    any_size=True,
)
DINOV2_WITH_REGISTERS = dataclasses.replace(
    DINOV2,
    attention=_Attention("Dinov2WithRegistersAttention"),
    num_prefix=lambda config: 1 + config.num_register_tokens,
)
CLIP = _Family(
    _Attention(
        "CLIPAttention",
        adapter=OUT_PROJ,
        heads="num_heads",
        dropout="dropout",
        setting="attention_dropout",
    ),
    since=(5, 6),
    halves=_halves("self_attn", ("layer_norm1", "layer_norm2")),
    blocks="encoder.layers",
    place="self_attn",
)


def _options(model: Any) -> dict[str, Any]:
    return {"add_pooling_layer": model.pooler is not None, "use_mask_token": model.embeddings.mask_token is not None}


MEMBERS = {
    "ViTModel": _Member(VIT, options=_options),
    "ViTForImageClassification": _Member(VIT, "vit"),
    "DeiTModel": _Member(DEIT, options=_options),
    "DeiTForImageClassification": _Member(DEIT, "deit"),
    "DeiTForImageClassificationWithTeacher": _Member(DEIT, "deit"),
    "Dinov2Model": _Member(DINOV2),
    "Dinov2ForImageClassification": _Member(DINOV2, "dinov2"),
    "Dinov2WithRegistersModel": _Member(DINOV2_WITH_REGISTERS),
    "Dinov2WithRegistersForImageClassification": _Member(DINOV2_WITH_REGISTERS, "dinov2_with_registers"),
    "CLIPVisionModel": _Member(CLIP),
    "CLIPVisionModelWithProjection": _Member(CLIP, "vision_model"),
    "CLIPForImageClassification": _Member(CLIP, "vision_model", unused=("post_layernorm",)),
}

# Where the predictions are in what a model returns; the first that is there.
OUTPUTS = ("logits", "image_embeds", "pooler_output")


def _is_theirs(kind: type) -> bool:
    return kind.__module__.startswith("transformers.models.")


def _find(model: nn.Module) -> _Member | None:
    """The row of a model's class, or of the class it was derived from."""
    return next((MEMBERS[kind.__name__] for kind in type(model).__mro__ if _is_known(kind)), None)


def _is_known(kind: type) -> bool:
    return _is_theirs(kind) and kind.__name__ in MEMBERS


def _member(model: nn.Module) -> _Member:
    member = _find(model)
    assert member is not None  # `_refusal` has seen to it
    return member


def _tower(model: nn.Module) -> Any:
    return model.get_submodule(_member(model).tower)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Site(Site):
    """An attention module whose weights can be recorded."""

    recorder: nn.Module

    def put(self, module: nn.Module) -> None:
        """Stands another module in its place."""
        # When outputs are first asked for, transformers hooks the attention modules that it finds in the model. Ours
        # are no such, so it must do that before: then dense layers give their weights, and so does a restored model.
        with contextlib.suppress(ImportError):
            from transformers.utils.output_capturing import maybe_install_capturing_hooks

            maybe_install_capturing_hooks(self.recorder)  # pyright: ignore[reportArgumentType]
            _make_picklable(self.recorder)
        super().put(module)


@dataclasses.dataclass(frozen=True)
class _Recorder:
    """A hook of transformers that records outputs, which is a local function and so cannot be pickled, made anew."""

    key: str
    index: int
    capture_initial_hidden_state: bool

    @functools.cached_property
    def hook(self) -> Callable[..., None]:
        """As transformers makes it."""
        from transformers.utils.output_capturing import install_output_capuring_hook

        blank = nn.Identity()
        install_output_capuring_hook(blank, **dataclasses.asdict(self))
        return next(iter(blank._forward_hooks.values()))

    def __call__(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self.hook(module, inputs, output)

    def __reduce__(self) -> tuple:
        return _Recorder, dataclasses.astuple(self)


def _make_picklable(model: nn.Module) -> None:
    names = {field.name for field in dataclasses.fields(_Recorder)}
    for module in model.modules():
        for number, hook in module._forward_hooks.items():
            if inspect.isfunction(hook) and names <= (settings := inspect.getclosurevars(hook).nonlocals).keys():
                module._forward_hooks[number] = _Recorder(**{name: settings[name] for name in names})


def _sites(model: nn.Module) -> Iterator[Site]:
    member = _member(model)
    family, attention = member.family, member.family.attention
    start = f"{member.tower}." if member.tower else ""
    for index, block in enumerate(model.get_submodule(f"{start}{family.blocks}").children()):
        module: Any = getattr(block, family.place, None)
        if _is_theirs(type(module)) and type(module).__name__ == attention.kind:
            yield _Site(
                name=f"{start}{family.blocks}.{index}.{family.place}",
                parent=block,
                attribute=family.place,
                module=module,
                adapter=attention.adapter,
                num_heads=getattr(module, attention.heads),
                head_dim=module.head_dim,
                recorder=_tower(model).get_submodule(family.recorder),
            )


def _refusal(model: nn.Module) -> str | None:
    member = _find(model)
    if member is None:
        if type(model).__name__.startswith("Swin"):
            return "its attention already works inside shifted windows, not over all tokens"
        return obstacle(model) or "it is not one of the models of transformers that are known"
    family, attention = member.family, member.family.attention
    sites: list[Any] = []
    with contextlib.suppress(AttributeError):  # built otherwise
        sites = list(_sites(model))
    if not sites:
        version = sys.modules["transformers"].__version__
        if tuple(map(int, version.split(".")[:2])) < family.since:
            first = ".".join(map(str, family.since))
            return f"transformers {version} builds it as before {first}: upgrade, pip install 'transformers>={first}'"
        return f"its blocks hold no {attention.kind}"
    if any(getattr(site.module, attention.dropout) > 0 for site in sites):
        return f"it uses attention dropout: make it with {attention.setting}=0"
    return None


def _pair(size: Any) -> tuple[int, int]:
    height, width = size if isinstance(size, list | tuple) else (size, size)
    return int(height), int(width)


def _image_size(model: nn.Module) -> tuple[int, int]:
    """Where any size will do, the config says which is meant: it can be changed after the model was made."""
    tower = _tower(model)
    return _pair(tower.config.image_size) if _member(model).family.any_size else _built_size(tower)


def _built_size(tower: Any) -> tuple[int, int]:
    """What the position embeddings are for."""
    embeddings = tower.embeddings
    return _pair((embeddings if hasattr(embeddings, "image_size") else embeddings.patch_embeddings).image_size)


def _setting(size: Any) -> Any:
    """As a config has it: one number where one will do, for CLIP takes no other."""
    height, width = size
    return height if height == width else [height, width]


def _grid(model: nn.Module) -> TokenGrid:
    tower = _tower(model)
    (height, width), patch = _image_size(model), _pair(tower.embeddings.patch_size)
    return TokenGrid((height // patch[0], width // patch[1]), _member(model).family.num_prefix(tower.config))


@dataclasses.dataclass
class _GridWatcher:
    """Sets the grid from the size of each image, and refuses images the model cannot take.

    An object, not a closure, so that a deep copy of the model watches the copy's own grid.
    """

    grid: TokenGrid
    any_size: bool

    def __call__(self, embeddings: Any, inputs: tuple[Any, ...], settings: dict[str, Any]) -> None:
        pixels = inputs[0] if inputs else settings["pixel_values"]
        refuse_tracing(pixels)
        height, width = pixels.shape[-2:]
        fixed = not self.any_size and not settings.get("interpolate_pos_encoding")
        if fixed:
            expected = _pair(embeddings.image_size)
            if (height, width) != expected:
                raise DataError(
                    f"images are {height} x {width} but the model takes {expected[0]} x {expected[1]}: "
                    "resize them, or call it with interpolate_pos_encoding=True"
                )
        patch = _pair(embeddings.patch_size)
        # What is left over at the edges, it ignores.
        self.grid.begin((height // patch[0], width // patch[1]), only=fixed)


def _watch(model: nn.Module, grid: TokenGrid) -> Any:
    watcher = _GridWatcher(grid, _member(model).family.any_size)
    return _tower(model).embeddings.register_forward_pre_hook(watcher, with_kwargs=True)


def _describe(model: Any) -> dict[str, Any]:
    member, tower = _member(model), _tower(model)
    config = json.loads(model.config.to_json_string(use_diff=False))
    own = config["vision_config"] if model.config.sub_configs else config
    own["image_size"] = _setting(_built_size(tower))
    for part in (config, own):
        part.pop("dtype", None)  # the weights' own, whatever the model was made in
    return {
        "architecture": type(model).__name__,
        "img_size": list(_image_size(model)),
        "config": config,
        "options": member.options(model),
        "data": getattr(model, "pretrained_cfg", None),
    }


def _build(description: dict[str, Any], layers: int) -> nn.Module:
    import transformers

    name: Any = description.get("architecture")
    kind: Any = getattr(transformers, name, None) if isinstance(name, str) and name in MEMBERS else None
    if kind is None:
        raise CheckpointError(
            f"{name!r} is no class of transformers {transformers.__version__} that is known here: make the model "
            "yourself and pass it as load(path, model=...)"
        )
    _check_config(description.get("config"), layers)
    try:
        model = kind(kind.config_class.from_dict(description["config"]), **description["options"])
        if MEMBERS[name].family.any_size:
            _tower(model).config.image_size = _setting(description["img_size"])
    except Exception as error:  # a config's own checks raise what they like
        raise CheckpointError(
            f"transformers {transformers.__version__} cannot make a {name} of the config in the file: "
            f"{reason_of(error)}"
        ) from None
    model.pretrained_cfg = _checked(description.get("data"))
    return model


# Larger numbers are no sizes of a model, and transformers makes a label for each class before anybody can look.
LARGEST = 2**20


def _check_config(config: Any, layers: int) -> None:
    """An error if a config asks for what no file of weights can hold, or for code from elsewhere."""
    own = config.get("vision_config", config) if isinstance(config, dict) else None
    if not isinstance(own, dict) or own.get("num_hidden_layers") != layers:
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
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value
        elif isinstance(value, int | float) and not abs(value) <= LARGEST:
            raise CheckpointError(f"the config in the file has a number that cannot be, {value!r}: the file is damaged")


def _checked(data: Any) -> dict[str, Any] | None:
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


def _blocks(model: nn.Module) -> list[BlockSite]:
    family = _member(model).family
    blocks = _tower(model).get_submodule(family.blocks)
    return [BlockSite(blocks, name, block, family.halves) for name, block in blocks.named_children()]


def _last_block(model: nn.Module) -> nn.Module:
    return list(_tower(model).get_submodule(_member(model).family.blocks).children())[-1]


def _class_token(model: nn.Module) -> bool:
    return True


def _num_classes(model: Any) -> int:
    return int(getattr(model, "num_labels", 0))  # a config has some even where the model has no head


def _unused(model: nn.Module) -> set[str]:
    member = _member(model)
    start = f"{member.tower}." if member.tower else ""
    unused = tuple(f"{start}{part}" for part in ("embeddings.mask_token", *member.unused))
    return {name for name, _ in model.named_parameters() if name.startswith(unused)}


def _logits(output: Any) -> Tensor:
    for name in OUTPUTS:
        if (found := getattr(output, name, None)) is not None:
            return found
    if getattr(output, "last_hidden_state", None) is None:
        raise ConfigError(f"the model returned a {type(output).__name__}: set its config's return_dict to True")
    return output.last_hidden_state[:, 0]


HOST = Host(
    name="huggingface",
    library="transformers",
    supported=SUPPORTED,
    refusal=_refusal,
    grid=_grid,
    watch=_watch,
    sites=_sites,
    describe=_describe,
    build=_build,
    image_size=_image_size,
    blocks=_blocks,
    last_block=_last_block,
    class_token=_class_token,
    num_classes=_num_classes,
    unused=_unused,
    logits=_logits,
)
