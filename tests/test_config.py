import math

import numpy as np
import pytest

from sparsifiner.config import (
    BACKENDS,
    SparseConfig,
    TokenConfig,
    budget,
    name_tile,
    parse_cells,
    parse_tile,
    parse_tiles,
)
from sparsifiner.errors import ConfigError


@pytest.mark.parametrize(
    ("keep", "tokens", "expected"),
    [
        (0.9, 197, 178),
        (0.7, 197, 138),
        (0.1, 197, 20),
        (0.05, 197, 10),
        (0.01, 197, 2),
        (0.28, 25, 7),
        (1.0, 197, 197),
    ],
)
def test_budget_is_the_papers(keep, tokens, expected):
    assert budget(keep, tokens) == expected


def test_budget_is_at_least_one():
    assert budget(1e-12, 5) == 1


@pytest.mark.parametrize("keep", [0, -0.1, 1.0001, math.nan, math.inf, True, "0.5", None, [0.5, 2.0]])
def test_keep_outside_its_range_is_refused(keep):
    with pytest.raises(ConfigError, match="keep must be a share of the tokens in"):
        SparseConfig(keep)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_down": 0}, "n_down must be a whole number"),
        ({"n_down": 3.5}, "n_down must be a whole number"),
        ({"tau": 1.0}, "tau must be in"),
        ({"tau": math.nan}, "tau must be in"),
        ({"basis_threshold": -0.01}, "basis_threshold must be"),
        ({"basis_threshold": math.inf}, "basis_threshold must be"),
        ({"basis_threshold": 10**400}, "basis_threshold must be"),
        ({"keep": 10**400}, "keep must be"),
        ({"tau": 10**400}, "tau must be"),
        ({"residual": 1}, "residual must be True or False"),
        ({"tile": (2,)}, "tile must be"),
        ({"tile": (0, 2)}, "tile must be two or three whole numbers"),
        ({"tile": (2, 2, 2, 2)}, "tile must be"),
        ({"tile": (2, 2.5, 2)}, "tile must be two or three whole numbers"),
        ({"cells": ((1, 2, 2), (2, 2))}, "cells of 2 x 2 patches do not hold whole cells of 1 x 2 x 2"),
        ({"cells": ((2, 2, 2), (3, 4, 4))}, "cells of 3 x 4 x 4 patches do not hold whole cells of 2 x 2 x 2"),
        ({"tile": "22"}, "tile must be"),
        ({"tile": []}, "tile is an empty list"),
        ({"tile": [None, (2, 0)]}, "tile of a layer must be two or three whole numbers"),
        ({"tile": [(2, 2), 2]}, "tile must be"),
        ({"tile": [None, (2, 2)], "pattern": "window"}, "set tile=None for fixed patterns"),
        ({"backend": "cuda"}, "unknown backend 'cuda'"),
        ({"keep": []}, "empty list"),
    ],
)
def test_impossible_settings_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        SparseConfig(**({"keep": 0.5} | changes))


def test_round_trip_through_json():
    tokens = TokenConfig(0.7, blocks=[1, 3], fuse="official")
    config = SparseConfig(keep=[0.5, 0.25], n_down=np.int64(49), tau=np.float32(0.5), tile=[2, 7], tokens=tokens)
    again = SparseConfig.from_json(config.to_json())
    assert again == config
    assert again.keep == (0.5, 0.25)
    assert again.tile == (2, 7)
    assert hash(again) == hash(config)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not a config in JSON"),
        ("[]", "at least 'keep'"),
        ('{"keep": 0.5, "warp": 1}', "unknown setting 'warp'"),
    ],
)
def test_damaged_json_is_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        SparseConfig.from_json(text)


def test_tile_per_layer():
    config = SparseConfig(0.5, tile=[[4, 4], None, [4, 4], [2, 7]])
    assert config.tile == ((4, 4), None, (4, 4), (2, 7))
    assert SparseConfig.from_json(config.to_json()) == config
    assert config.tiles == ((4, 4), (2, 7))
    assert [layer.tile for layer in config.replace(dense=[1]).per_layer(4)] == list(config.tile)
    assert SparseConfig(0.5, tile=(2, 2)).tile_per_layer(3) == ((2, 2),) * 3
    assert SparseConfig(0.5, tile=[None, None], pattern="window").tiles == ()
    with pytest.raises(ConfigError, match="tile lists 4 tiles but the model has 3 attention layers"):
        config.per_layer(3)
    for text, tile in {"none": None, "2x7": (2, 7), "none,4x4": (None, (4, 4))}.items():
        assert parse_tiles(text) == tile
        assert name_tile(tile) == text
    for nonsense in ("", "4x4,", "2x", "none none"):
        with pytest.raises(ConfigError, match="expected ROWSxCOLUMNS"):
            parse_tiles(nonsense)


def test_sides_of_clips():
    config = SparseConfig(0.5, tile=[2, 4, 4], pattern="cells", cells=[[2, 2], [2, 4, 4]])
    assert (config.tile, config.cells) == ((2, 4, 4), ((2, 2), (2, 4, 4)))
    assert SparseConfig.from_json(config.to_json()) == config
    assert config.can_keep(0.1, 40)  # two numbers are a frame deep
    assert parse_tile("2x4x4") == (2, 4, 4)
    assert parse_cells("1x2x2,2x4x4") == ((1, 2, 2), (2, 4, 4))
    for text in ("2", "2x2x2x2", "2x", "2x4x4,", "x4x4"):
        with pytest.raises(ConfigError, match="--tile: expected ROWSxCOLUMNS, such as 2x7, or of clips FRAMESxROWS"):
            parse_tile(text, "--tile")


def test_keep_per_layer():
    assert SparseConfig(0.5).keep_per_layer(3) == (0.5, 0.5, 0.5)
    assert SparseConfig([0.5, 0.2]).keep_per_layer(2) == (0.5, 0.2)
    with pytest.raises(ConfigError, match="keep lists 2 values but the model has 3 attention layers"):
        SparseConfig([0.5, 0.2]).keep_per_layer(3)


def test_replace_validates():
    assert SparseConfig(0.5).replace(keep=0.1).keep == 0.1
    with pytest.raises(ConfigError, match="keep must be"):
        SparseConfig(0.5).replace(keep=2)
    with pytest.raises(ConfigError, match="unknown setting 'kep'"):
        SparseConfig(0.5).replace(kep=0.1)


def test_every_backend_of_the_table_can_be_asked_for():
    from sparsifiner.ops import dispatch

    assert set(BACKENDS) == {"auto", *dispatch._TABLE}


@pytest.mark.parametrize("text", ["[" * 100_000, '{"keep": ' + "9" * 5000 + "}", '{"keep": 0.5', "\0"])
def test_json_that_python_gives_up_on(text):
    with pytest.raises(ConfigError, match="not a config in JSON"):
        SparseConfig.from_json(text)
