"""Vision Transformers of Hugging Face's transformers, and those inside its larger models.

`common` has the families of the common form, `dinov3`, `nested` and `sam3` those that need more; `table` lists every
class; `family` says what a family is.
"""

from __future__ import annotations

import contextlib
import dataclasses
import operator
import sys
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from sparsifiner.errors import ConfigError, DataError
from sparsifiner.hosts import BlockSite, Handles, Host, Site, refuse_tracing
from sparsifiner.hosts.huggingface import rebuild
from sparsifiner.hosts.huggingface.family import NO_WEIGHTS, Family, pair
from sparsifiner.hosts.huggingface.images import data_config as data_config
from sparsifiner.hosts.huggingface.recording import RecordedSite
from sparsifiner.hosts.huggingface.refusals import why_not
from sparsifiner.hosts.huggingface.table import MEMBERS as MEMBERS
from sparsifiner.hosts.huggingface.table import find_member, image_size, is_theirs, member_of, tower_of
from sparsifiner.nn.attention import SparseAttention
from sparsifiner.nn.grid import TokenGrid

SUPPORTED = (
    "Hugging Face's ViT, DeiT (distilled too), ViT-MSN, I-JEPA, DINOv2 (with registers too), DINOv3, CLIP's, SigLIP's, "
    "MetaCLIP 2's, OWL-ViT's and AIMv2's vision towers, DPT, ViTPose, YOLOS and SAM 3's vision encoder, with a "
    "classifier, as a backbone or inside a larger model"
)

# Where the predictions are in what a model returns; the first that is there.
OUTPUTS = ("logits", "image_embeds", "pooler_output")


def _family(model: nn.Module) -> Family:
    return member_of(model).family


def _start(model: nn.Module) -> str:
    tower = member_of(model).tower
    return f"{tower}." if tower else ""


def _places(model: nn.Module) -> Iterator[tuple[str, nn.Module, Any]]:
    """Of each block the name of its attention, itself, and the attention, of whatever class."""
    family, start = _family(model), _start(model)
    for index, block in enumerate(model.get_submodule(f"{start}{family.blocks}").children()):
        yield f"{start}{family.blocks}.{index}.{family.place}", block, getattr(block, family.place, None)


def _sites(model: nn.Module) -> Iterator[Site]:
    family, attention = _family(model), _family(model).attention
    for name, block, module in _places(model):
        known = is_theirs(type(module)) and type(module).__name__ == attention.kind
        if known and family.dense(block) is None:
            yield RecordedSite(
                name=name,
                parent=block,
                attribute=family.place,
                module=module,
                adapter=attention.adapter,
                num_heads=operator.attrgetter(attention.heads)(module),
                head_dim=operator.attrgetter(attention.width)(module),
                recorder=tower_of(model).get_submodule(family.recorder),
            )


def _left_dense(model: nn.Module) -> dict[str, str]:
    reasons = ((name, _family(model).dense(block)) for name, block, _ in _places(model))
    return {name: reason for name, reason in reasons if reason is not None}


def _knows(model: nn.Module) -> bool:
    return find_member(model) is not None


def _refusal(model: nn.Module) -> str | None:
    member = find_member(model)
    if member is None:
        return why_not(model)
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
    if any(operator.attrgetter(attention.dropout)(site.module) > 0 for site in sites):
        return f"it uses attention dropout: make it with {attention.setting}=0"
    return family.obstacle(tower_of(model))


def _patch_size(tower: Any) -> tuple[int, int]:
    embeddings = tower.embeddings
    owners: list[Any] = [embeddings, getattr(embeddings, "patch_embeddings", None), tower.config]
    return pair(next(owner.patch_size for owner in owners if hasattr(owner, "patch_size")))


def _grid(model: nn.Module) -> TokenGrid:
    tower = tower_of(model)
    (height, width), patch = image_size(model), _patch_size(tower)
    return TokenGrid((height // patch[0], width // patch[1]), _family(model).num_prefix(tower.config))


@dataclasses.dataclass
class _GridWatcher:
    """Sets the grid from the size of each image, and refuses images the model cannot take.

    An object, not a closure, so that a deep copy of the model watches the copy's own grid.
    """

    grid: TokenGrid
    patch: tuple[int, int]
    expected: tuple[int, int] | None  # None where any size will do
    told: bool

    def __call__(self, embeddings: Any, inputs: tuple[Any, ...], settings: dict[str, Any]) -> None:
        pixels = inputs[0] if inputs else settings["pixel_values"]
        refuse_tracing(pixels)
        height, width = pixels.shape[-2:]
        fixed = self.expected is not None and not settings.get("interpolate_pos_encoding")
        if fixed and (height, width) != self.expected:
            rows, columns = self.expected or (0, 0)
            raise DataError(
                f"images are {height} x {width} but the model takes {rows} x {columns}: resize them"
                + (", or call it with interpolate_pos_encoding=True" if self.told else "")
            )
        # What is left over at the edges, it ignores.
        self.grid.begin((height // self.patch[0], width // self.patch[1]), only=fixed)


@dataclasses.dataclass
class _WeightsWatcher:
    """Refuses attention weights that a tower is asked for and that its sparse layers do not hear of."""

    def __call__(self, tower: nn.Module, inputs: tuple[Any, ...], settings: dict[str, Any]) -> None:
        layers = (module for module in tower.modules() if isinstance(module, SparseAttention))
        if settings.get("output_attentions") and any(not layer.is_dense() for layer in layers):
            raise ConfigError(NO_WEIGHTS)


def _watch(model: nn.Module, grid: TokenGrid) -> Any:
    family, tower = _family(model), tower_of(model)
    expected = None if family.any_size(tower) else family.size(tower)
    watcher = _GridWatcher(grid, _patch_size(tower), expected, family.told)
    handles = [tower.embeddings.register_forward_pre_hook(watcher, with_kwargs=True)]
    if family.deaf:
        handles.append(tower.register_forward_pre_hook(_WeightsWatcher(), with_kwargs=True))
    return Handles(handles)


def _blocks(model: nn.Module) -> list[BlockSite]:
    family, tower = _family(model), tower_of(model)
    blocks, behind = tower.get_submodule(family.blocks), family.behind(tower.config)
    return [BlockSite(blocks, name, block, family.halves, behind) for name, block in blocks.named_children()]


def _last_block(model: nn.Module) -> nn.Module:
    return list(tower_of(model).get_submodule(_family(model).blocks).children())[-1]


def _every_token(model: nn.Module) -> str | None:
    return _family(model).every_token


def _class_token(model: nn.Module) -> bool:
    return _family(model).class_token


def _num_classes(model: Any) -> int:
    return int(getattr(model, "num_labels", 0))  # a config has some even where the model has no head


def _unused(model: nn.Module) -> set[str]:
    start = _start(model)
    unused = tuple(f"{start}{part}" for part in ("embeddings.mask_token", *member_of(model).unused))
    return {name for name, _ in model.named_parameters() if name.startswith(unused)}


def _logits(model: nn.Module, output: Any) -> Tensor:
    for name in OUTPUTS:
        if (found := getattr(output, name, None)) is not None:
            return found
    if maps := getattr(output, "feature_maps", None):
        last = maps[-1]  # [batch, D, rows, columns], or [batch, n, D]
        return last.mean((2, 3)) if last.ndim == 4 else last.mean(1)
    if getattr(output, "last_hidden_state", None) is None:
        raise ConfigError(f"the model returned a {type(output).__name__}: set its config's return_dict to True")
    return output.last_hidden_state[:, 0] if _class_token(model) else output.last_hidden_state.mean(1)


HOST = Host(
    name="huggingface",
    library="transformers",
    supported=SUPPORTED,
    knows=_knows,
    refusal=_refusal,
    grid=_grid,
    watch=_watch,
    sites=_sites,
    left_dense=_left_dense,
    describe=rebuild.describe,
    describe_holder=rebuild.describe_holder,
    build=rebuild.build,
    image_size=image_size,
    blocks=_blocks,
    last_block=_last_block,
    every_token=_every_token,
    class_token=_class_token,
    num_classes=_num_classes,
    unused=_unused,
    logits=_logits,
)
