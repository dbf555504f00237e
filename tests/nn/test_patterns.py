import math

import pytest
import torch

import sparsifiner as sp
from sparsifiner.convert import sparse_layers
from sparsifiner.errors import ConfigError
from sparsifiner.inspect.statistics import measure
from sparsifiner.nn.patterns import RANKINGS, pattern_connectivity, pattern_mask
from sparsifiner.ops import reference

from ..toys import make_vit


@pytest.mark.parametrize("pattern", list(RANKINGS))
@pytest.mark.parametrize(
    ("grid", "budget"), [((5, 5), 6), ((4, 7), 1), ((3, 3), 9), ((1, 8), 3), ((6, 6), 35), ((3, 4, 5), 9)]
)
def test_every_query_keeps_the_budget(pattern, grid, budget):
    mask = pattern_mask(pattern, grid, 2, budget)
    patches = math.prod(grid)
    assert mask[:2].all()
    assert mask[:, :2].all()
    own = mask[2:, 2:]
    assert own.diagonal().all()
    without_self = own.sum(1) - 1
    assert bool((without_self <= budget).all())
    assert bool((without_self >= min(budget, patches) - 1).all())


def test_window_is_the_nearest():
    mask = pattern_mask("window", (5, 5), 0, 5)
    assert mask[12].nonzero().flatten().tolist() == [7, 11, 12, 13, 17]
    assert mask[0].nonzero().flatten().tolist() == [0, 1, 2, 5, 6]  # at a corner: as many


def test_axial_is_row_and_column():
    mask = pattern_mask("axial", (5, 5), 0, 9).view(25, 5, 5)
    expected = torch.zeros(5, 5, dtype=torch.bool)
    expected[2], expected[:, 3] = True, True
    assert torch.equal(mask[13], expected)


def test_patterns_of_clips():
    """A window is a ball in time and space; axial is a row, a column and the same place in every frame."""
    middle = (2 * 5 + 2) * 5 + 2
    mask = pattern_mask("window", (5, 5, 5), 0, 7)[middle].view(5, 5, 5)
    ball = torch.zeros(5, 5, 5, dtype=torch.bool)
    ball[1:4, 2, 2] = ball[2, 1:4, 2] = ball[2, 2, 1:4] = True
    assert torch.equal(mask, ball)
    mask = pattern_mask("axial", (5, 5, 5), 0, 13)[middle].view(5, 5, 5)
    lines = torch.zeros(5, 5, 5, dtype=torch.bool)
    lines[:, 2, 2] = lines[2, :, 2] = lines[2, 2, :] = True
    assert torch.equal(mask, lines)


def test_strided_is_even():
    mask = pattern_mask("strided", (4, 4), 0, 4)
    assert mask[1].nonzero().flatten().tolist() == [1, 5, 9, 13]
    assert mask[14].nonzero().flatten().tolist() == [2, 6, 10, 14]


def test_bigbird_is_global_near_and_random():
    mask = pattern_mask("bigbird", (8, 8), 0, 16)
    everywhere = mask.all(0)
    assert everywhere.sum() >= 4
    window = pattern_mask("window", (8, 8), 0, 8)
    assert bool((mask >= window).all())
    rest = mask & ~window & ~everywhere
    assert len({tuple(row.tolist()) for row in rest}) > 50  # each query draws its own
    assert torch.equal(mask, pattern_mask("bigbird", (8, 8), 0, 16))


@pytest.mark.parametrize("pattern", list(RANKINGS))
def test_a_model_with_a_fixed_pattern(vit, photos, pattern):
    config = sp.suggest_config(vit, 0.3, pattern=pattern, residual=False)
    student = sp.sparsify(vit, config)
    expected = {}

    def masked(layer, q, k, v):
        mask = pattern_mask(pattern, (5, 5), 1, 8).expand(len(q), 3, -1, -1)
        return reference.masked_attention(q, k, v, mask, layer.scale)

    for layer in sparse_layers(student):
        layer.core = masked
    expected = student(photos)
    for layer in sparse_layers(student):
        layer.core = None
    for backend in ("reference", "eager", "cpu", "auto"):
        sp.reconfigure(student, backend=backend)
        torch.testing.assert_close(student(photos), expected, rtol=1e-4, atol=1e-5)
    student(photos).sum().backward()
    statistics = measure(student, photos)[0]
    assert statistics.connections == 3 * pattern_mask(pattern, (5, 5), 1, 8)[1:].sum()
    counts = sp.count_flops(student, photos, convention="measured")
    assert counts.predictor == counts.residual == 0
    sp.reconfigure(student, residual=True)
    sp.calibrate(student, photos)
    with torch.no_grad():
        close, far = (student(photos) - vit(photos)).norm(), (expected - vit(photos)).norm()
    assert close < far  # what a fixed pattern drops can be estimated too


def test_pattern_of_the_tokens_left():
    mask = pattern_mask("window", (4, 4), 1, 3)
    positions = torch.tensor([[0, 1, 2, 6, 16], [0, 3, 4, 8, 12]])
    connectivity = pattern_connectivity(mask, 1, 2, 2, positions)
    found = connectivity.mask()
    for image in range(2):
        wanted = mask[positions[image]][:, positions[image]]
        assert torch.equal(found[image, 0], wanted)
        assert torch.equal(found[image, 1], wanted)


def test_linformer(vit, photos):
    student = sp.sparsify(vit, sp.SparseConfig(keep=1.0, n_down=6, pattern="linformer"))
    sp.calibrate(student, photos)
    layer = sparse_layers(student)[0]
    q, k, v = torch.randn(3, 2, 3, 26, 8).unbind(0)
    w_down, w_up = layer.predictor.w_down, layer.predictor.w_up
    rows = torch.softmax(q @ (w_down @ k).mT / math.sqrt(8), -1) @ (w_up @ v)
    rows[:, :, :1] = torch.softmax(q[:, :, :1] @ k.mT / math.sqrt(8), -1) @ v
    torch.testing.assert_close(layer.attend(q, k, v), rows, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(student(photos), vit(photos), atol=1e-3)
    with sp.capture(student, queries=[0, 3]) as seen:
        student(photos)
    assert seen[0].mask[:, :, 0].all()
    assert not seen[0].mask[:, :, 1].any()
    torch.testing.assert_close(seen[0].estimate[:, :, 1], seen[0].coefficients[:, :, 1:].matmul(w_up)[:, :, 0])
    assert measure(student, photos)[0].recall == 0
    counts = sp.count_flops(student)
    assert counts.attention == 2 * 2 * 26 * 24
    assert counts.predictor == 2 * (4 * 26 * 6 * 24 - 2 * 6 * 24)


def test_unknown_patterns_and_tiles_are_refused():
    with pytest.raises(ConfigError, match="unknown pattern"):
        sp.SparseConfig(0.5, pattern="spiral")
    with pytest.raises(ConfigError, match="tile"):
        sp.SparseConfig(0.5, pattern="window", tile=(2, 2))
    with pytest.raises(ConfigError, match="unknown pattern"):
        pattern_mask("learned", (2, 2), 1, 2)


def test_fixed_patterns_with_dropped_tokens(photos):
    vit = make_vit(depth=4)
    tokens = sp.TokenConfig(0.5, blocks=(1,), fuse=True)
    student = sp.sparsify(vit, sp.suggest_config(vit, 0.2, pattern="axial", tokens=tokens))
    sp.calibrate(student, photos)
    with torch.no_grad():
        for residual in (True, False):
            sp.reconfigure(student, residual=residual, backend="reference")
            expected = student(photos)
            sp.reconfigure(student, backend="cpu")
            torch.testing.assert_close(student(photos), expected, rtol=1e-4, atol=1e-5)
