import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from sparsifiner.distillation import losses
from sparsifiner.errors import ConfigError


def problem(batch=2, heads=3, n=26, d=8, m=5, dtype=torch.float64):
    q, k = torch.randn(2, batch, heads, n, d, dtype=dtype)
    w_down = torch.rand(heads, m, n, dtype=dtype) / n
    w_up = torch.randn(heads, m, n, dtype=dtype) / n
    return q, k, w_down.requires_grad_(), w_up.requires_grad_()


def spelled_out(q, k, w_down, w_up, num_prefix, scale, tau):
    """The loss as the paper writes it, with everything of size n x n."""
    attention = torch.softmax(q @ k.mT * scale, -1)[:, :, num_prefix:]
    a_down = torch.softmax(q[:, :, num_prefix:] @ (w_down @ k).mT * scale, -1)
    error = torch.where(a_down > tau, a_down, 0) @ w_up - attention
    return error.square().sum(-1).mean()


@pytest.mark.parametrize("m", [1, 5, 8, 11, 20])  # fewer than, as many as, and more than the columns of a query
@pytest.mark.parametrize("num_prefix", [0, 1, 2])
def test_attention_loss_is_exact(m, num_prefix):
    q, k, w_down, w_up = problem(m=m)
    about = {"num_prefix": num_prefix, "scale": 0.3, "tau": 0.15}
    expected = spelled_out(q, k, w_down, w_up, **about)
    loss = losses.attention_loss(q, k, w_down, w_up, **about, constant=True)
    torch.testing.assert_close(loss, expected)
    wanted = torch.autograd.grad(expected, (w_down, w_up))
    without = losses.attention_loss(q, k, w_down, w_up, **about)
    for got, want in zip(torch.autograd.grad(without, (w_down, w_up)), wanted, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("m", [5, 64, 70])
def test_attention_loss_never_builds_the_attention(m):
    """Torch builds it where its flash kernel cannot run; here nothing else may, so that it would be an error."""
    q, k, w_down, w_up = problem(d=64, m=m, dtype=torch.float32)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        losses.attention_loss(q, k, w_down, w_up, num_prefix=1, scale=0.125, tau=0.0).backward()
    assert w_up.grad.abs().sum() > 0


def test_attention_loss_in_bfloat16_is_near():
    q, k, w_down, w_up = problem(dtype=torch.float32)
    about = {"num_prefix": 1, "scale": 0.3, "tau": 0.1, "constant": True}
    half = losses.attention_loss(q.bfloat16(), k.bfloat16(), w_down, w_up, **about)
    torch.testing.assert_close(half, losses.attention_loss(q, k, w_down, w_up, **about), rtol=0.05, atol=1e-3)


def test_the_other_losses():
    ours, theirs = torch.randn(2, 4, 7)
    p, log = theirs.softmax(-1), torch.log_softmax
    expected = (p * (log(theirs, -1) - log(ours, -1))).sum() / 4
    torch.testing.assert_close(losses.prediction_loss(ours, theirs), expected)
    assert losses.prediction_loss(ours, ours + 3).abs() < 1e-6
    labels = torch.tensor([0, 3, 6, 2])
    hard = losses.label_loss(ours, labels)
    torch.testing.assert_close(losses.label_loss(ours, torch.eye(7)[labels]), hard)  # shares of classes, as mixup's
    torch.testing.assert_close(losses.token_loss(ours, theirs), (ours - theirs).square().mean())


def test_predictions_of_every_place():
    ours, theirs = torch.randn(2, 3, 5, 2, 4)
    each = [losses.prediction_loss(ours[:, :, i, j], theirs[:, :, i, j]) for i in range(2) for j in range(4)]
    torch.testing.assert_close(losses.prediction_loss(ours, theirs), torch.stack(each).mean())
    labels = torch.randint(0, 5, (3, 2, 4))
    labels[0] = -100
    counted = losses.label_loss(ours[1:], labels[1:])
    torch.testing.assert_close(losses.label_loss(ours, labels), counted)
    with pytest.raises(ConfigError, match="of the same places"):
        losses.label_loss(ours, labels[:, :1])
