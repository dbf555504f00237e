"""Times: sparse attention against dense and other ways to compute it, by turns, in one process.

Machines are shared and noisy: every figure is a minimum and percentiles of many runs, candidates take turns so that a
slow moment hits all of them, and a speed is only ever a ratio within one measurement.
"""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from sparsifiner.convert import dense_mode, reconfigure, restore_in_place, sparse_layers
from sparsifiner.errors import ConfigError
from sparsifiner.inspect.observe import observing
from sparsifiner.nn.grid import landmark_pooling
from sparsifiner.ops import cpu, reference
from sparsifiner.ops.attention import Residual, predict, sparse_attention
from sparsifiner.ops.connectivity import Connectivity, low_rank_attention, query_groups
from sparsifiner.ops.eager import top_budget
from sparsifiner.sides import Sides

Tile = Sides | None


@dataclasses.dataclass(frozen=True)
class Timing:
    """Milliseconds of one candidate."""

    minimum: float
    p20: float
    p50: float
    p80: float
    runs: int


def take_turns(candidates: dict[str, Callable[[], object]], seconds: float, least: int = 5) -> dict[str, Timing]:
    """Runs the candidates by turns for about ``seconds`` each, and at least ``least`` times.

    On one thread the clock is the thread's CPU time, which other processes do not enter.
    """
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for run in candidates.values():  # warm up
        run()
    end = time.perf_counter() + seconds * len(candidates)
    while time.perf_counter() < end or len(next(iter(times.values()))) < least:
        for name, run in candidates.items():
            start = clock()
            run()
            times[name].append(1000 * (clock() - start))
    return {name: _timing(sorted(values)) for name, values in times.items()}


def _timing(ordered: list[float]) -> Timing:
    def percentile(share: float) -> float:
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    return Timing(ordered[0], percentile(0.2), percentile(0.5), percentile(0.8), len(ordered))


@dataclasses.dataclass(frozen=True)
class Problem:
    """One attention layer's inputs and predictor weights, of no landmarks where a model has no predictors."""

    q: Tensor
    k: Tensor
    v: Tensor
    w_down: Tensor
    w_up: Tensor
    grid: Sides
    num_prefix: int
    tau: float
    basis_threshold: float
    source: str

    @property
    def scale(self) -> float:
        """Of the logits."""
        return self.q.shape[-1] ** -0.5

    def to(self, dtype: torch.dtype) -> Problem:
        """The same with queries, keys and values in another dtype, as slices of one qkv."""
        packed = torch.stack([self.q, self.k, self.v]).permute(1, 3, 0, 2, 4).to(dtype).contiguous()
        q, k, v = packed.permute(2, 0, 3, 1, 4).unbind(0)
        return dataclasses.replace(self, q=q, k=k, v=v)


def simulate(batch: int, heads: int, grid: tuple[int, int], head_dim: int = 64, n_down: int = 32) -> Problem:
    """Tokens that resemble their neighbours, and the predictor a ridge regression finds for them."""
    generator = torch.Generator().manual_seed(0)
    tokens, prefix, dim = grid[0] * grid[1], 1, heads * head_dim
    coarse = torch.randn(batch, dim, 7, 7, generator=generator)
    smooth = functional.interpolate(coarse, size=grid, mode="bicubic").flatten(2).mT  # [batch, tokens, dim]
    x = smooth + 0.5 * torch.randn(batch, tokens, dim, generator=generator)
    x = torch.cat([torch.randn(batch, prefix, dim, generator=generator), x], 1)
    mixing = torch.randn(dim, 3 * dim, generator=generator) / dim**0.5
    mixing[:, dim : 2 * dim] = 0.7 * mixing[:, :dim] + 0.7 * mixing[:, dim : 2 * dim]  # keys resemble queries
    qkv = (x @ mixing).view(batch, prefix + tokens, 3, heads, head_dim)
    q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    w_down = landmark_pooling(n_down, grid, prefix).expand(heads, -1, -1).contiguous()
    w_up = _ridge(q[:1], k[:1], w_down, prefix)
    area = tokens / 196
    return Problem(q, k, v, w_down, w_up, grid, prefix, 1.6 / n_down, 0.01 / area, "simulated")


def _ridge(q: Tensor, k: Tensor, w_down: Tensor, prefix: int) -> Tensor:
    scale = q.shape[-1] ** -0.5
    a_down = low_rank_attention(q, k, w_down, prefix, scale)[0].double()  # [heads, rows, m]
    gram = a_down.mT @ a_down
    right = torch.zeros(gram.shape[0], gram.shape[1], k.shape[2], dtype=torch.float64)
    for rows in torch.arange(q.shape[2] - prefix).split(512):
        attention = reference.full_attention(q[:, :, prefix + rows], k, scale)[0].double()
        right += a_down[:, rows].mT @ attention
    eye = torch.eye(gram.shape[-1], dtype=torch.float64)
    return torch.linalg.solve(gram + 1e-4 * gram.diagonal(dim1=1, dim2=2).mean(-1)[:, None, None] * eye, right).float()


def problem_from(student: nn.Module, images: Tensor, layers: tuple[int, ...]) -> Problem:
    """Real inputs: those of some layers of a converted model, whose heads are put side by side."""
    converted = sparse_layers(student)
    seen: dict[int, Any] = {}
    with torch.inference_mode(), dense_mode(student):
        chosen = [converted[i] for i in layers]
        with observing(chosen, lambda seen_now: seen.__setitem__(id(seen_now.layer), seen_now)):
            student(images)
    first = chosen[0]
    none = torch.empty(first.num_heads, 0, first.grid.num_tokens)
    weights = [layer.predictor.at(layer.grid.size) if layer.has_predictor else (none, none) for layer in chosen]
    q, k, v = (torch.cat([getattr(seen[id(layer)], name) for layer in chosen], 1) for name in "qkv")
    return Problem(
        q.clone(),
        k.clone(),
        v.clone(),
        torch.cat([down for down, _ in weights]).detach(),
        torch.cat([up for _, up in weights]).detach(),
        first.grid.size,
        first.grid.num_prefix,
        first.config.tau,
        first.basis_threshold if first.has_predictor else 0.0,
        "real",
    )


def masked_dense(p: Problem, budget: int) -> Tensor:
    """What published code does: everything is computed, then masked."""
    a_down = low_rank_attention(p.q, p.k, p.w_down, 0, p.scale)
    mask = top_budget(reference.scores(a_down, p.w_up, p.tau, p.basis_threshold), budget)
    mask[..., : p.num_prefix] = True
    mask[:, :, : p.num_prefix] = True
    mask.diagonal(dim1=2, dim2=3).fill_(True)
    return reference.masked_attention(p.q, p.k, p.v, mask, p.scale)


def flex(p: Problem, budget: int) -> Callable[[], Tensor] | str:
    """FlexAttention with a block mask: the 128 x 128 blocks whose mean score is highest, as many as the budget.

    It needs inductor and a C++ compiler. Where it cannot run, the reason instead.
    """
    try:
        from torch.nn.attention.flex_attention import BlockMask, flex_attention

        n, size = p.q.shape[2], 128
        blocks = -(-n // size)
        a_down = low_rank_attention(p.q, p.k, p.w_down, 0, p.scale)
        scores = reference.scores(a_down, p.w_up, p.tau, p.basis_threshold)
        padded = functional.pad(scores, (0, blocks * size - n, 0, blocks * size - n))
        means = padded.unflatten(3, (blocks, size)).unflatten(2, (blocks, size)).mean((3, 5))
        kept = max(1, round(budget / n * blocks))
        indices = means.topk(kept, -1).indices.sort(-1).values.int()
        room = functional.pad(indices, (0, blocks - kept))
        mask = BlockMask.from_kv_blocks(
            torch.full(means.shape[:3], kept, dtype=torch.int32), room, BLOCK_SIZE=size, seq_lengths=(n, n)
        )
        q, k, v = (x.contiguous() for x in (p.q, p.k, p.v))
        compiled = torch.compile(flex_attention, dynamic=False)

        def run() -> Tensor:
            return compiled(q, k, v, block_mask=mask)  # pyright: ignore[reportReturnType]

        with torch.inference_mode():
            run()
        return run
    except Exception as error:  # whatever a compiler on somebody's machine may say
        return f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"


def _connect(p: Problem, budget: int, tile: Tile, backend: str) -> tuple[Connectivity, Residual]:
    return predict(
        p.q,
        p.k,
        p.w_down,
        p.w_up,
        budget=budget,
        grid=p.grid,
        num_prefix=p.num_prefix,
        tau=p.tau,
        basis_threshold=p.basis_threshold,
        tile=tile,
        backend=backend,
    )


def gathered(p: Problem, budget: int, tile: Tile, residual: bool, backend: str) -> Tensor:
    """Lists first, then attention over them: the eager backend's way, and training's."""
    connectivity, estimate = _connect(p, budget, tile, backend)
    return sparse_attention(p.q, p.k, p.v, connectivity, residual=estimate if residual else None, backend=backend)


def fused(p: Problem, budget: int, tile: Tile, residual: bool, narrow: bool = False) -> Callable[[], Tensor]:
    """The kernels, with weights packed beforehand as in a model."""
    packed = cpu.pack(p.w_down, p.w_up, p.basis_threshold)
    members = query_groups(p.grid, p.num_prefix, tile, p.q.device).int()

    def run() -> Tensor:
        return cpu.fused(
            p.q,
            p.k,
            p.v,
            packed,
            members,
            budget=budget,
            tau=p.tau,
            scale=p.scale,
            num_prefix=p.num_prefix,
            residual=residual,
            narrow=narrow,
        )

    return run


def multiply_adds(p: Problem, budget: int, tile: Tile, residual: bool) -> tuple[float, float]:
    """Of dense and of sparse attention, per call; connections and densities as they are in these inputs."""
    batch, heads, n, d = p.q.shape
    m, patches = p.w_down.shape[1], n - p.num_prefix
    connectivity, estimate = _connect(p, budget, tile, "auto")
    connections = float(connectivity.connections().sum())
    survivors = float((estimate.a_down > p.tau).double().mean())
    basis = float((p.w_up > p.basis_threshold).double().mean())
    rows = patches if tile is None else connectivity.members.shape[0]
    sparse = connections * (2 * d + (m if residual else 0))
    sparse += batch * heads * (2 * p.num_prefix * n * d + patches * m * d + survivors * basis * rows * m * n)
    sparse += float((p.w_down != 0).sum()) * batch * d
    if residual:
        sparse += 2 * batch * heads * n * m * d
    return 2.0 * batch * heads * n * n * d, sparse


def backward_runs(p: Problem, budget: int, tile: Tile, residual: bool) -> dict[str, Callable[[], object]]:
    """The backward passes alone, of SDPA and of attention over lists, on the same inputs."""
    q, k, v = inputs = [x.detach().clone().requires_grad_() for x in (p.q, p.k, p.v)]
    dense = functional.scaled_dot_product_attention(q, k, v, scale=p.scale)
    connectivity, estimate = _connect(p, budget, tile, "cpu")
    batch, heads, n, _ = p.q.shape
    nothing = p.q.new_empty(batch, heads, n - p.num_prefix, 0), p.q.new_empty(heads, 0, n)
    low_rank = (estimate.a_down, estimate.w_up) if residual else nothing
    a_down, w_up = leaves = [x.detach().clone().requires_grad_() for x in low_rank]
    sparse = cpu.attend(q, k, v, connectivity, a_down, w_up, p.scale)
    direction = torch.randn(p.q.shape)
    sparse_direction = direction[:, :, p.num_prefix :].contiguous()
    wanted = [*inputs, *leaves] if residual else inputs
    return {
        "dense": lambda: torch.autograd.grad(dense, inputs, direction, retain_graph=True),
        "sparse": lambda: torch.autograd.grad(sparse, wanted, sparse_direction, retain_graph=True),
    }


def model_runs(student: nn.Module, images: Tensor, forms: dict[str, dict[str, Any]]) -> dict[str, Callable[[], object]]:
    """The whole model, dense and in each form (settings for `reconfigure`), without gradients."""

    def run(model: nn.Module) -> Callable[[], object]:
        def forward() -> None:
            with torch.inference_mode():
                model(images)

        return forward

    # Each its own modules, so that no change of settings is timed, but the same weights: where in memory these lie
    # makes a difference of up to a tenth.
    weights = {id(tensor): tensor for tensor in (*student.parameters(), *student.buffers())}
    runs = {"dense": run(restore_in_place(copy.deepcopy(student, dict(weights))))}
    for name, changes in forms.items():
        twin = copy.deepcopy(student, dict(weights))
        reconfigure(twin, **changes)
        runs[name] = run(twin)
    return runs


def core_share(student: nn.Module, images: Tensor, seconds: float) -> float:
    """The share of a dense forward that its attention cores take: what sparsity can save at most."""
    layers = sparse_layers(student)
    if not layers:
        raise ConfigError("the model has no converted layers")
    p = problem_from(student, images, (0,)).to(images.dtype)
    with torch.inference_mode():
        times = take_turns(
            {
                "model": model_runs(student, images, {})["dense"],
                "core": lambda: functional.scaled_dot_product_attention(p.q, p.k, p.v, scale=p.scale),
            },
            seconds,
            least=3,
        )
    return len(layers) * times["core"].minimum / times["model"].minimum
