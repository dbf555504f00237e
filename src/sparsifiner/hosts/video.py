"""Encoders of clips of Hugging Face's transformers: VideoMAE and V-JEPA 2. Their grids have frames, rows and columns.

Of V-JEPA 2 the encoder is converted. Its predictor stays dense: it sees a part of the clip's tokens and as many masks
as are to be predicted, in an order of their own and some twice, so that there is no grid whose cells could stand for
them. So does the attention of a classifier's pooler, behind the encoder.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sparsifiner.errors import CheckpointError, ConfigError, DataError, reason_of
from sparsifiner.hosts import BlockAdapter, BlockSite, Host, Site, refuse_tracing
from sparsifiner.hosts.huggingface import rebuild
from sparsifiner.hosts.huggingface.family import NO_WEIGHTS
from sparsifiner.hosts.huggingface.recording import RecordedSite
from sparsifiner.hosts.huggingface.table import is_theirs
from sparsifiner.nn.attention import AttentionAdapter
from sparsifiner.nn.grid import TokenGrid

SUPPORTED = "Hugging Face's VideoMAE and V-JEPA 2 (its encoder), with a classifier or without"

NO_POSITIONS = "sparse attention sees whole clips: set keep=1.0, or call it without position_mask"


def _weights_wanted() -> bool:
    """Whether transformers records attention weights in this call: these models do not tell their attention."""
    collector: Any = sys.modules["transformers.utils.output_capturing"]._active_collector
    # As it does itself: torch.compile cannot look at a context variable.
    recorded = collector.global_var if torch.compiler.is_compiling() else collector.get()
    return recorded is not None and "attentions" in recorded


def _heads(part: nn.Module, x: Tensor, head_dim: int) -> Tensor:
    return part(x).view(*x.shape[:-1], -1, head_dim).transpose(1, 2)


# VideoMAE: the module that is replaced holds its attention and the projection beside it.


def _mae_arguments(attention: Any, hidden_states: Tensor, **settings: Any) -> tuple[Tensor, None, str | None]:
    return hidden_states, None, NO_WEIGHTS if _weights_wanted() else None


def _mae_qkv(attention: Any, x: Tensor, context: None) -> tuple[Tensor, Tensor, Tensor]:
    inner = attention.attention
    q, k, v = (_heads(part, x, inner.attention_head_size) for part in (inner.query, inner.key, inner.value))
    return q, k, v


def _mae_attend(block: Any, x: Tensor, **settings: Any) -> Tensor:
    return block.attention(block.layernorm_before(x), **settings) + x


def _mae_feed(block: Any, x: Tensor) -> Tensor:
    return block.output(block.intermediate(block.layernorm_after(x)), x)


def _mae_project(attention: Any, heads: Tensor, x: Tensor, context: None) -> Tensor:
    return attention.output(heads.transpose(1, 2).flatten(2), x)


def _mae_mixing(attention: Any) -> Tensor:
    return attention.output.dense.weight


def _mae_scale(attention: Any) -> float:
    return attention.attention.scaling


def _mae_dim(block: Any) -> int:
    return block.layernorm_before.normalized_shape[0]


# Functions with names, here and below: converted models are pickled with them.
VIDEOMAE = AttentionAdapter(
    qkv=_mae_qkv, project=_mae_project, mixing=_mae_mixing, scale=_mae_scale, arguments=_mae_arguments
)
VIDEOMAE_HALVES = BlockAdapter(attend=_mae_attend, feed=_mae_feed, dim=_mae_dim)


# V-JEPA 2: queries and keys are turned by frame, row and column.


class Places(NamedTuple):
    """Where the patches of a call stand, ``[batch, patches]`` on the whole grid; None where all are there."""

    cells: Tensor | None

    def left(self, cells: Tensor) -> Places:
        """Of the patches that are left."""
        return Places(cells)


def _jepa_arguments(
    attention: Any, hidden_states: Tensor, position_mask: Tensor | None = None
) -> tuple[Tensor, Places, str | None]:
    refusal = NO_POSITIONS if position_mask is not None else NO_WEIGHTS if _weights_wanted() else None
    return hidden_states, Places(None), refusal


def _jepa_qkv(attention: Any, x: Tensor, context: Places) -> tuple[Tensor, Tensor, Tensor]:
    parts = (attention.query, attention.key, attention.value)
    q, k, v = (_heads(part, x, attention.attention_head_size) for part in parts)
    places = attention.get_position_ids(x, masks=context.cells)
    fused = 0 if context.cells is None else x.shape[1] - context.cells.shape[1]  # tokens that stand nowhere

    def turned(heads: Tensor) -> Tensor:
        patches = attention.apply_rotary_embeddings(heads[:, :, fused:], places)
        return torch.cat([heads[:, :, :fused], patches], 2) if fused else patches

    return turned(q), turned(k), v


def _jepa_attend(block: Any, x: Tensor, position_mask: Tensor | None = None, **settings: Any) -> Tensor:
    added, _ = block.attention(block.norm1(x), position_mask=position_mask)
    return block.drop_path(added) + x


def _jepa_feed(block: Any, x: Tensor) -> Tensor:
    return block.drop_path(block.mlp(block.norm2(x))) + x


def _jepa_project(attention: Any, heads: Tensor, x: Tensor, context: Places) -> tuple[Tensor, None]:
    return attention.proj(heads.transpose(1, 2).flatten(2)), None


def _jepa_mixing(attention: Any) -> Tensor:
    return attention.proj.weight


def _jepa_scale(attention: Any) -> float:
    return attention.scaling


def _jepa_dim(block: Any) -> int:
    return block.norm1.normalized_shape[0]


def _jepa_wrap(tokens: Tensor) -> tuple[Tensor, None]:
    return tokens, None  # beside them a block returns attention weights


VJEPA2 = AttentionAdapter(
    qkv=_jepa_qkv, project=_jepa_project, mixing=_jepa_mixing, scale=_jepa_scale, arguments=_jepa_arguments
)
VJEPA2_HALVES = BlockAdapter(attend=_jepa_attend, feed=_jepa_feed, dim=_jepa_dim, wrap=_jepa_wrap)


@dataclasses.dataclass(frozen=True)
class _Family:
    """One architecture.

    Attributes:
        kind: the class of the module that is replaced. By exact type: a subclass may compute something else.
        adapter: how to talk to it.
        halves: how to run the two halves of a block.
        inner: where in that module its attention is.
        embeddings: where in the tower clips become tokens.
        side: what its config calls height and width of a clip.
        frames: what its config calls the number of pictures.
        any_size: whether it takes clips of any size and length, and positions beyond those it was trained on.
    """

    kind: str
    adapter: AttentionAdapter
    halves: BlockAdapter
    embeddings: str
    side: str
    frames: str
    inner: str = ""
    any_size: bool = False

    def size(self, config: Any) -> tuple[int, int, int]:
        """Pictures, height and width of the clips that a config means."""
        side = getattr(config, self.side)
        height, width = side if isinstance(side, list | tuple) else (side, side)
        return getattr(config, self.frames), int(height), int(width)


@dataclasses.dataclass(frozen=True)
class _Member:
    """A model class, where in it the tower is, and what of that its predictions do not depend on."""

    family: _Family
    tower: str = ""
    unused: tuple[str, ...] = ()


_MAE = _Family(
    "VideoMAEAttention",
    VIDEOMAE,
    VIDEOMAE_HALVES,
    embeddings="embeddings",
    side="image_size",
    frames="num_frames",
    inner="attention",
)
_JEPA = _Family(
    "VJEPA2RopeAttention",
    VJEPA2,
    VJEPA2_HALVES,
    embeddings="encoder.embeddings",
    side="crop_size",
    frames="frames_per_clip",
    any_size=True,
)
MEMBERS = {
    "VideoMAEModel": _Member(_MAE),
    "VideoMAEForVideoClassification": _Member(_MAE, "videomae"),
    "VJEPA2Model": _Member(_JEPA, unused=("predictor.",)),
    "VJEPA2ForVideoClassification": _Member(_JEPA, "vjepa2", unused=("predictor.",)),
}
BLOCKS = "encoder.layer"


def _find(model: nn.Module) -> _Member | None:
    """The row of a model's class, or of the class it was derived from."""
    theirs = (kind for kind in type(model).__mro__ if is_theirs(kind))
    return next((MEMBERS[kind.__name__] for kind in theirs if kind.__name__ in MEMBERS), None)


def _member(model: nn.Module) -> _Member:
    member = _find(model)
    assert member is not None  # `_Video.owns` has seen to it
    return member


def _tower(model: nn.Module) -> Any:
    return model.get_submodule(_member(model).tower)


def _start(model: nn.Module) -> str:
    tower = _member(model).tower
    return f"{tower}." if tower else ""


def _sites(model: nn.Module) -> Iterator[Site]:
    family, tower = _member(model).family, _tower(model)
    for index, block in enumerate(tower.get_submodule(BLOCKS).children()):
        module: Any = getattr(block, "attention", None)
        if type(module).__name__ == family.kind and is_theirs(type(module)):
            inner = module.get_submodule(family.inner)
            yield RecordedSite(
                name=f"{_start(model)}{BLOCKS}.{index}.attention",
                parent=block,
                attribute="attention",
                module=module,
                adapter=family.adapter,
                num_heads=inner.num_attention_heads,
                head_dim=inner.attention_head_size,
                recorder=tower,
            )


# Attention that is in a model beside its encoder.
BESIDE = {
    "VJEPA2RopeAttention": "it is the predictor's, which sees masks and some places twice: its tokens have no grid",
    "VJEPA2PoolerSelfAttention": "it is the pooler's, behind the encoder, and of a class that is not known here",
}


def _left_dense(model: nn.Module) -> dict[str, str]:
    converted = {site.name for site in _sites(model)}
    kinds = {name: type(module).__name__ for name, module in model.named_modules() if name not in converted}
    return {name: BESIDE[kind] for name, kind in kinds.items() if kind in BESIDE}


def _refusal(model: nn.Module) -> str | None:
    family = _member(model).family
    sites: list[Any] = []
    with contextlib.suppress(AttributeError):  # built otherwise
        sites = list(_sites(model))
    if not sites:
        return f"transformers {sys.modules['transformers'].__version__} builds it without {family.kind}"
    if any(site.module.get_submodule(family.inner).dropout_prob > 0 for site in sites):
        return "it uses attention dropout: make it with attention_probs_dropout_prob=0"
    return None


def _patch(config: Any) -> tuple[int, int, int]:
    side = config.patch_size
    return config.tubelet_size, *(side if isinstance(side, list | tuple) else (side, side))


def _grid(model: nn.Module) -> TokenGrid:
    config = _tower(model).config
    size = _member(model).family.size(config)
    return TokenGrid(tuple(side // part for side, part in zip(size, _patch(config), strict=True)), 0)


@dataclasses.dataclass
class _GridWatcher:
    """Sets the grid from the size of each clip, and refuses clips the model cannot take.

    An object, not a closure, so that a deep copy of the model watches the copy's own grid.
    """

    grid: TokenGrid
    family: _Family

    def __call__(self, embeddings: Any, inputs: tuple[Any, ...], settings: dict[str, Any]) -> None:
        clips: Any = inputs[0] if inputs else settings.get("pixel_values", settings.get("pixel_values_videos"))
        refuse_tracing(clips)
        if clips.ndim != 5:
            raise DataError(
                f"expected clips [batch, frames, channels, height, width], got a tensor of {tuple(clips.shape)}"
            )
        count, _, height, width = clips.shape[1:]
        expected, patch = self.family.size(embeddings.config), _patch(embeddings.config)
        if not self.family.any_size and (count, height, width) != expected:
            raise DataError(
                f"clips are {count} frames of {height} x {width} but the model takes {expected[0]} of {expected[1]} x "
                f"{expected[2]}: choose as many frames and resize them"
            )
        if count < patch[0]:
            count *= patch[0]  # which V-JEPA 2 repeats as often
        # What is left over at the edges and at the end, it ignores.
        size = tuple(side // part for side, part in zip((count, height, width), patch, strict=True))
        self.grid.begin(size, only=not self.family.any_size)
        masked = inputs[1] if len(inputs) > 1 else settings.get("bool_masked_pos")
        if masked is not None:  # VideoMAE takes these out before the first block
            self.grid.drop((~masked).nonzero()[:, 1].view(len(masked), -1))


def _watch(model: nn.Module, grid: TokenGrid) -> Any:
    family = _member(model).family
    watcher = _GridWatcher(grid, family)
    return _tower(model).get_submodule(family.embeddings).register_forward_pre_hook(watcher, with_kwargs=True)


def _describe(model: Any) -> dict[str, Any]:
    config = json.loads(model.config.to_json_string(use_diff=False))
    config.pop("dtype", None)  # the weights' own, whatever the model was made in
    return {"architecture": type(model).__name__, "img_size": list(_image_size(model)), "config": config}


def _build(description: dict[str, Any], layers: int) -> nn.Module:
    import transformers

    name: Any = description.get("architecture")
    kind: Any = getattr(transformers, name, None) if isinstance(name, str) and name in MEMBERS else None
    if kind is None:
        raise CheckpointError(
            f"{name!r} is no class of transformers {transformers.__version__} that is known here: make the model "
            "yourself and pass it as load(path, model=...)"
        )
    rebuild.check_config(description.get("config"), layers)
    try:
        return kind(kind.config_class.from_dict(description["config"]))
    except Exception as error:  # a config's own checks raise what they like
        raise CheckpointError(
            f"transformers {transformers.__version__} cannot make a {name} of the config in the file: "
            f"{reason_of(error)}"
        ) from None


def _frames(model: nn.Module) -> int:
    return _member(model).family.size(_tower(model).config)[0]


def _image_size(model: nn.Module) -> tuple[int, int]:
    return _member(model).family.size(_tower(model).config)[1:]


def _blocks(model: nn.Module) -> list[BlockSite]:
    blocks = _tower(model).get_submodule(BLOCKS)
    halves = _member(model).family.halves
    return [BlockSite(blocks, name, block, halves) for name, block in blocks.named_children()]


def _last_block(model: nn.Module) -> nn.Module:
    return list(_tower(model).get_submodule(BLOCKS).children())[-1]


def _num_classes(model: Any) -> int:
    return int(getattr(model, "num_labels", 0))  # a config has some even where the model has no head


def _unused(model: nn.Module) -> set[str]:
    unused = tuple(_start(model) + part for part in _member(model).unused)
    return {name for name, _ in model.named_parameters() if unused and name.startswith(unused)}


def _logits(model: nn.Module, output: Any) -> Tensor:
    if (found := getattr(output, "logits", None)) is not None:
        return found
    if getattr(output, "last_hidden_state", None) is None:
        raise ConfigError(f"the model returned a {type(output).__name__}: set its config's return_dict to True")
    return output.last_hidden_state.mean(1)  # there is no class token


def _settings(model: nn.Module) -> dict[str, Any]:
    return {"skip_predictor": True} if _member(model).unused and not _member(model).tower else {}


@dataclasses.dataclass(frozen=True)
class _Video(Host):
    """Of the models of a library that has many more: those it knows."""

    def owns(self, model: nn.Module) -> bool:
        """Whether it is one of these."""
        return _find(model) is not None


HOST = _Video(
    name="video",
    library="transformers",
    supported=SUPPORTED,
    knows=lambda model: _find(model) is not None,
    refusal=_refusal,
    grid=_grid,
    watch=_watch,
    sites=_sites,
    left_dense=_left_dense,
    describe=_describe,
    describe_holder=rebuild.describe_holder,
    build=_build,
    image_size=_image_size,
    class_token=lambda model: False,
    blocks=_blocks,
    last_block=_last_block,
    every_token=lambda model: None,
    num_classes=_num_classes,
    unused=_unused,
    logits=_logits,
    frames=_frames,
    settings=_settings,
)
