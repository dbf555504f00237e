"""The README's table on this machine: what is in it; never how fast anything is."""

import json

import pytest
import torch
from typer.testing import CliRunner

import sparsifiner.digits  # noqa: F401 - registers the model
from sparsifiner import processor
from sparsifiner.cli.main import app
from sparsifiner.errors import ConfigError
from sparsifiner.inspect import overview

MODEL = "vit_digits_sparsifiner"
SIZES = (overview.Size(8, 2), overview.Size(16, 1))


@pytest.fixture
def small(monkeypatch):
    """The same, of a model that takes no time."""
    measure = overview.overview
    monkeypatch.setattr(overview, "overview", lambda **given: measure(model=MODEL, sizes=SIZES, **given))
    monkeypatch.setattr(overview, "take_turns", lambda runs, _, least: take_turns(runs, 0.01, least))
    monkeypatch.setattr(overview, "time_layers", lambda student, images: time_layers(student, images, seconds=0.001))
    return overview.overview


take_turns, time_layers = overview.take_turns, overview.time_layers


def test_every_case_and_a_table(small):
    found = small()
    kinds = [(case.pixels, case.dtype) for case in found.cases]
    assert kinds == [(pixels, dtype) for pixels in (8, 16) for dtype in ("float32", "bfloat16")]
    assert not found.left_out
    for case in found.cases:
        assert case.tokens == case.pixels**2 + 1
        assert json.loads(case.settings)["pattern"] == "cells"
        assert case.dense > case.dense_attention > 0
        assert case.ceiling > 1
        assert case.speed_up == case.dense / case.sparse
    lines = found.markdown().splitlines()
    assert [line.count("|") for line in lines[:6]] == [4] * 6
    assert lines[0].endswith("| float32 | bfloat16 |")
    assert "the attention itself, 257 tokens" in lines[3]
    for word in (found.machine["name"], f"torch {torch.__version__}", "2 of 8, 1 of 16 pixels"):
        assert word in lines[7]


def test_what_is_left_out_is_said(small, monkeypatch):
    monkeypatch.setattr(processor, "is_sound", lambda: False)
    monkeypatch.setattr(processor, "describe", lambda: "torch's own bfloat16 ended in SIGILL")
    found = small(latest=-1.0)
    assert [(case.pixels, case.dtype) for case in found.cases] == [(8, "float32")]
    assert found.left_out == (
        "bfloat16, for torch's own bfloat16 ended in SIGILL",
        "float32 at 16 pixels, for want of time",
    )
    assert found.markdown().endswith("Left out: float32 at 16 pixels, for want of time.")


def test_on_the_command_line(small, tmp_path):
    result = CliRunner().invoke(app, ["bench", "--all", "--threads", "1", "--out", str(tmp_path / "a.md"), "--json"])
    assert result.exit_code == 0, result.output
    about = json.loads(result.stdout)
    assert len(about["cases"]) == 4
    assert about["cases"][0]["speed_up"] > 0
    assert about["machine"]["name"]
    assert (tmp_path / "a.md").read_text().startswith(f"| {MODEL}, keep 0.1, dense / cells | float32 | bfloat16 |")
    for option in (["--keep", "0.2"], ["--n-down", "3"], ["--backward"]):
        with pytest.raises(ConfigError, match=f"--all measures what the README does: leave out {option[0]}"):
            CliRunner().invoke(app, ["bench", "--all", *option], catch_exceptions=False)
