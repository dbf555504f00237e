import dataclasses
import itertools

import pytest
import torch

import sparsifiner as sp
from sparsifiner.errors import ConfigError
from sparsifiner.inspect.compare import Evaluation, Row
from sparsifiner.inspect.sweep import LEVELS, Point, Setting, allocate, frontier, layer_recalls, possible_levels, sweep


@pytest.fixture
def student(vit, photos):
    student = sp.sparsify(vit, sp.suggest_config(vit, 0.3, pattern="learned", n_down=9))
    sp.calibrate(student, photos)
    return student


def test_sweep_measures_every_setting(student, photos):
    batches = [(photos, torch.arange(6) % 7)]
    before = sp.config_of(student)
    settings = [Setting(0.2), Setting(0.2, (0.1, 0.3)), Setting(0.2, None, sp.TokenConfig(0.5)), Setting(1.0)]
    dense, points = sweep(Evaluation(student, batches), settings)
    assert sp.config_of(student) == before
    assert [point.setting for point in points] == settings
    assert dense.recall == 1
    whole = points[3].row
    assert (whole.agreement, whole.total_macs, whole.recall) == (100, dense.total_macs, 1)
    assert points[0].row.recall < 1
    assert points[2].row.total_macs < points[0].row.total_macs
    assert points[1].to_dict()["layers"] == "0.1 0.3"
    assert points[2].to_dict()["token_keep"] == 0.5


def test_tiles_and_levels_of_cells(vit, photos):
    student = sp.sparsify(vit, sp.SparseConfig(0.4, pattern="cells", tile=(4, 4)))
    shapes = [{}, {"tile": ()}, {"tile": (2, 2)}, {"cells": ((1, 1), (2, 2))}, {"tile": (), "cells": ((1, 2),)}]
    _, points = sweep(Evaluation(student, [(photos, torch.arange(6) % 7)]), [Setting(0.4, **shape) for shape in shapes])
    names = ["", "per query", "tile 2x2", "cells 1x1 2x2", "per query, cells 1x2"]
    assert [point.to_dict()["shape"] for point in points] == names
    assert [point.setting.name for point in points[:2]] == ["keep 0.4", "keep 0.4, per query"]
    assert len({point.row.divergence for point in points}) == 5


def row(cost, value):
    empty = dict.fromkeys([field.name for field in dataclasses.fields(Row)])
    return Row(**(empty | {"total_macs": cost, "top1": value}))


def test_frontier():
    points = [
        Point(Setting(0.5), row(*pair)) for pair in ((3, 70), (1, 60), (2, 59), (2, 65), (4, 70), (3, 71), (1, 61))
    ]
    assert [(p.row.total_macs, p.row.top1) for p in frontier(points)] == [(1, 61), (2, 65), (3, 71)]


def test_recalls_rise_with_the_rate(student, photos):
    before = sp.config_of(student)
    recalls = layer_recalls(student, photos, (0.1, 0.3, 1.0))
    assert sp.config_of(student) == before
    assert len(recalls) == 2
    for layer in recalls:
        assert layer == sorted(layer)
        assert layer[-1] == 1


def test_allocate_spends_where_recall_gains_most():
    levels = (0.1, 0.2, 0.4)
    flat, steep = [0.9, 0.91, 0.92], [0.2, 0.6, 0.9]
    assert allocate([flat, steep, flat], 0.2, levels) == (0.1, 0.4, 0.1)
    assert allocate([flat, flat], 0.1, levels) == (0.1, 0.1)
    assert allocate([flat, steep], 1.0, levels) == (0.4, 0.4)
    late = [0.1, 0.1, 0.9]  # gains only in the second step: it must be jumped to
    assert allocate([late, flat], 0.25, levels) == (0.4, 0.1)


def test_allocate_is_near_the_best_of_all():
    torch.manual_seed(0)
    levels = LEVELS[3:9]
    recalls = [torch.rand(len(levels)).sort().values.tolist() for _ in range(4)]
    found = allocate(recalls, 0.12, levels)
    assert sum(found) <= 4 * 0.12 + 1e-9

    def recall(keeps):
        return sum(layer[levels.index(keep)] for layer, keep in zip(recalls, keeps, strict=True))

    every = (keeps for keeps in itertools.product(levels, repeat=4) if sum(keeps) <= 4 * 0.12 + 1e-9)
    best = max(recall(keeps) for keeps in every)
    assert recall(found) >= 0.9 * best
    assert recall(found) > recall((levels[1],) * 4)


def test_impossible_allocations_are_refused():
    with pytest.raises(ConfigError, match="below the least"):
        allocate([[0.5, 1.0]], 0.05, (0.1, 1.0))
    with pytest.raises(ConfigError, match="ascend"):
        allocate([[0.5, 1.0]], 0.5, (1.0, 0.1))


def test_levels_that_hold_a_cell(vit, photos):
    student = sp.sparsify(vit, sp.SparseConfig(0.3, pattern="cells"))
    levels = possible_levels(student)
    assert levels == tuple(level for level in LEVELS if level > 3 / 26)  # a cell has four patches
    recalls = layer_recalls(student, photos, levels)
    assert all(layer == sorted(layer) and layer[-1] == pytest.approx(1) for layer in recalls)
    assert sum(allocate(recalls, 0.4, levels)) <= 2 * 0.4
    assert possible_levels(sp.sparsify(vit, sp.SparseConfig(0.3, n_down=5))) == LEVELS
