"""The segmentation example from end to end on scenes of a few pixels, and what it says of bad input."""

import csv
import importlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "segmentation"


@pytest.fixture
def segment(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLE))
    return importlib.import_module("segment")


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    """Bright is class 1, dark is class 0, and the last row is not counted."""
    root = tmp_path_factory.mktemp("scenes")
    random = np.random.default_rng(0)
    for part, count in (("train", 8), ("val", 3)):
        (root / part).mkdir()
        for number in range(count):
            classes = np.kron(random.integers(0, 2, (3, 4)), np.ones((16, 16))).astype(np.uint8)
            picture = np.repeat((classes * 200 + 20)[..., None], 3, axis=2).astype(np.uint8)
            Image.fromarray(picture).save(root / part / f"{number}.webp")
            classes[-1] = 2
            Image.fromarray(classes).save(root / part / f"{number}.png")
    return root


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    import timm

    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("weights") / "weights.safetensors"
    save_file(timm.create_model("vit_tiny_patch16_224", img_size=(48, 64), num_classes=3).state_dict(), path)
    return path


def options(scenes, weights, out):
    about = {"data": scenes, "out": out, "weights": weights, "model": "vit_tiny_patch16_224", "size": "48x64"}
    found = [part for name, value in (about | {"classes": 2, "void": 2}).items() for part in (f"--{name}", str(value))]
    return [*found, "--threads", "1"]


def rows(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_from_dense_training_to_a_distilled_and_measured_model(segment, scenes, weights, tmp_path, capsys):
    shared = options(scenes, weights, tmp_path)
    sparse = ["--keep", "0.5"]
    segment.main(["train", *shared, "--epochs", "3"])
    head = next((tmp_path / "48x64").glob("head-*.safetensors"))
    segment.main(["train", *shared, "--epochs", "3"])
    assert "is there already" in capsys.readouterr().out
    segment.main(["evaluate", *shared, *sparse, "--seconds", "0.01"])
    table = rows(tmp_path / "results.csv")
    assert [row["form"] for row in table] == ["dense", *segment.FORMS]
    assert all(0 <= float(row["miou"]) <= 100 and float(row["ms"]) > 0 for row in table)
    assert float(table[0]["agreement"]) == 100
    segment.main(["distil", *shared, *sparse, "--epochs", "1", "--label-weight", "1"])
    before = (tmp_path / "results.csv").stat().st_mtime_ns
    segment.main(["evaluate", *shared, *sparse, "--seconds", "0.01", "--forms", "cells per query"])
    assert (tmp_path / "results.csv").stat().st_mtime_ns == before  # known already
    segment.main(["evaluate", *shared, *sparse, "--seconds", "0.01", "--forms", "cells"])
    distilled = [row["form"] for row in rows(tmp_path / "results.csv") if row["training"] == "distilled"]
    assert distilled == ["cells"]
    segment.main(["pictures", *shared, *sparse, "--picture", str(tmp_path / "figure.png")])
    assert Image.open(tmp_path / "figure.png").size == (5 * 240, 16 + 3 * 180)
    assert set(load_file(head)) == {"mix.weight", "mix.bias", "classify.weight", "classify.bias"}


def test_features_that_are_there_are_not_made_again(segment, scenes, weights, tmp_path, monkeypatch):
    shared = options(scenes, weights, tmp_path)
    segment.main(["train", *shared, "--epochs", "1"])
    monkeypatch.setattr(sys.modules["segmenter"], "features", None)  # to be called is an error
    segment.main(["train", *shared, "--epochs", "2", "--again"])


def test_scores(segment):
    truth = torch.tensor([[0, 0, 1], [1, -100, 1]])
    found = segment.score([torch.tensor([[0, 1, 1], [1, 0, 0]])], [truth], 3)
    assert found.accuracy == pytest.approx(60)
    assert found.ious[:2].tolist() == pytest.approx([100 / 3, 50])
    assert found.miou == pytest.approx((100 / 3 + 50) / 2)  # a class that is nowhere has no part


def test_bad_input_is_one_line_and_exit_code_2(scenes, weights, tmp_path):
    (tmp_path / "empty").mkdir()
    arguments = options(tmp_path / "empty", weights, tmp_path / "out")
    run = subprocess.run(
        [sys.executable, EXAMPLE / "segment.py", "train", *arguments],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert run.returncode == 2
    assert run.stderr.count("\n") == 1
    assert run.stderr.startswith("error: ")
    assert "no images with class maps" in run.stderr


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"classes": 1}, "with class 1: expected 0 to 0"),
        ({"size": "48"}, "expected HEIGHTxWIDTH"),
        ({"size": "50x64"}, "a multiple of the patches of 16 x 16, got 50x64"),
        ({"data": "nowhere"}, "nowhere does not exist"),
    ],
)
def test_what_cannot_be_is_said(segment, scenes, weights, tmp_path, changes, message):
    found = options(scenes, weights, tmp_path) + [
        part for name, value in changes.items() for part in (f"--{name}", str(value))
    ]
    with pytest.raises(segment.sp.SparsifinerError, match=message) as caught:
        segment.main(["train", *found])
    assert "\n" not in str(caught.value)
    with pytest.raises(segment.sp.SparsifinerError, match="run `segment.py train` first"):
        segment.main(["evaluate", *options(scenes, weights, tmp_path)])


def test_a_broken_scene_loses_nothing(segment, scenes, weights, tmp_path):
    import shutil

    data = tmp_path / "data"
    shutil.copytree(scenes, data)
    good = (data / "val" / "1.webp").read_bytes()
    (data / "val" / "1.webp").write_bytes(good[:40])
    shared = options(data, weights, tmp_path / "out")
    segment.main(["train", *shared, "--epochs", "1"])
    with pytest.raises(segment.sp.SparsifinerError, match="cannot read image val/1.webp"):
        segment.main(["evaluate", *shared, "--keep", "0.5", "--seconds", "0.01", "--forms", "cells"])
    (data / "val" / "1.webp").write_bytes(good)
    segment.main(["evaluate", *shared, "--keep", "0.5", "--seconds", "0.01", "--forms", "cells"])
    assert len(rows(tmp_path / "out" / "results.csv")) == 2
