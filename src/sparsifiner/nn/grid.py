"""Tokens as positions on a grid, of an image or of a clip: landmark cells, and resampling to another grid."""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from sparsifiner.errors import ConfigError
from sparsifiner.sides import Sides, spelled


class PerThread(threading.local):
    """A ``state`` of which every thread has its own, as ``make`` gives it; a copy of what holds it starts anew.

    Thread-local and not a context variable, which torch.compile cannot set: a call never leaves its thread. And one
    object that is changed, never another in its place: that too torch.compile would miss.
    """

    def __init__(self, make: Callable[[], Any]) -> None:  # run in each thread
        self.make, self.state = make, make()

    def __deepcopy__(self, memo: dict) -> PerThread:
        return PerThread(self.make)

    def __reduce__(self) -> tuple:
        return PerThread, (self.make,)


@dataclasses.dataclass
class Call:
    """What belongs to one call of a model, and to no other: the image's grid, and which of its tokens are left.

    Attributes:
        size: rows and columns of patches; of clips frames, rows and columns.
        num_fused: tokens after the prefix that stand for dropped ones; layers treat them as prefix tokens.
        cells: int64 ``[batch, patches left]``, the grid cell of each patch token in ascending order; None for all.
        stands: int64 ``[batch, fusions]``, where fused tokens are ranked as patches: the cells at which they stand, the
            newest first, which is no patch yet; the others are among ``cells``, or -1 if they were fused again.
        presence: ``[batch, n]`` in [0, 1], where tokens are dropped by weight instead (training); None for all.
        shares: ``[batch]`` each, what share of the patches counted after each dropping by weight.
        ranks: whose attention the next layer tells a block that drops tokens by it: the class token's, or the mean
            patch's where there is none.
        class_attention: ``[batch, n]``, what that layer told.
    """

    size: Sides
    num_fused: int = 0
    cells: Tensor | None = None
    stands: Tensor | None = None
    presence: Tensor | None = None
    shares: list[Tensor] = dataclasses.field(default_factory=list)
    ranks: Literal["class", "pooled"] | None = None
    class_attention: Tensor | None = None

    def merged(self) -> Tensor | None:
        """Boolean ``[batch, patches left]``: which patches are fused tokens in truth; None where none can be."""
        if self.stands is None or self.cells is None:
            return None
        return (self.cells[..., None] == self.stands[:, None, 1:]).any(-1)


NO_SIZE = (0, 0)  # of a thread that has made no call yet: the model's own counts


@dataclasses.dataclass
class _Now:
    """``call`` is under way, or left over; ``latest`` began or ended last; ``outer`` are those that wait meanwhile."""

    # Never None: torch.compile would compile the same code anew for every thread that has made no call yet.
    call: Call = dataclasses.field(default_factory=lambda: Call(NO_SIZE))
    latest: Call = dataclasses.field(default_factory=lambda: Call(NO_SIZE))
    outer: tuple[Call, ...] = ()
    dense: bool = False


class TokenGrid:
    """The grid of patches behind the tokens of a call; one object shared by a model's layers.

    The layers of a model have no other way to hear of the image they work on. So each thread has its own `Call`: a host
    calls `begin` with each input, and blocks that drop tokens tell what is left. `enter` and `leave`, around a call of
    the whole model, let a call wait while another of the same thread runs within it.

    Args:
        size: rows and columns of patches of the model's own input size, of clips frames before them: what counts
            before any call. A frame is one of patches, which may span several pictures.
        num_prefix: tokens at the start that are no patches (class, distillation, registers).
    """

    def __init__(self, size: Sides, num_prefix: int) -> None:
        self.own_size = size
        self.num_prefix = num_prefix
        self._threads = PerThread(_Now)

    @property
    def _now(self) -> _Now:
        return self._threads.state

    @property
    def call(self) -> Call:
        """The call of this thread that is under way; between calls, the last one that was."""
        call = self._now.call
        if call.size == NO_SIZE:
            call.size = self.own_size
        return call

    @property
    def latest(self) -> Call:
        """The call of this thread that ended last: for those who made it and want to know more than its output."""
        return self.call if self._now.latest.size == NO_SIZE else self._now.latest

    def begin(self, size: Sides, *, only: bool = False) -> None:
        """A new input: all of its tokens are there.

        Args:
            size: rows and columns of its patches, of clips frames before them.
            only: the model takes no other size, so that this is its own.
        """
        if only:
            self.own_size = size
        self._now.call = self._now.latest = Call(size)

    def enter(self) -> None:
        """The whole model is called; a call that is under way waits."""
        self._now.outer = (*self._now.outer, self._now.call)

    def leave(self) -> None:
        """The whole model has run, or failed to; the call that waited goes on."""
        now = self._now
        now.latest, waited, now.outer = now.call, now.outer[-1], now.outer[:-1]
        if now.outer:  # otherwise what has run stays, to be looked at
            now.call = waited

    @property
    def dense(self) -> bool:
        """Whether, in this thread, all tokens stay and all layers attend to all of them."""
        return self._now.dense

    @dense.setter
    def dense(self, wanted: bool) -> None:
        self._now.dense = wanted

    @property
    def size(self) -> Sides:
        """Rows and columns of patches; of clips frames, rows and columns."""
        return self.call.size

    @property
    def num_fused(self) -> int:
        """As in `Call`."""
        return self.call.num_fused

    @property
    def cells(self) -> Tensor | None:
        """As in `Call`."""
        return self.call.cells

    @property
    def presence(self) -> Tensor | None:
        """As in `Call`."""
        return self.call.presence

    @property
    def num_tokens(self) -> int:
        """Prefix tokens and patches of the whole grid, however many are left."""
        return self.num_prefix + math.prod(self.size)

    @property
    def prefix(self) -> int:
        """How many of the present tokens, at the start, are no patches."""
        return self.num_prefix + self.num_fused

    @property
    def tokens_left(self) -> int:
        """How many tokens there are now."""
        return self.num_tokens if self.cells is None else self.prefix + self.cells.shape[1]

    def drop(self, kept: Tensor, num_fused: int = 0) -> None:
        """Only the present patch tokens ``kept`` (int64 ``[batch, count]``, ascending, counted from 0) are left."""
        call = self.call
        call.cells = kept if call.cells is None else call.cells.gather(1, kept)
        call.num_fused = num_fused

    def absorb(self, kept: Tensor, heaviest: Tensor) -> Tensor:
        """Of all tokens after the prefix, the fused one among them, ``kept`` are left as patches, the others fused.

        A layer knows patches by their places. A fused token that is kept as a patch stands where the heaviest of those
        in it stood, which is free.

        Args:
            kept: int64 ``[batch, count]``, counted from 0 behind the prefix.
            heaviest: ``[batch, 1]``, of the others the one with the largest part in the new fused token.

        Returns:
            ``kept`` in the order of their places.
        """
        call = self.call
        places, older = call.cells, kept.new_empty(len(kept), 0)
        if places is None:
            places = torch.arange(math.prod(call.size), device=kept.device).expand(len(kept), -1)
        if call.stands is not None:
            places, older = torch.cat([call.stands[:, :1], places], dim=1), call.stands
        kept = kept.gather(1, places.gather(1, kept).argsort(1))
        call.cells, call.num_fused = places.gather(1, kept), 1
        older = torch.where((older[..., None] == call.cells[:, None]).any(-1), older, -1)
        call.stands = torch.cat([places.gather(1, heaviest), older], dim=1)
        return kept

    def merged(self) -> Tensor | None:
        """As in `Call`."""
        return self.call.merged()

    def weigh(self, presence: Tensor) -> None:
        """The tokens stay, and count as much as ``presence`` ``[batch, n]`` says."""
        call = self.call
        call.presence = presence
        call.shares.append(presence[:, self.prefix :].mean(1))

    def positions(self) -> Tensor | None:
        """``[batch, n]``: where the present tokens stand among prefix, fused tokens and grid; None if all are there."""
        if self.cells is None:
            return None
        first = torch.arange(self.prefix, device=self.cells.device).expand(len(self.cells), -1)
        return torch.cat([first, self.cells + self.prefix], dim=1)

    def widen(self, weights: Tensor) -> Tensor:
        """Predictor weights ``[heads, m, n]`` with a column of zeros for each fused token, which has no place."""
        if not self.num_fused:
            return weights
        fused = weights.new_zeros(*weights.shape[:-1], self.num_fused)
        return torch.cat([weights[..., : self.num_prefix], fused, weights[..., self.num_prefix :]], dim=-1)

    def pick(self, weights: Tensor) -> Tensor:
        """Predictor weights ``[heads, m, n]`` for the present tokens; ``[batch, heads, m, n]`` if images differ."""
        weights, positions = self.widen(weights), self.positions()
        if positions is not None:
            index = positions[:, None, None].expand(-1, *weights.shape[:2], -1)
            weights = weights.expand(len(positions), -1, -1, -1).gather(3, index)
        if self.presence is not None:
            own = weights if weights.ndim == 4 else weights[None]
            weights = own * self.presence[:, None, None].to(weights.dtype)
        return weights


def landmark_cells(count: int, grid: Sides) -> Tensor:
    """Cuts the grid into ``count`` cells with sides as equal as can be: int64, as the grid, a cell index each.

    Rows of patches form bands of equal height, each cut into cells of equal width, to one patch. Of clips frames form
    bands, each cut as an image is: a patch is as long in time as it is wide.
    """
    if not 1 <= count <= math.prod(grid):
        raise ConfigError(f"cannot cut a {spelled(grid)} grid into {count} cells")
    length, *rest = grid
    if not rest:
        return torch.arange(length) * count // length
    area = math.prod(rest)
    feasible = [bands for bands in range(1, length + 1) if -(-count // bands) <= area and bands <= count]

    def elongation(bands: int) -> tuple[float, int]:
        height, width = length / bands, (area * bands / count) ** (1 / len(rest))
        # Among equals, whole patches and equal bands make the more regular cells.
        return max(height / width, width / height), (length % bands) + (count % bands)

    bands = min(feasible, key=elongation)
    cells = torch.empty(grid, dtype=torch.int64)
    first = 0
    for band in range(bands):
        here = (band + 1) * count // bands - band * count // bands
        cells[band * length // bands : (band + 1) * length // bands] = first + landmark_cells(here, tuple(rest))
        first += here
    return cells


def landmark_pooling(count: int, grid: Sides, num_prefix: int) -> Tensor:
    """Each landmark the mean of its cell: ``[count, n]``, rows that sum to one, nothing of the prefix."""
    cells = landmark_cells(count, grid).flatten()
    pooling = torch.zeros(count, num_prefix + len(cells))
    pooling[cells, num_prefix + torch.arange(len(cells))] = 1.0
    return pooling / pooling.sum(1, keepdim=True)


def resample(weights: Tensor, old: Sides, new: Sides, num_prefix: int) -> Tensor:
    """Carries ``[heads, m, n]`` from one grid to another as position embeddings are: bicubic, or trilinear over time.

    Prefix columns are copied. Rows keep the sum over their patches: a landmark stays a mean of keys
    (w_down), and the attention mass it stands for is spread over more or fewer keys (w_up).
    """
    if old == new:
        return weights
    if len(old) != len(new):
        raise ConfigError(f"weights of a grid of {spelled(old)} patches cannot be resampled to one of {spelled(new)}")
    heads, landmarks, _ = weights.shape
    prefix, patches = weights[..., :num_prefix], weights[..., num_prefix:]
    pictures = patches.reshape(1, heads * landmarks, *old).float()
    if len(old) == 2:
        resized = functional.interpolate(pictures, size=new, mode="bicubic", antialias=True)
    else:
        resized = functional.interpolate(pictures, size=new, mode="trilinear")
    resized = resized.reshape(heads, landmarks, -1)
    before, after = patches.float().sum(-1, keepdim=True), resized.sum(-1, keepdim=True)
    # Rows that sum to nearly nothing have no mass to keep and would only be blown up.
    usable = after.abs() > 1e-3 * resized.abs().sum(-1, keepdim=True)
    area = math.prod(old) / math.prod(new)
    resized = resized * torch.where(usable, before / torch.where(usable, after, 1), area)
    return torch.cat([prefix, resized.to(weights.dtype)], dim=-1)
