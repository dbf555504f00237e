import csv

import pytest
import torch

import sparsifiner as sp
from sparsifiner.inspect.compare import Evaluation
from sparsifiner.report import reproduction
from sparsifiner.report.paper import DEIT_S, DEIT_T_384, paper_rows

from ..toys import make_vit

ROWS = paper_rows()


def test_every_row_of_the_paper_is_there():
    assert [sum(row.table == table for row in ROWS) for table in (1, 2, 3, 4)] == [17, 12, 4, 2]


def test_overall_counts_are_the_papers():
    """Table 3 prints overall figures: attention and feed-forward parts, without projections."""
    for row in ROWS:
        if row.paper_overall is not None:
            assert row.overall == pytest.approx(row.paper_overall, abs=0.025)
    whole = (DEIT_T_384.attention() + DEIT_T_384.feed_forward() + DEIT_T_384.projections()) / 1e3
    assert whole == pytest.approx(4.60, abs=0.005)


def test_a_models_own_count_agrees_with_the_formula():
    import timm

    model = timm.create_model("deit_small_patch16_224")
    for token_keep, keep in ((0.7, 0.25), (0.5, 1.0)):
        config = sp.SparseConfig(keep, tokens=sp.TokenConfig(token_keep))
        counts = sp.count_flops(sp.sparsify(model, config))
        tokens = sp.TokenConfig(token_keep)
        assert counts.mlp == pytest.approx(DEIT_S.feed_forward(tokens) * 1e6)
        assert counts.projections == pytest.approx(DEIT_S.projections(tokens) * 1e6)
        if keep == 1:
            assert counts.mhsa == pytest.approx(DEIT_S.attention(1.0, tokens) * 1e6)
        else:  # where the budget covers what is left we run dense, and the paper pays for the predictor still
            assert counts.mhsa == pytest.approx(DEIT_S.attention(keep, tokens) * 1e6, rel=0.02)
    dynamic = sp.count_flops(sp.sparsify(model, sp.SparseConfig(1.0, tokens=sp.TokenConfig(0.7, "dynamicvit"))))
    evit = sp.count_flops(sp.sparsify(model, sp.SparseConfig(1.0, tokens=sp.TokenConfig(0.7))))
    assert dynamic.attention < evit.attention
    assert dynamic.dense_total == evit.dense_total
    scorer = 384 * 384 + 384 * 192 + 192 * 96 + 96 * 2
    assert dynamic.other - evit.other == scorer * (196 + 138 + 97)


def test_the_claim_is_answered_by_counts():
    text = reproduction.claim(ROWS)
    assert "saves 68% of the attention" in text or "saves 69% of the attention" in text
    assert "not for the whole model" in text
    of_deit_s = {(row.token_keep, row.keep): row for row in ROWS if row.model == "DeiT-S"}
    dense, both = of_deit_s[1, 1], of_deit_s[0.5, 0.25]
    assert 1 - both.whole / dense.whole < 0.6 < 1 - both.formula / dense.formula


@pytest.fixture
def student(vit, photos):
    student = sp.sparsify(vit, sp.suggest_config(vit, 0.3, pattern="learned", n_down=9))
    sp.calibrate(student, photos)
    return student


@pytest.fixture
def batches(photos):
    return [(photos, torch.arange(6) % 7)]


def measure(student, batches, name="ours"):
    return reproduction.measure_rows(student, name, Evaluation(student, batches), ROWS)


def test_measured_columns_are_of_the_model_at_hand(student, batches, tmp_path):
    before = sp.config_of(student)
    measured = measure(student, batches)
    assert sp.config_of(student) == before
    left_out = {(row.table, row.method) for i, row in enumerate(ROWS) if i not in measured.rows}
    dropped_its_way = (1, "Sparsifiner")  # with fewer tokens, and not with EViT
    assert left_out == {(1, "DynamicViT"), dropped_its_way, (3, "DeiT-T"), (3, "Sparsifiner")}
    first = measured.rows[0]
    assert (first.agreement, first.top1) == (100, measured.dense.top1)
    same = [measured.rows[i] for i, row in enumerate(ROWS) if (row.token_keep, row.keep) == (1, 0.5) and row.table != 3]
    assert len(same) == 2
    assert all(row is same[0] for row in same)
    reproduction.write(ROWS, [measured], tmp_path)
    with (tmp_path / "tables.csv").open() as file:
        table = list(csv.DictReader(file))
    assert len(table) == len(ROWS)
    assert float(table[0]["paper"]) == 357.7
    assert float(table[0]["measured_agreement"]) == 100
    assert table[2]["measured_top1"] == ""
    text = (tmp_path / "tables.md").read_text()
    assert "ours: VisionTransformer, 26 tokens, 9 landmarks, 6 images, top-1" in text
    both = next(i for i, row in enumerate(ROWS) if row.method == "Sparsifiner + EViT")
    saved = [
        1 - getattr(measured.rows[both], name) / getattr(measured.dense, name)
        for name in ("attention_macs", "total_macs")
    ]
    assert f"EViT 0.7 with keep 0.25 {saved[0]:.0%} and {saved[1]:.0%} (ours)" in text
    assert text.count("### Table") == 4
    assert text.count("ours: M") == 3  # not in the table of high resolution
    assert (tmp_path / "tables.png").stat().st_size > 10_000


def rows_of(measured):
    return {(ROWS[i].method, ROWS[i].token_keep, ROWS[i].keep) for i in measured.rows}


def test_models_are_measured_in_the_rows_they_are_for(vit, student, batches, tmp_path):
    sp.reconfigure(student, tokens=sp.TokenConfig(0.7))
    evit = measure(student, batches, "evit")
    assert rows_of(evit) == {
        (method, share, keep) for method, keep in (("EViT", 1), ("Sparsifiner + EViT", 0.25)) for share in (0.7, 0.5)
    }
    sp.reconfigure(student, tokens=None, pattern="linformer")
    low = measure(student, batches, "low")
    assert rows_of(low) == {("Linformer", 1, None)}
    dynamic = sp.sparsify(
        vit, sp.suggest_config(vit, 0.3, pattern="learned", n_down=9, tokens=sp.TokenConfig(0.7, "dynamicvit"))
    )
    own = measure(dynamic, batches, "dynamic")
    assert rows_of(own) == {
        (method, share, keep) for method, keep in (("DynamicViT", 1), ("Sparsifiner", 0.25)) for share in (0.7, 0.5)
    }
    # Each in columns of its own, where it was measured; in the CSV each in a line of its own.
    found = reproduction.markdown(ROWS, [evit, low, own]).split("### Table")
    assert [[name in part for name in ("evit: M", "low: M", "dynamic: M")] for part in found[1:]] == [
        [True, False, True],
        [False, False, False],
        [False, False, False],
        [False, True, False],
    ]
    records = reproduction.records(ROWS, [evit, low, own])
    assert len(records) == len(ROWS)  # no row has two
    assert len(reproduction.records(ROWS, [evit, evit])) == len(ROWS) + len(evit.rows)
    reproduction.write(ROWS, [low, evit], tmp_path)  # the first row has nothing measured: the columns are there still
    assert "measured_with" in (tmp_path / "tables.csv").read_text().splitlines()[0]


def test_many_tokens_are_for_the_table_of_high_resolution(photos):
    vit = make_vit(img_size=96, patch_size=4, depth=1)
    student = sp.sparsify(vit, sp.suggest_config(vit, 0.3, pattern="learned"))
    images = torch.nn.functional.interpolate(photos[:2], (96, 96))
    measured = measure(student, [(images, torch.arange(2))])
    assert measured.tokens == 577
    assert {ROWS[i].table for i in measured.rows} == {3}
    assert len(measured.rows) == 4


def test_dynamicvit_is_counted_both_ways():
    """Before the attention of blocks 4, 7 and 10: those three see the fewer tokens already."""
    tokens = [197] * 3 + [139] * 3 + [98] * 3 + [69] * 3
    before = sum(2 * n * n * 384 for n in tokens) / 1e6
    text = reproduction.dynamicvit(ROWS)
    assert f"{before:.1f} M at 0.7 on DeiT-S" in text
    row = next(row for row in ROWS if row.method == "DynamicViT")
    assert row.formula > before


def test_tables_without_a_model(tmp_path):
    reproduction.write(ROWS, [], tmp_path)
    assert "measured" not in (tmp_path / "tables.csv").read_text()
    assert [table.row_count for table in reproduction.terminal(ROWS)] == [17, 12, 4, 2]
