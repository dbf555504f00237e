"""`backend="auto"`: which form runs is measured once per layer and shape."""

import time

import pytest
import torch

import sparsifiner as sp
from sparsifiner.convert import sparse_layers
from sparsifiner.nn.attention import SparseAttention
from sparsifiner.ops import cost


@pytest.mark.parametrize(("slow", "pays"), [("dense", True), ("sparse", False)])
def test_the_faster_form_wins_and_is_remembered(slow, pays):
    calls = []

    def run(name):
        calls.append(name)
        time.sleep(0.005 if name == slow else 0)

    decisions = cost.Decisions()
    decision = decisions.decide("a shape", lambda: run("sparse"), lambda: run("dense"))
    assert decision.pays is pays
    assert decisions.known("a shape") == decision
    assert calls == ["sparse", "dense"] * (cost.REPEATS + 1)


@pytest.fixture
def free(monkeypatch, _stay_sparse):
    """Undoes what conftest does to all other tests: the choice is free again."""
    monkeypatch.undo()


@pytest.mark.usefixtures("free")
@pytest.mark.parametrize("pays", [True, False])
def test_auto_follows_the_measurement(pays, vit, photos, monkeypatch):
    student = sp.sparsify(vit, sp.SparseConfig(keep=0.2, n_down=5)).eval()
    monkeypatch.setattr(cost.Decision, "pays", property(lambda self: pays))
    with torch.no_grad():
        for _ in range(2):  # once to measure, once to follow
            out = student(photos)
        sp.reconfigure(student, backend="sparse")
        dense, sparse = vit(photos), student(photos)
    assert not torch.equal(dense, sparse)
    assert torch.equal(out, sparse if pays else dense)
    assert [len(layer.costs) for layer in sparse_layers(student)] == [1, 1]


@pytest.mark.usefixtures("free")
def test_auto_stays_sparse_where_dense_would_be_another_thing(vit, photos, monkeypatch):
    """In training gradients must reach the predictor; observers must have something to see."""
    student = sp.sparsify(vit, sp.SparseConfig(keep=0.2, n_down=5))
    monkeypatch.setattr(SparseAttention, "_measure", lambda *args: pytest.fail("measured"))
    student(photos).sum().backward()
    with torch.no_grad(), sp.capture(student, layers=[0, 1]):
        student(photos)
    sp.reconfigure(student, backend="eager")
    with torch.no_grad():
        student(photos)
