"""The oracle against loops written from the paper, number by number."""

import math

import pytest
import torch

from sparsifiner.ops import reference
from sparsifiner.ops.attention import predict
from sparsifiner.ops.connectivity import query_groups


def by_hand(q, k, v, w_down, w_up, budget, tau, threshold, prefix, residual, groups):
    """One head, plain Python: Eq. 1-6 and the residual as method and paper state them."""
    n, d, m = len(q), len(q[0]), len(w_down)
    scale = 1 / math.sqrt(d)
    dot = lambda a, b: sum(x * y for x, y in zip(a, b, strict=True))  # noqa: E731

    def softmax(row):
        top = max(row)
        powers = [math.exp(x - top) for x in row]
        return [power / sum(powers) for power in powers]

    k_down = [[sum(w_down[c][j] * k[j][t] for j in range(n)) for t in range(d)] for c in range(m)]
    a_down = [softmax([dot(q[i], k_down[c]) * scale for c in range(m)]) for i in range(n)]
    scores = [
        [
            sum(
                (a_down[i][c] if a_down[i][c] > tau else 0.0) * (w_up[c][j] if w_up[c][j] > threshold else 0.0)
                for c in range(m)
            )
            for j in range(n)
        ]
        for i in range(n)
    ]
    out = []
    for i in range(n):
        if i < prefix:
            weights = softmax([dot(q[i], k[j]) * scale for j in range(n)])
            out.append([sum(weights[j] * v[j][t] for j in range(n)) for t in range(d)])
            continue
        group = next(g for g in groups if i in g)
        row = [sum(scores[g][j] for g in group) / len(group) for j in range(n)]
        best = sorted(range(n), key=lambda j: (-row[j], j))[:budget]
        kept = sorted({j for j in best if row[j] > 0} | set(range(prefix)) | {i})
        weights = softmax([dot(q[i], k[j]) * scale for j in kept])
        exact = [sum(w * v[j][t] for w, j in zip(weights, kept, strict=True)) for t in range(d)]
        if residual:
            s = [sum(a_down[i][c] * w_up[c][j] for c in range(m)) for j in range(n)]
            rho = min(1.0, max(0.0, sum(s) - sum(s[j] for j in kept)))
            dropped = [j for j in range(n) if j not in kept]
            exact = [(1 - rho) * exact[t] + sum(s[j] * v[j][t] for j in dropped) for t in range(d)]
        out.append(exact)
    return torch.tensor(out, dtype=torch.float64)


@pytest.mark.parametrize("tile", [None, (2, 2)])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("prefix", [0, 2])
def test_reference_equals_loops(tile, residual, prefix):
    grid, d, m, budget = (3, 3), 4, 5, 3
    n = prefix + 9
    q, k, v = (torch.randn(1, 2, n, d, dtype=torch.float64) * 2 for _ in range(3))
    w_down = torch.rand(2, m, n, dtype=torch.float64)
    w_up = torch.randn(2, m, n, dtype=torch.float64) * 0.2
    settings = {"budget": budget, "num_prefix": prefix, "tau": 0.15, "basis_threshold": 0.05}
    connectivity, estimate = predict(q, k, w_down, w_up, grid=grid, tile=tile, backend="reference", **settings)
    mask = connectivity.mask()
    rows = (q[:, :, prefix:], k, v, mask[:, :, prefix:], d**-0.5)
    patches = (
        reference.residual_attention(*rows, estimate.a_down, w_up) if residual else reference.masked_attention(*rows)
    )
    dense = reference.full_attention(q[:, :, :prefix], k, d**-0.5) @ v
    result = torch.cat([dense, patches], dim=2)
    groups = [[t for t in g if t >= 0] for g in query_groups(grid, prefix, tile, torch.device("cpu")).tolist()]
    for head in range(2):
        lists = [x[head].tolist() for x in (q[0], k[0], v[0], w_down, w_up)]
        expected = by_hand(*lists, budget, 0.15, 0.05, prefix, residual, groups)
        torch.testing.assert_close(result[0, head], expected, rtol=1e-10, atol=1e-10)


def test_ties_go_to_the_lower_index_and_zeros_are_discarded():
    rows = torch.tensor([[1.0, 3.0, 1.0, 1.0], [0.0, 0.0, 2.0, 0.0], [0.0, 0.0, 0.0, 0.0], [5.0, 5.0, 5.0, 5.0]])
    assert reference.top_budget(rows, 2).tolist() == [
        [True, True, False, False],
        [False, False, True, False],
        [False, False, False, False],
        [True, True, False, False],
    ]


def test_with_everything_kept_the_result_is_dense():
    q, k, v = (torch.randn(2, 3, 10, 8, dtype=torch.float64) for _ in range(3))
    mask = torch.ones(2, 3, 10, 10, dtype=torch.bool)
    w_up = torch.randn(3, 4, 10, dtype=torch.float64)
    a_down = reference.coefficients(q, k, torch.rand(3, 4, 10, dtype=torch.float64), 8**-0.5)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(reference.masked_attention(q, k, v, mask, 8**-0.5), expected)
    # What the estimate says of kept keys cancels, whatever it is.
    torch.testing.assert_close(reference.residual_attention(q, k, v, mask, 8**-0.5, a_down, w_up), expected)
