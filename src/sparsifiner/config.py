"""SparseConfig: everything that decides how sparse the attention is. Light: imports no torch."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import numbers
import re
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from sparsifiner.errors import ConfigError, reason_of
from sparsifiner.files import parse_json
from sparsifiner.sides import Sides, short, spelled

BACKENDS = ("auto", "cpu", "eager", "reference")
PATTERNS = ("learned", "window", "axial", "strided", "bigbird", "linformer", "cells")
TOKEN_METHODS = ("evit", "dynamicvit")

Tile = Sides | None


class LayerSettings(NamedTuple):
    """What may differ from attention layer to attention layer; as `SparseConfig` has it for all of them."""

    keep: float
    dense: bool
    tile: Tile


class BlockTokens(NamedTuple):
    """How many tokens are no patches to a block's attention, and how many its attention and feed-forward part see."""

    prefix: int
    attention: int
    feed_forward: int


@dataclasses.dataclass(frozen=True)
class TokenConfig:
    """Which tokens are dropped on the way through the blocks.

    Args:
        keep: share of the patch tokens that each of the blocks below keeps, rounded up, in (0, 1].
        method: ``"evit"`` keeps those that the class token attends to most, after the block's attention, and needs no
            training; ``"dynamicvit"`` asks a small network before the block, which must be trained.
        blocks: the blocks that drop tokens, counted from 0; None for those after a quarter, a half and three quarters
            of the depth (blocks 4, 7 and 10 of 12, counted from 1).
        fuse: the dropped tokens live on in one token, their sum weighted by the attention they got; EViT only. With
            True, the fused token of an earlier block is always part of the new one; ``"official"`` counts and ranks it
            as a patch, which may be kept, as EViT's own code does: for checkpoints that were trained so.
    """

    keep: float
    method: str = "evit"
    blocks: Sequence[int] | None = None
    fuse: bool | str = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "keep", _keep_rate(self.keep, "the tokens' keep"))
        if self.method not in TOKEN_METHODS:
            raise ConfigError(f"unknown token method {self.method!r}: choose one of {', '.join(TOKEN_METHODS)}")
        if self.blocks is not None:
            object.__setattr__(self, "blocks", _numbers(self.blocks, "blocks", "blocks"))
            if not self.blocks:
                raise ConfigError("blocks is an empty list: name some, or None for the usual ones")
        if not isinstance(self.fuse, bool) and not (isinstance(self.fuse, str) and self.fuse == "official"):
            raise ConfigError(f"fuse must be True, False or 'official', got {self.fuse!r}")
        if self.fuse and self.method != "evit":
            raise ConfigError("only EViT fuses dropped tokens: set fuse=False")

    def blocks_of(self, depth: int) -> tuple[int, ...]:
        """The blocks that drop tokens in a model of so many."""
        if self.blocks is None:
            return tuple(sorted({depth * quarter // 4 for quarter in (1, 2, 3)}))
        if self.blocks[-1] >= depth:
            raise ConfigError(f"block {self.blocks[-1]} does not exist: the model has blocks 0 to {depth - 1}")
        return tuple(self.blocks)

    def kept(self, patches: int) -> int:
        """How many of so many patch tokens a block keeps."""
        return budget(self.keep, patches)

    def layer_tokens(self, patches: int, prefix: int, depth: int) -> list[BlockTokens]:
        """What the halves of each block see of so many patches and prefix tokens."""
        blocks, counts, fused = self.blocks_of(depth), [], 0
        for block in range(depth):
            first, before = prefix + fused, prefix + fused + patches
            if block in blocks and self.keep < 1:
                ranked = patches + fused if self.fuse == "official" else patches
                if self.fuse != "official" or self.kept(ranked) < ranked:  # else there is nothing to fuse
                    patches, fused = self.kept(ranked), int(bool(self.fuse))
            after = prefix + fused + patches
            counts.append(BlockTokens(first, before if self.method == "evit" else after, after))
        return counts


@dataclasses.dataclass(frozen=True)
class SparseConfig:
    """How the attention of a converted model is made sparse.

    Args:
        keep: share of all tokens each patch query may attend to, in (0, 1]; one number, or one per
            attention layer. The budget is ``B = ceil(keep * n)``; where it covers all tokens, the layer is
            the host's own dense attention. With ``pattern="cells"`` one number is the mean over the layers, of which
            early ones get more (`spread_over_depth`).
        n_down: number of landmarks of the low-rank attention (``m`` in the docs).
        tau: low-rank attention coefficients up to this count as zero in the selection (Eq. 2).
        basis_threshold: entries of ``w_up`` up to this count as zero in the selection.
        residual: add back the low-rank estimate of what was dropped; off is the paper's own output.
        tile: patch queries of a ``(rows, columns)`` tile of the grid share one list of keys; None for a
            list per query. Tiles that do not divide the grid are cut at its border. Of clips it may be
            ``(frames, rows, columns)``, of patches of which each may span several pictures (a tubelet); with two
            numbers it is one such frame deep. Or a list of such, one per attention layer, as `tune` writes it.
        backend: what computes it: ``"auto"`` takes the best that can run; the others are the names `sparsifiner info`
            lists. All compute the same function, to rounding.
        dense: attention layers, counted from 0, that run the host's dense attention whatever ``keep`` says. `tune`
            lists those here in which sparse attention is not faster on the machine at hand.
        pattern: how the keys are chosen: ``"learned"`` asks the predictor; ``"window"``, ``"axial"``, ``"strided"`` and
            ``"bigbird"`` take the same B keys for every image, to compare with; ``"linformer"`` takes none and leaves
            everything to the low-rank attention. ``"cells"`` asks no predictor either: the means of the keys in each
            cell of the grid say which cells are opened, as many as hold B keys, and with ``residual`` every other cell
            stands for its keys as one token. It needs no calibration, and of the above ``keep`` and ``tile`` only; a
            model made so has no predictors, and cannot take another pattern later.
        cells: for ``pattern="cells"``, the rows and columns of patches in a cell of each level, finest first: the cells
            of a level hold whole cells of the one before. Of clips also frames, rows and columns, as ``tile``.
        breadth: how many times the keys of the cells opened at one level those opened at the next coarser hold, at
            least 1: the larger, the more cells are looked at finely.
        tolerance: open only cells whose error, if left closed, is estimated to be larger: easy queries then open few,
            and ``keep`` is the most that any may open. 0 opens as many as ``keep`` allows.
        tokens: which tokens are dropped on the way; None keeps all.
        narrow: the fused kernels hold keys and values in 16 bits (bfloat16; sums stay in float32): less memory to
            read, at a relative error of 2^-9 a value. Only in inference; other backends take no notice.
    """

    keep: float | Sequence[float]
    n_down: int = 32
    tau: float = 0.05
    basis_threshold: float = 0.01
    residual: bool = True
    tile: Tile | Sequence[Tile] = None
    backend: str = "auto"
    dense: Sequence[int] = ()
    narrow: bool = False
    pattern: str = "learned"
    cells: Sequence[Sides] = ((2, 2),)
    breadth: float = 3.0
    tolerance: float = 0.0
    tokens: TokenConfig | None = None

    def __post_init__(self) -> None:
        keep = self.keep
        if isinstance(keep, Sequence) and not isinstance(keep, str):
            if not keep:
                raise ConfigError("keep is an empty list: give one number, or one number per attention layer")
            object.__setattr__(self, "keep", tuple(_keep_rate(value) for value in keep))
        else:
            object.__setattr__(self, "keep", _keep_rate(keep))
        if not _is_int(self.n_down) or self.n_down < 1:
            raise ConfigError(f"n_down must be a whole number of at least 1, got {self.n_down!r}")
        if not _is_real(self.tau) or not 0 <= self.tau < 1:
            raise ConfigError(f"tau must be in [0, 1), got {self.tau!r}")
        # Scores are then sums of products that are never negative, which selection relies on.
        if not _is_real(self.basis_threshold) or not 0 <= self.basis_threshold <= sys.float_info.max:
            raise ConfigError(f"basis_threshold must be a number of at least 0, got {self.basis_threshold!r}")
        object.__setattr__(self, "n_down", int(self.n_down))
        object.__setattr__(self, "tau", float(self.tau))
        object.__setattr__(self, "basis_threshold", float(self.basis_threshold))
        for name in ("residual", "narrow"):
            if not isinstance(value := getattr(self, name), bool):
                raise ConfigError(f"{name} must be True or False, got {value!r}")
        object.__setattr__(self, "tile", _tiles(self.tile))
        object.__setattr__(self, "cells", _levels(self.cells))
        if not _is_real(self.tolerance) or not 0 <= self.tolerance <= sys.float_info.max:
            raise ConfigError(f"tolerance must be a number of at least 0, got {self.tolerance!r}")
        object.__setattr__(self, "tolerance", float(self.tolerance))
        if not _is_real(self.breadth) or not 1 <= self.breadth <= sys.float_info.max:
            raise ConfigError(f"breadth must be a number of at least 1, got {self.breadth!r}")
        object.__setattr__(self, "breadth", float(self.breadth))
        if self.backend not in BACKENDS:
            raise ConfigError(f"unknown backend {self.backend!r}: choose one of {', '.join(BACKENDS)}")
        object.__setattr__(self, "dense", _numbers(self.dense, "dense", "layers"))
        if self.pattern not in PATTERNS:
            raise ConfigError(f"unknown pattern {self.pattern!r}: choose one of {', '.join(PATTERNS)}")
        if self.pattern not in ("learned", "cells") and self.tiles:
            raise ConfigError("tiles share lists that depend on the image: set tile=None for fixed patterns")
        if isinstance(self.tokens, dict):  # from JSON
            try:
                object.__setattr__(self, "tokens", TokenConfig(**self.tokens))
            except TypeError as error:
                raise ConfigError(f"tokens: {error}") from None
        if not isinstance(self.tokens, TokenConfig | None):
            raise ConfigError(f"tokens must be a TokenConfig or None, got {self.tokens!r}")

    @property
    def asks_predictor(self) -> bool:
        """Whether layers need weights of their own: all patterns but cells estimate with them."""
        return self.pattern != "cells"

    def can_keep(self, keep: float, num_tokens: int) -> bool:
        """Whether so small a share is possible: where cells are opened, a budget must hold one."""
        return self.asks_predictor or budget(keep, num_tokens) >= math.prod(self.cells[0])

    def keep_per_layer(self, num_layers: int) -> tuple[float, ...]:
        """Spreads ``keep`` over the layers, or says that the list does not fit."""
        if not isinstance(self.keep, Sequence):
            return spread_over_depth(self.keep, num_layers) if self.pattern == "cells" else (self.keep,) * num_layers
        if len(self.keep) != num_layers:
            raise ConfigError(
                f"keep lists {len(self.keep)} values but the model has {num_layers} attention layers: "
                "give one number, or one per layer"
            )
        return tuple(self.keep)

    @property
    def tiles(self) -> tuple[Any, ...]:
        """The tiles in use, each once."""
        return tuple(dict.fromkeys(tile for tile in _listed(self.tile) or [self.tile] if tile is not None))

    def tile_per_layer(self, num_layers: int) -> tuple[Tile, ...]:
        """The tile of each layer, or says that the list does not fit."""
        tile: Any = self.tile
        if (listed := _listed(tile)) is None:
            return (tile,) * num_layers
        if len(listed) != num_layers:
            raise ConfigError(
                f"tile lists {len(listed)} tiles but the model has {num_layers} attention layers: give one, or one per "
                "layer"
            )
        return tuple(listed)

    def per_layer(self, num_layers: int) -> list[LayerSettings]:
        """What each layer is to do; or says what does not fit."""
        if self.dense and max(self.dense) >= num_layers:
            raise ConfigError(f"dense lists layer {max(self.dense)}: the model has layers 0 to {num_layers - 1}")
        dense = (number in self.dense for number in range(num_layers))
        found = zip(self.keep_per_layer(num_layers), dense, self.tile_per_layer(num_layers), strict=True)
        return [LayerSettings(*layer) for layer in found]

    def replace(self, **changes: Any) -> SparseConfig:
        """A copy with some settings changed, validated anew."""
        known = {field.name for field in dataclasses.fields(self)}
        if unknown := sorted(set(changes) - known):
            raise ConfigError(f"unknown setting {unknown[0]!r}: choose from {', '.join(sorted(known))}")
        return dataclasses.replace(self, **changes)

    def to_json(self) -> str:
        """One line of JSON from which `from_json` makes an equal config."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> SparseConfig:
        """Reads what `to_json` wrote; unknown or missing fields are an error, never ignored."""
        try:
            fields = parse_json(text)
        except ValueError as error:
            raise ConfigError(f"not a config in JSON: {reason_of(error)}") from None
        if not isinstance(fields, dict) or "keep" not in fields:
            raise ConfigError("a config in JSON must be an object with at least 'keep'")
        earlier = [name for name in ("cell", "refine") if name in fields]
        if earlier and fields.get("pattern") == "cells":
            raise ConfigError(
                f"{earlier[0]!r} in the config is of a version that weighed the keys of a cell otherwise: convert the "
                "dense model anew"
            )
        for name in earlier:  # other patterns never looked at it
            del fields[name]
        known = {field.name for field in dataclasses.fields(cls)}
        if unknown := sorted(set(fields) - known):
            raise ConfigError(f"unknown setting {unknown[0]!r} in the config: written by a newer version?")
        if fields.get("backend") == "sparse":  # as version 0.1 called what "auto" is now
            fields["backend"] = "auto"
        return cls(**fields)


def budget(keep: float, num_tokens: int) -> int:
    """``B = ceil(keep * n)``, the number of keys a patch query selects."""
    # The subtraction undoes binary rounding: 0.28 * 25 is 7.000000000000001 and must give 7.
    return max(1, math.ceil(keep * num_tokens - 1e-9))


# What a layer of a model that opens cells gets of the mean budget, first to last. Errors of early layers go
# through all that follow, and late layers look at means (docs/cells.md has what was measured).
_BY_DEPTH = (1.0, 2.0, 2.0, 1.5, 1.5, 1.0, 0.75, 0.75, 0.5, 0.5, 0.25, 0.25)


def spread_over_depth(keep: float, num_layers: int) -> tuple[float, ...]:
    """A share for each layer, of which ``keep`` is the mean: early layers have up to twice it, the last a quarter.

    No share is over 1; what is too much for some goes to the others.
    """
    last = len(_BY_DEPTH) - 1
    parts = []
    for layer in range(num_layers):
        depth = last * layer / max(1, num_layers - 1)
        low = min(int(depth), last - 1)
        parts.append(_BY_DEPTH[low] + (depth - low) * (_BY_DEPTH[low + 1] - _BY_DEPTH[low]))
    shares = [1.0] * num_layers
    open_layers, left = set(range(num_layers)), keep * num_layers
    while open_layers:
        factor = left / sum(parts[layer] for layer in open_layers)
        full = {layer for layer in open_layers if factor * parts[layer] >= 1}
        if not full:
            for layer in open_layers:
                shares[layer] = factor * parts[layer]
            break
        open_layers -= full
        left -= len(full)
    return tuple(shares)


def parse_tile(text: str, what: str = "tile") -> Tile:
    """What people write for a tile: ``2x7``, rows by columns, ``2x4x4`` with frames; ``none`` for one per query."""
    return None if text == "none" else _parse_sides(text, f"{what}: expected ROWSxCOLUMNS, such as 2x7, {_OF_CLIPS}")


def parse_tiles(text: str, what: str = "tile") -> Tile | tuple[Tile, ...]:
    """What people write for ``tile``: one, or one per layer between commas: ``none,4x4,...``."""
    tiles = tuple(parse_tile(part, what) for part in text.split(","))
    return tiles[0] if len(tiles) == 1 else tiles


def name_tile(tile: Any) -> str:
    """As `parse_tiles` reads it."""
    return ",".join("none" if one is None else short(one) for one in _listed(tile) or [tile])


def parse_cells(text: str, what: str = "cells") -> tuple[Sides, ...]:
    """What people write for ``cells``: ``2x2,4x4``, a level each, finest first; ``1x2x2,2x4x4`` with frames."""
    expected = f"{what}: expected ROWSxCOLUMNS of each level between commas, such as 2x2,4x4, {_OF_CLIPS}"
    return _levels(tuple(_parse_sides(part, expected) for part in text.split(",")))


_OF_CLIPS = "or of clips FRAMESxROWSxCOLUMNS, such as 2x4x4"


def _parse_sides(text: str, expected: str) -> Sides:
    if not re.fullmatch(r"\d{1,9}(x\d{1,9}){1,2}", text, re.ASCII):
        raise ConfigError(f"{expected}, got {text!r}")
    return tuple(map(int, text.split("x")))


def _is_int(value: object) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _is_real(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _numbers(value: object, what: str, of: str) -> tuple[int, ...]:
    if (
        not isinstance(value, Sequence)
        or isinstance(value, str)
        or not all(_is_int(number) and number >= 0 for number in value)
        or sorted(set(value)) != list(value)
    ):
        raise ConfigError(f"{what} must be ascending numbers of {of}, counted from 0, got {value!r}")
    return tuple(int(number) for number in value)


def _keep_rate(value: object, what: str = "keep", of: str = "the tokens") -> float:
    number: Any = value
    if not _is_real(number) or not 0 < number <= 1:
        raise ConfigError(f"{what} must be a share of {of} in (0, 1], got {value!r}")
    return float(number)


def _levels(value: object) -> tuple[Sides, ...]:
    if not isinstance(value, Sequence) or isinstance(value, str) or not value or _is_int(value[0]):
        raise ConfigError(f"cells must list (rows, columns) of each level, such as ((2, 2), (4, 4)), got {value!r}")
    levels = tuple(_sides(level, "a cell") for level in value)
    for fine, coarse in itertools.pairwise(levels):
        inner, outer = ((1,) * (3 - len(level)) + level for level in (fine, coarse))
        if inner == outer or any(large % small for small, large in zip(inner, outer, strict=True)):
            raise ConfigError(
                f"cells of {spelled(coarse)} patches do not hold whole cells of {spelled(fine)}: list levels from fine "
                "to coarse, each a multiple of the one before"
            )
    return levels


def _listed(tile: Any) -> Sequence[Any] | None:
    """The tiles it lists, one per layer; None if it is one tile, which is a sequence of numbers."""
    if not _is_list(tile) or not all(one is None or _is_list(one) for one in tile):
        return None
    return tile


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _tiles(value: object) -> Tile | tuple[Tile, ...]:
    if value is None:
        return None
    if (listed := _listed(value)) is None:
        return _sides(value, "tile", ", None, or a list of such, one per attention layer")
    if not listed:
        raise ConfigError("tile is an empty list: give (rows, columns) or None, or one of them per attention layer")
    return tuple(None if tile is None else _sides(tile, "tile of a layer", ", or None") for tile in listed)


def _sides(value: object, what: str, more: str = "") -> Sides:
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) not in (2, 3):
        raise ConfigError(
            f"{what} must be (rows, columns), such as (2, 2), or of clips (frames, rows, columns){more}, got {value!r}"
        )
    if not all(_is_int(side) and side >= 1 for side in value):
        raise ConfigError(f"{what} must be two or three whole numbers of at least 1, got {value!r}")
    return tuple(int(side) for side in value)
