import math

import pytest
import torch

from sparsifiner.errors import ConfigError
from sparsifiner.ops.connectivity import Connectivity, lists_from_mask, query_groups, tiles_of


def test_lists_from_mask_ascend_and_are_padded():
    mask = torch.tensor([[[True, False, True, True], [False, True, False, False]]])
    lists, counts = lists_from_mask(mask, 4)
    assert lists.tolist() == [[[0, 2, 3, -1], [1, -1, -1, -1]]]
    assert counts.tolist() == [[3, 1]]
    assert lists.dtype == counts.dtype == torch.int32


@pytest.mark.parametrize("prefix", [0, 1, 3])
def test_mask_round_trip(prefix):
    n = 11
    mask = torch.rand(2, 3, n, n) < 0.4
    mask[:, :, :prefix] = True
    mask.diagonal(dim1=2, dim2=3).fill_(True)
    connectivity = Connectivity.from_mask(mask, prefix)
    assert torch.equal(connectivity.mask(), mask)
    assert torch.equal(connectivity.connections(), mask[:, :, prefix:].sum((2, 3)))
    rows = torch.tensor([n - 1, 0, 4])
    assert torch.equal(connectivity.mask(rows), mask[:, :, rows])


def test_mask_of_a_tile_adds_each_query_to_its_own_row_only():
    members = query_groups((2, 3), 1, (2, 2), torch.device("cpu"))
    indices = torch.tensor([[[[0, 1], [0, -1]]]], dtype=torch.int32)
    counts = torch.tensor([[[2, 1]]], dtype=torch.int32)
    connectivity = Connectivity(indices, counts, members, num_tokens=7, num_prefix=1, adds_self=True)
    mask = connectivity.mask()[0, 0]
    assert mask[0].all()
    assert [row.nonzero().flatten().tolist() for row in mask[1:]] == [
        [0, 1],
        [0, 1, 2],
        [0, 3],
        [0, 1, 4],
        [0, 1, 5],
        [0, 6],
    ]
    assert connectivity.connections().item() == mask[1:].sum().item()


def test_groups_cover_every_patch_once():
    for grid in ((1, 1), (4, 4), (5, 3), (7, 2)):
        for tile in (None, (1, 1), (2, 2), (3, 5), (9, 9)):
            members = query_groups(grid, 2, tile, torch.device("cpu"))
            listed = members[members >= 0].sort().values
            assert torch.equal(listed, torch.arange(2, 2 + grid[0] * grid[1]))


def test_ragged_tiles_are_cut_at_the_border():
    members = query_groups((3, 3), 0, (2, 2), torch.device("cpu"))
    assert members.tolist() == [[0, 1, 3, 4], [2, -1, 5, -1], [6, 7, -1, -1], [8, -1, -1, -1]]


def test_tiles_of_clips():
    """Cut at the border in time too; two numbers are a frame deep."""
    device = torch.device("cpu")
    members = query_groups((3, 2, 3), 1, (2, 2, 2), device)
    assert members.tolist() == [
        [1, 2, 4, 5, 7, 8, 10, 11],
        [3, -1, 6, -1, 9, -1, 12, -1],
        [13, 14, 16, 17, -1, -1, -1, -1],
        [15, -1, 18, -1, -1, -1, -1, -1],
    ]
    assert torch.equal(query_groups((3, 2, 3), 1, (2, 2), device), query_groups((3, 2, 3), 1, (1, 2, 2), device))
    assert torch.equal(query_groups((4, 4), 1, (1, 2, 2), device), query_groups((4, 4), 1, (2, 2), device))
    for grid in ((1, 1, 1), (4, 2, 2), (5, 3, 4)):
        for tile in (None, (2, 2), (2, 3, 1), (9, 9, 9)):
            members = query_groups(grid, 2, tile, device)
            assert torch.equal(members[members >= 0].sort().values, torch.arange(2, 2 + math.prod(grid)))
            if tile is not None:
                tiles, count = tiles_of(grid, tile, torch.arange(math.prod(grid)))
                assert count == len(members)
                assert all((members[tiles[place]] == place + 2).any() for place in range(math.prod(grid)))


def test_a_row_without_keys_is_refused():
    mask = torch.zeros(1, 1, 3, 3, dtype=torch.bool)
    with pytest.raises(ConfigError, match="attends to nothing"):
        Connectivity.from_mask(mask, 0)
    with pytest.raises(ConfigError, match="mask must be boolean"):
        Connectivity.from_mask(mask.float(), 0)


def test_parts_that_do_not_belong_together_are_refused():
    with pytest.raises(ConfigError, match="do not belong together"):
        Connectivity(
            torch.zeros(1, 1, 2, 2, dtype=torch.int32),
            torch.zeros(1, 1, 3, dtype=torch.int32),
            torch.zeros(2, 1, dtype=torch.long),
            num_tokens=3,
            num_prefix=1,
        )


@pytest.mark.parametrize("adds_self", [False, True])
def test_own_keys_are_in_their_own_lists_only(adds_self):
    lists = torch.tensor([[[[0, 2, -1], [0, 1, 4]]]], dtype=torch.int32)
    shared = Connectivity(lists, torch.tensor([[[2, 3]]]), torch.tensor([[1, 2], [3, 4]]), 5, 1, adds_self=adds_self)
    own = shared.with_own_keys()
    assert own.members.tolist() == [[1], [2], [3], [4]]
    expected = [[0, 2, 5, -1], [0, 2, 6, -1], [0, 1, 4, 7], [0, 1, 4, 8]]
    assert own.indices[0, 0].tolist() == expected
    assert own.counts.tolist() == [[[3, 3, 4, 4]]]
    assert own.num_tokens == 9
    assert torch.equal(own.mask()[:, :, :5, :5], shared.mask())
