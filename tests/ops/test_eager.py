"""The eager backend against the reference: every row, every gradient, over shapes nobody chose."""

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from sparsifiner.ops import agreement, dispatch, eager, reference
from sparsifiner.ops.attention import Residual, predict, sparse_attention
from sparsifiner.ops.connectivity import Connectivity, accumulation_dtype, query_groups


@pytest.fixture(autouse=True)
def _eager(monkeypatch):
    """Where a test names no backend it means this one."""
    monkeypatch.setattr(dispatch, "_AUTO", ("eager",))


@st.composite
def problems(draw):
    grid = draw(st.tuples(st.integers(1, 7), st.integers(1, 7)))
    prefix = draw(st.integers(0, 3))
    n = prefix + grid[0] * grid[1]
    return {
        "grid": grid,
        "prefix": prefix,
        "batch": draw(st.integers(1, 3)),
        "heads": draw(st.integers(1, 3)),
        "head_dim": draw(st.sampled_from([1, 3, 8, 16])),
        "landmarks": draw(st.integers(1, min(n, 9))),
        "budget": draw(st.integers(1, n)),
        "tile": draw(st.sampled_from([None, (1, 1), (2, 2), (2, 3), (5, 1), (9, 9)])),
        "tau": draw(st.sampled_from([0.0, 0.05, 0.3])),
        "basis_threshold": draw(st.sampled_from([0.0, 0.01, 0.5])),
        "dtype": draw(st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16])),
        "residual": draw(st.booleans()),
        "strided": draw(st.booleans()),
        "levels": draw(st.booleans()),  # few distinct scores: ties everywhere
        "scale": draw(st.sampled_from([1e-3, 1.0, 30.0])),
        "seed": draw(st.integers(0, 2**16)),
    }


def tensors(problem):
    generator = torch.Generator().manual_seed(problem["seed"])
    batch, heads, d, m = (problem[name] for name in ("batch", "heads", "head_dim", "landmarks"))
    n = problem["prefix"] + problem["grid"][0] * problem["grid"][1]
    packed = torch.randn(batch, n, 3, heads, d, generator=generator, dtype=torch.float64) * problem["scale"]
    packed = packed.to(problem["dtype"])
    q, k, v = packed.permute(2, 0, 3, 1, 4).unbind(0)  # strided views, as a host's qkv gives them
    if not problem["strided"]:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    w_down = torch.rand(heads, m, n, generator=generator, dtype=torch.float64)
    w_up = torch.randn(heads, m, n, generator=generator, dtype=torch.float64) * 0.3
    if problem["levels"]:
        w_up = (w_up * 3).round() / 4
    return q, k, v, w_down.to(problem["dtype"]), w_up.to(problem["dtype"])


def run(problem, q, k, v, w_down, w_up, backend, connectivity=None):
    predicted, residual = predict(
        q,
        k,
        w_down,
        w_up,
        budget=problem["budget"],
        grid=problem["grid"],
        num_prefix=problem["prefix"],
        tau=problem["tau"],
        basis_threshold=problem["basis_threshold"],
        tile=problem["tile"],
        backend=backend,
    )
    connectivity = connectivity or predicted
    out = sparse_attention(q, k, v, connectivity, residual=residual if problem["residual"] else None, backend=backend)
    return predicted, out


@hypothesis.settings(max_examples=250, deadline=None)
@hypothesis.given(problems())
def test_selection_equals_the_reference_on_every_row(problem):
    q, _, _, _, w_up = tensors(problem)
    prefix = problem["prefix"]
    members = query_groups(problem["grid"], prefix, problem["tile"], q.device)
    # The same coefficients go to both, in float64 with few distinct values: sums are then exact in any order,
    # up to the mean over a tile, so the sets must be equal and no row may hide behind rounding.
    a_down = torch.rand(problem["batch"], problem["heads"], len(q[0, 0]) - prefix, w_up.shape[1])
    a_down = (a_down * 8).round().double() / 8
    basis = (w_up.double() * 16).round() / 16
    settings = (members, problem["budget"], problem["tau"], problem["basis_threshold"], prefix)
    ours, theirs = eager.select(a_down, basis, *settings), reference.select(a_down, basis, *settings)
    if problem["tile"] is None or members.shape[1] in (1, 2, 4):  # means of these sizes are exact
        assert torch.equal(ours[0], theirs[0])
        assert torch.equal(ours[1], theirs[1])
        return
    group_of = agreement.groups_of_rows(members, w_up.shape[-1], prefix)
    exact = agreement.Bounds.certain(a_down)
    scores = agreement.score_bounds(exact, basis, *settings[2:4], group_of, torch.float64)
    forced = agreement.forced_keys(a_down.shape[2], w_up.shape[-1], prefix)
    for lists in (ours, theirs):
        connectivity = Connectivity(*lists, members, num_tokens=w_up.shape[-1], num_prefix=prefix, adds_self=True)
        mask = connectivity.mask()[:, :, prefix:]
        assert not agreement.unexplained(mask, scores.lower, scores.upper, problem["budget"], forced).any()


@hypothesis.settings(max_examples=250, deadline=None)
@hypothesis.given(problems())
def test_output_equals_the_reference_on_every_row(problem):
    q, k, v, w_down, w_up = tensors(problem)
    connectivity, ours = run(problem, q, k, v, w_down, w_up, "eager")
    _, expected = run(
        problem, q.double(), k.double(), v.double(), w_down.double(), w_up.double(), "reference", connectivity
    )
    _, plain = run(problem, q, k, v, w_down, w_up, "reference", connectivity)
    assert ours.dtype == q.dtype
    assert ours.shape == q.shape
    assert bool(torch.isfinite(ours).all())
    # At most twice the error that plain PyTorch makes in this dtype, the resolution of the result, and what one
    # rounding of the largest logit does to a softmax (plain PyTorch in float64 is the oracle itself).
    largest = (q.double() @ k.double().mT).abs().max() * q.shape[-1] ** -0.5 + 1
    rounding = torch.finfo(accumulation_dtype(q.dtype)).eps * largest * v.double().abs().max()
    resolution = torch.finfo(q.dtype).eps * expected.abs().max()
    allowed = 2 * (plain.double() - expected).abs().max() + 4 * (rounding + resolution)
    assert (ours.double() - expected).abs().max() <= allowed


@hypothesis.settings(max_examples=120, deadline=None)
@hypothesis.given(problems())
def test_gradients_equal_the_reference(problem):
    problem = problem | {"dtype": torch.float64, "scale": min(problem["scale"], 1.0)}
    inputs = tensors(problem)
    direction = torch.randn(inputs[0].shape, dtype=torch.float64)
    grads = []
    connectivity = None
    for backend in ("eager", "reference"):
        leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
        predicted, out = run(problem, *leaves, backend, connectivity)
        connectivity = connectivity or predicted
        hypothesis.assume(not problem["residual"] or not at_a_kink(problem, leaves, connectivity))
        used = leaves if problem["residual"] else leaves[:3]
        grads.append(torch.autograd.grad(out, used, direction))
    for name, ours, expected in zip(("q", "k", "v", "w_down", "w_up"), *grads, strict=False):
        torch.testing.assert_close(ours, expected, rtol=1e-8, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}")


def at_a_kink(problem, leaves, connectivity) -> bool:
    """Whether a dropped mass lies on the edge of its clamp, where rounding decides which side's slope holds."""
    q, k, _, w_down, w_up = (leaf.detach() for leaf in leaves)
    prefix = problem["prefix"]
    estimate = reference.coefficients(q, k, w_down, q.shape[-1] ** -0.5)[:, :, prefix:] @ w_up
    mass = estimate.masked_fill(connectivity.mask()[:, :, prefix:], 0).sum(-1)
    return bool(((mass.abs() < 1e-9) | ((mass - 1).abs() < 1e-9)).any())


@pytest.mark.parametrize("tile", [None, (2, 2)])
def test_gradients_by_finite_differences(tile):
    n, heads, m = 7, 2, 3
    q, k, v = (torch.randn(1, heads, n, 3, dtype=torch.float64, requires_grad=True) for _ in range(3))
    w_up = (torch.rand(heads, m, n, dtype=torch.float64) * 0.2).requires_grad_()
    a_down = torch.rand(1, heads, n - 1, m, dtype=torch.float64).softmax(-1).requires_grad_()
    w_down = torch.rand(heads, m, n, dtype=torch.float64)
    connectivity, _ = predict(q, k, w_down, w_up, budget=2, grid=(2, 3), tile=tile)

    def attend(q, k, v, a_down, w_up):
        return sparse_attention(q, k, v, connectivity, residual=Residual(a_down, w_up))

    assert torch.autograd.gradcheck(attend, (q, k, v, a_down, w_up))


def test_chunks_do_not_change_the_result(monkeypatch):
    problem = {
        "grid": (5, 4), "prefix": 1, "batch": 2, "heads": 2, "head_dim": 8, "landmarks": 4, "budget": 6, "tile": (2, 3),
        "tau": 0.0, "basis_threshold": 0.0, "dtype": torch.float64, "residual": True, "strided": True,
        "levels": False, "scale": 1.0, "seed": 3,
    }  # fmt: skip
    inputs = [tensor.requires_grad_() for tensor in tensors(problem)]
    _, whole = run(problem, *inputs, "eager")
    whole_grads = torch.autograd.grad(whole.square().sum(), inputs)
    monkeypatch.setattr(eager, "CHUNK_ELEMENTS", 1)  # a group at a time
    _, chunked = run(problem, *inputs, "eager")
    torch.testing.assert_close(chunked, whole)
    torch.testing.assert_close(torch.autograd.grad(chunked.square().sum(), inputs), whole_grads)


def test_fresh_memory_is_never_read():
    """Every element of the output is written: with poisoned allocations nothing turns NaN."""
    before = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        q, k, v = (torch.randn(2, 2, 21, 8, requires_grad=True) for _ in range(3))
        w_down, w_up = torch.rand(2, 4, 21), torch.rand(2, 4, 21, requires_grad=True)
        for tile in (None, (3, 3)):
            connectivity, residual = predict(q, k, w_down, w_up, budget=3, grid=(4, 5), tile=tile)
            out = sparse_attention(q, k, v, connectivity, residual=residual)
            grads = torch.autograd.grad(out.sum(), (q, k, v, w_up))
            assert all(bool(torch.isfinite(tensor).all()) for tensor in (out, *grads))
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = before


def test_nan_inputs_give_nan_and_never_crash():
    q, k, v = (torch.randn(1, 1, 10, 4) for _ in range(3))
    q[0, 0, 5] = torch.nan
    w = torch.rand(1, 3, 10)
    connectivity, residual = predict(q, k, w, w, budget=4, grid=(3, 3))
    out = sparse_attention(q, k, v, connectivity, residual=residual)
    assert torch.isnan(out[0, 0, 5]).all()
    assert torch.isfinite(out[0, 0, [0, 1, 2, 3, 4, 6, 7, 8, 9]]).all()


def test_operators_keep_torchs_contract():
    q, k, v = (torch.randn(1, 2, 10, 4, requires_grad=True) for _ in range(3))
    w_up = torch.rand(2, 3, 10, requires_grad=True)
    a_down = torch.rand(1, 2, 9, 3).softmax(-1)
    members = query_groups((3, 3), 1, (2, 2), q.device)
    torch.library.opcheck(torch.ops.sparsifiner.select, (a_down, w_up.detach(), members, 3, 0.05, 0.01, 1))
    indices, _ = eager.select(a_down, w_up.detach(), members, 3, 0.05, 0.01, 1)
    a_down.requires_grad_()
    arguments = (q, k, v, indices, members, a_down, w_up, None, 0.5, 1, True)
    torch.library.opcheck(torch.ops.sparsifiner.attend, arguments)


def test_compiles_as_one_graph():
    q, k, v = (torch.randn(1, 2, 10, 4) for _ in range(3))
    w = torch.rand(2, 3, 10)

    def layer(q, k, v):
        connectivity, residual = predict(q, k, w, w, budget=3, grid=(3, 3))
        return sparse_attention(q, k, v, connectivity, residual=residual)

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, k, v), layer(q, k, v))


def test_flop_formulas():
    batch, heads, n, d, m, budget = 2, 3, 26, 8, 4, 5
    q, k, v = (torch.randn(batch, heads, n, d) for _ in range(3))
    w = torch.rand(heads, m, n)
    with FlopCounterMode(display=False) as counter:
        connectivity, residual = predict(q, k, w, w, budget=budget, grid=(5, 5))
        sparse_attention(q, k, v, connectivity, residual=residual)
    counts = {str(op): flops for op, flops in counter.get_flop_counts()["Global"].items()}
    width = budget + 2
    assert counts["sparsifiner.select"] == 2 * batch * heads * 25 * m * n
    assert counts["sparsifiner.attend"] == 2 * batch * heads * 25 * width * (2 * d + m)


def test_memory_stays_linear():
    """No tensor of n x n elements is ever allocated."""
    n, grid = 1 + 40 * 40, (40, 40)
    q, k, v = (torch.randn(1, 1, n, 4, requires_grad=True) for _ in range(3))
    w = torch.rand(1, 4, n)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            out = function(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, tuple | list) else (out,):
                if isinstance(tensor, torch.Tensor):
                    largest = max(largest, tensor.untyped_storage().nbytes() // tensor.element_size())
            return out

    with Watch():
        connectivity, residual = predict(q, k, w, w, budget=8, grid=grid, tau=0.0, basis_threshold=0.0)
        sparse_attention(q, k, v, connectivity, residual=residual).sum().backward()
    assert largest < n * n / 2


@pytest.mark.parametrize("backend", ["eager", "reference"])
def test_one_patch_is_enough(backend):
    q, k, v = (torch.randn(1, 1, 1, 4) for _ in range(3))
    w = torch.ones(1, 1, 1)
    connectivity, residual = predict(q, k, w, w, budget=1, grid=(1, 1), num_prefix=0, backend=backend)
    torch.testing.assert_close(sparse_attention(q, k, v, connectivity, residual=residual, backend=backend), v)
