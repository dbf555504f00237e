"""survey(): what of a dense model would be converted, and how much that could gain, before anything is."""

from __future__ import annotations

import copy
import dataclasses
import math
from typing import Any

import torch
from torch import nn

from sparsifiner.config import SparseConfig
from sparsifiner.convert import find_part, sparsify
from sparsifiner.errors import UnsupportedModelError
from sparsifiner.inspect.flops import count_flops
from sparsifiner.sides import Sides, spelled


@dataclasses.dataclass(frozen=True)
class Survey:
    """Of a model that is refused, all but its class and the reason is empty.

    Attributes:
        model: its class.
        refused: why it cannot be converted, or None if it can.
        host: the library it comes from.
        part: the path of the encoder in it that is converted; empty where that is the model itself.
        encoder: the class of what is converted.
        image_size: height and width of its images.
        frames: how many pictures there are in its clips; None where it takes images.
        grid: rows and columns of patches, of clips frames before them.
        prefix: tokens that are no patches.
        layers: attention layers that would be sparse.
        left_dense: names of attention layers that stay as they are, and why.
        every_token: why no token can be dropped, or None if some can.
        attention: multiply-adds of one image in the attention that would be sparse: scores and values.
        total: multiply-adds of one image in the encoder.
    """

    model: str
    refused: str | None = None
    host: str = ""
    part: str = ""
    encoder: str = ""
    image_size: tuple[int, int] = (0, 0)
    frames: int | None = None
    grid: Sides = (0, 0)
    prefix: int = 0
    layers: int = 0
    left_dense: dict[str, str] = dataclasses.field(default_factory=dict)
    every_token: str | None = None
    attention: float = 0.0
    total: float = 0.0

    @property
    def tokens(self) -> int:
        """Patches and all others."""
        return self.prefix + math.prod(self.grid)

    @property
    def share(self) -> float:
        """Of the multiply-adds that are in attention which would be sparse."""
        return self.attention / self.total if self.total else 0.0

    @property
    def ceiling(self) -> float:
        """How many times as fast the encoder were, if that attention cost nothing and time went with multiply-adds."""
        return 1 / (1 - self.share)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        if self.refused is not None:
            return {"model": self.model, "refused": self.refused}
        derived = {"tokens": self.tokens, "share": self.share, "ceiling": self.ceiling}
        return dataclasses.asdict(self) | derived

    def __str__(self) -> str:
        if self.refused is not None:
            return f"{self.model} cannot be converted: {self.refused}"
        where = f"{self.model}, of which its {self.part}, a {self.encoder}" if self.part else self.model
        clip = "" if self.frames is None else f"{self.frames} frames of "
        lines = [
            f"{where}: {self.layers} attention layers would be sparse",
            f"tokens: {self.tokens} at {clip}{spelled(self.image_size)} pixels ({spelled(self.grid)} patches and "
            f"{self.prefix} others)",
            f"multiply-adds: {self.total / 1e9:.2f} G, of which {self.share:.1%} in that attention; faster by "
            f"{self.ceiling:.2f}x at most, where time goes with them",
        ]
        lines += [f"{len(names)} stay dense ({_some(names)}): {why}" for why, names in self._by_reason().items()]
        if self.every_token is not None:
            lines.append(f"no tokens can be dropped: {self.every_token}")
        return "\n".join(lines)

    def _by_reason(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for name, why in self.left_dense.items():
            found.setdefault(why, []).append(name)
        return found


def _some(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"


def survey(model: nn.Module) -> Survey:
    """Looks at a dense model, which may be on the meta device: nothing is computed.

    Example:
        ``print(survey(timm.create_model("vit_small_patch16_dinov3")))``
    """
    name = type(model).__name__
    try:
        found = find_part(model)
    except UnsupportedModelError as error:
        reason = str(error).removeprefix(f"{name} cannot be converted: ").partition(" (supported: ")[0]
        return Survey(name, refused=reason)
    host, grid = found.host, found.host.grid(found.module)
    with torch.device("meta"):  # a copy whose weights take no memory
        weights = {id(weight): nn.Parameter(torch.empty_like(weight)) for weight in found.module.parameters()}
        outline = copy.deepcopy(found.module, weights)
    student = sparsify(outline, SparseConfig(0.5, pattern="cells"))
    with torch.no_grad():
        count = count_flops(student)
    return Survey(
        model=name,
        host=host.library,
        part=found.path,
        encoder=type(found.module).__name__,
        image_size=host.image_size(found.module),
        frames=host.frames(found.module),
        grid=grid.size,
        prefix=grid.num_prefix,
        layers=len(list(host.sites(found.module))),
        left_dense=host.left_dense(found.module),
        every_token=host.every_token(found.module),
        attention=count.dense_attention,
        total=count.dense_total,
    )
