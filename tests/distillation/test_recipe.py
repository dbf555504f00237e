import dataclasses

import pytest

import sparsifiner as sp
from sparsifiner.distillation.data import augmentation
from sparsifiner.distillation.recipe import config_for, names
from sparsifiner.errors import ConfigError


def test_defaults_are_the_papers():
    r = sp.Recipe()
    assert (r.phase1_epochs, r.phase1_learning_rate, r.phase2_epochs) == (5, 3e-4, 40)
    assert (r.phase2_learning_rate, r.phase2_final_learning_rate, r.phase2_warmup_epochs) == (8e-5, 2e-6, 3)
    assert (r.label_weight, r.token_weight, r.prediction_weight, r.attention_weight) == (1, 0.5, 0.5, 0)
    assert (r.weight_decay, r.l1, r.batch_size) == (0.05, 0, 168)


@pytest.mark.parametrize("name", names())
def test_named_recipes_are_whole(name):
    recipe = sp.Recipe.read(name)
    assert sp.Recipe.from_json(recipe.to_json()) == recipe


def test_there_is_a_recipe_for_each_of_the_papers_models_and_for_here():
    assert {
        "deit-s-224",
        "lv-vit-s-224",
        "deit-t-384",
        "two-cores",
        "digits",
        "large-cells",
        "large-predictors",
    } <= set(names())


def test_a_file_of_ones_own(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text("keep = 0.5\nphase2_epochs = 1\n")
    assert sp.Recipe.read(path) == sp.Recipe(keep=0.5, phase2_epochs=1)
    path.write_text("keep = 0.5\nfrobnicate = 1\n")
    with pytest.raises(ConfigError, match="unknown setting 'frobnicate'"):
        sp.Recipe.read(path)
    path.write_text("keep = = 2")
    with pytest.raises(ConfigError, match="not TOML"):
        sp.Recipe.read(path)
    with pytest.raises(ConfigError, match="no recipe 'nope'"):
        sp.Recipe.read("nope")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"keep": 0}, "keep must be"),
        ({"keep": "a"}, "keep must be of type float"),
        ({"batch_size": 2.5}, "batch_size must be of type int"),
        ({"batch_size": True}, "batch_size must be of type int"),
        ({"phase2_epochs": -1}, "phase2_epochs must be at least 0"),
        ({"flip": 2}, "flip must be at least 0 and at most 1"),
        ({"start": "somehow"}, "start must be one of"),
        ({"elastic": "0.5:0.1"}, "must ascend"),
        ({"elastic": "0.5"}, "expected LOW:HIGH"),
        ({"tile": "2"}, "expected ROWSxCOLUMNS"),
        ({"cells": "2x2;4x4"}, "cells: expected ROWSxCOLUMNS of each level between commas, such as 2x2,4x4"),
        ({"cells": "2x2,3x3"}, "do not hold whole cells of 2 x 2"),
        ({"tile": "²x²"}, "expected ROWSxCOLUMNS"),
        ({"tile": f"2x{'9' * 5000}"}, "expected ROWSxCOLUMNS"),
        ({"phase1_epochs": 10**400}, "phase1_epochs must be a finite number"),
        ({"phase1_epochs": float("inf")}, "phase1_epochs must be a finite number"),
        ({"phase1_epochs": 0, "phase2_epochs": 0}, "nothing to do"),
        ({"phase2_learning_rate": 1e-7}, "is above phase2_learning_rate"),
        ({"cache_teacher": True}, "crop is random"),
        ({"straight_through": True, "attention_weight": 1}, "choose one"),
        ({"phase1_learning_rate": float("nan")}, "must be at least 0"),
    ],
)
def test_impossible_settings(settings, message):
    with pytest.raises(ConfigError, match=message):
        sp.Recipe(**settings)


def test_config_takes_what_is_given_and_suggests_the_rest(vit):
    config = config_for(sp.Recipe(keep=0.2, tile="2x2", residual=False, tau=0.01, n_down=4), vit)
    assert (config.keep, config.tile, config.residual, config.tau, config.n_down) == (0.2, (2, 2), False, 0.01, 4)
    assert config_for(sp.Recipe(keep=0.2), vit) == sp.suggest_config(vit, 0.2, pattern="learned")


def test_every_field_says_what_it_is():
    assert all(
        field.metadata["help"].endswith((".", "(repeated augmentation); epochs stay as long."))
        for field in dataclasses.fields(sp.Recipe)
    )


@pytest.mark.parametrize("text", ["[" * 100_000, "keep = " + "9" * 5000, "keep = " + "[" * 50_000, "\xff"])
def test_files_that_python_gives_up_on(tmp_path, text):
    (tmp_path / "a.toml").write_text(text, encoding="latin-1")
    with pytest.raises(ConfigError, match="is not TOML"):
        sp.Recipe.read(tmp_path / "a.toml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000, "not a recipe in JSON"),
        ("9" * 5000, "not a recipe in JSON"),
        ('{"keep": 0.5', "not a recipe in JSON"),
        ("[[]]", "must be an object"),
        ('{"keep": 0.5, "x": 1}', "unknown setting 'x'"),
    ],
)
def test_recipes_in_json_that_are_none(text, message):
    with pytest.raises(ConfigError, match=message):
        sp.Recipe.from_json(text)
    recipe = sp.Recipe(keep=0.4)
    assert sp.Recipe.from_json(recipe.to_json()) == recipe


def test_an_augmentation_that_timm_does_not_know(vit):
    with pytest.raises(ConfigError, match="timm cannot augment images .*auto_augment 'loudly'"):
        augmentation(vit, sp.Recipe(auto_augment="loudly"))


def test_cells_of_several_levels(vit):
    recipe = sp.Recipe(keep=0.3, pattern="cells", cells="1x2,2x4", breadth=2.5, tile="none")
    config = config_for(recipe, vit)
    assert (config.pattern, config.cells, config.breadth, config.tile) == ("cells", ((1, 2), (2, 4)), 2.5, None)
