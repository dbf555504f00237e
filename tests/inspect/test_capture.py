from types import SimpleNamespace

import pytest
import torch

import sparsifiner as sp
from sparsifiner.errors import ConfigError
from sparsifiner.inspect.capture import seen_cells
from sparsifiner.ops.connectivity import Connectivity


@pytest.fixture
def student(vit, photos):
    student = sp.sparsify(vit, sp.SparseConfig(0.3, n_down=5, tau=0.05, basis_threshold=0.0))
    sp.calibrate(student, photos)
    return student


@pytest.mark.parametrize("tile", [None, (2, 3)])
def test_capture_shows_the_layer_and_changes_nothing(student, photos, tile):
    sp.reconfigure(student, tile=tile)
    plain = student(photos)
    with sp.capture(student) as seen:
        watched = student(photos)
    assert torch.equal(plain, watched)
    assert torch.equal(student(photos), plain)
    assert sorted(seen) == [0, 1]
    for block, capture in zip(student.blocks, seen.values(), strict=True):
        assert capture.mask.shape == capture.full_map.shape == (6, 3, 26, 26)
        torch.testing.assert_close(capture.full_map.sum(-1), torch.ones(6, 3, 26))
        torch.testing.assert_close(capture.sparse_map.sum(-1), torch.ones(6, 3, 26))
        assert bool((capture.sparse_map[~capture.mask] == 0).all())
        assert bool(capture.mask[:, :, 0].all())  # the class token attends to everything
        assert bool(capture.mask[..., 0].all())  # and everything to it
        assert bool(capture.mask.diagonal(dim1=2, dim2=3).all())
        kept = capture.full_map * capture.mask
        torch.testing.assert_close(capture.sparse_map, kept / kept.sum(-1, keepdim=True))
        torch.testing.assert_close(capture.coefficients[:, :, 1:].sum(-1), torch.ones(6, 3, 25))
        torch.testing.assert_close(capture.estimate, capture.coefficients @ block.attn.predictor.w_up)
        assert torch.equal(capture.connectivity.mask(), capture.mask)


def test_chosen_layers_heads_and_queries(student, photos):
    with sp.capture(student) as all_of_it:
        student(photos)
    with sp.capture(student, layers=[1], heads=[2, 0], queries=[25, 0, 3]) as seen:
        student(photos)
    assert list(seen) == [1]
    capture = seen[1]
    for name in ("mask", "full_map", "sparse_map", "estimate", "coefficients"):
        whole = getattr(all_of_it[1], name)
        torch.testing.assert_close(getattr(capture, name), whole[:, [2, 0]][:, :, [25, 0, 3]])
    assert capture.queries.tolist() == [25, 0, 3]
    assert capture.heads.tolist() == [2, 0]
    assert capture.grid == (5, 5)
    assert capture.num_prefix == 1


def test_a_dense_layer_shows_its_full_map(student, photos):
    with sp.dense_mode(student), sp.capture(student, layers=[0], queries=[4]) as seen:
        student(photos)
    assert seen[0].connectivity is None
    assert seen[0].estimate is None
    assert bool(seen[0].mask.all())
    torch.testing.assert_close(seen[0].sparse_map, seen[0].full_map)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"layers": [2]}, "layer 2 does not exist"), ({"heads": [3]}, "head 3 does not exist")],
)
def test_what_does_not_exist_is_refused(student, arguments, message):
    with pytest.raises(ConfigError, match=message), sp.capture(student, **arguments):
        pass


def test_a_query_that_does_not_exist_is_refused(student, photos):
    with (
        pytest.raises(ConfigError, match="query 26 does not exist: the model has queries 0 to 25"),
        sp.capture(student, queries=[26]),
    ):
        student(photos)
    assert bool(torch.isfinite(student(photos)).all())  # the observer is gone


def test_cells_of_one_level(vit, photos):
    student = sp.sparsify(vit, sp.SparseConfig(0.3, pattern="cells"))
    with sp.capture(student, layers=[1], queries=[0, 7, 25]) as seen:
        student(photos[:2])
    found = seen[1]
    numbers = seen_cells(found.opened, found.queries)
    assert numbers.shape == (2, 3, 3, 25)
    rows, columns = torch.arange(25) // 5 // 2, torch.arange(25) % 5 // 2
    assert torch.equal(numbers, (3 * rows + columns).expand(2, 3, 3, 25))
    # A key is kept or gets something through its cell, and that is all there is.
    kept = found.mask[:, :, 1:]
    assert torch.equal(found.estimate[:, :, 1:] > 0, ~kept)
    used = found.sparse_map * (1 - found.estimate.sum(-1, keepdim=True)) + found.estimate
    torch.testing.assert_close(used.sum(-1), torch.ones(2, 3, 3))


def test_cells_of_several_levels():
    """Four patches in a row, cells of one and of two, and one of all: lists are keys 0 to 4, then cells."""
    cells = SimpleNamespace(of=torch.tensor([[0, 1, 2, 3]]), parent=torch.tensor([4, 4, 5, 5, 6, 6, -1]))
    for listed, wanted in [
        ([0, 1, 6, 10], [0, 1, 5, 5]),  # the first patch itself, the second as its own cell, the rest as one
        ([0, 1, 2, 10], [0, 1, 5, 5]),
        ([0, 11], [6, 6, 6, 6]),
        ([0, 1, 2, 3, 4], [0, 1, 2, 3]),
    ]:
        row = torch.tensor(listed, dtype=torch.int32)[None, None, None]
        about = {"members": torch.tensor([[1]]), "num_prefix": 1}
        counts = torch.full((1, 1, 1), len(listed), dtype=torch.int32)
        lists = Connectivity(row, counts, num_tokens=12, **about)
        keys = Connectivity(row[..., :1], counts.clamp(max=1), num_tokens=5, **about)
        assert (
            seen_cells(SimpleNamespace(lists=lists, keys=keys, cells=cells), torch.tensor([1])).flatten().tolist()
            == wanted
        )
