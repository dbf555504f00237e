import copy

import pytest
import torch

import sparsifiner as sp
from sparsifiner.convert import sparse_layers
from sparsifiner.errors import ConfigError
from sparsifiner.nn.predictor import ConnectivityPredictor


def test_landmarks_start_as_means_of_cells():
    predictor = ConnectivityPredictor(num_heads=3, n_down=4, grid=(4, 4), num_prefix=2)
    assert predictor.w_down.shape == (3, 4, 18)
    torch.testing.assert_close(predictor.w_down.sum(-1), torch.ones(3, 4))
    assert predictor.w_down[..., :2].abs().sum() == 0
    assert torch.equal(predictor.w_up, predictor.w_down)


def test_more_landmarks_than_patches_are_refused():
    with pytest.raises(ConfigError, match="n_down=17 is more landmarks than the 4 x 4 grid has patches"):
        ConnectivityPredictor(1, 17, (4, 4), 1)


def test_resampled_weights_follow_the_parameters():
    predictor = ConnectivityPredictor(2, 4, (4, 4), 1)
    assert predictor.at((4, 4))[0] is predictor.w_down
    with torch.no_grad():
        first = predictor.at((6, 6))
        assert predictor.at((6, 6))[1] is first[1]  # kept
        predictor.w_up.mul_(2)
        torch.testing.assert_close(predictor.at((6, 6))[1], 2 * first[1])


def test_gradients_reach_the_parameters_through_resampling():
    predictor = ConnectivityPredictor(1, 4, (4, 4), 1)
    predictor.at((6, 6))[1].square().sum().backward()
    assert predictor.w_up.grad is not None
    assert predictor.w_up.grad.abs().sum() > 0


def test_weights_resampled_in_inference_can_be_trained_on():
    predictor = ConnectivityPredictor(1, 4, (4, 4), 1).requires_grad_(False)
    with torch.inference_mode():
        predictor.at((6, 6))
    x = torch.ones(1, 4, 37, requires_grad=True)
    (x * predictor.at((6, 6))[1]).sum().backward()  # saves the resampled tensor


def test_rebase_resamples_the_parameters():
    predictor = ConnectivityPredictor(1, 4, (4, 4), 1)
    with torch.no_grad():
        expected = predictor.at((6, 5))[1].clone()
    predictor.rebase((6, 5))
    assert predictor.grid == (6, 5)
    assert torch.equal(predictor.w_up, expected)


def test_a_copy_is_independent():
    predictor = ConnectivityPredictor(1, 4, (4, 4), 1)
    with torch.no_grad():
        before = predictor.at((6, 6))[1].clone()
        twin = copy.deepcopy(predictor)
        twin.w_up.zero_()
        assert twin.at((6, 6))[1].abs().sum() == 0
        assert torch.equal(predictor.at((6, 6))[1], before)


@torch.inference_mode()
def test_a_model_copied_in_inference_mode_runs_and_sees_changes(vit, photos):
    """Torch counts no changes of such weights: nothing derived from them may be kept."""
    student = copy.deepcopy(sp.sparsify(vit, sp.SparseConfig(0.3, n_down=5, tau=0.0)))
    before = student(photos)
    assert torch.equal(student(photos), before)
    for layer in sparse_layers(student):
        layer.predictor.w_up.copy_(layer.predictor.w_up.roll(7, -1))
    assert not torch.allclose(student(photos), before, atol=1e-4)
