"""The fused kernels against the reference in float64: every row of every batch element, every gradient."""

import contextlib
import dataclasses
import itertools
import threading

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from sparsifiner.errors import BackendError
from sparsifiner.ops import agreement, cpu, dispatch, eager, reference
from sparsifiner.ops.attention import predict, sparse_attention
from sparsifiner.ops.connectivity import Connectivity, low_rank_attention, query_groups


def test_the_kernels_are_built():
    """Without them most of the suite would still pass, on the eager backend."""
    assert cpu.unavailable() is None
    assert dispatch.resolve("auto", torch.empty(1, 1, 2, 8)) is cpu


@pytest.fixture(autouse=True)
def _poison():
    """Scratch memory holds NaN, and -1 where it holds indices, before every use."""
    native = cpu.native()
    native.poison_scratch(True)
    yield
    native.poison_scratch(False)


# What this machine can run of what was compiled, the best first.
VARIANTS = [] if cpu.unavailable() else cpu.native().instruction_sets()


@contextlib.contextmanager
def running(variant, threads=1):
    """On one variant of the kernels, and so many threads."""
    native, before = cpu.native(), torch.get_num_threads()
    best = native.instruction_set()
    native.use(variant)
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        native.use(best)
        torch.set_num_threads(before)


@pytest.fixture(params=VARIANTS)
def _instructions(request):
    with running(request.param):
        yield


@st.composite
def problems(draw, largest=46):
    side = min(largest, draw(st.sampled_from([8, 16, 24, 46])))  # what the reference does grows with the fourth power
    grid = draw(st.tuples(st.integers(1, side), st.integers(1, side)))
    prefix = draw(st.integers(0, 5))
    n = prefix + grid[0] * grid[1]
    budget = draw(st.one_of(st.integers(1, n), st.integers(1, max(1, n // 8))))
    return {
        "grid": grid,
        "prefix": prefix,
        "batch": draw(st.integers(1, 2)),
        "heads": draw(st.integers(1, 3)),
        "head_dim": draw(st.sampled_from([1, 16, 24, 48, 64, 80, 100, 128, 256])),
        "landmarks": draw(st.integers(1, min(grid[0] * grid[1], 128))),
        "budget": budget,
        "tile": draw(st.sampled_from([None, None, (1, 1), (2, 2), (2, 7), (4, 4), (5, 9)])),
        "tau": draw(st.sampled_from([0.0, 0.02, 0.3])),
        "basis_threshold": draw(st.sampled_from([0.0, 0.01, 0.5])),
        "residual": draw(st.booleans()),
        "layout": draw(st.sampled_from(["qkv", "contiguous", "last dimension strided"])),
        "pooled": draw(st.booleans()),  # a w_down of few non-zeros
        "basis": draw(st.sampled_from(["random", "levels", "equal", "zero", "tiny"])),
        "scale": draw(st.sampled_from([1e-20, 1e-3, 1.0, 30.0])),
        "threads": draw(st.sampled_from([1, 2, 5])),
        "variant": draw(st.sampled_from(VARIANTS)),
        "seed": draw(st.integers(0, 2**16)),
    }


def tensors(problem, dtype=torch.float32):
    generator = torch.Generator().manual_seed(problem["seed"])

    def random(*shape):
        return torch.randn(*shape, generator=generator)

    batch, heads, d, m = (problem[name] for name in ("batch", "heads", "head_dim", "landmarks"))
    rows, columns = problem["grid"]
    n = problem["prefix"] + rows * columns
    if problem["layout"] == "last dimension strided":
        packed = random(3, batch, heads, d, n).transpose(3, 4)
    elif problem["layout"] == "qkv":
        packed = random(batch, n, 3, heads, d).permute(2, 0, 3, 1, 4)
    else:
        packed = random(3, batch, heads, n, d)
    q, k, v = (packed * problem["scale"] if problem["scale"] != 1 else packed).to(dtype).unbind(0)
    w_down = torch.rand(heads, m, n, generator=generator) / n
    if problem["pooled"]:
        w_down = torch.zeros(heads, m, n)
        w_down[:, torch.arange(n) % m, torch.arange(n)] = 1.0
    w_up = random(heads, m, n) * 0.3
    if problem["basis"] == "levels":  # few distinct scores: ties everywhere
        w_up = (w_up * 3).round() / 4
    elif problem["basis"] == "equal":
        w_up = torch.full_like(w_up, 0.75)
    elif problem["basis"] == "zero":
        w_up = torch.zeros_like(w_up) * -1.0
    elif problem["basis"] == "tiny":
        w_up = w_up.abs() * 1e-42  # denormal
    return q, k, v, w_down, w_up


def settings(problem):
    return {
        "budget": problem["budget"],
        "tau": problem["tau"],
        "num_prefix": problem["prefix"],
        "scale": problem["head_dim"] ** -0.5,
    }


def fused(problem, q, k, v, w_down, w_up, **changes):
    members = query_groups(problem["grid"], problem["prefix"], problem["tile"], q.device)
    packed = cpu.pack(w_down, w_up, problem["basis_threshold"])
    return cpu.fused(q, k, v, packed, members, residual=problem["residual"], **settings(problem), **changes)


def oracle(problem, q, k, v, w_down, w_up, dtype=torch.float32):
    """The output in float64, how far rounding may carry a row from it, and the rows whose selection it decides."""
    q, k, v, w_down, w_up = (x.double() for x in (q, k, v, w_down, w_up))
    parts = []
    for b, h in itertools.product(range(len(q)), range(len(w_up))):  # one head at a time: n x n in float64 is large
        own = (x[b : b + 1, h : h + 1] for x in (q, k, v))
        parts.append(_oracle_of_a_head(problem, *own, w_down[h : h + 1], w_up[h : h + 1]))
    expected, allowed, undecided = (torch.cat(x).unflatten(0, q.shape[:2]).squeeze(2) for x in zip(*parts, strict=True))
    return expected, agreement.stored(allowed, expected, dtype), undecided


def rounding_has_no_choice(q, k, w_down, w_up, *, budget, tau, threshold, scale, prefix, group_of):
    """Whether every backend on every machine must select the same keys of these inputs."""
    rows, n = q[:, :, prefix:].double(), q.shape[2]
    coefficients = agreement.coefficient_bounds(rows, k.double(), w_down.double(), scale)
    scores = agreement.score_bounds(coefficients, w_up.double(), tau, threshold, group_of)
    return not agreement.undecided(scores, budget, agreement.forced_keys(n - prefix, n, prefix)).any()


def _oracle_of_a_head(problem, q, k, v, w_down, w_up):
    prefix, scale, budget, n = problem["prefix"], problem["head_dim"] ** -0.5, problem["budget"], q.shape[2]
    members = query_groups(problem["grid"], prefix, problem["tile"], q.device)
    group_of = agreement.groups_of_rows(members, n, prefix) if members.shape[1] > 1 else None
    rows, forced = q[:, :, prefix:], agreement.forced_keys(n - prefix, n, prefix)
    coefficients = agreement.coefficient_bounds(rows, k, w_down, scale)
    scores = agreement.score_bounds(coefficients, w_up, problem["tau"], problem["basis_threshold"], group_of)
    mask = reference.top_budget(scores.exact, budget) | forced
    if problem["residual"]:
        expected = reference.residual_attention(rows, k, v, mask, scale, coefficients.exact, w_up)
        allowed = agreement.output_error(rows, k, v, mask, scale, (coefficients, w_up, v))
    else:
        expected = reference.masked_attention(rows, k, v, mask, scale)
        allowed = agreement.output_error(rows, k, v, mask, scale)
    undecided = functional.pad(agreement.undecided(scores, budget, forced), (prefix, 0), value=False)
    if prefix:
        every = torch.ones(1, 1, prefix, n, dtype=torch.bool)
        dense = reference.full_attention(q[:, :, :prefix], k, scale) @ v
        expected = torch.cat([dense, expected], 2)
        allowed = torch.cat([agreement.output_error(q[:, :, :prefix], k, v, every, scale), allowed], 2)
    return expected, allowed, undecided


@hypothesis.settings(max_examples=150, deadline=None)
@hypothesis.given(problems())
def test_every_row_equals_the_reference(problem):
    q, k, v, w_down, w_up = tensors(problem)
    expected, allowed, undecided = oracle(problem, q, k, v, w_down, w_up)
    with running(problem["variant"], problem["threads"]):
        out = fused(problem, q, k, v, w_down, w_up)
    assert out.shape == q.shape
    share = ((out.double() - expected).abs() / allowed).amax(-1)[~undecided]
    assert bool((share <= 1).all()), share.max()
    assert bool(torch.isfinite(out).all())


@hypothesis.settings(max_examples=80, deadline=None)
@hypothesis.given(problems())
def test_selection_is_the_references_own(problem):
    """Coefficients and basis of few bits: sums are exact, so every set must be equal, ties included."""
    generator = torch.Generator().manual_seed(problem["seed"])
    batch, heads, m, prefix = (problem[name] for name in ("batch", "heads", "landmarks", "prefix"))
    n = prefix + problem["grid"][0] * problem["grid"][1]
    a_down = torch.randint(0, 17, (batch, heads, n - prefix, m), generator=generator) / 16
    w_up = torch.randint(-4, 9, (heads, m, n), generator=generator) / 8
    tile = None if problem["tile"] == (5, 9) or problem["tile"] == (2, 7) else problem["tile"]  # means by 2^k only
    rows, columns = problem["grid"]
    if tile and (rows % tile[0] or columns % tile[1]):
        tile = None
    members = query_groups(problem["grid"], prefix, tile, a_down.device)
    arguments = (a_down, w_up, members, problem["budget"], problem["tau"], problem["basis_threshold"], prefix)
    with running(problem["variant"], problem["threads"]):
        indices, counts = cpu.select(*arguments)
    expected_indices, expected_counts = reference.select(*(x.double() for x in arguments[:2]), *arguments[2:])
    assert torch.equal(indices, expected_indices)
    assert torch.equal(counts, expected_counts)


@pytest.mark.usefixtures("_instructions")
@pytest.mark.parametrize("tile", [None, (2, 2), (2, 7), (5, 5)])
def test_fused_selects_what_select_selects(tile):
    """Values that tell which keys were used: softmax weights of equal logits are one over the list's length."""
    grid, heads, m = (14, 14), 2, 49
    n = 197
    q, k = torch.zeros(1, heads, n, 64), torch.zeros(1, heads, n, 64)
    q[..., :2], k[..., :2] = torch.randn(1, heads, n, 2), torch.randn(1, heads, n, 2) * 1e-3
    w_down, w_up = torch.rand(heads, m, n) / n, (torch.randn(heads, m, n) * 4).round() / 32
    members = query_groups(grid, 1, tile, q.device)
    a_down = low_rank_attention(q, k, w_down, 1, 0.25)
    indices, counts = cpu.select(a_down, w_up, members, 30, 0.0, 0.01, 1)
    listed = Connectivity(indices, counts, members, num_tokens=n, num_prefix=1, adds_self=tile is not None)
    packed = cpu.pack(w_down, w_up, 0.01)
    keywords = {"budget": 30, "tau": 0.0, "scale": 0.25, "num_prefix": 1, "residual": False}
    used = agreement.keys_used(lambda v: cpu.fused(q, k, v, packed, members, **keywords), torch.empty_like(q))
    # The basis has few levels, so scores lie close: the two compute a_down with different rounding, which may move a
    # key across the cut. Each must be right by itself, and where rounding has no choice they are then the same.
    group_of = None if tile is None else agreement.groups_of_rows(members, n, 1)
    exact = [x.double() for x in (q[:, :, 1:], k, w_down)]
    forced = agreement.forced_keys(n - 1, n, 1)
    for mask, coefficients in (
        (listed.mask(), agreement.Bounds.certain(a_down.double())),
        (used, agreement.coefficient_bounds(*exact, 0.25)),
    ):
        assert bool(mask[:, :, 0].all())
        scores = agreement.score_bounds(coefficients, w_up.double(), 0.0, 0.01, group_of)
        assert not agreement.unexplained(mask[:, :, 1:], scores.lower, scores.upper, 30, forced).any()


def leaves(*inputs):
    return [x.detach().clone().requires_grad_() for x in inputs]


def output_error(connectivity, inputs, scale):
    """How far attention over given lists and coefficients may be off."""
    q, k, v, a_down, w_up = (x.detach() for x in inputs)
    prefix = connectivity.num_prefix
    residual = (agreement.Bounds.certain(a_down), w_up, v) if w_up.shape[1] else None
    mask = connectivity.mask()[:, :, prefix:]
    return agreement.output_error(q[:, :, prefix:], k, v, mask, scale, residual)


@hypothesis.settings(max_examples=120, deadline=None)
@hypothesis.given(problems(largest=12))
def test_gradients_equal_the_reference(problem):
    q, k, v, w_down, w_up = tensors(problem)
    prefix, scale = problem["prefix"], problem["head_dim"] ** -0.5
    members = query_groups(problem["grid"], prefix, problem["tile"], q.device)
    a_down = low_rank_attention(q, k, w_down, prefix, scale)
    if not problem["residual"]:
        a_down, w_up = a_down[..., :0], w_up[:, :0]
        some = torch.rand(*a_down.shape[:3], 1), torch.rand(problem["heads"], 1, q.shape[2])
        indices, counts = cpu.select(*some, members, problem["budget"], 0.0, 0.0, prefix)
    else:
        indices, counts = cpu.select(
            a_down, w_up, members, problem["budget"], problem["tau"], problem["basis_threshold"], prefix
        )
    connectivity = Connectivity(
        indices, counts, members, num_tokens=q.shape[2], num_prefix=prefix, adds_self=members.shape[1] > 1
    )
    inputs = leaves(q, k, v, a_down, w_up)
    exact = leaves(*(x.double() for x in inputs))
    with running(problem["variant"], problem["threads"]):
        out = cpu.attend(*inputs[:3], connectivity, *inputs[3:], scale)
        direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
        # Where the dropped mass is within rounding of 0 or 1, its slope is one thing or the other: such rows stay out.
        estimates = exact[3].detach() @ exact[4].detach()
        mass = estimates.masked_fill(connectivity.mask()[:, :, prefix:], 0).sum(-1)
        direction = torch.where(((mass.abs() < 1e-4) | ((mass - 1).abs() < 1e-4))[..., None], 0, direction)
        gradients = torch.autograd.grad(out, inputs, direction)
        again = torch.autograd.grad(cpu.attend(*inputs[:3], connectivity, *inputs[3:], scale), inputs, direction)
    expected = reference.attend(*exact[:3], connectivity, *exact[3:], scale)
    wanted = torch.autograd.grad(expected, exact, direction.double(), allow_unused=True)
    allowed = output_error(connectivity, exact, scale)
    assert bool(((out.double() - expected.detach()).abs() <= allowed).all())
    logits = q.double().norm(dim=-1).max() * k.double().norm(dim=-1).max() * scale
    tolerance = float((2e-4 if problem["residual"] else 2e-5) + 4 * torch.finfo(torch.float32).eps * logits)
    for name, gradient, repeated, exact_gradient in zip(
        ["q", "k", "v", "a_down", "w_up"], gradients, again, wanted, strict=True
    ):
        assert torch.equal(gradient, repeated), f"{name} is not deterministic"
        assert bool(torch.isfinite(gradient).all()), name
        # Softmax saturates at huge logits: gradients are then differences of nearly equal numbers.
        if exact_gradient is None or not exact_gradient.numel() or problem["scale"] > 1:
            continue
        natural = {"q": k, "k": q}.get(name, torch.ones(1)).abs().amax() * (v.abs().amax() if name != "v" else 1)
        size = torch.maximum(exact_gradient.abs().amax(), 0.01 * natural.double()).clamp(min=1e-30)
        error = (gradient.double() - exact_gradient).abs().amax() / size
        assert float(error) < 10 * tolerance, name


@pytest.mark.usefixtures("_instructions")
@pytest.mark.parametrize("tile", [None, (2, 3)])
def test_gradients_of_the_whole_layer(tile):
    """Through predict and sparse_attention: w_down and w_up too."""
    grid, n = (5, 6), 31
    q, k, v = (torch.randn(2, 2, n, 24) for _ in range(3))
    w_down, w_up = torch.rand(2, 7, n) / n, torch.rand(2, 7, n) / 20
    members = query_groups(grid, 1, tile, q.device)
    group_of = None if tile is None else agreement.groups_of_rows(members, n, 1)
    settings = {"budget": 6, "tau": 0.01, "threshold": 0.01, "scale": 24**-0.5, "prefix": 1, "group_of": group_of}
    assert rounding_has_no_choice(q, k, w_down, w_up, **settings)

    def gradients(backend, dtype):
        inputs = [x.to(dtype).requires_grad_() for x in (q, k, v, w_down, w_up)]
        connectivity, residual = predict(
            *inputs[:2], *inputs[3:], budget=6, grid=grid, tau=0.01, tile=tile, backend=backend
        )
        out = sparse_attention(*inputs[:3], connectivity, residual=residual, backend=backend)
        return torch.autograd.grad(out.square().sum(), inputs)

    for got, wanted in zip(gradients("cpu", torch.float32), gradients("reference", torch.float64), strict=True):
        torch.testing.assert_close(got.double(), wanted, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("tile", [None, (2, 2)])
@pytest.mark.parametrize("residual", [False, True])
def test_bfloat16(tile, residual):
    problem = {
        "grid": (9, 10),
        "prefix": 1,
        "batch": 2,
        "heads": 2,
        "head_dim": 40,
        "landmarks": 9,
        "budget": 20,
        "tile": tile,
        "tau": 0.02,
        "basis_threshold": 0.0,
        "residual": residual,
        "layout": "qkv",
        "pooled": True,
        "basis": "random",
        "scale": 1.0,
        "seed": 3,
    }
    q, k, v, w_down, w_up = tensors(problem, torch.bfloat16)
    out = fused(problem, q, k, v, w_down, w_up)
    assert out.dtype == torch.bfloat16
    expected, allowed, undecided = oracle(problem, q, k, v, w_down, w_up, torch.bfloat16)
    # Sums are float32: what is left is the rounding of the result, 2^-9 of it.
    assert bool(((out.double() - expected).abs() <= allowed)[~undecided].all())
    inputs = leaves(q, k, v)
    connectivity, estimate = predict(
        *inputs[:2], w_down.bfloat16(), w_up.bfloat16(), budget=20, grid=(9, 10), tile=tile, backend="cpu"
    )
    sparse_attention(*inputs, connectivity, residual=estimate if residual else None, backend="cpu").sum().backward()
    assert all(x.grad.dtype == torch.bfloat16 and bool(torch.isfinite(x.grad).all()) for x in inputs)


def test_tokens_that_were_dropped():
    """Each sample keeps its own tokens; their weights are picked by the positions they had."""
    torch.manual_seed(1)  # whose scores lie further from the cut than rounding reaches, which is asserted
    grid, prefix, heads, m, d = (6, 7), 1, 2, 9, 20
    full, n, batch = prefix + 42, 20, 3
    patches = (torch.randperm(42)[: n - 1].sort().values + 1 for _ in range(batch))
    positions = torch.stack([torch.cat([torch.zeros(1, dtype=torch.long), kept]) for kept in patches])
    q, k, v = (torch.randn(batch, heads, n, d) for _ in range(3))
    for w_down in (torch.rand(heads, m, full) / n, torch.zeros(heads, m, full)):
        if not bool(w_down.any()):
            w_down[:, torch.arange(full) % m, torch.arange(full)] = 0.3
        w_up = torch.rand(heads, m, full) / 9
        packed = cpu.pack(w_down, w_up, 0.02)
        for tile in (None, (2, 3)):
            members = query_groups(grid, prefix, tile, q.device)
            keywords = {"budget": 6, "tau": 0.01, "scale": 0.3, "num_prefix": prefix, "residual": True}
            out = cpu.fused(q, k, v, packed, members, positions=positions, **keywords)
            for b in range(batch):
                kept = positions[b].long()
                down, up = w_down[..., kept].double(), w_up[..., kept].double()
                own = [x[b : b + 1].double() for x in (q, k, v)]
                tiles = agreement.groups_of_rows(members, full, prefix, positions[b : b + 1])
                settings = {"budget": 6, "tau": 0.01, "threshold": 0.02, "scale": 0.3, "prefix": prefix}
                group_of = None if tile is None else tiles
                assert rounding_has_no_choice(*own[:2], down, up, **settings, group_of=group_of)
                expected = _dropped(*own, down, up, kept, members, keywords)
                torch.testing.assert_close(out[b : b + 1].double(), expected, rtol=1e-4, atol=1e-5)


def _dropped(q, k, v, w_down, w_up, kept, members, settings):
    prefix, scale = settings["num_prefix"], settings["scale"]
    a_down = reference.coefficients(q[:, :, prefix:], k, w_down, scale)
    scores = reference.scores(a_down, w_up, settings["tau"], 0.02)
    groups = [[i for i, p in enumerate(kept.tolist()) if p in set(group.tolist())] for group in members]
    mask = torch.zeros(*q.shape[:2], len(kept) - prefix, len(kept), dtype=torch.bool)
    for group in groups:
        rows = torch.tensor(group, dtype=torch.long) - prefix
        if len(rows):
            mask[:, :, rows] = reference.top_budget(scores[:, :, rows].mean(2, keepdim=True), settings["budget"])
    mask[..., :prefix] = True
    mask.diagonal(prefix, 2, 3).fill_(True)
    rows = reference.residual_attention(q[:, :, prefix:], k, v, mask, scale, a_down, w_up)
    return torch.cat([reference.full_attention(q[:, :, :prefix], k, scale) @ v, rows], 2)


@pytest.mark.parametrize("tile", [None, (2, 2)])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_what_is_not_finite_shows_where_eager_shows_it(tile, bad, which):
    inputs = {name: torch.randn(1, 2, 26, 16) for name in "qkv"}
    inputs[which][0, 1, 7, 3] = bad
    q, k, v = inputs.values()
    w_down = torch.zeros(2, 5, 26)
    w_down[:, torch.arange(26) % 5, torch.arange(26)] = 0.2
    w_up = torch.rand(2, 5, 26)
    packed = cpu.pack(w_down, w_up, 0.0)
    members = query_groups((5, 5), 1, tile, q.device)
    for residual in (False, True):
        out = cpu.fused(q, k, v, packed, members, budget=5, tau=0.0, scale=0.25, num_prefix=1, residual=residual)
        connectivity, estimate = predict(
            q, k, w_down, w_up, budget=5, grid=(5, 5), tau=0.0, basis_threshold=0.0, tile=tile, backend="eager"
        )
        expected = sparse_attention(q, k, v, connectivity, residual=estimate if residual else None, backend="eager")
        finite = torch.isfinite(out).all(-1)
        if which == "v" and not residual:  # eager multiplies other queries' values by zero, which spreads them
            assert torch.equal(finite[:, 1], ~connectivity.mask()[:, 1, :, 7])
            assert bool(finite[:, 0].all())
        else:
            assert torch.equal(finite, torch.isfinite(expected).all(-1))


@pytest.mark.usefixtures("_instructions")
@pytest.mark.parametrize("tile", [None, (3, 4)])
def test_several_python_threads_at_once(tile):
    """Every kernel, on two threads of its own, called on the same inputs by three: bit for bit what it is alone."""
    problem = {
        "grid": (12, 11),
        "prefix": 1,
        "batch": 2,
        "heads": 3,
        "head_dim": 32,
        "landmarks": 12,
        "budget": 20,
        "tile": tile,
        "tau": 0.0,
        "basis_threshold": 0.0,
        "residual": True,
        "layout": "qkv",
        "pooled": True,
        "basis": "random",
        "scale": 1.0,
        "seed": 5,
    }
    q, k, v, w_down, w_up = tensors(problem)
    members = query_groups(problem["grid"], 1, tile, q.device)
    a_down = low_rank_attention(q, k, w_down, 1, 0.2)
    packed = cpu.pack(w_down, w_up, 0.0)
    torch.set_num_threads(2)  # until the fixture ends

    def everything():
        keywords = {"budget": 20, "tau": 0.0, "scale": 0.2, "num_prefix": 1, "residual": True}
        out = cpu.fused(q, k, v, packed, members, **keywords)
        indices, counts = cpu.select(a_down, w_up, members, 20, 0.0, 0.0, 1)
        lists = Connectivity(indices, counts, members, num_tokens=133, num_prefix=1, adds_self=tile is not None)
        inputs = leaves(q, k, v, a_down, w_up)
        rows = cpu.attend(*inputs[:3], lists, *inputs[3:], 0.2)
        return out, indices, rows, *torch.autograd.grad(rows.square().sum(), inputs)

    expected, wrong = everything(), []

    def work():
        for _ in range(4):
            wrong.extend(
                i for i, (x, y) in enumerate(zip(everything(), expected, strict=True)) if not torch.equal(x, y)
            )

    workers = [threading.Thread(target=work) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


def test_outputs_are_written_everywhere():
    before = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        q, k, v = (torch.randn(2, 2, 21, 8, requires_grad=True) for _ in range(3))
        w_down, w_up = torch.rand(2, 4, 21), torch.rand(2, 4, 21, requires_grad=True)
        for tile in (None, (3, 3)):
            connectivity, residual = predict(q, k, w_down, w_up, budget=3, grid=(4, 5), tile=tile, backend="cpu")
            out = sparse_attention(q, k, v, connectivity, residual=residual, backend="cpu")
            grads = torch.autograd.grad(out.sum(), (q, k, v, w_up))
            assert all(bool(torch.isfinite(tensor).all()) for tensor in (out, *grads))
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = before


def test_operators_keep_torchs_contract():
    q, k, v = (torch.randn(1, 2, 10, 4, requires_grad=True) for _ in range(3))
    w_up = torch.rand(2, 3, 10, requires_grad=True)
    a_down = torch.rand(1, 2, 9, 3).softmax(-1)
    members = query_groups((3, 3), 1, (2, 2), q.device)
    torch.library.opcheck(torch.ops.sparsifiner.cpu_select, (a_down, w_up.detach(), members, 3, 0.05, 0.01, 1))
    indices, _ = cpu.select(a_down, w_up.detach(), members, 3, 0.05, 0.01, 1)
    a_down.requires_grad_()
    torch.library.opcheck(
        torch.ops.sparsifiner.cpu_attend, (q, k, v, indices, members, a_down, w_up, None, 0.5, 1, True)
    )
    packed = cpu.pack(torch.rand(2, 3, 10), w_up.detach(), 0.01)
    plain = (x.detach() for x in (q, k, v))
    arguments = (*plain, *packed.tensors(), members.int(), None, 3, 0.05, 0.5, 1, True, False)
    torch.library.opcheck(torch.ops.sparsifiner.fused, arguments)
    torch.library.opcheck(torch.ops.sparsifiner.pack, (torch.rand(2, 3, 10), w_up.detach(), 0.01))


def test_flop_formulas():
    batch, heads, n, d, m, budget = 2, 3, 26, 8, 4, 5
    q, k, v = (torch.randn(batch, heads, n, d) for _ in range(3))
    w = torch.rand(heads, m, n)
    packed, members = cpu.pack(w, w, 0.0), query_groups((5, 5), 1, None, q.device)
    with FlopCounterMode(display=False) as counter:
        connectivity, residual = predict(q, k, w, w, budget=budget, grid=(5, 5), backend="cpu")
        sparse_attention(q, k, v, connectivity, residual=residual, backend="cpu")
        cpu.fused(q, k, v, packed, members, budget=budget, tau=0.0, scale=1.0, num_prefix=1, residual=True)
    counts = {str(op): flops for op, flops in counter.get_flop_counts()["Global"].items()}
    width = budget + 2
    assert counts["sparsifiner.cpu_select"] == 2 * batch * heads * 25 * m * n
    assert counts["sparsifiner.cpu_attend"] == 2 * batch * heads * 25 * width * (2 * d + m)
    assert counts["sparsifiner.fused"] == 2 * batch * heads * (4 * n * m * d + n * m * n + n * budget * (2 * d + m))


def test_lists_out_of_bounds_are_refused():
    q, k, v = (torch.randn(1, 1, 5, 8) for _ in range(3))
    empty = (torch.empty(1, 1, 4, 0), torch.empty(1, 0, 5))
    members = torch.arange(1, 5)[:, None]
    for lists in ([0, 5], [0, 9999], [3, 1], [2, 2]):
        indices = torch.tensor(lists, dtype=torch.int32).expand(1, 1, 4, 2).contiguous()
        connectivity = Connectivity(indices, torch.full((1, 1, 4), 2), members, num_tokens=5, num_prefix=1)
        with pytest.raises(ValueError, match="ascending indices of tokens"):
            cpu.attend(q, k, v, connectivity, *empty, 1.0)


def test_weights_packed_for_other_lanes_are_refused():
    packed = cpu.pack(torch.rand(1, 3, 26), torch.rand(1, 3, 26), 0.0)
    members = query_groups((5, 5), 1, None, torch.device("cpu"))
    x = torch.randn(1, 1, 26, 8)
    other = dataclasses.replace(packed, up=packed.up[..., :-1])
    with pytest.raises(BackendError, match="pack them again"):
        cpu.fused(x, x, x, other, members, budget=2, tau=0.0, scale=1.0, num_prefix=1, residual=True)
    with pytest.raises(ValueError, match="cannot run the instruction set avx1024"):
        cpu.native().use("avx1024")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": torch.randn(1, 1, 25, 8)}, "differ"),
        ({"v": torch.randn(1, 1, 26, 8).bfloat16()}, "differ"),
        ({"members": torch.tensor([[26]])}, "members must be patch tokens, 1 to 25"),
        ({"members": torch.tensor([[0]])}, "members must be patch tokens"),
        ({"members": torch.tensor([[-2]])}, "members must be patch tokens"),
        ({"positions": torch.full((1, 26), 26)}, r"positions must be \[1, 26\]"),
        ({"positions": torch.zeros(1, 25)}, r"positions must be \[1, 26\]"),
        ({"packed": cpu.pack(torch.rand(1, 3, 30), torch.rand(1, 3, 30), 0.0)}, "the weights know 30 tokens and 26"),
    ],
)
def test_nothing_out_of_bounds_goes_down(change, message):
    x = torch.randn(1, 1, 26, 8)
    arguments = {"q": x, "k": x, "v": x, "packed": cpu.pack(torch.rand(1, 3, 26), torch.rand(1, 3, 26), 0.0)}
    arguments["members"] = query_groups((5, 5), 1, None, x.device)
    with pytest.raises(BackendError, match=message):
        cpu.fused(**(arguments | change), budget=2, tau=0.0, scale=1.0, num_prefix=1, residual=True)


@pytest.mark.parametrize(
    ("tensor", "landmarks", "reason"),
    [
        (torch.empty(1, 1, 2, 8, dtype=torch.float64), 4, "float32 and bfloat16, not float64"),
        (torch.empty(1, 1, 2, 264), 4, "head dimensions up to 256, not 264"),
        (torch.empty(1, 1, 2, 8), 129, "up to 128 landmarks, not 129"),
        (torch.empty(1, 1, 2, 8, device="meta"), 4, "the tensors are on meta"),
    ],
)
def test_what_the_kernels_cannot_take(tensor, landmarks, reason):
    assert reason in cpu.can_run(tensor, landmarks)
    assert dispatch.resolve("auto", tensor, landmarks) is eager
    with pytest.raises(BackendError, match=reason):
        dispatch.resolve("cpu", tensor, landmarks)


def test_an_install_without_a_compiler_says_what_it_lacks(monkeypatch):
    monkeypatch.setattr(cpu.library, "_native", None)
    monkeypatch.setattr(cpu.library, "_missing", "no module named _native")
    assert "reinstall with a C++17 compiler" in cpu.can_run(torch.empty(1, 1, 2, 8))
    assert dispatch.resolve("auto", torch.empty(1, 1, 2, 8)) is eager
    with pytest.raises(BackendError, match="not installed"):
        cpu.native()


@pytest.mark.usefixtures("_instructions")
@pytest.mark.parametrize("tile", [None, (2, 2)])
@pytest.mark.parametrize("head_dim", [16, 20, 64, 72])
def test_keys_and_values_in_16_bits(tile, head_dim):
    """As if keys and values had been rounded to bfloat16, but for the landmarks, which are made before."""
    grid, n, heads, m = (11, 12), 133, 2, 9
    q, k, v = (torch.randn(2, heads, n, head_dim) for _ in range(3))
    k, v = k.bfloat16().float(), v.bfloat16().float()
    w_down, w_up = torch.rand(heads, m, n) / n, torch.rand(heads, m, n) / 9
    members = query_groups(grid, 1, tile, q.device)
    packed = cpu.pack(w_down, w_up, 0.02)
    keywords = {"budget": 20, "tau": 0.01, "scale": 0.2, "num_prefix": 1, "residual": True}
    held = cpu.fused(q, k, v, packed, members, narrow=True, **keywords)
    torch.testing.assert_close(held, cpu.fused(q, k, v, packed, members, **keywords), rtol=1e-4, atol=1e-5)
    rough = torch.randn_like(v)  # values only: landmarks are made of keys
    plain = keywords | {"residual": False}
    held = cpu.fused(q, k, rough, packed, members, narrow=True, **plain)
    rounded = cpu.fused(q, k, rough.bfloat16().float(), packed, members, **plain)
    torch.testing.assert_close(held, rounded, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(held, cpu.fused(q, k, rough, packed, members, **plain), rtol=1e-4, atol=1e-5)
    odd = v.clone()
    odd[0, 0, 5, 0], odd[1, 1, 9, 1] = torch.nan, torch.finfo(torch.float32).max  # which rounds to infinity
    out = cpu.fused(q, k, odd, packed, members, narrow=True, **keywords)
    assert bool(torch.isnan(out[0, 0]).any())
    assert not bool(torch.isfinite(out[1, 1]).all())
