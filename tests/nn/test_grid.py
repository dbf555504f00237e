import math

import pytest
import torch

from sparsifiner.errors import ConfigError
from sparsifiner.nn.grid import landmark_cells, resample


@pytest.mark.parametrize("grid", [(14, 14), (5, 7), (1, 9), (24, 24), (7, 1), (8, 14, 14), (3, 4, 5), (1, 6, 6)])
@pytest.mark.parametrize("count", [1, 2, 7, 31, 32, 49])
def test_cells_cover_the_grid_evenly(grid, count):
    if count > math.prod(grid):
        with pytest.raises(ConfigError, match="cannot cut"):
            landmark_cells(count, grid)
        return
    cells = landmark_cells(count, grid)
    sizes = cells.flatten().bincount(minlength=count)
    assert cells.shape == grid
    assert len(sizes) == count
    assert sizes.min() >= 1
    # Rounding to whole patches may double a cell's area, no more than twice over.
    assert sizes.max() <= 4 * sizes.min()


def test_aligned_cells_are_squares():
    cells = landmark_cells(49, (14, 14))
    assert torch.equal(cells[::2, ::2].flatten(), torch.arange(49))
    assert torch.equal(cells[::2, ::2], cells[1::2, 1::2])


def test_resampling_keeps_prefix_and_sums_and_smooth_shapes():
    weights = torch.rand(2, 3, 1 + 16)
    larger = resample(weights, (4, 4), (6, 9), 1)
    assert larger.shape == (2, 3, 1 + 54)
    assert torch.equal(larger[..., :1], weights[..., :1])
    torch.testing.assert_close(larger[..., 1:].sum(-1), weights[..., 1:].sum(-1))
    flat = torch.full((1, 1, 16), 0.25)
    torch.testing.assert_close(resample(flat, (4, 4), (8, 8), 0), torch.full((1, 1, 64), 0.0625))


def test_aligned_cells_of_clips_are_cubes():
    cells = landmark_cells(2 * 7 * 7, (4, 14, 14))
    assert torch.equal(cells[::2, ::2, ::2].flatten(), torch.arange(98))
    assert all(
        torch.equal(cells[::2, ::2, ::2], cells[t::2, y::2, x::2])
        for t, y, x in torch.cartesian_prod(*[torch.arange(2)] * 3)
    )


def test_resampling_over_time():
    """As an image where frames are alike, and smoothly between frames that are not."""
    ramp = torch.arange(4.0)[:, None, None].expand(4, 3, 3)
    weights = torch.cat([torch.tensor([7.0]), ramp.flatten()])[None, None]
    longer = resample(weights, (4, 3, 3), (8, 6, 6), 1)
    assert longer[0, 0, 0] == 7
    frames = longer[0, 0, 1:].view(8, 6, 6)
    torch.testing.assert_close(frames, frames[:, :1, :1].expand(8, 6, 6))
    torch.testing.assert_close(frames.sum(), ramp.sum())
    assert bool((frames[1:, 0, 0] > frames[:-1, 0, 0]).all())
    with pytest.raises(ConfigError, match="weights of a grid of 4 x 3 x 3 patches cannot be resampled to one of 6 x 6"):
        resample(weights, (4, 3, 3), (6, 6), 1)


def test_resampling_to_the_same_grid_is_the_same_tensor():
    weights = torch.rand(2, 3, 17)
    assert resample(weights, (4, 4), (4, 4), 1) is weights


def test_rows_without_mass_are_not_blown_up():
    weights = torch.randn(1, 4, 36)
    weights -= weights.mean(-1, keepdim=True)
    assert resample(weights, (6, 6), (9, 9), 0).abs().max() < weights.abs().max()
