"""The bench verb: what it prints and writes; never how fast anything is."""

import csv
import json

import pytest
import torch
from typer.testing import CliRunner

from sparsifiner.cli.main import app
from sparsifiner.config import budget as budget_of
from sparsifiner.inspect import speed

FAST = ["--seconds", "0.01", "--threads", "1", "--batch", "1", "--heads", "2", "--head-dim", "16", "--n-down", "9"]


def run(*arguments):
    result = CliRunner().invoke(app, ["bench", *arguments, *FAST])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_operator_rows_csv_and_plot(tmp_path):
    out, plot = tmp_path / "speed.csv", tmp_path / "speed.png"
    text = run("--tokens", "5,9", "--keep", "0.3,0.1", "--tile", "2x2", "--out", str(out), "--plot", str(plot))
    assert "faster than dense" in text or "slower than dense" in text
    with out.open() as file:
        rows = list(csv.DictReader(file))
    assert {row["n"] for row in rows} == {"26", "82"}
    assert len(rows) == 2 * (1 + 2 * 2)
    for row in rows:
        assert float(row["minimum"]) <= float(row["p20"]) <= float(row["p50"]) <= float(row["p80"])
        assert row["torch"] == torch.__version__
        assert row["threads"] == "1"
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_json_with_residual_and_bfloat16():
    rows = json.loads(run("--tokens", "6", "--keep", "0.2", "--residual", "--dtype", "bfloat16", "--json"))
    assert [row["name"] for row in rows] == ["dense (SDPA)", "sparse, keep 0.2", "sparse, keep 0.2, tile 4x4"]
    assert rows[1]["macs_ratio"] > 0
    assert rows[1]["achieved"] == pytest.approx(rows[1]["speed_up"] / rows[1]["macs_ratio"])


def test_backward_rows():
    rows = json.loads(run("--tokens", "6", "--keep", "0.2", "--backward", "--json"))
    assert [row["name"] for row in rows][:2] == ["backward, dense (SDPA)", "backward, keep 0.2"]


def test_a_whole_model_has_a_ceiling():
    import sparsifiner.digits  # noqa: F401 - registers the model

    rows = json.loads(run("--model", "vit_digits_sparsifiner", "--keep", "0.2", "--residual", "--json"))
    assert rows[0]["name"] == "model, dense"
    assert all(row["ceiling"] > 1 for row in rows)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--dtype", "int8"], "float32 or bfloat16"), (["--tokens", "many"], "--tokens"), (["--tile", "2by2"], "tile")],
)
def test_bad_input(arguments, message):
    result = CliRunner().invoke(app, ["bench", *arguments, *FAST])
    assert result.exit_code != 0
    assert message in str(result.exception)


def test_the_slow_ways_compute_the_same():
    p = speed.simulate(1, 2, (6, 6), 16, 9)
    budget = budget_of(0.25, 37)
    expected = speed.fused(p, budget, None, False)()
    torch.testing.assert_close(speed.masked_dense(p, budget), expected, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(speed.gathered(p, budget, None, False, "eager"), expected, rtol=1e-3, atol=1e-4)
