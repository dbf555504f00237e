import pytest
import torch

import sparsifiner as sp
from sparsifiner.convert import sparse_layers
from sparsifiner.errors import ConfigError
from sparsifiner.nn.grid import TokenGrid


@pytest.fixture
def student(vit):
    return sp.sparsify(vit, sp.SparseConfig(keep=0.3, n_down=5, tau=0.0, basis_threshold=0.0))


def test_backends_agree_in_a_model(student, photos):
    for tile in (None, (2, 2), (3, 4)):
        for residual in (False, True):
            sp.reconfigure(student, tile=tile, residual=residual, backend="reference")
            expected = student(photos)
            for backend in ("eager", "cpu"):
                sp.reconfigure(student, backend=backend)
                torch.testing.assert_close(student(photos), expected, rtol=1e-4, atol=1e-5)
                with torch.no_grad():  # on the kernels this is another path: one call, no lists
                    torch.testing.assert_close(student(photos), expected, rtol=1e-4, atol=1e-5)


def test_kernels_see_changed_weights(student, photos):
    """Weights are packed once, and again when they change: in place, by an optimiser, or by another grid."""
    sp.reconfigure(student, backend="cpu")
    predictor = sparse_layers(student)[0].predictor
    with torch.no_grad():
        before = student(photos)
        packed = predictor.packed(TokenGrid((5, 5), 1), 0.0)
        assert predictor.packed(TokenGrid((5, 5), 1), 0.0) is packed
        assert predictor.packed(TokenGrid((5, 5), 1), 0.1) is not packed
        predictor.w_up.mul_(3)
        assert not torch.allclose(student(photos), before, atol=1e-4)
        predictor.w_up.div_(3)
        torch.testing.assert_close(student(photos), before)
    optimiser = torch.optim.SGD(predictor.parameters(), lr=1.0)
    student(photos).square().sum().backward()
    optimiser.step()
    with torch.no_grad():
        assert not torch.allclose(student(photos), before, atol=1e-4)


def test_training_with_kernels_is_training_without(vit, photos):
    """A mini-model's loss, step by step."""
    losses = {}
    for backend in ("cpu", "eager"):
        student = sp.sparsify(vit, sp.SparseConfig(keep=0.3, n_down=5, tau=0.0, backend=backend)).train()
        optimiser = torch.optim.AdamW(student.parameters(), lr=1e-3)
        labels = torch.arange(len(photos))
        losses[backend] = []
        for _ in range(12):
            loss = torch.nn.functional.cross_entropy(student(photos), labels)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            losses[backend].append(loss.item())
    assert losses["cpu"][-1] < 0.8 * losses["cpu"][0]
    torch.testing.assert_close(losses["cpu"], losses["eager"], rtol=2e-3, atol=2e-3)


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
    assert second.budget() == 8
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
    torch.compiler.reset()  # what other tests compiled of the same code counts against one limit
    for backend in ("cpu", "eager"):
        sp.reconfigure(student, backend=backend)
        compiled = torch.compile(student, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(photos), student(photos), rtol=1e-4, atol=1e-5)
        with torch.no_grad():
            torch.testing.assert_close(compiled(photos), student(photos), rtol=1e-4, atol=1e-5)


@torch.inference_mode()
def test_narrow_holds_keys_and_values_in_16_bits(student, photos):
    sp.reconfigure(student, backend="cpu")
    whole = student(photos)
    sp.reconfigure(student, narrow=True)
    held = student(photos)
    assert not torch.equal(held, whole)
    torch.testing.assert_close(held, whole, rtol=0.05, atol=0.02)
