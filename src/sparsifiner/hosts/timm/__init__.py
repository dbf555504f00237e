"""timm's VisionTransformer and Eva families."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import timm
import torch
from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from sparsifiner.errors import CheckpointError, DataError, reason_of
from sparsifiner.hosts import BlockSite, Handles, Host, Site, obstacle, refuse_tracing
from sparsifiner.hosts.lvvit import LVViT  # registers it with timm too, so that `_build` finds it by name
from sparsifiner.hosts.timm.attention import ADAPTERS
from sparsifiner.hosts.timm.blocks import BLOCKS
from sparsifiner.nn.grid import TokenGrid

SUPPORTED = (
    "timm's VisionTransformer and Eva families: ViT of any size, DeiT (distilled too), DeiT-3, DINOv2, LV-ViT, EVA, "
    "EVA-02, DINOv3, Perception Encoder, with or without rotary embedding, class token, registers, layer scale or "
    "qk-norm"
)

# Why families that are not VisionTransformers cannot be converted, by the start of the class name, where their parts do
# not show it.
REASONS = {
    "NaFlexVit": "it pads images of many sizes to one length and masks what was added: its tokens are on no one grid",
    "SwinTransformer": "its attention already works inside shifted windows, not over all tokens",
    "Cait": "its talking-heads attention mixes heads before and after the softmax",
    "Xcit": "its attention is over channels, not over tokens",
    "DaVit": "its attention works inside windows and over channels, not over all tokens",
    "SHViT": "its attention has one head, over some of the channels, between convolutions",
    "EfficientVitMsra": "its heads run one after the other, each on what the last one gave",
    "EfficientVit": "its attention is linear: without a softmax there are no weights of which to keep the largest",
}


@dataclasses.dataclass
class _GridWatcher:
    """Sets the grid from the size of each image, and refuses images the model cannot take.

    An object, not a closure, so that a deep copy of the model watches the copy's own grid.
    """

    grid: TokenGrid

    def __call__(self, patch_embed: Any, inputs: tuple[Any, ...]) -> None:
        refuse_tracing(inputs[0])
        height, width = inputs[0].shape[-2:]
        expected = patch_embed.img_size
        fixed = False
        if expected is not None and getattr(patch_embed, "strict_img_size", True):
            fixed = True
            if (height, width) != tuple(expected):
                raise DataError(
                    f"images are {height} x {width} but the model takes {expected[0]} x {expected[1]}: "
                    "resize them, or call model.set_input_size"
                )
        elif not getattr(patch_embed, "dynamic_img_pad", False):
            patch = patch_embed.patch_size
            if height % patch[0] or width % patch[1]:
                raise DataError(f"images are {height} x {width}, not a whole number of {patch[0]} x {patch[1]} patches")
        rows, columns = patch_embed.dynamic_feat_size((height, width))
        self.grid.begin((int(rows), int(columns)), only=fixed)


@dataclasses.dataclass
class _Ballot:
    """Takes the vote from tokens that are weighed out: LV-ViT's second head looks for the largest logits of all."""

    grid: TokenGrid

    def __call__(self, largest: Any, inputs: tuple[Tensor]) -> Tensor | None:
        if self.grid.presence is None:
            return None
        out = self.grid.presence[:, self.grid.prefix :, None] < 0.5
        out = out & ~out.all(1, keepdim=True)  # of nothing there is no largest: if none is left all vote
        return inputs[0].masked_fill(out, -torch.inf)


def _watch(model: Any, grid: TokenGrid) -> Any:
    handles = [model.patch_embed.register_forward_pre_hook(_GridWatcher(grid))]
    if isinstance(model, LVViT):
        handles.append(model.aux_pool.register_forward_pre_hook(_Ballot(grid)))
    return Handles(handles)


def _knows(model: nn.Module) -> bool:
    return isinstance(model, VisionTransformer | Eva)


def _refusal(model: Any) -> str | None:
    if not _knows(model):
        return _why_not(model)
    if not isinstance(getattr(model, "patch_drop", None), nn.Identity | None):
        return "it drops patches in training (patch_drop_rate): make it with patch_drop_rate=0"
    sites = list(_sites(model))
    if not sites:
        return f"its blocks ({type(model.blocks[0]).__name__}) hold no attention module of a known kind"
    if any(getattr(site.module, "attn_drop", nn.Dropout(0)).p > 0 for site in sites):
        return "it uses attention dropout: make it with attn_drop_rate=0"
    return None


def _why_not(model: nn.Module) -> str:
    """Of a model of timm that is of neither family."""
    name = type(model).__name__
    if any("Partition" in type(module).__name__ for module in model.modules()):
        return "its attention works inside windows and grids, not over all tokens"
    known = next((reason for start, reason in REASONS.items() if name.startswith(start)), None)
    return known or obstacle(model) or "it is not a timm VisionTransformer or Eva"


def _grid(model: Any) -> TokenGrid:
    rows, columns = model.patch_embed.grid_size
    return TokenGrid((int(rows), int(columns)), int(model.num_prefix_tokens))


def _sites(model: Any) -> Iterator[Site]:
    for name, module in model.blocks.named_modules(prefix="blocks"):
        if adapter := ADAPTERS.get(type(module)):
            path, _, attribute = name.rpartition(".")
            yield Site(
                name=name,
                parent=model.get_submodule(path),
                attribute=attribute,
                module=module,
                adapter=adapter,
                num_heads=module.num_heads,
                head_dim=module.head_dim,
            )


def _left_dense(model: nn.Module) -> dict[str, str]:
    return {}


def _describe(model: Any) -> dict[str, Any]:
    """What `build` needs; arguments that only show in the weights are caught when these are loaded."""
    return {
        "architecture": (getattr(model, "pretrained_cfg", None) or {}).get("architecture"),
        "num_classes": model.num_classes,
        "img_size": list(model.patch_embed.img_size),
        "in_chans": model.in_chans,
        "global_pool": model.global_pool,
        "dynamic_img_size": model.dynamic_img_size,
    }


def _describe_holder(model: nn.Module) -> dict[str, Any]:
    return {"architecture": None}  # what holds a model is not made by name


# What `_describe` writes. A file could ask timm for other things: to load another file, for one.
ARGUMENTS = frozenset({"num_classes", "img_size", "in_chans", "global_pool", "dynamic_img_size"})


def _build(description: dict[str, Any], layers: int) -> nn.Module:
    arguments = dict(description)
    architecture = arguments.pop("architecture", None)
    if not architecture:
        raise CheckpointError(
            "the model was not made by timm.create_model, so its name is not in the file: "
            "make it yourself and pass it as load(path, model=...)"
        )
    if foreign := sorted(set(arguments) - ARGUMENTS):
        raise CheckpointError(f"{foreign[0]!r} is no argument of a model in a file: written by a newer version?")
    if not isinstance(architecture, str) or not timm.is_model(architecture):
        raise CheckpointError(
            f"timm {timm.__version__} has no model {architecture!r}: install the timm it came from, "
            "or import what registers it"
        )
    try:
        return timm.create_model(architecture, pretrained=False, **arguments)
    except Exception as error:  # timm asserts, torch complains of sizes: whatever the arguments lead to
        raise CheckpointError(
            f"timm {timm.__version__} cannot make a {architecture} of the arguments in the file: {reason_of(error)}"
        ) from None


def _image_size(model: Any) -> tuple[int, int]:
    height, width = model.patch_embed.img_size
    return int(height), int(width)


def _class_token(model: Any) -> bool:
    return model.cls_token is not None


def _blocks(model: Any) -> list[BlockSite]:
    return [
        BlockSite(model.blocks, name, block, BLOCKS.get(type(block))) for name, block in model.blocks.named_children()
    ]


def _last_block(model: Any) -> nn.Module:
    return model.blocks[-1]


def _num_classes(model: Any) -> int:
    return int(model.num_classes)


def _unused(model: Any) -> set[str]:
    return set()


def _every_token(model: nn.Module) -> str | None:
    return None


def _logits(model: nn.Module, output: Any) -> Tensor:
    return output


HOST = Host(
    name="timm",
    library="timm",
    supported=SUPPORTED,
    knows=_knows,
    refusal=_refusal,
    grid=_grid,
    watch=_watch,
    sites=_sites,
    left_dense=_left_dense,
    describe=_describe,
    describe_holder=_describe_holder,
    build=_build,
    image_size=_image_size,
    class_token=_class_token,
    blocks=_blocks,
    last_block=_last_block,
    every_token=_every_token,
    num_classes=_num_classes,
    unused=_unused,
    logits=_logits,
)
