import copy
import io

import pytest
import torch

import sparsifiner as sp
from sparsifiner.convert import conversion_of, sparse_layers
from sparsifiner.errors import ConfigError, UnsupportedModelError

from .toys import make_vit


def test_the_model_given_is_untouched(vit, photos):
    before = vit(photos)
    keys = list(vit.state_dict())
    student = sp.sparsify(vit, sp.SparseConfig(keep=0.3, n_down=5))
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.zero_()
    assert torch.equal(vit(photos), before)
    assert list(vit.state_dict()) == keys


def test_host_parameters_keep_their_names_and_values(vit):
    student = sp.sparsify(vit, sp.SparseConfig(keep=0.3, n_down=5))
    state = student.state_dict()
    for name, value in vit.state_dict().items():
        assert torch.equal(state[name], value)
    assert "blocks.1.attn.predictor.w_up" in state


def test_restore_gives_the_current_weights_and_leaves_the_student(vit, photos):
    student = sp.sparsify(vit, sp.SparseConfig(keep=0.3, n_down=5))
    with torch.no_grad():
        student.blocks[0].attn.qkv.weight.mul_(0.5)
    dense = sp.restore(student)
    with sp.dense_mode(student):
        assert torch.equal(dense(photos), student(photos))
    assert not torch.equal(dense(photos), vit(photos))
    assert len(sparse_layers(student)) == 2
    assert not sparse_layers(dense)
    with pytest.raises(UnsupportedModelError, match="is not a converted model"):
        sp.restore(dense)
    sp.sparsify(dense, sp.SparseConfig(0.5, n_down=5))(photos)  # and can be converted anew


@pytest.mark.parametrize(
    ("size", "landmarks"), [(224, 49), (256, 64), (384, 64), (112, 16), (32, 1), (16, 1), ((224, 448), 50), (592, 64)]
)
def test_suggested_landmarks_fit_the_grid(size, landmarks):
    from timm.models.vision_transformer import VisionTransformer

    model = VisionTransformer(img_size=size, embed_dim=12, depth=1, num_heads=1)
    config = sp.suggest_config(model, 0.25, pattern="learned")
    assert config.n_down == landmarks
    assert config.tau == 1 / max(2, landmarks)
    sp.sparsify(model, config)


@pytest.mark.parametrize(
    ("size", "keep", "tile", "cells", "breadth"),
    [
        ((12, 12), 0.5, None, ((1, 2),), 3),
        ((14, 14), 0.5, (4, 4), ((1, 2),), 3),
        ((19, 21), 0.5, (4, 4), ((1, 2),), 3),  # 399 patches
        ((20, 20), 0.1, (4, 4), ((2, 2), (4, 4), (8, 8)), 2.5),
        ((55, 55), 0.25, (4, 4), ((2, 2), (4, 4), (8, 8)), 2.5),
        ((55, 55), 0.15, (4, 4), ((1, 2), (2, 4), (4, 8)), 2),
        ((55, 55), [0.1], (4, 4), ((1, 2), (2, 4), (4, 8)), 2),
        ((3, 134), 0.5, (4, 4), ((2, 2),), 2.5),  # whose coarser cells would be higher than the grid
        ((6, 500), 0.5, (4, 4), ((2, 2), (4, 4)), 2.5),
        ((1, 9), 0.5, None, ((1, 2),), 3),
    ],
)
def test_cells_are_suggested_by_the_number_of_patches(size, keep, tile, cells, breadth):
    from timm.models.vision_transformer import VisionTransformer

    model = VisionTransformer(img_size=(2 * size[0], 2 * size[1]), patch_size=2, embed_dim=4, depth=1, num_heads=1)
    config = sp.suggest_config(model, keep)
    assert config == sp.SparseConfig(keep, pattern="cells", tile=tile, cells=cells, breadth=breadth)
    student = sp.sparsify(model, config)
    assert sp.suggest_config(student, keep) == config


@pytest.mark.parametrize("keep", [0, 1.5, float("nan"), "half", [], [0.1, "half"]])
def test_a_bad_keep_is_an_error_of_suggestions_too(vit, keep):
    with pytest.raises(ConfigError, match="keep"):
        sp.suggest_config(vit, keep)


def test_what_is_suggested_runs_without_calibration(vit, photos):
    student = sp.sparsify(vit, sp.suggest_config(vit, 0.5))
    assert torch.isfinite(student(photos)).all()


def test_suggestions_give_way_to_what_is_asked_for(vit):
    assert sp.suggest_config(vit, 0.5, tile=(2, 2), cells=[(1, 2)]).cells == ((1, 2),)
    assert sp.suggest_config(make_vit(img_size=200), 0.5).tile == (4, 4)
    assert sp.suggest_config(make_vit(img_size=200), 0.5, tile=None).tile is None
    with pytest.raises(ConfigError, match="n_down is of predictors, and cells ask none: say pattern='learned' too"):
        sp.suggest_config(vit, 0.5, n_down=5)
    config = sp.suggest_config(vit, [0.5, 0.2], pattern="learned", n_down=5, tile=(2, 2))
    assert (config.n_down, config.tau, config.tile, config.keep) == (5, 0.2, (2, 2), (0.5, 0.2))


def test_settings_that_do_not_fit_the_model(vit):
    with pytest.raises(ConfigError, match="keep lists 3 values but the model has 2"):
        sp.sparsify(vit, sp.SparseConfig([0.1, 0.2, 0.3], n_down=5))
    with pytest.raises(ConfigError, match="n_down=32 is more landmarks than the 5 x 5 grid"):
        sp.sparsify(vit, sp.SparseConfig(0.5))
    with pytest.raises(ConfigError, match="expected a SparseConfig, got float"):
        sp.sparsify(vit, 0.5)  # pyright: ignore[reportArgumentType]
    student = sp.sparsify(vit, sp.SparseConfig(0.5, n_down=5))
    with pytest.raises(UnsupportedModelError, match="sparse already"):
        sp.sparsify(student, sp.SparseConfig(0.5, n_down=5))
    with pytest.raises(ConfigError, match="n_down is 5 in this model's predictors and cannot become 6"):
        sp.reconfigure(student, n_down=6)


def test_a_refused_change_changes_nothing(vit):
    student = sp.sparsify(vit, sp.SparseConfig(0.5, n_down=5))
    for change in ({"n_down": 6}, {"keep": [0.1]}, {"keep": 7.0}, {"nonsense": 1}):
        with pytest.raises(ConfigError):
            sp.reconfigure(student, **change)
    assert sp.config_of(student) == sp.SparseConfig(0.5, n_down=5)
    assert {layer.keep for layer in sparse_layers(student)} == {0.5}


def test_a_tile_that_does_not_fit_the_grid_is_cut(vit, photos):
    student = sp.sparsify(vit, sp.SparseConfig(0.3, n_down=5, tile=(2, 3), tau=0.0, basis_threshold=0.0))
    with sp.capture(student, layers=[0]) as seen:
        student(photos)
    connectivity = seen[0].connectivity
    assert connectivity is not None
    assert (connectivity.members >= 0).sum(1).tolist() == [6, 4, 6, 4, 3, 2]  # 5 x 5 patches


def test_dense_mode_is_the_host_and_ends_after_an_error(vit, photos):
    student = sp.sparsify(vit, sp.SparseConfig(0.2, n_down=5, tau=0.0, basis_threshold=0.0))
    sparse = student(photos)
    with pytest.raises(RuntimeError, match="enough"), sp.dense_mode(student):
        assert torch.equal(student(photos), vit(photos))
        raise RuntimeError("enough")
    assert torch.equal(student(photos), sparse)


def test_copies_and_pickles_are_whole(vit, photos):
    student = sp.sparsify(vit, sp.SparseConfig(0.2, n_down=5, tau=0.0, basis_threshold=0.0))
    expected = student(photos)
    buffer = io.BytesIO()
    torch.save(student, buffer)
    buffer.seek(0)
    for twin in (copy.deepcopy(student), torch.load(buffer, weights_only=False)):
        assert torch.equal(twin(photos), expected)
        with torch.no_grad():
            twin.blocks[0].attn.proj.weight.zero_()
        assert torch.equal(student(photos), expected)
        assert conversion_of(twin).grid is sparse_layers(twin)[0].grid


def test_moving_the_student_moves_the_host_module(vit, photos):
    student = sp.sparsify(vit, sp.SparseConfig(0.2, n_down=5)).double()
    with sp.dense_mode(student):
        assert student(photos.double()).dtype == torch.float64


CELLS = sp.SparseConfig(0.3, pattern="cells")


def test_a_model_made_for_cells_is_the_host_and_no_more(vit, photos):
    student = sp.sparsify(vit, CELLS)  # whose n_down of 32 is more than the 25 patches
    assert student.state_dict().keys() == vit.state_dict().keys()
    assert not any(layer.has_predictor for layer in sparse_layers(student))
    with pytest.raises(ConfigError, match="made with pattern='cells' and has no predictors"):
        _ = sparse_layers(student)[0].predictor
    assert not torch.equal(student(photos), vit(photos))
    assert torch.equal(sp.restore(student)(photos), vit(photos))
    sp.reconfigure(student, keep=1.0, n_down=3, tile=(2, 2))  # there is nothing that fixes n_down
    assert torch.equal(student(photos), vit(photos))


def test_copies_pickles_and_replicas_of_a_model_made_for_cells(vit, photos):
    student = sp.sparsify(vit, CELLS)
    expected = student(photos)
    buffer = io.BytesIO()
    torch.save(student, buffer)
    buffer.seek(0)
    replica = sparse_layers(student)[0]._replicate_for_data_parallel()
    assert not replica.has_predictor
    for twin in (copy.deepcopy(student), torch.load(buffer, weights_only=False), torch.nn.DataParallel(student)):
        assert torch.equal(twin(photos), expected)


@pytest.mark.parametrize("pattern", ["learned", "window", "linformer"])
def test_a_model_made_for_cells_takes_no_other_pattern(vit, photos, pattern):
    student = sp.sparsify(vit, CELLS)
    expected = student(photos)
    with pytest.raises(ConfigError, match=f"pattern='{pattern}' asks predictors.*sparsify the dense model anew"):
        sp.reconfigure(student, pattern=pattern, tokens=sp.TokenConfig(0.5))
    assert sp.config_of(student) == CELLS
    assert torch.equal(student(photos), expected)  # no tokens are dropped either


def test_a_model_with_predictors_keeps_them_while_it_opens_cells(vit, photos):
    student = sp.sparsify(vit, sp.SparseConfig(0.3, n_down=5))
    expected = student(photos)
    sp.reconfigure(student, pattern="cells")
    assert torch.equal(student(photos), sp.sparsify(vit, CELLS)(photos))
    sp.reconfigure(student, pattern="learned")
    assert torch.equal(student(photos), expected)


def test_a_model_made_for_cells_drops_tokens_and_is_counted(vit, photos):
    student = sp.sparsify(vit, CELLS.replace(tokens=sp.TokenConfig(0.5)))
    student(photos)
    count = sp.count_flops(student, photos, convention="measured")
    assert 0 < count.mhsa < count.dense_attention
    assert sp.tune(student, photos, seconds=0.001).tokens == 26
