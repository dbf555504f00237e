import pytest
import torch

from sparsifiner.errors import BackendError, ConfigError
from sparsifiner.ops import dispatch
from sparsifiner.ops.attention import predict, sparse_attention
from sparsifiner.ops.connectivity import Connectivity

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
