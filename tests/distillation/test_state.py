"""What an interrupted run leaves, and what becomes of it when it is damaged."""

import json

import pytest
import torch
from safetensors.torch import save_file

from sparsifiner.distillation import state
from sparsifiner.distillation.teacher import CachedTeacher
from sparsifiner.errors import CheckpointError

GOOD = {"phase": 2, "step": 10, "recipe": {"keep": 0.5}, "world": 1, "images": 64, "best": None}


def test_a_good_state(tmp_path):
    (tmp_path / state.STATE).write_text(json.dumps(GOOD))
    assert state.read_state(tmp_path) == state.RunState(**GOOD)


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        "9" * 5000,
        "\xff",
        "[]",
        json.dumps(GOOD | {"extra": 1}),
        json.dumps(GOOD | {"step": float("inf")}),
        json.dumps(GOOD | {"step": -1}),
        json.dumps(GOOD | {"phase": 3}),
        json.dumps(GOOD | {"recipe": []}),
        json.dumps(GOOD | {"best": "much"}),
    ],
)
def test_damaged_states(tmp_path, text):
    (tmp_path / state.STATE).write_text(text, encoding="latin-1")
    with pytest.raises(CheckpointError, match="is not a whole checkpoint of a run"):
        state.read_state(tmp_path)


ABOUT = {"digest": "0", "images": 2, "mirrored": False}


@pytest.mark.parametrize(
    ("metadata", "count", "message"),
    [
        ("[" * 100_000, 4, "is damaged"),
        ("9" * 5000, 4, "is damaged"),
        ("[]", 4, "its digest differs"),
        (json.dumps(ABOUT | {"images": 3}), 4, "its images differs"),
        (json.dumps(ABOUT), 3, "outputs of some images are missing"),
    ],
)
def test_damaged_outputs_of_a_teacher(tmp_path, metadata, count, message):
    path = tmp_path / "teacher.safetensors"
    save_file({"logits": torch.zeros(count, 3), "tokens": torch.zeros(4, 5, 6)}, path, {"teacher": metadata})
    with pytest.raises(CheckpointError, match=message):
        CachedTeacher(path, ABOUT)
