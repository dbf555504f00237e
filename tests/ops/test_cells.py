"""Attention at two resolutions: every row and every gradient against the reference, on every backend."""

import pytest
import torch
from torch.nn import functional

import sparsifiner as sp
from sparsifiner.convert import sparse_layers
from sparsifiner.errors import ConfigError
from sparsifiner.ops import cells, cpu, reference

from ..toys import make_vit

BACKENDS = ["cpu", "eager"]


def inputs(grid=(6, 5), prefix=1, heads=2, batch=2, d=8, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    n = prefix + grid[0] * grid[1]
    return [torch.randn(batch, heads, n, d, generator=generator, dtype=torch.float64).to(dtype) * 1.5 for _ in range(3)]


def opened_mask(opened):
    """Boolean [batch, heads, patch queries, cells]: of which cells the lists hold keys."""
    keys, of = opened.keys, opened.cells.of
    patches = keys.mask(torch.arange(keys.num_prefix, keys.num_tokens))[..., keys.num_prefix :]
    found = torch.zeros(*patches.shape[:3], opened.cells.count, dtype=torch.long)
    return found.scatter_add(3, of[:, None, None].expand_as(patches), patches.long()) > 0


def plain_opening(q, k, v, cell_of, own, prefix, count, scale):
    """The rule in words, in float64: what the cell gets times how far its keys and values are from their means."""
    q, k, v = (x[:, :, prefix:].double() for x in (q, k, v))
    total = int(cell_of.max()) + 1
    scores = torch.full((*q.shape[:3], total), -torch.inf, dtype=torch.float64)
    for cell in range(total):
        inside = (cell_of == cell).nonzero().flatten()
        keys, values = k[:, :, inside], v[:, :, inside]
        spread = [
            (x - x.mean(2, keepdim=True)).square().mean(2).sum(-1).clamp(min=1e-30).sqrt().log()[..., None]
            for x in (keys, values)
        ]
        logit = (q * keys.mean(2, keepdim=True)).sum(-1) * scale
        scores[..., cell] = logit + torch.tensor(float(len(inside))).log() + spread[0] + spread[1]
    scores[own.expand_as(scores)] = torch.inf
    return reference.top_budget(scores - scores[~own.expand_as(scores)].min() + 1, count)


@pytest.mark.parametrize(
    ("grid", "cell", "prefix", "tile"),
    [
        ((6, 5), (2, 2), 1, None),
        ((6, 6), (2, 2), 0, None),
        ((7, 5), (3, 2), 3, None),
        ((6, 6), (2, 2), 1, (4, 4)),
        ((5, 7), (2, 2), 2, (2, 3)),
        ((4, 4), (1, 1), 1, (2, 2)),
        ((3, 9), (3, 3), 1, None),
    ],
)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("closed", [True, False])
def test_every_row_and_gradient(grid, cell, prefix, tile, backend, closed):
    budget = max(cell[0] * cell[1], grid[0] * grid[1] // 2)
    results = {}
    for name, dtype in (("reference", torch.float64), (backend, torch.float32)):
        q, k, v = (x.requires_grad_() for x in inputs(grid, prefix, dtype=dtype))
        opened = cells.connect(
            q, k, v, budget=budget, grid=grid, cell=cell, num_prefix=prefix, tile=tile, closed=closed
        )
        if name == "reference":
            mask = opened_mask(opened)
            scale = q.shape[-1] ** -0.5
            exact = reference.full_attention(q[:, :, :prefix], k, scale) @ v
            of = opened.cells.of.expand(len(q), -1)
            rows = reference.cell_attention(q[:, :, prefix:], k, v, mask, of, scale, closed)
            out = torch.cat([exact, rows], 2)
        else:
            assert torch.equal(opened_mask(opened), mask)  # no near ties in these inputs
            out = cells.cell_attention(q, k, v, opened, backend=backend)
        direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
        results[name] = [out, *torch.autograd.grad(out, (q, k, v), direction)]
    for ours, theirs in zip(results[backend], results["reference"], strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize(
    ("grid", "cell", "tile"), [((6, 5), (2, 2), None), ((6, 6), (2, 2), (4, 4)), ((7, 5), (3, 2), None)]
)
def test_cells_are_opened_by_what_it_mends(grid, cell, tile):
    q, k, v = inputs(grid, dtype=torch.float64)
    opened = cells.connect(q, k, v, budget=16, grid=grid, cell=cell, tile=tile)
    found, about = opened_mask(opened), opened.cells
    count = max(16 // (cell[0] * cell[1]), int(about.own.sum(1).max()))
    own = torch.zeros(grid[0] * grid[1], about.count, dtype=torch.bool)
    queries = q.clone()
    for group, touched in zip(about.members, about.own, strict=True):
        members = group[group >= 0]
        own[members - 1] = touched
        queries[:, :, members] = q[:, :, members].mean(2, keepdim=True)
    expected = plain_opening(queries, k, v, about.of[0], own, 1, count, q.shape[-1] ** -0.5)
    assert torch.equal(found, expected)
    assert bool((found.sum(-1) == count).all())


@pytest.mark.parametrize("backend", BACKENDS)
def test_all_cells_opened_is_dense_attention(backend):
    q, k, v = inputs((6, 5), dtype=torch.float32)
    opened = cells.connect(q, k, v, budget=36, grid=(6, 5), cell=(2, 2))
    out = cells.cell_attention(q, k, v, opened, backend=backend)
    torch.testing.assert_close(out, functional.scaled_dot_product_attention(q, k, v), rtol=1e-5, atol=1e-6)


def test_equal_keys_in_a_cell_cost_nothing():
    """A cell of equal keys and values stands for them exactly: whatever is opened, the output is dense attention's."""
    q, k, v = inputs((6, 6), dtype=torch.float64)
    for x in (k, v):
        patches = x[:, :, 1:].unflatten(2, (3, 2, 3, 2))
        x[:, :, 1:] = patches[:, :, :, :1, :, :1].expand_as(patches).flatten(2, 5)
    opened = cells.connect(q, k, v, budget=4, grid=(6, 6), cell=(2, 2))
    out = cells.cell_attention(q, k, v, opened, backend="eager")
    torch.testing.assert_close(out, functional.scaled_dot_product_attention(q, k, v))


def test_ties_go_to_the_lower_cell():
    q, k, v = (torch.ones(1, 1, 17, 4) for _ in range(3))
    mask = opened_mask(cells.connect(q, k, v, budget=8, grid=(4, 4), cell=(2, 2)))
    for query in range(16):
        own = (query // 8) * 2 + query % 4 // 2
        assert mask[0, 0, query].nonzero().flatten().tolist() == sorted({own, 0 if own else 1})


@pytest.mark.parametrize("tile", [None, (2, 2), (4, 4)])
def test_dropped_tokens(tile):
    """Cells hold what is left of them; a cell that is empty neither is opened nor stands for anything."""
    grid, prefix = (6, 6), 2
    q, k, v = inputs(grid, prefix, dtype=torch.float64)
    kept = torch.stack([torch.tensor([0, 1, 2, 8, 9, 14, 15, 20, 21, 27, 33, 35]), torch.arange(12) * 3])
    positions = torch.cat([torch.arange(prefix).expand(2, -1), kept + prefix], 1)
    q, k, v = (x.gather(2, positions[:, None, :, None].expand(-1, 2, -1, 8)) for x in (q, k, v))
    opened = cells.connect(q, k, v, budget=8, grid=grid, cell=(2, 2), num_prefix=prefix, tile=tile, positions=positions)
    mask, of = opened_mask(opened), opened.cells.of
    assert bool(mask.gather(3, of[:, None, :, None].expand(-1, 2, -1, -1)).all())  # each query's own cell
    scale = q.shape[-1] ** -0.5
    expected = reference.cell_attention(q[:, :, prefix:], k, v, mask, of, scale)
    for backend in ("eager", "auto"):
        out = cells.cell_attention(q, k, v, opened, backend=backend)
        torch.testing.assert_close(out[:, :, prefix:], expected)
    if tile is not None:  # those of a tile that are left open the same cells
        tiles = (kept // 6 // tile[0]) * 3 + kept % 6 // tile[1]
        for image in range(2):
            for number in tiles[image].unique():
                together = mask[image][:, tiles[image] == number]
                assert torch.equal(together, together[:, :1].expand_as(together))


def test_bfloat16_is_as_good_as_torchs_own():
    q, k, v = inputs((8, 8), d=64, dtype=torch.bfloat16)
    opened = cells.connect(q, k, v, budget=16, grid=(8, 8), cell=(2, 2))
    of = opened.cells.of.expand(2, -1)
    wide = [x.double() for x in (q, k, v)]
    expected = reference.cell_attention(wide[0][:, :, 1:], wide[1], wide[2], opened_mask(opened), of, 0.125)
    dense = functional.scaled_dot_product_attention(q, k, v).double()
    allowed = (dense - functional.scaled_dot_product_attention(*wide)).abs().max()
    for backend in BACKENDS:
        out = cells.cell_attention(q, k, v, opened, backend=backend)[:, :, 1:].double()
        assert (out - expected).abs().max() < 3 * allowed  # mean keys and values are rounded too


def test_fresh_memory_is_not_read():
    q, k, v = inputs((6, 5))
    opened = cells.connect(q, k, v, budget=8, grid=(6, 5), cell=(2, 2))
    expected = cells.cell_attention(q, k, v, opened, backend="cpu")
    cpu.native().poison_scratch(True)
    try:
        assert torch.equal(cells.cell_attention(q, k, v, opened, backend="cpu"), expected)
    finally:
        cpu.native().poison_scratch(False)


def test_bad_input():
    q, k, v = inputs((6, 5))
    with pytest.raises(ConfigError, match="cells of 8 x 2 patches are larger than the grid of 6 x 5"):
        cells.connect(q, k, v, budget=16, grid=(6, 5), cell=(8, 2))
    with pytest.raises(ConfigError, match="a budget of 3 keys is less than one cell of 2 x 2 patches: raise keep"):
        cells.connect(q, k, v, budget=3, grid=(6, 5), cell=(2, 2))
    for nonsense in ((2,), "22", (0, 2), 4, None, (2, 2, 2)):
        with pytest.raises(ConfigError, match="cell must be"):
            sp.SparseConfig(0.5, pattern="cells", cell=nonsense)


class TestModels:
    CONFIG = sp.SparseConfig(0.4, n_down=4, pattern="cells")

    @pytest.fixture
    def student(self):
        return sp.sparsify(make_vit(), self.CONFIG)

    @pytest.mark.parametrize("changes", [{}, {"tile": (2, 2)}, {"residual": False}, {"cell": (1, 2)}], ids=str)
    @torch.no_grad()
    def test_backends_agree_and_files_come_back(self, photos, changes, tmp_path):
        student = sp.sparsify(make_vit(), self.CONFIG.replace(**changes))
        out = student(photos)
        sp.reconfigure(student, backend="eager")
        torch.testing.assert_close(student(photos), out, rtol=1e-4, atol=1e-5)
        assert not torch.allclose(out, make_vit()(photos), atol=1e-4)
        sp.save(student, tmp_path / "a.safetensors")
        assert torch.equal(sp.load(tmp_path / "a.safetensors", model=make_vit())(photos), student(photos))

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
