import pytest
import timm
import torch
from torch.utils.flop_counter import FlopCounterMode

import sparsifiner as sp
from sparsifiner.config import TokenConfig
from sparsifiner.convert import conversion_of, sparse_layers
from sparsifiner.errors import ConfigError
from sparsifiner.inspect.flops import dense_layer, sparse_layer
from sparsifiner.inspect.statistics import measure
from sparsifiner.report.paper import flops_rows

from ..toys import make_vit

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
        if layer.tile is not None:
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


FORMS = {
    "class token": {},
    "norm after the block": {"block_fn": timm.models.vision_transformer.ResPostBlock},
    "registers": {"reg_tokens": 4},
    "no class token": {"class_token": False, "global_pool": "avg"},
    "attention pooling": {"class_token": False, "global_pool": "map"},
    "attention pooling, no head": {"class_token": False, "global_pool": "map", "num_classes": 0},
    "attention pooling beside a class token": {"global_pool": "map", "reg_tokens": 1},
    "pooling by self-attention": {"global_pool": "prr"},
}


def counted_by_torch(model, images) -> float:
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model.requires_grad_(False)(images)
    return counter.get_total_flops() / 2


@pytest.mark.parametrize("form", FORMS)
def test_every_form_adds_up_to_torchs_own_count(form):
    dense = make_vit(**FORMS[form])
    expected = counted_by_torch(dense, torch.zeros(1, 3, 20, 20))
    student = sp.sparsify(dense, sp.SparseConfig(1.0, n_down=4))
    count = sp.count_flops(student)
    assert count.total == count.dense_total == expected
    feed_forward = 2 * 2 * 24 * 96 * student.patch_embed.num_patches
    assert feed_forward <= count.mlp < feed_forward * 1.3  # the blocks', not that of the pooling

    # With half the patches dropped in the second block, what comes after sees fewer. Torch also counts the class
    # token's attention that ranks them, which the method's own count leaves out.
    sp.reconfigure(student, tokens=TokenConfig(0.5, blocks=(1,)))
    ranking = conversion_of(student).grid.num_tokens * 24
    dropped = sp.count_flops(student)
    assert dropped.total + ranking == counted_by_torch(student.eval(), torch.zeros(1, 3, 20, 20))
    assert dropped.dense_total == expected


def test_attention_pooling_by_hand():
    dense = make_vit(class_token=False, global_pool="map")
    count = sp.count_flops(sp.sparsify(dense, sp.SparseConfig(1.0, n_down=4)))
    patches, dim, classes = 25, 24, 7
    embedding, head = patches * 3 * 4 * 4 * dim, dim * classes
    # One latent query: its projection, keys and values of all patches, scores and values, the output, its own MLP.
    pooling = dim * dim + 2 * patches * dim * dim + 2 * patches * dim + dim * dim + 2 * dim * 4 * dim
    assert count.other == embedding + pooling + head
    assert count.mlp == 2 * patches * 2 * dim * 4 * dim


def test_parallel_blocks_and_the_second_head_of_lv_vit():
    parallel = timm.create_model("vit_small_patch16_18x2_224", depth=1, img_size=32, num_classes=3).eval()
    count = sp.count_flops(sp.sparsify(parallel, sp.SparseConfig(1.0, n_down=4)))
    assert count.total == counted_by_torch(parallel, torch.zeros(1, 3, 32, 32))

    model = timm.create_model("lvvit_t", depth=2, img_size=64, num_classes=5).eval()
    student = sp.sparsify(model, sp.SparseConfig(1.0, n_down=4, tokens=TokenConfig(0.5, blocks=(1,))))
    counts = sp.count_flops(student)
    assert counts.dense_total == counted_by_torch(model, torch.zeros(1, 3, 64, 64))
    with sp.dense_mode(student):
        all_tokens = sp.count_flops(student)
    assert all_tokens.other - counts.other == 8 * 240 * 5  # eight of sixteen patches are not classified
