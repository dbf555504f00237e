"""Figures and the report of a model of clips: frames of patches beside each other."""

import numpy as np
import pytest
import torch
import transformers

import sparsifiner as sp
from sparsifiner.convert import sparse_layers
from sparsifiner.errors import ConfigError
from sparsifiner.inspect import compare
from sparsifiner.inspect.statistics import measure
from sparsifiner.report import figures, html

SHAPE = {"image_size": 16, "patch_size": 4, "num_frames": 6, "tubelet_size": 2, "num_labels": 7}
WIDTH = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
CELLS = {"pattern": "cells", "cells": ((1, 2, 2), (2, 2, 4)), "tile": (2, 2, 2)}
QUERY = (2, 1, 3)  # token 39 of 3 x 4 x 4


@pytest.fixture(scope="module")
def clip():
    return torch.randn(6, 3, 16, 16, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def photo():
    """Every picture in a grey of its own."""
    return np.broadcast_to(np.linspace(0, 0.5, 6)[:, None, None, None], (6, 16, 16, 3)).copy()


@pytest.fixture(params=["cells", "learned"])
def student(request, clip):
    torch.manual_seed(0)
    model = transformers.VideoMAEForVideoClassification(transformers.VideoMAEConfig(**SHAPE, **WIDTH)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=0.3)
    if request.param == "cells":
        return sp.sparsify(model, sp.SparseConfig(0.3, **CELLS))
    student = sp.sparsify(model, sp.SparseConfig(0.3, n_down=6, tau=0.0, basis_threshold=0.0))
    sp.calibrate(student, clip[None])
    return student


def test_a_scene_is_what_capture_sees(student, clip, photo):
    scene = figures.look(student, clip, photo, QUERY)
    assert (scene.grid, scene.token, scene.frames, scene.place, scene.sides) == ((3, 4, 4), 39, (2,), (1, 3), (4, 4))
    with sp.capture(student, queries=[39]) as seen:
        student(clip[None])
    row = seen[0].full_map[0, 1, 0]
    torch.testing.assert_close(scene.maps[0].full_map[0, 1, 0], row)
    np.testing.assert_allclose(scene.on_grid(row), row[32:].view(4, 4))
    np.testing.assert_allclose(scene.background[0, 0], photo[4, 0, 0])  # frame 2 of patches begins with picture 4
    middle = figures.look(student, clip, photo)
    assert (middle.query, middle.frames) == ((1, 2, 2), (1,))


def test_frames_beside_each_other(student, clip, photo):
    scene = figures.look(student, clip, photo, QUERY, frames=(0, 2))
    row = scene.maps[0].full_map[0, 0, 0]
    picture = scene.on_grid(row)
    assert (picture.shape, scene.sides, scene.place) == ((4, 8), (4, 8), (1, 7))
    np.testing.assert_allclose(picture[:, :4], row[:16].view(4, 4))
    np.testing.assert_allclose(picture[:, 4:], row[32:].view(4, 4))
    assert scene.background.shape == (16, 32, 3)
    assert figures.look(student, clip, photo, QUERY, frames=(0, 1)).place is None
    figure = figures.connections(scene, [0], [1])
    mask = scene.maps[0].mask[0, 1, 0]
    assert figure.axes[1].get_xlabel() == f"{int(mask.sum())} of 48 patches"  # of all frames, not of those shown
    shade = figure.axes[1].get_images()[1].get_array()[..., 3]
    assert np.array_equal(shade == 0, scene.on_grid(mask) > 0)


def test_all_figures_and_the_report(student, clip, photo, tmp_path):
    scene = figures.look(student, clip, photo, QUERY)
    about = {"layers": [0], "heads": [0], "tokens": sp.TokenConfig(0.5, blocks=[0])}
    if sparse_layers(student)[0].config.pattern != "cells":
        assert len(figures.figures(scene, clip, tmp_path, **about, only=["basis", "coefficients"])) == 4
        return
    names = {path.stem for path in figures.figures(scene, clip, tmp_path, **about)}
    assert names == {"connections", "attentions", "cells", "patterns", "recall", "tokens"}
    pictures = html.pictures_of(student, clip, photo, "a clip")
    assert sum("over frames 0, 1, 2 of 3" in picture.caption for picture in pictures) == 1
    rows = compare.compare(student, [(clip[None], torch.tensor([1]))], [compare.Form("sparse", {})], [0.3])
    html.write_report(
        tmp_path / "report.html",
        student,
        title="clips",
        command="none",
        rows=rows,
        statistics=measure(student, clip[None]),
        statistics_images=1,
        pictures=pictures,
        log=[],
    )
    page = (tmp_path / "report.html").read_text()
    assert "6 frames of 16 x 16 pixels, 48 tokens" in page
    assert page.count("<figure>") == len(pictures)


def test_patterns_and_cells_reach_into_other_frames(student, clip, photo):
    scene = figures.look(student, clip, photo, (1, 1, 1), frames=(0, 1, 2))
    figure = figures.patterns(scene, [0], 0)
    window = figure.axes[0].get_images()[1].get_array()[..., 3] == 0
    assert window[1, 1]
    assert window[1, 5]
    assert window[1, 9]
    if sparse_layers(student)[0].config.pattern == "cells":
        axes = figures.opened_cells(scene, [0], 0).axes[1]
        opened = scene.maps[0].opened
        kept = int(scene.maps[0].mask[0, 0, 0].sum())
        rows = opened.lists.mask(scene.maps[0].queries)[0, 0, 0]
        assert axes.get_xlabel() == f"{kept} of 48 patches, {int(rows[48:].sum())} standing cells"


def test_what_does_not_exist_is_refused(student, clip, photo):
    with pytest.raises(ConfigError, match=r"patch \(3, 0, 0\) does not exist: there are 3 x 4 x 4 patches"):
        figures.look(student, clip, photo, (3, 0, 0))
    with pytest.raises(ConfigError, match=r"patch \(1, 1\) does not exist: there are 3 x 4 x 4 patches"):
        figures.look(student, clip, photo, (1, 1))
    with pytest.raises(ConfigError, match="frame 3 does not exist: the clip has frames of patches 0 to 2"):
        figures.look(student, clip, photo, frames=(0, 3))
    with pytest.raises(ConfigError, match="the photo of 3 x 4 x 4 patches has 3 dimensions, not 4"):
        figures.look(student, clip, photo[0])


def test_the_explorer_says_that_it_shows_photos(student):
    from sparsifiner.explorer.pictures import lens_of

    with pytest.raises(ConfigError, match="the page shows timm's models only, not VideoMAEForVideoClassification"):
        lens_of(student)
