import pytest
import timm
import torch

import sparsifiner as sp
from sparsifiner.config import TokenConfig
from sparsifiner.convert import sparse_layers
from sparsifiner.errors import ConfigError
from sparsifiner.inspect.flops import dense_layer, sparse_layer
from sparsifiner.inspect.statistics import measure
from sparsifiner.report.paper import flops_rows

ROWS = {(row.model, row.setting): row for row in flops_rows()}

# What the formulas are known to give against the paper; a wider gap is a change in the formula.
TOLERANCE = {
    "DeiT-S dense": 0.0002,
    "LV-ViT-S dense": 0.0002,
    "DeiT-T 384 dense": 0.0002,
    "DeiT-S keep": 0.001,
    "DeiT-S keep 0.345": 0.117,
    "LV-ViT-S keep": 0.0013,
    "DeiT-T 384 keep 0.5": 0.005,
    "DeiT-T 384 keep 0.25": 0.044,
    "DeiT-T 384 keep 0.1": 0.005,
    "DeiT-S EViT / DynamicViT 0.7": 0.0005,
    "DeiT-S EViT / DynamicViT 0.5": 0.0035,
    "DeiT-S EViT 0.7 and": 0.011,
    "DeiT-S EViT 0.5 and": 0.0045,
    "DeiT-S Linformer": 0.001,
    "LV-ViT-S EViT / DynamicViT 0.7": 0.028,
    "LV-ViT-S EViT / DynamicViT 0.5": 0.053,
}


def test_all_rows_are_there():
    assert len(ROWS) == 3 + 11 + 3 + 3 + 4 + 2 + 2


@pytest.mark.parametrize("key", ROWS, ids=" ".join)
def test_the_papers_row(key):
    name = " ".join(key)
    start = max((start for start in TOLERANCE if name.startswith(start)), key=len)
    assert abs(ROWS[key].difference) <= TOLERANCE[start]


def test_tokens_left_by_pruning():
    def attention(keep: float) -> list[int]:
        return [seen.attention for seen in TokenConfig(keep).layer_tokens(196, 1, 12)]

    assert attention(0.7) == [197] * 4 + [139] * 3 + [98] * 3 + [69] * 2
    assert attention(0.5) == [197] * 4 + [99] * 3 + [50] * 3 + [26] * 2


def test_a_budget_beyond_the_tokens_counts_them_once():
    assert sparse_layer(10, 8, 2, budget=99).attention == dense_layer(10, 8)


def deit_t_384():
    return timm.create_model("deit_tiny_patch16_224", img_size=384)


def test_whole_model_of_deit_t_384():
    student = sp.sparsify(deit_t_384(), sp.SparseConfig(1.0))
    count = sp.count_flops(student)
    assert count.attention == count.dense_attention == pytest.approx(1534.1e6, rel=1e-4)
    assert count.predictor == count.residual == 0
    assert count.total == count.dense_total
    # The blocks alone are the 4.60 G of a full count; the paper's 3.58 G leaves out the projections.
    blocks = count.total - count.other
    assert blocks == pytest.approx(4.597e9, rel=1e-3)
    assert blocks - count.projections == pytest.approx(3.58e9, rel=2e-3)


def test_paper_convention_on_a_model_is_the_formula():
    student = sp.sparsify(deit_t_384(), sp.SparseConfig(0.1))
    count = sp.count_flops(student, density=0.0)
    assert count.mhsa == pytest.approx(ROWS["DeiT-T 384", "keep 0.1 (B = 58)"].formula * 1e6)
    assert count.residual == 0
    assert count.to_dict()["total"] == count.total
    assert '"convention": "paper"' in str(count)


def brute_force(student, images):
    """Connections and non-zero products of a converted model, counted from its masks and coefficients."""
    n = 26
    core = predictor = residual = 0.0
    with sp.capture(student) as seen:
        student(images)
    for layer, capture in zip(sparse_layers(student), seen.values(), strict=True):
        heads, d, m = layer.num_heads, layer.head_dim, layer.predictor.n_down
        connections = capture.mask[:, :, 1:].sum().item() / len(images)
        core += 2 * n * heads * d + 2 * connections * d
        used = capture.coefficients[:, :, 1:] > layer.config.tau
        if layer.config.tile is not None:
            groups = capture.connectivity.members
            used = torch.stack([used[:, :, [t - 1 for t in g if t > 0]].any(2) for g in groups.tolist()], 2)
        basis = layer.predictor.w_up > layer.basis_threshold
        products = sum(basis[h, c].sum().item() * used[:, h, :, c].sum().item() for h in range(heads) for c in range(m))
        predictor += (2 * n - 1) * m * heads * d + products / len(images)
        residual += (2 * n - 1) * m * heads * d + connections * m
    return core, predictor, residual


@pytest.mark.parametrize("tile", [None, (2, 2)])
def test_measured_convention_counts_what_happens(vit, photos, tile):
    student = sp.sparsify(vit, sp.SparseConfig(0.3, n_down=5, tau=0.1, basis_threshold=0.05, tile=tile))
    sp.calibrate(student, photos)
    count = sp.count_flops(student, photos, convention="measured")
    expected = brute_force(student, photos)
    assert (count.attention, count.predictor, count.residual) == pytest.approx(expected)
    sp.reconfigure(student, residual=False)
    assert sp.count_flops(student, photos, convention="measured").residual == 0


def test_measured_needs_images(vit):
    student = sp.sparsify(vit, sp.SparseConfig(0.3, n_down=5))
    with pytest.raises(ConfigError, match="needs images"):
        sp.count_flops(student, convention="measured")
    with pytest.raises(ConfigError, match="unknown convention 'guess'"):
        sp.count_flops(student, convention="guess")  # pyright: ignore[reportArgumentType]


def test_statistics_of_a_dense_layer(vit, photos):
    student = sp.sparsify(vit, sp.SparseConfig([1.0, 0.3], n_down=5))
    dense, sparse = measure(student, photos)
    assert dense.recall == pytest.approx(1)
    assert dense.kept_share == 1
    assert dense.coefficient_density == dense.score_products == 0
    assert sparse.kept_share < 1


@pytest.mark.parametrize("tile", [None, (2, 3)])
def test_recall_is_the_share_of_attention_kept(vit, photos, tile):
    student = sp.sparsify(vit, sp.SparseConfig(0.3, n_down=5, tau=0.0, basis_threshold=0.0, tile=tile))
    statistics = measure(student, photos)
    with sp.capture(student) as seen:
        student(photos)
    for layer, capture in zip(statistics, seen.values(), strict=True):
        kept = (capture.full_map * capture.mask)[:, :, 1:].sum(-1).mean((0, 2))
        torch.testing.assert_close(torch.tensor(layer.recall_per_head), kept)
        assert layer.recall == pytest.approx(kept.mean().item(), rel=1e-5)
        assert layer.kept_share == pytest.approx(capture.mask[:, :, 1:].float().mean().item(), rel=1e-5)
        assert layer.score_density == pytest.approx(layer.basis_density, rel=1e-5)  # every coefficient counts
