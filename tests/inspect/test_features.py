import pytest
import torch

import sparsifiner as sp
from sparsifiner.convert import conversion_of
from sparsifiner.errors import ConfigError
from sparsifiner.inspect.features import feature_map

from ..toys import make_vit


def outputs(student):
    """Every block's patch tokens, their cells and which of them are fused in the next pass."""
    seen = []
    grid = conversion_of(student).grid
    for block in student.blocks:
        block.register_forward_hook(lambda _, __, out: seen.append((out[:, grid.prefix :], grid.cells, grid.merged())))
    return seen


def test_without_pruning_it_is_the_last_block(vit, photos):
    student = sp.sparsify(vit, sp.suggest_config(vit, 0.3, pattern="learned", n_down=9))
    seen = outputs(student)
    features, kept = feature_map(student, photos)
    assert torch.equal(features.flatten(2).mT, seen[-1][0])
    assert features.shape == (6, 24, 5, 5)
    assert kept.all()


@pytest.mark.parametrize("fuse", [False, True, "official"])
@pytest.mark.parametrize("blocks", [(0, 2), (1, 3), (0, 1, 3)])
def test_dropped_tokens_stay_what_they_were(photos, fuse, blocks):
    vit = make_vit(depth=4)
    tokens = sp.TokenConfig(0.5, blocks=blocks, fuse=fuse)
    student = sp.sparsify(vit, sp.suggest_config(vit, 0.3, pattern="learned", n_down=9, tokens=tokens))
    seen = outputs(student)
    with torch.no_grad():
        features, kept = feature_map(student, photos)
        before = student.patch_embed(photos) + student.pos_embed[:, 1:]
    for image in range(6):
        for cell in range(25):
            last = before[image, cell]
            for patches, cells, merged in seen:
                if cells is None:
                    last, there = patches[image, cell], True
                elif there := cell in (cells[image] if merged is None else cells[image][~merged[image]]):
                    last = patches[image, cells[image].tolist().index(cell)]
            row, column = divmod(cell, 5)
            torch.testing.assert_close(features[image, :, row, column], last, rtol=1e-5, atol=1e-6)
            assert kept[image, row, column] == there
    if fuse == "official" and len(blocks) == 3:
        assert seen[-1][2].any()  # or nothing of it was tested
    with torch.no_grad():
        zeroed, _ = feature_map(student, photos, dropped="zero")
    assert bool((zeroed.mT.mT[~kept[:, None].expand_as(zeroed)] == 0).all())
    assert torch.equal(zeroed[kept[:, None].expand_as(zeroed)], features[kept[:, None].expand_as(features)])


def test_it_leaves_no_hooks(vit, photos):
    student = sp.sparsify(vit, sp.suggest_config(vit, 0.3, pattern="learned", n_down=9))
    feature_map(student, photos)
    assert not any(block._forward_hooks or block._forward_pre_hooks for block in student.blocks)
    with pytest.raises(ConfigError, match="dropped"):
        feature_map(student, photos, dropped="mean")
