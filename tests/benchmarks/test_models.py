"""A small sample of what benchmarks/models.py tries, and that it finds what is wrong."""

import importlib.util
import sys
from pathlib import Path

import pytest
import timm
import torch

import sparsifiner as sp

from ..toys import make_eva, make_vit

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def models():
    sys.path.insert(0, str(FOLDER))  # as when it is run: it imports its neighbour
    try:
        spec = importlib.util.spec_from_file_location("models", FOLDER / "models.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules["models"] = module  # where its dataclasses look
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(FOLDER))
    return module


def test_models_that_are_converted_work(models):
    for make, compiled in ((make_vit, False), (make_eva, True)):
        forms = ("cells",) if compiled else ("cells", "learned")
        row = models.tried(models.Subject("timm", "toys", make.__name__, make), forms, compiled)
        assert (row["outcome"], row["tokens"], row["part"]) == ("works", 26, "")
    held = models.Subject("none", "toys", "held", lambda: torch.nn.ModuleDict({"inside": make_eva()}))
    assert models.tried(held, forms=("cells",))["part"] == "inside"


def test_others_say_why(models):
    row = models.tried(
        models.Subject("timm", "swin", "swin", lambda: timm.create_model("swin_tiny_patch4_window7_224"))
    )
    assert row["outcome"] == "refused"
    assert row["why"] == "its attention already works inside shifted windows, not over all tokens"

    def fails():
        raise ImportError("another package")

    assert models.tried(models.Subject("timm", "", "", fails))["outcome"] == "not made"


def test_what_is_wrong_is_found(models, monkeypatch):
    """A model that does not give the same twice; a restored one that is still sparse."""

    def broken():
        model = make_vit()
        model.calls = 0

        def count(module, inputs):
            module.calls += 1
            module.cls_token.data.add_(module.calls)

        model.register_forward_pre_hook(count)
        return model

    row = models.tried(models.Subject("timm", "toys", "broken", broken), forms=("cells",))
    assert (row["outcome"], row["why"]) == ("failed", "cells: is_dense_inside")
    monkeypatch.setattr(sp, "restore", lambda student: student)
    row = models.tried(models.Subject("timm", "toys", "vit", make_vit), forms=("learned",))
    assert (row["outcome"], row["why"]) == ("failed", "learned: restores")


def test_the_page_counts_them(models):
    rows = [
        models.tried(models.Subject("timm", "toys", "vit", make_vit), forms=("cells",)),
        models.tried(models.Subject("timm", "", "linear", lambda: torch.nn.Linear(1, 1))),
    ]
    text = models.page(rows, 8)
    assert "| timm | 1 | 1 | 0 | 0 |" in text
    assert "| vit | 1 | VisionTransformer | itself | 26 |" in text
    assert "| it is not a model of timm or transformers | linear |" in text


def test_kinds_are_told_apart(models):
    """Of models that differ in size alone one is tried."""
    subjects = list(models.timm_subjects("test_vit"))
    assert sum(subject.alike for subject in subjects) == len(timm.list_models("*test_vit*"))
    assert "test_vit" in {subject.name for subject in subjects}
    assert {"SiglipVisionModel"} <= {subject.name for subject in models.huggingface_subjects("Siglip")}
