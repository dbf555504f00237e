"""Attention at several resolutions: every row and every gradient against the reference, on every backend."""

import itertools
import math

import pytest
import torch
from torch.nn import functional

import sparsifiner as sp
from sparsifiner.convert import sparse_layers
from sparsifiner.errors import BackendError, ConfigError
from sparsifiner.ops import cells, cpu, reference
from sparsifiner.ops.connectivity import query_groups

from ..toys import make_vit

BACKENDS = ["cpu", "eager"]
ONE, TWO, THREE = ((2, 2),), ((2, 2), (4, 4)), ((1, 2), (2, 4), (4, 4))
CLIP = ((1, 2, 2), (2, 2, 4))  # of frames, rows and columns


def inputs(grid=(6, 5), prefix=1, heads=2, batch=2, d=8, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    n = prefix + math.prod(grid)
    return [torch.randn(batch, heads, n, d, generator=generator, dtype=torch.float64).to(dtype) * 1.5 for _ in range(3)]


def opening(grid=(6, 5), budget=16, **settings):
    return cells.Opening(grid=grid, budget=budget, **settings)


def plain_holds(how, places):
    """Boolean [cells, patches]: the patches, at these places, that the cells of all levels hold."""
    along = torch.unravel_index(places, how.grid)
    levels = []
    for cell in how.cells:
        cell = (1,) * (len(how.grid) - len(cell)) + cell
        counts = [-(-side // part) for side, part in zip(how.grid, cell, strict=True)]
        where = [place // part for place, part in zip(along, cell, strict=True)]
        holding = torch.cartesian_prod(*map(torch.arange, counts))  # [cells, sides], row by row
        levels.append((torch.stack(where, -1)[None] == holding[:, None]).all(-1))
    return torch.cat(levels)


def plain_mask(q, k, v, how, places=None):
    """The rule in words, in float64, group by group.

    Returns boolean [batch, heads, patches, n + cells], what each query attends to, and `plain_holds` of each image.
    """
    prefix, patches = how.num_prefix, q.shape[2] - how.num_prefix
    places = torch.arange(patches).expand(len(q), -1) if places is None else places
    groups = query_groups(how.grid, 0, how.tile, torch.device("cpu"))
    starts = how.levels().starts
    masks, all_holds = torch.zeros(*q.shape[:2], patches, q.shape[2] + starts[-1], dtype=torch.bool), []
    scale, opened = q.shape[-1] ** -0.5, how.levels().opened
    for image, head in itertools.product(range(len(q)), range(q.shape[1])):
        holds = plain_holds(how, places[image])
        if head == 0:
            all_holds.append(holds)
        queries, keys, values = (x[image, head, prefix:].double() for x in (q, k, v))
        usual = queries.mean(0) * scale  # the query that weighs the keys of a cell
        weights = [torch.softmax(keys[hold] @ usual, 0) for hold in holds]
        means = [[share @ x[hold] for x in (keys, values)] for share, hold in zip(weights, holds, strict=True)]
        for group in groups:
            members = [i for i in range(patches) if int(places[image, i]) in group.tolist()]
            if not members:
                continue
            query = queries[members].mean(0)
            logits = [
                torch.logsumexp(keys[hold] @ usual, 0) + (query * scale - usual) @ mean[0]
                for hold, mean in zip(holds, means, strict=True)
            ]
            whole = [query @ key.double() * scale for key in k[image, head, :prefix]]
            whole += [logits[c] for c in range(starts[1]) if holds[c].any()]
            total = torch.logsumexp(torch.stack(whole), 0)
            candidates, chosen, standing = range(starts[-2], starts[-1]), [], []
            for level in reversed(range(len(how.cells))):
                scores = {}
                for cell in candidates:
                    hold = holds[cell]
                    if not hold.any():
                        continue
                    spread = [
                        (weights[cell] @ (x[hold] - mean).square().sum(1)).clamp(min=1e-30)
                        for x, mean in zip((keys, values), means[cell], strict=True)
                    ]
                    error = float(logits[cell] + (spread[0] * spread[1]).log() / 2)
                    scores[cell] = math.inf if hold[members].any() else error
                order = sorted(scores, key=lambda c: (-scores[c], c))
                chosen = order[: opened[level]]
                if how.tolerance:
                    chosen = [c for c in chosen if scores[c] >= float(total) + math.log(how.tolerance)]
                standing += [c for c in order if c not in chosen]
                if level:
                    finer = range(starts[level - 1], starts[level])
                    inside = {
                        c: [f for f in finer if holds[f].any() and bool(holds[c][holds[f]].all())] for c in chosen
                    }
                    candidates = [f for c in chosen for f in inside[c]]
            row = torch.zeros(masks.shape[-1], dtype=torch.bool)
            row[:prefix] = True
            for cell in chosen:
                row[prefix:][:patches] |= holds[cell]
            if how.closed:
                row[[q.shape[2] + cell for cell in standing]] = True
            masks[image, head, members] = row
    return masks, torch.stack(all_holds)


def mask_of(opened, n):
    return opened.lists.mask(torch.arange(opened.lists.num_prefix, n))


CASES = [
    ((6, 5), ONE, 1, None, 0.0),
    ((6, 6), ONE, 0, None, 0.3),
    ((7, 5), ((3, 2),), 3, None, 0.0),
    ((6, 6), ONE, 1, (4, 4), 0.0),
    ((5, 7), ONE, 2, (2, 3), 0.2),
    ((4, 4), ((1, 1),), 1, (2, 2), 0.0),
    ((3, 9), ((3, 3),), 1, None, 0.0),
    ((8, 8), TWO, 1, None, 0.0),
    ((8, 8), TWO, 1, (4, 4), 0.3),
    ((9, 7), TWO, 2, (3, 3), 0.0),
    ((8, 9), THREE, 0, (2, 2), 0.0),
    ((7, 8), THREE, 1, None, 0.2),
    ((2, 4, 4), ONE, 1, None, 0.0),  # two numbers: a frame deep
    ((3, 4, 3), ((2, 2, 2),), 0, None, 0.2),
    ((4, 4, 4), CLIP, 0, (2, 2, 4), 0.0),
    ((3, 5, 4), CLIP, 2, (2, 2), 0.3),
    ((5, 3, 4), ((1, 1, 2), (3, 1, 4)), 1, (3, 2, 2), 0.0),  # ragged along all three sides
    ((2, 1, 6), ((1, 1, 2), (2, 1, 2), (2, 1, 4)), 1, None, 0.0),
]


@pytest.mark.parametrize(("grid", "levels", "prefix", "tile", "tolerance"), CASES)
@pytest.mark.parametrize("closed", [True, False])
def test_every_row_and_gradient(grid, levels, prefix, tile, tolerance, closed):
    """Lists, outputs and gradients of every backend, and what the fused kernel does in one call."""
    budget = max(math.prod(levels[0]), math.prod(grid) // 3)
    how = opening(grid, budget, cells=levels, num_prefix=prefix, tile=tile, tolerance=tolerance, closed=closed)
    q, k, v = (x.requires_grad_() for x in inputs(grid, prefix, dtype=torch.float64))
    with torch.no_grad():
        mask, holds = plain_mask(q, k, v, how)
    scale = q.shape[-1] ** -0.5
    exact = reference.full_attention(q[:, :, :prefix], k, scale) @ v
    expected = torch.cat([exact, reference.cell_attention(q[:, :, prefix:], k, v, mask, holds, scale)], 2)
    direction = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    wanted = [expected, *torch.autograd.grad(expected, (q, k, v), direction)]
    for backend in BACKENDS:
        q, k, v = (x.requires_grad_() for x in inputs(grid, prefix))
        opened = cells.connect(q, k, v, how, backend=backend)
        assert torch.equal(mask_of(opened, q.shape[2]), mask), backend  # no near ties in these inputs
        assert int(opened.lists.counts.max()) <= how.levels().longest
        out = cells.cell_attention(q, k, v, opened, backend=backend)
        for ours, theirs in zip([out, *torch.autograd.grad(out, (q, k, v), direction.float())], wanted, strict=True):
            torch.testing.assert_close(ours.double(), theirs, rtol=2e-4, atol=2e-5)
    with torch.no_grad():
        torch.testing.assert_close(cells.fused(q, k, v, how).double(), wanted[0], rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("name", cpu.native().instruction_sets())
@pytest.mark.parametrize(("levels", "tile"), [(CLIP, None), (CLIP, (2, 2, 2)), (((1, 2), (1, 4), (2, 4)), (1, 4, 4))])
@torch.no_grad()
def test_clips_on_every_instruction_set(name, levels, tile):
    """A grid that no cell or tile divides along any side, with strided inputs."""
    before = cpu.instruction_set()
    qkv = torch.randn(2, 3 * 7 * 9, 3, 2, 64, generator=torch.Generator().manual_seed(2)) * 1.5
    q, k, v = qkv.permute(2, 0, 3, 1, 4)
    how = opening((3, 7, 9), 40, cells=levels, tile=tile, num_prefix=0)
    expected = cells.connect(q, k, v, how, backend="eager")
    rows = cells.cell_attention(q, k, v, expected, backend="eager")
    try:
        cpu.native().use(name)
        cpu.native().poison_scratch(True)
        assert torch.equal(cells.connect(q, k, v, how, backend="cpu").lists.indices, expected.lists.indices)
        for ours in (cells.fused(q, k, v, how), cells.cell_attention(q, k, v, expected, backend="cpu")):
            torch.testing.assert_close(ours, rows, rtol=1e-4, atol=1e-5)
    finally:
        cpu.native().use(before)
        cpu.native().poison_scratch(False)


@pytest.mark.parametrize("name", cpu.native().instruction_sets())
@pytest.mark.parametrize("tile", [None, (4, 4), (8, 8)])
@pytest.mark.parametrize(
    ("levels", "d", "tolerance"),
    [(ONE, 64, 0.01), (TWO, 64, 0.01), (TWO, 20, 0.01), (TWO, 64, 0.0), (THREE, 80, 0.01), (THREE, 32, 0.0)],
)
@torch.no_grad()
def test_every_instruction_set(name, tile, levels, d, tolerance):
    """Large enough for several blocks of queries, with strided inputs; every list and every row."""
    before = cpu.instruction_set()
    qkv = torch.randn(2, 226, 3, 3, d, generator=torch.Generator().manual_seed(2)) * 1.5
    q, k, v = qkv.permute(2, 0, 3, 1, 4)
    how = opening((15, 15), 50, cells=levels, tile=tile, tolerance=tolerance)
    expected = cells.connect(q, k, v, how, backend="eager")
    rows = cells.cell_attention(q, k, v, expected, backend="eager")
    try:
        cpu.native().use(name)
        cpu.native().poison_scratch(True)
        assert torch.equal(cells.connect(q, k, v, how, backend="cpu").lists.indices, expected.lists.indices)
        for ours in (cells.fused(q, k, v, how), cells.cell_attention(q, k, v, expected, backend="cpu")):
            torch.testing.assert_close(ours, rows, rtol=1e-4, atol=1e-5)
    finally:
        cpu.native().use(before)
        cpu.native().poison_scratch(False)


def bfloat16_error(q, k, v, opened, prefix):
    """What rounding may do to rows of bfloat16, where weights, means of cells and the result are rounded, no more.

    Weights and mean values by half a unit each; a mean key so much that its logit, and each weight with it, is off.
    """
    unit, wide = 2.0**-8 / 2, [x.double() for x in (q, k, v)]
    size = cells.cell_attention(wide[0], wide[1], wide[2].abs(), opened, backend="eager")[:, :, prefix:]
    terms = wide[0][:, :, prefix:].abs() @ wide[1].abs().mT * q.shape[-1] ** -0.5
    return size * (torch.expm1(2 * unit * terms.amax(-1, keepdim=True)) + 3.1 * unit) + 1e-5


@pytest.mark.parametrize("name", cpu.native().instruction_sets())
@pytest.mark.parametrize("tile", [None, (3, 3), (8, 8)])
@pytest.mark.parametrize(
    ("levels", "d", "prefix", "closed"),
    [
        (ONE, 64, 1, True),
        (TWO, 64, 3, True),
        (THREE, 64, 0, False),
        (TWO, 40, 1, True),
        (ONE, 130, 2, True),
        (THREE, 32, 1, True),
    ],
)
@torch.no_grad()
def test_every_row_of_bfloat16(name, tile, levels, d, prefix, closed):
    before = cpu.instruction_set()
    qkv = torch.randn(2, prefix + 143, 3, 3, d, generator=torch.Generator().manual_seed(5)).bfloat16()
    q, k, v = qkv.permute(2, 0, 3, 1, 4)
    how = opening((13, 11), 31, cells=levels, tile=tile, num_prefix=prefix, closed=closed)
    opened = cells.connect(q, k, v, how, backend="eager")
    exact = cells.cell_attention(q.double(), k.double(), v.double(), opened, backend="eager")
    try:
        cpu.native().use(name)
        cpu.native().poison_scratch(True)
        ours = cells.fused(q, k, v, how)
    finally:
        cpu.native().use(before)
        cpu.native().poison_scratch(False)
    assert ours.dtype == torch.bfloat16
    apart = (ours.double() - exact).abs()
    assert bool((apart[:, :, prefix:] <= bfloat16_error(q, k, v, opened, prefix)).all())
    dense = reference.full_attention(q.double(), k.double(), d**-0.5) @ v.double()
    torchs = functional.scaled_dot_product_attention(q, k, v).double()
    allowed = (torchs - dense).abs().max()
    assert bool((apart.amax((1, 2, 3)) < 2 * allowed).all())


@pytest.mark.parametrize("tile", [None, (4, 4)])
@pytest.mark.parametrize("levels", [ONE, TWO])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_threads_and_batches_change_nothing(tile, levels, dtype):
    q, k, v = inputs((12, 12), heads=3, batch=3, d=64, dtype=dtype)
    how = opening((12, 12), 40, cells=levels, tile=tile)
    alone, before = cells.fused(q[1:2], k[1:2], v[1:2], how), torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            assert torch.equal(cells.fused(q, k, v, how)[1:2], alone)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("grid", "levels"), [((6, 5), ONE), ((6, 5), TWO), ((3, 5, 4), CLIP)])
def test_all_cells_opened_is_dense_attention(grid, levels):
    q, k, v = inputs(grid, dtype=torch.float32)
    how = opening(grid, 128, cells=levels)  # cells cut at the border count as whole ones
    dense = functional.scaled_dot_product_attention(q, k, v)
    for backend in BACKENDS:
        opened = cells.connect(q, k, v, how, backend=backend)
        out = cells.cell_attention(q, k, v, opened, backend=backend)
        torch.testing.assert_close(out, dense, rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        torch.testing.assert_close(cells.fused(q, k, v, how), dense, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("levels", [ONE, TWO])
def test_equal_keys_in_a_cell_cost_nothing(levels):
    """A cell of equal keys and values stands for them exactly: whatever is opened, the output is dense attention's."""
    q, k, v = inputs((8, 8), dtype=torch.float64)
    side = levels[-1][0]
    for x in (k, v):
        patches = x[:, :, 1:].unflatten(2, (8 // side, side, 8 // side, side))
        x[:, :, 1:] = patches[:, :, :, :1, :, :1].expand_as(patches).flatten(2, 5)
    opened = cells.connect(q, k, v, opening((8, 8), 4, cells=levels))
    out = cells.cell_attention(q, k, v, opened, backend="eager")
    torch.testing.assert_close(out, functional.scaled_dot_product_attention(q, k, v))


@pytest.mark.parametrize("backend", BACKENDS)
def test_ties_go_to_the_lower_cell(backend):
    q, k, v = (torch.ones(1, 1, 65, 4) for _ in range(3))
    opened = cells.connect(q, k, v, opening((8, 8), 12, cells=TWO, breadth=2.6), backend=backend)
    mask = mask_of(opened, 65)[0, 0, :, 65:]
    coarse = mask[:, 16:]  # of the 16 fine and 4 coarse cells those that stand
    for query in range(64):
        own = (query // 32) * 2 + query % 8 // 4
        assert (~coarse[query]).nonzero().flatten().tolist() == sorted({own, 0 if own else 1})
        fine = query // 16 * 4 + query % 8 // 2
        there = [c for c in range(16) if not coarse[query, c // 8 * 2 + c % 4 // 2]]
        opened_cells = set(there) - set(mask[query, :16].nonzero().flatten().tolist())
        assert opened_cells == {fine, *[c for c in there if c != fine][:2]}


@pytest.mark.parametrize("tile", [None, (2, 2), (2, 2, 2)])
@pytest.mark.parametrize("budget", [12, 16, 22])
def test_ties_in_clips(tile, budget):
    """Frames that repeat each other tie on every level: the lower cell is opened, that of the earlier frame."""
    q, k, v = (torch.ones(1, 1, 1 + 4 * 4 * 6, 4) for _ in range(3))
    k[:, :, 1 + 48 :] = 2
    how = opening((4, 4, 6), budget, cells=CLIP, tile=tile)
    expected, _ = plain_mask(q, k, v, how)
    for backend in BACKENDS:
        assert torch.equal(mask_of(cells.connect(q, k, v, how, backend=backend), q.shape[2]), expected)


@pytest.mark.parametrize("tile", [None, (2, 2), (4, 4)])
@pytest.mark.parametrize("levels", [ONE, TWO, THREE])
@pytest.mark.parametrize("budget", [16, 20, 26])
def test_ties_of_one_group_leave_nothing_to_the_next(levels, tile, budget):
    """An image of two colours: cells tie on every level, and those that score higher come last."""
    q, k, v = (torch.ones(1, 1, 145, 4) for _ in range(3))
    k[:, :, 1 + 8 * 12 :] = 2
    how = opening((12, 12), budget, cells=levels, tile=tile)
    expected = cells.connect(q, k, v, how, backend="eager").lists.indices
    assert torch.equal(cells.connect(q, k, v, how, backend="cpu").lists.indices, expected)


@pytest.mark.parametrize("tile", [None, (4, 4)])
@pytest.mark.parametrize("levels", [ONE, TWO])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_not_a_number_shows(levels, tile, dtype):
    """Without cells that stand for the rest too: a cell that holds it is always opened."""
    q, k, v = inputs((8, 8), d=64, dtype=dtype)
    k[0, 0, 30, 3] = torch.nan
    for backend, closed in itertools.product(BACKENDS, (True, False)):
        how = opening((8, 8), 8 if tile is None else 32, closed=closed, cells=levels, tile=tile)
        out = cells.cell_attention(q, k, v, cells.connect(q, k, v, how, backend=backend), backend=backend)
        assert bool(out[0, 0].isnan().all())
        assert bool(out[0, 1].isfinite().all())
    with torch.no_grad():
        out = cells.fused(q, k, v, how)
        assert bool(out[0, 0].isnan().all())
        assert bool(out[0, 1].isfinite().all())


@pytest.mark.parametrize(
    ("grid", "levels", "tile"),
    [
        *[((6, 6), levels, tile) for levels in (ONE, TWO) for tile in (None, (2, 2), (4, 4))],
        *[((3, 4, 3), ((1, 2, 2), (2, 4, 2)), tile) for tile in (None, (2, 2, 2), (1, 4, 4))],
    ],
)
def test_dropped_tokens(grid, levels, tile):
    """Cells hold what is left of them; a cell that is empty neither is opened nor stands for anything."""
    prefix = 2
    q, k, v = inputs(grid, prefix)
    kept = torch.stack([torch.tensor([0, 1, 2, 8, 9, 14, 15, 20, 21, 27, 33, 35]), torch.arange(12) * 3])
    positions = torch.cat([torch.arange(prefix).expand(2, -1), kept + prefix], 1)
    q, k, v = (x.gather(2, positions[:, None, :, None].expand(-1, 2, -1, 8)) for x in (q, k, v))
    how = opening(grid, 8, num_prefix=prefix, tile=tile, cells=levels)
    mask, holds = plain_mask(q, k, v, how, kept)
    scale = q.shape[-1] ** -0.5
    wide = [x.double() for x in (q, k, v)]
    expected = reference.cell_attention(wide[0][:, :, prefix:], wide[1], wide[2], mask, holds, scale)
    for backend in ("eager", "auto"):
        opened = cells.connect(q, k, v, how, positions=positions, backend=backend)
        assert torch.equal(mask_of(opened, q.shape[2]), mask)
        out = cells.cell_attention(q, k, v, opened, backend=backend)
        torch.testing.assert_close(out[:, :, prefix:].double(), expected, rtol=1e-4, atol=1e-5)
    out = cells.fused(q, k, v, how, positions=positions)
    torch.testing.assert_close(out[:, :, prefix:].double(), expected, rtol=1e-4, atol=1e-5)
    narrow = [x.bfloat16() for x in (q, k, v)]
    opened = cells.connect(*narrow, how, positions=positions, backend="eager")
    exact = cells.cell_attention(*(x.double() for x in narrow), opened, backend="eager")
    apart = (cells.fused(*narrow, how, positions=positions).double() - exact)[:, :, prefix:].abs()
    assert bool((apart <= bfloat16_error(*narrow, opened, prefix)).all())


@pytest.mark.parametrize("tile", [None, (4, 4)])
def test_bfloat16_is_as_good_as_torchs_own(tile):
    q, k, v = inputs((8, 8), d=64, dtype=torch.bfloat16)
    how = opening((8, 8), 16, tile=tile)
    wide = [x.double() for x in (q, k, v)]
    mask, holds = plain_mask(q, k, v, how)
    expected = reference.cell_attention(wide[0][:, :, 1:], wide[1], wide[2], mask, holds, 0.125)
    dense = functional.scaled_dot_product_attention(q, k, v).double()
    allowed = (dense - functional.scaled_dot_product_attention(*wide)).abs().max()
    with torch.no_grad():
        assert (cells.fused(q, k, v, how)[:, :, 1:].double() - expected).abs().max() < 2 * allowed
    for backend in BACKENDS:
        opened = cells.connect(q, k, v, how, backend=backend)
        assert torch.equal(mask_of(opened, 65), mask)
        out = cells.cell_attention(q, k, v, opened, backend=backend)[:, :, 1:].double()
        assert (out - expected).abs().max() < 3 * allowed  # mean keys and values are rounded too


def test_compiles_as_one_graph():
    q, k, v = inputs((8, 8), d=16)
    how = opening((8, 8), 16, cells=TWO, tile=(4, 4))

    def run(q, k, v):
        return cells.cell_attention(q, k, v, cells.connect(q, k, v, how)), cells.fused(q, k, v, how)

    with torch.no_grad():
        for ours, theirs in zip(torch.compile(run, fullgraph=True)(q, k, v), run(q, k, v), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_operators_keep_torchs_contract():
    q, k, v = inputs((4, 4), d=4)
    levels = opening((4, 4), 8, cells=TWO).levels()
    cut = cells.cut_cells((4, 4), TWO, q.device)
    about = (q, k, v, cut.of, cut.parent, cut.starts, levels.opened, query_groups((4, 4), 1, (2, 2), q.device))
    settings = (1, 0.5, 0.0, True)
    torch.library.opcheck(torch.ops.sparsifiner.open_cells, (*about, None, *settings, levels.longest))
    torch.library.opcheck(torch.ops.sparsifiner.cpu_open_cells, (*about, *settings, levels.longest))
    torch.library.opcheck(torch.ops.sparsifiner.fused_cells, (*about, None, *settings))
    opened = cells.connect(q, k, v, opening((4, 4), 8)).lists
    q, k, v = (x.requires_grad_() for x in (q, torch.cat([k, k[:, :, :4]], 2), torch.cat([v, v[:, :, :4]], 2)))
    none = torch.empty(2, 2, 16, 0), torch.empty(2, 0, 21)
    arguments = (q, k, v, opened.indices, opened.members, *none, torch.rand(2, 2, 21), 0.5, 1, False)
    for operator in (torch.ops.sparsifiner.attend, torch.ops.sparsifiner.cpu_attend):
        torch.library.opcheck(operator, arguments)


def test_torch_func():
    q, k, v = inputs((6, 6))
    how = opening((6, 6), 8)

    def loss(q, k, v):
        return cells.cell_attention(q, k, v, cells.connect(q, k, v, how)).square().sum()

    expected = torch.autograd.grad(loss(*(x.requires_grad_() for x in (q, k, v))), (q, k, v))
    q, k, v = (x.detach() for x in (q, k, v))
    for ours, theirs in zip(torch.func.grad(loss, (0, 1, 2))(q, k, v), expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    each = torch.vmap(torch.func.grad(loss))(*(x[:, None] for x in (q, k, v)))
    torch.testing.assert_close(each.squeeze(1), expected[0], rtol=1e-4, atol=1e-5)


def test_bad_input():
    q, k, v = inputs((6, 5))
    with pytest.raises(ConfigError, match="cells of 8 x 2 patches are larger than the grid of 6 x 5"):
        cells.connect(q, k, v, opening(cells=((8, 2),)))
    with pytest.raises(ConfigError, match="a budget of 3 keys is less than one cell of 2 x 2 patches: raise keep"):
        cells.connect(q, k, v, opening(budget=3))
    with pytest.raises(ConfigError, match="a cell of 2 x 2 x 2 patches is 2 frames deep and the model's grid of 6 x 5"):
        cells.connect(q, k, v, opening(cells=((2, 2, 2),)))
    with pytest.raises(
        ConfigError, match="a tile of 4 x 2 x 2 patches is 4 frames deep .* give rows and columns alone"
    ):
        cells.connect(q, k, v, opening(tile=(4, 2, 2)))
    with pytest.raises(BackendError, match="queries, keys and values differ"):
        cells.fused(q, k[:, :, 1:], v, opening())
    of, parent = torch.zeros(1, 30, dtype=torch.int32), torch.full((9,), -1)
    members = torch.arange(1, 31)[:, None]
    starts = ([0, 8], [0, 4, 9], [0])
    for wrong in ((of + 9, parent, [0, 9], [4]), *((of, parent, ends, [4, 2][: len(ends) - 1]) for ends in starts)):
        with pytest.raises(BackendError, match="do not belong together"):
            cpu.fused_cells(q, k, v, *wrong, members, None, 1, 0.3, 0.0, True)
    for nonsense in ((), ((2,),), "22", ((0, 2),), 4, None, (2, 2), ((2, 2, 2, 2),), ((2, 2, 0),)):
        with pytest.raises(ConfigError, match=r"cells? must "):
            sp.SparseConfig(0.5, pattern="cells", cells=nonsense)
    for levels in (((2, 2), (3, 3)), ((4, 4), (2, 2)), ((2, 2), (2, 2)), ((2, 2), (4, 3))):
        with pytest.raises(ConfigError, match="do not hold whole cells of"):
            sp.SparseConfig(0.5, pattern="cells", cells=levels)
    with pytest.raises(ConfigError, match="breadth must be a number of at least 1"):
        sp.SparseConfig(0.5, breadth=0.5)
    with pytest.raises(ConfigError, match="tolerance must be a number of at least 0"):
        sp.SparseConfig(0.5, tolerance=-0.1)


class TestModels:
    CONFIG = sp.SparseConfig(0.4, n_down=4, pattern="cells")

    @pytest.fixture
    def student(self):
        return sp.sparsify(make_vit(), self.CONFIG)

    @pytest.mark.parametrize(
        "changes", [{}, {"tile": (2, 2)}, {"residual": False}, {"cells": ((1, 2), (5, 4))}], ids=str
    )
    @torch.no_grad()
    def test_backends_agree_and_files_come_back(self, photos, changes, tmp_path):
        student = sp.sparsify(make_vit(), self.CONFIG.replace(**changes))
        out = student(photos)
        sp.reconfigure(student, backend="eager")
        torch.testing.assert_close(student(photos), out, rtol=1e-4, atol=1e-5)
        assert not torch.allclose(out, make_vit()(photos), atol=1e-4)
        sp.save(student, tmp_path / "a.safetensors")
        assert torch.equal(sp.load(tmp_path / "a.safetensors", model=make_vit())(photos), student(photos))

    @torch.no_grad()
    def test_a_model_compiles_as_one_graph(self, student, photos):
        compiled = torch.compile(student, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(photos), student(photos), rtol=1e-4, atol=1e-5)

    def test_closer_to_dense_than_without_what_stands_for_the_rest(self, student, photos):
        dense = make_vit()(photos)
        with_rest = (student(photos) - dense).norm()
        sp.reconfigure(student, residual=False)
        assert with_rest < 0.7 * (student(photos) - dense).norm()

    def test_it_trains(self, student, photos):
        data = photos, torch.arange(6)
        recipe = sp.Recipe(
            keep=0.4, phase1_epochs=0, phase2_epochs=2, batch_size=3, mixup=0.0, cutmix=0.0,
            log_every=1, pattern="cells", phase2_warmup_epochs=0.5,
        )  # fmt: skip
        before = student.blocks[0].attn.qkv.weight.clone()
        lines = sp.distill(student, data, recipe).lines
        assert all(torch.isfinite(torch.tensor(line["loss"])) for line in lines)
        assert not torch.equal(student.blocks[0].attn.qkv.weight, before)

    @torch.no_grad()
    def test_what_is_seen_is_what_is_computed(self, student, photos):
        """Kept keys and what stands for the rest, times the values, are the output of the layer."""
        layer, outputs, values = sparse_layers(student)[1], [], []
        attend = layer.attend
        layer.attend = lambda q, k, v: values.append(v) or outputs.append(attend(q, k, v)) or outputs[-1]
        with sp.capture(student, layers=[1]) as seen:
            student(photos)
        found = seen[1]
        used = found.sparse_map * (1 - found.estimate.sum(-1, keepdim=True)) + found.estimate
        torch.testing.assert_close(used.sum(-1), torch.ones(6, 3, 26), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(used @ values[0], outputs[0], rtol=1e-4, atol=1e-5)
        assert bool((found.estimate[..., 0, :] == 0).all())  # the class token attends to keys

    def test_counts(self, student, photos):
        sp.reconfigure(student, keep=[0.4, 0.4])
        measured = sp.count_flops(student, photos, convention="measured")
        paper = sp.count_flops(student)
        assert 0 < measured.mhsa <= paper.mhsa  # cells at the border hold fewer keys
        per_layer = 25 * 9 * 24 + 2 * 25 * 24  # a 5 x 5 grid has 3 x 3 cells
        assert paper.predictor == measured.predictor == 2 * per_layer
        assert paper.residual == 2 * 25 * (9 - 2) * 24
        assert paper.attention == 2 * (2 * 26 * 24 + 2 * 25 * (1 + 2 * 4) * 24)

    @torch.no_grad()
    def test_any_grid_and_dropped_tokens(self, photos):
        student = sp.sparsify(make_vit(dynamic_img_size=True), self.CONFIG)
        for size in ((20, 20), (32, 16), (16, 44)):
            assert torch.isfinite(student(torch.randn(1, 3, *size))).all()
        sp.reconfigure(student, tokens=sp.TokenConfig(0.6, blocks=[0], fuse=True))
        assert torch.isfinite(student(photos)).all()
        sp.reconfigure(student, tokens=sp.TokenConfig(0.6, "dynamicvit", blocks=[0]))
        student.train()
        with pytest.raises(ConfigError, match="DynamicViT cannot be trained with pattern='cells'"):
            student(photos)

    @torch.no_grad()
    def test_all_keys_are_the_host(self, student, photos):
        sp.reconfigure(student, keep=1.0)
        assert torch.equal(student(photos), make_vit()(photos))
