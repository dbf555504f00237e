"""What we know of other people's models: a table of hosts, one file each."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.fx
from torch import Tensor, nn

from sparsifiner.errors import UnsupportedModelError
from sparsifiner.nn.attention import AttentionAdapter
from sparsifiner.nn.grid import TokenGrid


@dataclasses.dataclass(frozen=True)
class Site:
    """One attention module of a host model, and how to talk to it."""

    name: str
    parent: nn.Module
    attribute: str
    module: nn.Module
    adapter: AttentionAdapter
    num_heads: int
    head_dim: int

    def put(self, module: nn.Module) -> None:
        """Stands another module in its place."""
        setattr(self.parent, self.attribute, module)


def _alone(tokens: Tensor) -> Tensor:  # by name, so that blocks can be pickled
    return tokens


@dataclasses.dataclass(frozen=True)
class BlockAdapter:
    """The two halves of a host's block, between which tokens can be dropped.

    Attributes:
        attend: from the block, tokens ``[batch, n, D]`` and what else it is called with, to tokens with the attention
            added.
        feed: from the block and such tokens to tokens with the feed-forward part added.
        dim: D.
        wrap: from the last such tokens to what the block returns, where that is more than these.
    """

    attend: Callable[..., Tensor]
    feed: Callable[[Any, Tensor], Tensor]
    dim: Callable[[Any], int]
    wrap: Callable[[Tensor], Any] = _alone


def tokens_of(output: Any) -> Tensor:
    """The tokens ``[batch, n, D]`` in what a block returned: alone, or before attention weights and the like."""
    return output if isinstance(output, Tensor) else output[0]


@dataclasses.dataclass(frozen=True)
class BlockSite:
    """One block of a host model, and how to run its halves; no adapter where they cannot be told apart.

    ``behind`` of the tokens that are no patches come after the patches, all others before.
    """

    parent: nn.Module
    attribute: str
    module: nn.Module
    adapter: BlockAdapter | None
    behind: int = 0

    def put(self, module: nn.Module) -> None:
        """Stands another module in its place."""
        setattr(self.parent, self.attribute, module)


@dataclasses.dataclass(frozen=True)
class Host:
    """A library whose models can be converted.

    Attributes:
        name: how checkpoints call it.
        library: the package that its models come from.
        supported: one line for people whose model is not.
        knows: whether a model is of a class that can be converted, unless `refusal` says otherwise.
        refusal: one line that says why this model of the library cannot be converted, or None if it can.
        grid: the model's token grid at its own input size.
        watch: makes the grid follow the size of each input; returns a handle with ``remove()``.
        sites: the attention modules in the order they run.
        left_dense: names of attention modules that stay as they are, and why.
        describe: the arguments that make the model again, for checkpoints.
        describe_holder: the same of a model of any kind that holds one of this host's.
        build: makes a model from such arguments and the number of its attention layers, without weights and without a
            network. The arguments are a file's, which may say anything: what cannot be made is a `CheckpointError`.
        image_size: height and width of the images the model takes now.
        class_token: whether the first token stands for the class.
        blocks: the blocks in the order they run.
        last_block: the module whose output are the tokens ``[batch, n, D]`` that the head sees, but for a norm.
        every_token: why no token can be dropped, or None if some can.
        num_classes: classes that the model predicts; 0 if it has no head.
        unused: names of parameters that `logits` does not depend on.
        logits: from the model and what it returns to the tensor that is compared with the teacher's,
            ``[batch, classes]`` or features.
        frames: how many pictures there are in a clip that the model takes; None where it takes images.
        settings: what else to call the model with to run what is converted and `logits`, and no more: of that
            multiply-adds are counted.
    """

    name: str
    library: str
    supported: str
    knows: Callable[[nn.Module], bool]
    refusal: Callable[[nn.Module], str | None]
    grid: Callable[[nn.Module], TokenGrid]
    watch: Callable[[nn.Module, TokenGrid], Any]
    sites: Callable[[nn.Module], Iterator[Site]]
    left_dense: Callable[[nn.Module], dict[str, str]]
    describe: Callable[[nn.Module], dict[str, Any]]
    describe_holder: Callable[[nn.Module], dict[str, Any]]
    build: Callable[[dict[str, Any], int], nn.Module]
    image_size: Callable[[nn.Module], tuple[int, int]]
    class_token: Callable[[nn.Module], bool]
    blocks: Callable[[nn.Module], list[BlockSite]]
    last_block: Callable[[nn.Module], nn.Module]
    every_token: Callable[[nn.Module], str | None]
    num_classes: Callable[[nn.Module], int]
    unused: Callable[[nn.Module], set[str]]
    logits: Callable[[nn.Module, Any], Tensor]
    frames: Callable[[nn.Module], int | None] = lambda model: None
    settings: Callable[[nn.Module], dict[str, Any]] = lambda model: {}

    def input_shape(self, model: nn.Module) -> tuple[int, ...]:
        """Of one input: channels, height and width; of a clip frames before them."""
        first = next(weight for weight in model.parameters() if weight.ndim in (4, 5))  # of the first convolution
        frames = self.frames(model)
        return (*(() if frames is None else (frames,)), first.shape[1], *self.image_size(model))

    def owns(self, model: nn.Module) -> bool:
        """Whether a model comes from this host's library, convertible or not: then `refusal` can tell."""
        return comes_from(model, self.library)


@dataclasses.dataclass
class Handles:
    """Of several hooks, which go together."""

    handles: list[Any]

    def remove(self) -> None:
        """Removes them all."""
        for handle in self.handles:
            handle.remove()


def comes_from(model: nn.Module, package: str) -> bool:
    """Whether a model's class, or one it was derived from, is of this package."""
    return any(f"{kind.__module__}.".startswith(f"{package}.") for kind in type(model).__mro__)


# Of parameters of attention that adds a bias to the logits by how far apart query and key are.
RELATIVE = ("rel_pos", "relative_position_bias", "attention_bias")


def obstacle(model: nn.Module) -> str | None:
    """What in a model that no host knows stands in the way, as far as its parts show it."""
    kinds = {type(module).__name__ for module in model.modules()}
    if any(mark in name for name, _ in model.named_parameters() for mark in RELATIVE):
        return "it adds a relative-position bias to the attention logits"
    names = kinds | {name for name, _ in model.named_modules()}
    if not any("attn" in name.lower() or "attention" in name.lower() for name in names):
        return "none of its modules is called attention"
    return None


def refuse_tracing(images: Any) -> None:
    """torch.fx records what is done to stand-ins, which have no size; what a grid is cannot be told from them."""
    if isinstance(images, torch.fx.Proxy):
        raise UnsupportedModelError(
            "a converted model cannot be traced by torch.fx (torchvision's create_feature_extractor does that): take "
            "features with sparsifiner.feature_map(student, images) or, of timm's models, with "
            "student.forward_intermediates(images)"
        )


# Hosts whose library is optional, and that library; the extra that installs it has the host's name.
OPTIONAL = {"video": "transformers", "huggingface": "transformers"}


def table() -> dict[str, Host]:
    """Every host by name; optional ones where their library is installed, which is not imported for that."""
    names = ["timm", *(name for name, library in OPTIONAL.items() if importlib.util.find_spec(library))]
    hosts = (importlib.import_module(f"sparsifiner.hosts.{name}").HOST for name in names)
    return {host.name: host for host in hosts}


@dataclasses.dataclass(frozen=True)
class Found:
    """The part of a model that can be converted: the model itself, where ``path`` is empty, or an encoder inside."""

    path: str
    module: nn.Module
    host: Host


def locate(model: nn.Module) -> Found:
    """What of a model can be converted; an error that says why nothing can, or which of several parts to choose."""
    hosts = list(table().values())
    owner = next((host for host in hosts if host.owns(model)), None)
    reason = f"it is not a model of {' or '.join(dict.fromkeys(host.library for host in hosts))}"
    if owner is not None and (reason := owner.refusal(model)) is None:
        return Found("", model, owner)
    inside = list(_inside(model, hosts))
    found = [part for part in inside if part.host.refusal(part.module) is None]
    if len(found) == 1:
        return found[0]
    name = type(model).__name__
    if found:
        raise UnsupportedModelError(
            f"{name} holds several encoders that can be converted ({', '.join(part.path for part in found)}): convert "
            "each by itself and put it in its place"
        )
    if inside:  # of a known class, and yet refused: that says more than that the whole is not known
        first = inside[0]
        reason = f"its {first.path}, a {type(first.module).__name__}, cannot: {first.host.refusal(first.module)}"
    supported = "; ".join(known.supported for known in hosts if owner in (None, known))
    raise UnsupportedModelError(f"{name} cannot be converted: {reason} (supported: {supported})")


def _inside(model: nn.Module, hosts: list[Host]) -> Iterator[Found]:
    """The outermost parts of a model that are of known classes: LLaVA's tower, a backbone, what a wrapper wraps."""
    within: tuple[str, ...] = ()
    for path, part in model.named_modules():
        if path.startswith(within) and within:
            continue
        if path and (host := next((host for host in hosts if host.owns(part) and host.knows(part)), None)):
            within = (*within, f"{path}.")
            yield Found(path, part, host)
