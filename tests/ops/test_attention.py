import pytest
import torch

from sparsifiner.errors import BackendError, ConfigError
from sparsifiner.nn.patterns import pattern_connectivity, pattern_mask
from sparsifiner.ops import dispatch
from sparsifiner.ops.attention import Residual, predict, presence_bias, sparse_attention
from sparsifiner.ops.connectivity import Connectivity, low_rank_attention

Q = torch.randn(1, 2, 10, 4)
W = torch.rand(2, 3, 10)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"grid": (3, 4)}, "10 tokens are not 1 prefix tokens and a 3 x 4 grid"),
        ({"w_up": torch.rand(2, 3, 9)}, r"must be \[heads, n_down, n\]"),
        ({"w_down": torch.rand(1, 3, 10)}, r"must be \[heads, n_down, n\]"),
        ({"budget": 0}, "budget must be at least 1"),
        ({"k": Q.double()}, "must agree in shape, dtype and device"),
        ({"q": Q[0]}, "must be floating point"),
        ({"q": Q.int()}, "must be floating point"),
        ({"backend": "warp"}, "unknown backend 'warp'"),
    ],
)
def test_predict_refuses(changes, message):
    arguments = {"q": Q, "k": Q, "w_down": W, "w_up": W, "budget": 3, "grid": (3, 3)} | changes
    with pytest.raises((ConfigError, BackendError), match=message):
        predict(arguments.pop("q"), arguments.pop("k"), **arguments)


def test_sparse_attention_refuses_lists_of_another_input():
    connectivity = Connectivity.from_mask(torch.ones(1, 2, 9, 9, dtype=torch.bool), 1)
    with pytest.raises(ConfigError, match="does not fit queries of shape"):
        sparse_attention(Q, Q, Q, connectivity)
    with pytest.raises(ConfigError, match="must agree"):
        sparse_attention(Q, Q, Q[..., :2], connectivity)
    with pytest.raises(ConfigError, match=r"presence must be \[1, 10\], got \(10,\)"):
        own = Connectivity.from_mask(torch.ones(1, 2, 10, 10, dtype=torch.bool), 1)
        sparse_attention(Q, Q, Q, own, presence=torch.ones(10))


def test_all_connected_is_dense_attention():
    q, k, v = (torch.randn(2, 3, 12, 8, dtype=torch.float64) for _ in range(3))
    connectivity = Connectivity.from_mask(torch.ones(2, 3, 12, 12, dtype=torch.bool), 2)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    for backend in ("eager", "reference", "auto"):
        torch.testing.assert_close(sparse_attention(q, k, v, connectivity, backend=backend), expected)


def test_a_backend_that_cannot_run_says_why(monkeypatch):
    for name in ("cpu", "eager"):
        monkeypatch.setattr(dispatch._TABLE[name], "can_run", lambda q, landmarks: "it is asleep")
    with pytest.raises(BackendError, match="backend 'eager' cannot run here: it is asleep"):
        dispatch.resolve("eager", Q)
    with pytest.raises(BackendError, match="no backend can run: cpu: it is asleep; eager: it is asleep"):
        dispatch.resolve("auto", Q)
    assert dispatch.reasons(Q) == {"cpu": "it is asleep", "eager": "it is asleep", "reference": None}


class TestPresence:
    """Tokens that are weighed out, against DynamicViT's formula with whole matrices in float64."""

    PRESENCE = torch.tensor([[1.0, 1, 0, 1, 0.4, 1, 0, 0, 1, 1, 1, 0, 1], [1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0.9, 0]])
    GRID = (3, 4)

    def inputs(self, dtype):
        generator = torch.Generator().manual_seed(1)
        q, k, v = (torch.randn(2, 3, 13, 8, generator=generator, dtype=torch.float64) * 1.5 for _ in range(3))
        w_down, w_up = (torch.rand(3, 5, 13, generator=generator, dtype=torch.float64) / 4 for _ in range(2))
        tensors = (q, k, v, w_down, w_up, self.PRESENCE)
        return [x.to(dtype, copy=True).requires_grad_() for x in tensors]

    def lists(self, q, k, w_down, w_up, presence, kind, backend):
        w_down, w_up = (w * presence[:, None, None] for w in (w_down, w_up))  # as a grid gives them
        if kind == "window":
            connectivity = pattern_connectivity(pattern_mask("window", self.GRID, 1, 3), 1, 2, 3, None)
            return connectivity, Residual(low_rank_attention(q, k, w_down, 1, 0.4), w_up)
        settings = {"budget": 4, "grid": self.GRID, "tile": kind, "scale": 0.4, "tau": 0.1, "backend": backend}
        return predict(q, k, w_down, w_up, **settings)

    def plain(self, q, k, v, w_down, w_up, presence, mask, with_residual):
        eye = torch.eye(13, dtype=q.dtype)
        policy = presence[:, None, None] + (1 - presence[:, None, None]) * eye + 1e-6  # so that logarithms are finite
        weights = torch.exp(q @ k.mT * 0.4) * policy * mask
        attention = weights / weights.sum(-1, keepdim=True)
        if not with_residual:
            return attention @ v
        there = presence[:, None, None]
        a_down = torch.softmax(q @ ((w_down * there) @ k).mT * 0.4, -1)
        dropped = (a_down @ (w_up * there)).masked_fill(mask, 0)  # nothing in the rows of the prefix
        return (1 - dropped.sum(-1, keepdim=True).clamp(max=1)) * (attention @ v) + dropped @ v

    @pytest.mark.parametrize("with_residual", [False, True])
    @pytest.mark.parametrize("kind", [None, (2, 2), (2, 3), "window"])
    @pytest.mark.parametrize("backend", ["reference", "eager", "cpu"])
    def test_a_query_attends_to_itself_whatever_its_presence(self, backend, kind, with_residual):
        tensors = self.inputs(torch.float32)
        q, k, v, *weights, presence = tensors
        connectivity, residual = self.lists(q, k, *weights, presence, kind, backend)
        found = sparse_attention(
            q,
            k,
            v,
            connectivity,
            residual=residual if with_residual else None,
            scale=0.4,
            backend=backend,
            presence=presence,
        )
        assert found.shape == q.shape
        exact = self.inputs(torch.float64)
        expected = self.plain(*exact, connectivity.mask(), with_residual)
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)
        direction = torch.randn(expected.shape, dtype=torch.float64)
        (found * direction).sum().backward()
        (expected * direction).sum().backward()
        for ours, theirs in zip(tensors, exact, strict=True):
            if theirs.grad is not None:  # weights have none without the residual
                torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=1e-3, atol=2e-4)

    @pytest.mark.parametrize("backend", ["reference", "eager", "cpu"])
    def test_with_every_key_it_is_the_dense_form(self, backend):
        q, k, v, _, _, presence = self.inputs(torch.float32)
        everything = Connectivity.from_mask(torch.ones(2, 3, 13, 13, dtype=torch.bool), 1)
        found = sparse_attention(q, k, v, everything, presence=presence, backend=backend)
        bias = presence_bias(presence, 13)
        dense = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        torch.testing.assert_close(found, dense, rtol=1e-4, atol=1e-5)

    def test_nothing_of_a_token_that_is_out_reaches_others(self):
        q, k, v, _, _, presence = (x.detach() for x in self.inputs(torch.float64))
        everything = Connectivity.from_mask(torch.ones(2, 3, 13, 13, dtype=torch.bool), 1)
        before = sparse_attention(q, k, v, everything, presence=presence)
        v = v.clone()
        v[0, :, 6] += 1  # a token of the first image that is out
        moved = (sparse_attention(q, k, v, everything, presence=presence) - before).abs().amax((1, 3))
        assert moved[0, 6] > 0.01
        moved[0, 6] = 0
        assert moved.max() < 1e-4
