import numpy as np
import pytest
import torch
from PIL import Image

import sparsifiner as sp
from sparsifiner.errors import ConfigError, DataError
from sparsifiner.inspect.compare import Evaluation
from sparsifiner.inspect.sweep import Setting, sweep
from sparsifiner.report import figures
from sparsifiner.report.photo import read_photo, visible
from sparsifiner.report.plots import trade_off

from ..toys import make_vit

LAYERS, HEADS = [0, 2], [0, 1]


@pytest.fixture
def student(photos):
    vit = make_vit(depth=4)
    student = sp.sparsify(vit, sp.suggest_config(vit, 0.3, pattern="learned", n_down=9))
    sp.calibrate(student, photos)
    return student


@pytest.fixture
def scene(student, photos):
    return figures.look(student, photos[0], np.full((20, 20, 3), 0.5), (1, 3))


def pictures(figure):
    """What each panel shows, photos (which have colours) left out."""
    return [
        [np.ma.getdata(image.get_array()) for image in axes.get_images() if np.ndim(image.get_array()) == 2]
        for axes in figure.axes
    ]


def test_a_scene_is_what_capture_sees(student, scene, photos):
    token = 1 + 1 * 5 + 3
    with sp.capture(student, queries=[token]) as seen:
        student(photos[:1])
    for layer in range(4):
        torch.testing.assert_close(scene.maps[layer].full_map, seen[layer].full_map)
        assert torch.equal(scene.maps[layer].mask, seen[layer].mask)
    assert scene.coefficients[0].shape == (3, 25, 9)
    assert scene.grid == (5, 5)


def test_looking_keeps_all_tokens_and_leaves_the_model_as_it_was(student, photos):
    sp.reconfigure(student, tokens=sp.TokenConfig(0.5))
    before = sp.config_of(student)
    scene = figures.look(student, photos[0], np.zeros((20, 20, 3)))
    assert sp.config_of(student) == before
    assert scene.query == (2, 2)
    assert all(seen.mask.shape[-1] == 26 for seen in scene.maps.values())


def test_connections(scene):
    figure = figures.connections(scene, LAYERS, HEADS)
    assert len(figure.axes) == 2 * 2 * 4
    panels = pictures(figure)
    seen = scene.maps[2]
    np.testing.assert_allclose(panels[4 * 3 + 2][0], scene.on_grid(seen.sparse_map[0, 1, 0]))
    np.testing.assert_allclose(panels[4 * 3 + 3][0], scene.on_grid(seen.full_map[0, 1, 0]))
    kept = int(seen.mask[0, 1, 0, 1:].sum())
    assert figure.axes[4 * 3 + 1].get_xlabel() == f"{kept} of 25 patches"


def test_three_attentions_share_a_scale(scene):
    figure = figures.three_attentions(scene, [1], 2)
    images = [axes.get_images()[0] for axes in figure.axes[1:4]]
    assert len({image.get_clim() for image in images}) == 1
    np.testing.assert_allclose(images[1].get_array(), scene.on_grid(scene.maps[1].estimate[0, 2, 0]))


def test_basis_leaves_out_what_is_below_the_threshold(scene):
    from sparsifiner.convert import sparse_layers

    figure = figures.basis(scene, [3], 1, most=4)
    layer = sparse_layers(scene.student)[3]
    shown = figure.axes[0].get_images()[0].get_array()
    wanted = scene.on_grid(layer.predictor.w_up[1, 0].detach())
    assert np.array_equal(np.ma.getmaskarray(shown), wanted <= layer.basis_threshold)


def test_coefficients(scene):
    figure = figures.coefficients(scene, 0, range(4))
    values = scene.coefficients[2][0].numpy()
    assert figure.axes[2].get_title() == f"layer 2: {(values > sp.config_of(scene.student).tau).mean():.0%}"


def test_patterns_have_as_many_keys(scene):
    figure = figures.patterns(scene, [1], 0)
    shades = [axes.get_images()[1].get_array()[..., 3] for axes in figure.axes]
    assert len(shades) == 5
    for shade in shades[:4]:
        assert 8 <= (shade == 0).sum() <= 9  # the budget, and the query itself
    assert np.array_equal(shades[4] == 0, scene.on_grid(scene.maps[1].mask[0, 0, 0]) > 0)


def test_recalls(scene):
    figure = figures.recalls(scene.statistics, 1)
    np.testing.assert_allclose(
        figure.axes[0].get_images()[0].get_array(), [layer.recall_per_head for layer in scene.statistics]
    )


def test_kept_tokens(student, scene, photos):
    tokens = sp.TokenConfig(0.5, blocks=(0, 2))
    stages = figures.left_tokens(student, photos[0], tokens)
    assert [(block, len(cells)) for block, cells in stages] == [(0, 13), (2, 7)]
    assert sp.config_of(student).tokens is None
    figure = figures.kept_tokens(scene, stages, "evit 0.5")
    for axes, (_, cells) in zip(figure.axes[1:], stages, strict=True):
        shade = axes.get_images()[1].get_array()[..., 3].flatten()
        assert np.array_equal(np.flatnonzero(shade == 0), cells.numpy())


def test_the_trade_off_shows_every_setting_against_both_costs(student, photos, scene, tmp_path):
    labels = torch.arange(len(photos)) % 7
    settings = [Setting(0.3), Setting(0.1), Setting(0.3, None, sp.TokenConfig(0.5))]
    dense, points = sweep(Evaluation(student, [(photos, labels)]), settings)
    figure = trade_off(dense, points)
    for axes, cost, unit in zip(figure.axes, ("total_macs", "milliseconds"), (1e9, 1.0), strict=True):
        drawn = {tuple(place) for line in axes.get_lines() for place in line.get_xydata().tolist()}
        assert drawn == {(getattr(row, cost) / unit, row.top1) for row in [dense, *(p.row for p in points)]}
    assert "top-1" in figure.axes[0].get_ylabel()
    paths = figures.figures(
        scene, photos[0], tmp_path, layers=[0], heads=[0], tokens=sp.TokenConfig(0.5), only=["trade-off"],
        swept=lambda: (dense, points),
    )  # fmt: skip
    assert [path.name for path in paths] == ["trade-off.png", "trade-off.pdf"]


def test_all_figures_are_written_in_both_formats(scene, photos, tmp_path):
    about = {"layers": LAYERS, "heads": HEADS, "tokens": sp.TokenConfig(0.5)}
    paths = figures.figures(scene, photos[0], tmp_path, **about)
    assert len(paths) == 14
    for path in paths:
        assert path.stat().st_size > 3000
        start = path.read_bytes()[:4]
        assert start == (b"%PDF" if path.suffix == ".pdf" else b"\x89PNG")
    with Image.open(tmp_path / "connections.png") as image:
        assert image.width > 800
        assert len(image.convert("L").getcolors(100_000)) > 20  # not blank
    assert len(figures.figures(scene, photos[0], tmp_path, **about, only=["recall"])) == 2


def test_what_does_not_exist_is_refused(student, scene, photos, tmp_path):
    with pytest.raises(ConfigError, match="5 x 5 patches"):
        figures.look(student, photos[0], scene.photo, (5, 0))
    for wrong in ({"layers": [4]}, {"heads": [3]}, {"only": ["rainbow"]}):
        about = {"layers": LAYERS, "heads": HEADS, "tokens": sp.TokenConfig(0.5)} | wrong
        with pytest.raises(ConfigError):
            figures.figures(scene, photos[0], tmp_path, **about)
    sp.reconfigure(student, keep=1.0)
    dense = figures.look(student, photos[0], scene.photo)
    with pytest.raises(ConfigError, match="dense"):
        figures.basis(dense, [0], 0)


def test_photos(vit, tmp_path):
    Image.new("RGB", (30, 40), (255, 0, 0)).save(tmp_path / "red.png")
    pixels, photo = read_photo(vit, tmp_path / "red.png")
    assert pixels.shape == (3, 20, 20)
    np.testing.assert_allclose(photo, np.broadcast_to([1.0, 0, 0], (20, 20, 3)), atol=1e-6)
    assert visible(torch.zeros(3, 2, 2), (0.5, 0.5, 0.5), (1.0, 1.0, 1.0)).mean() == 0.5
    (tmp_path / "broken.png").write_bytes((tmp_path / "red.png").read_bytes()[:40])
    for name, reason in (("broken.png", "cannot be read"), ("none.png", "does not exist")):
        with pytest.raises(DataError, match=reason):
            read_photo(vit, tmp_path / name)


@pytest.fixture
def opening(photos):
    student = sp.sparsify(make_vit(depth=4), sp.SparseConfig([0.3, 0.3, 1.0, 0.3], pattern="cells"))
    return figures.look(student, photos[0], np.full((20, 20, 3), 0.5), (1, 3))


def test_opened_cells(opening):
    figure = figures.opened_cells(opening, [0, 2], 1)  # of which the second is dense
    assert len(figure.axes) == 4
    axes = figure.axes[1]
    seen = opening.maps[0]
    mask = opening.on_grid(seen.mask[0, 1, 0]) > 0
    shade = axes.get_images()[-1].get_array()[..., 3]
    assert np.array_equal(shade == 0, mask)
    assert axes.get_xlabel() == f"{mask.sum()} of 25 patches, 7 standing cells"
    dim, bright = (collection.get_segments() for collection in axes.collections)
    assert len(dim) + len(bright) == 2 * 5 * 4  # 5 x 5 patches are 3 x 3 cells: four lines of five, each way
    used, full = pictures(figure)[2][0], pictures(figure)[3][0]
    assert used[~mask].sum() == pytest.approx(opening.on_grid(seen.estimate[0, 1, 0]).sum(), rel=1e-5)
    assert np.abs(used - full).max() < 0.5
    with pytest.raises(ConfigError, match="every layer shown is dense: it opens no cells"):
        figures.opened_cells(opening, [2], 0)


def test_all_figures_of_a_model_made_for_cells(opening, photos, tmp_path):
    paths = figures.figures(opening, photos[0], tmp_path, layers=[0, 3], heads=[0], tokens=sp.TokenConfig(0.5))
    names = {path.stem for path in paths}
    assert names == {"connections", "attentions", "cells", "patterns", "recall", "tokens"}
    with pytest.raises(ConfigError, match="unknown figure 'basis': choose from connections, attentions, cells"):
        figures.figures(opening, photos[0], tmp_path, layers=[0], heads=[0], tokens=sp.TokenConfig(0.5), only=["basis"])
