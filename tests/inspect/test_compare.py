import math

import pytest
import torch

import sparsifiner as sp
from sparsifiner.convert import sparse_layers
from sparsifiner.errors import DataError
from sparsifiner.inspect import compare as comparing
from sparsifiner.ops import reference
from sparsifiner.report import tables


@pytest.fixture
def student(vit, photos):
    student = sp.sparsify(vit, sp.SparseConfig(0.3, n_down=5, tau=0.05))
    sp.calibrate(student, photos)
    return student


@pytest.fixture
def batches(vit, photos):
    labels = vit(photos).argmax(1)
    labels[0] = (labels[0] + 1) % 7  # five of six are right
    return list(zip(photos.split(4), labels.split(4), strict=True))


ALL = [comparing.PAPER, comparing.RESIDUAL, comparing.tiled((2, 2)), comparing.ORACLE, comparing.LOW_RANK]


def test_every_form_against_dense(student, batches):
    before = sp.config_of(student)
    rows = comparing.compare(student, batches, ALL, [1.0, 0.2])
    assert [(row.form, row.keep) for row in rows] == [
        ("dense", None),
        ("paper form", 1.0), ("paper form", 0.2),
        ("residual", 1.0), ("residual", 0.2),
        ("residual + tile 2x2", 1.0), ("residual + tile 2x2", 0.2),
        ("exact top-B", 1.0), ("exact top-B", 0.2),
        ("low-rank only", None),
    ]  # fmt: skip
    dense = rows[0]
    assert dense.images == 6
    assert dense.top1 == pytest.approx(100 * 5 / 6)
    assert dense.agreement == 100
    assert dense.divergence == 0
    assert dense.kept_share == 1
    for row in rows[1:]:
        if row.keep == 1.0:  # dense by any name
            assert row.divergence == pytest.approx(0, abs=1e-9)
        else:
            assert row.divergence > 0
    assert rows[2].kept_share < 0.35
    assert rows[2].attention_macs < dense.attention_macs
    assert rows[4].attention_macs > rows[2].attention_macs  # the residual is counted
    assert rows[8].attention_macs is None  # an oracle saves nothing: no count is claimed
    assert sp.config_of(student) == before
    assert all(layer.core is None and not layer.is_dense() for layer in sparse_layers(student))


def test_the_oracle_keeps_the_most_attention_there_is(student, photos):
    layer = sparse_layers(student)[0]
    q, k, v = (torch.randn(1, 3, 26, 8) for _ in range(3))
    out = comparing.ORACLE.core(layer, q, k, v)
    true = reference.full_attention(q, k, layer.scale)
    row, budget = true[0, 1, 7], layer.budget()
    kept = sorted(set(row.topk(budget).indices.tolist()) | {0, 7})
    expected = (row[kept] / row[kept].sum()) @ v[0, 1, kept]
    torch.testing.assert_close(out[0, 1, 7], expected)
    torch.testing.assert_close(out[0, 1, 0], true[0, 1, 0] @ v[0, 1])


def test_low_rank_only_is_the_estimate(student):
    layer = sparse_layers(student)[0]
    q, k, v = (torch.randn(1, 3, 26, 8) for _ in range(3))
    with comparing.running_as(student, comparing.LOW_RANK, None):
        out = layer.attend(q, k, v)
    predictor = layer.predictor
    a_down = reference.coefficients(q, k, predictor.w_down, layer.scale)
    torch.testing.assert_close(out[:, :, 1:], (a_down @ predictor.w_up @ v)[:, :, 1:])


def test_agreement_and_divergence():
    dense = torch.tensor([[2.0, 0.0], [0.0, 3.0]])
    other = torch.tensor([[2.0, 0.0], [3.0, 0.0]])
    assert comparing.agreement(other, dense) == 50
    p = 1 / (1 + math.exp(-3))
    assert comparing.divergence(other, dense) == pytest.approx((p * 3 - (1 - p) * 3) / 2)
    assert comparing.divergence(dense, dense) == 0


def test_images_without_labels_have_no_top1(student, photos):
    rows = comparing.compare(student, [(photos, torch.full((6,), -1))], [], [])
    assert rows[0].top1 is None
    assert "|  | 100.00 |" in tables.markdown(rows)


def test_failures_leave_the_student_as_it_was(student, photos):
    before = sp.config_of(student)
    bad = photos.clone()
    bad[3] = torch.nan
    with pytest.raises(DataError, match="not finite"):
        comparing.compare(student, [(bad, torch.zeros(6))], [comparing.RESIDUAL], [0.2])
    with pytest.raises(DataError, match="no images"):
        comparing.compare(student, [], [comparing.RESIDUAL], [0.2])
    assert sp.config_of(student) == before
    assert not any(layer.is_dense() for layer in sparse_layers(student))


def test_tables(student, batches):
    rows = comparing.compare(student, batches, [comparing.RESIDUAL], [0.2])
    text = tables.markdown(rows)
    assert text.count("\n") == 4
    assert "| residual | 0.2 |" in text
    assert tables.as_csv(rows).splitlines()[0].startswith("form,keep,images,top1")
    assert tables.comparison(rows).row_count == 2


def test_cells_beside_the_predictor(student, batches, vit, photos):
    settings = sp.SparseConfig(0.3, pattern="cells", tile=(2, 2), cells=[(1, 2)])
    form = comparing.opening(settings)
    rows = comparing.compare(student, batches, [form], [0.3, 0.05])
    assert [(row.form, row.keep) for row in rows[1:]] == [("cells + tile 2x2", 0.3), ("cells + tile 2x2", 0.05)]
    wanted = sp.sparsify(vit, settings)
    assert rows[1].divergence == pytest.approx(comparing.divergence(wanted(photos), vit(photos)), rel=1e-3)
    larger = comparing.opening(settings.replace(cells=[(2, 2)]))
    assert len(comparing.compare(student, batches, [larger], [0.3, 0.05])) == 2  # 2 of 26 keys hold no cell of 4
    assert sp.config_of(student).pattern == "learned"
