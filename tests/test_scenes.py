"""Scenes that ask, and a model that takes them in every size."""

import pytest
import timm
import torch

import sparsifiner as sp
from sparsifiner import digits, scenes
from sparsifiner.convert import sparse_layers
from sparsifiner.inspect.compare import predict_all


@pytest.fixture(scope="module")
def source():
    return digits.load_digits()[0]


def test_scenes_are_what_they_say(source):
    drawn = scenes.draw(source, 3, 16, seed=1)
    assert drawn.images.shape == (3, 3, 128, 128)
    assert drawn.answers.shape == drawn.digits.shape == drawn.questions.shape == (3, 16, 16)
    assert torch.equal(drawn.images, scenes.draw(source, 3, 16, seed=1).images)
    assert not torch.equal(drawn.images, scenes.draw(source, 3, 16, seed=2).images)
    assert torch.equal(drawn.answers < 0, drawn.digits < 0)
    for answers, kinds, question in zip(drawn.answers, drawn.digits, drawn.questions, strict=True):
        asked = kinds[question & (kinds >= 0)].unique()
        assert len(asked) == 1
        assert torch.equal(answers == 1, kinds == asked)
        assert question.sum() == scenes.BLOCK**2
    red, _, blue = drawn.images[0].unbind(0)
    orange = torch.nn.functional.max_pool2d((red - blue)[None], scenes.PATCH)[0] > 1
    assert bool((drawn.questions[0] | ~orange).all())


def test_one_model_takes_canvases_of_any_size(source):
    model = timm.create_model(scenes.NAME).eval()
    for side, tokens in ((8, 65), (16, 257)):
        grown = scenes.at_size(model, side)
        student = sp.sparsify(grown, scenes.settings(grown, 0.3))
        drawn = scenes.draw(source, 2, side, seed=0)
        assert sparse_layers(student)[0].grid.num_tokens == tokens
        with torch.inference_mode():
            assert student(drawn.images).shape == (2, 2, side, side)
            assert torch.equal(model(drawn.images), grown(drawn.images))  # where it is bound to no size
        found = predict_all(student, drawn.batches(1))
        assert found.images == 2
        assert len(found.labels) == len(found.logits) == int((drawn.answers >= 0).sum())  # of patches with ink


def test_no_cells_larger_than_a_digit():
    model = scenes.at_size(timm.create_model(scenes.NAME), 64)
    assert max(max(cell) for cell in scenes.settings(model).cells) <= scenes.BLOCK


def test_the_same_seed_gives_the_same_model_and_another_checkpoint_of_it(source, tmp_path, monkeypatch):
    monkeypatch.setattr(scenes, "TOKENS", 128)
    monkeypatch.setattr(scenes, "MIXTURE", (16, 8))
    first, second = (scenes.train_scenes(source, steps=3) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    student = sp.sparsify(first, scenes.settings(first))
    sp.save(student, tmp_path / "scenes.safetensors")
    image = scenes.draw(source, 1, 32, seed=0).images
    with torch.inference_mode():
        assert torch.equal(sp.load(tmp_path / "scenes.safetensors")(image), student(image))
