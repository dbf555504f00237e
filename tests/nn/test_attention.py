import pytest
import torch

import sparsifiner as sp
from sparsifiner.convert import sparse_layers
from sparsifiner.errors import ConfigError


@pytest.fixture
def student(vit):
    return sp.sparsify(vit, sp.SparseConfig(keep=0.3, n_down=5, tau=0.0, basis_threshold=0.0))


def test_backends_agree_in_a_model(student, photos):
    for tile in (None, (2, 2), (3, 4)):
        for residual in (False, True):
            sp.reconfigure(student, tile=tile, residual=residual, backend="eager")
            ours = student(photos)
            sp.reconfigure(student, backend="reference")
            torch.testing.assert_close(ours, student(photos), rtol=1e-4, atol=1e-5)


def test_each_setting_changes_the_result(student, photos):
    base = student(photos)
    for change in (
        {"keep": 0.1},
        {"residual": False},
        {"tile": (2, 2)},
        {"tau": 0.2},
        {"basis_threshold": 0.3},
    ):
        before = {name: getattr(sp.config_of(student), name) for name in change}
        sp.reconfigure(student, **change)
        assert not torch.allclose(student(photos), base, atol=1e-5), change
        sp.reconfigure(student, **before)
    assert torch.equal(student(photos), base)


def test_per_layer_keep(student, photos):
    sp.reconfigure(student, keep=[1.0, 0.3])
    first, second = sparse_layers(student)
    assert first.is_dense(26)
    assert not second.is_dense(26)
    assert second.budget(26) == 8
    student(photos)


def test_training_reaches_backbone_and_predictor(student, photos):
    student.train()
    student(photos).square().sum().backward()
    for name, parameter in student.named_parameters():
        assert parameter.grad is not None, name
        assert bool(torch.isfinite(parameter.grad).all()), name
    first, last = sparse_layers(student)
    assert first.predictor.w_up.grad.abs().sum() > 0
    assert first.predictor.w_down.grad.abs().sum() > 0
    # The head reads the class token alone, and its row is dense: nothing reads the last layer's patch rows.
    assert last.predictor.w_up.grad.abs().sum() == 0


def test_without_residual_the_predictor_gets_no_gradient(student, photos):
    sp.reconfigure(student, residual=False)
    student(photos).square().sum().backward()
    assert all(layer.predictor.w_up.grad is None for layer in sparse_layers(student))


def test_train_and_eval_reach_the_host_module(student):
    layer = sparse_layers(student)[0]
    student.train()
    assert layer.host.training
    student.eval()
    assert not layer.host.training


def test_masks_are_only_for_dense_layers(student):
    layer = sparse_layers(student)[0]
    x = torch.randn(1, 26, 24)
    mask = torch.ones(26, 26, dtype=torch.bool)
    with pytest.raises(ConfigError, match="takes no attention mask"):
        layer(x, attn_mask=mask)
    with sp.dense_mode(student):
        torch.testing.assert_close(layer(x, attn_mask=mask), layer(x))


def test_a_wrong_number_of_tokens_is_refused(student):
    with pytest.raises(ConfigError, match="25 tokens came in but the 5 x 5 grid and 1 prefix tokens make 26"):
        sparse_layers(student)[0](torch.randn(1, 25, 24))


def test_any_image_in_a_batch_gives_the_same_as_alone(student, photos):
    together = student(photos)
    alone = torch.cat([student(photo[None]) for photo in photos])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes(student, photos, dtype):
    expected = student(photos)
    out = student.to(dtype)(photos.to(dtype))
    assert out.dtype == dtype
    tolerance = {torch.bfloat16: 0.15, torch.float16: 0.03, torch.float64: 1e-4}[dtype]
    torch.testing.assert_close(out.float(), expected, rtol=tolerance, atol=tolerance)


def test_compiles_as_one_graph(student, photos):
    compiled = torch.compile(student, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(photos), student(photos), rtol=1e-4, atol=1e-5)
