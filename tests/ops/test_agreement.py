import itertools

import pytest
import torch

from sparsifiner.ops import agreement, eager, reference
from sparsifiner.ops.connectivity import query_groups

SCORES = torch.tensor([0.5, 0.0, 0.25, 0.5, 0.25, 0.0, 0.125], dtype=torch.float64)


@pytest.mark.parametrize("budget", [1, 2, 3, 4, 5, 6, 7])
@pytest.mark.parametrize("forced", [(), (0,), (0, 4), (1, 2), (0, 1, 2, 3, 4, 5, 6)])
def test_without_rounding_only_the_references_own_selection_is_explained(budget, forced):
    """Every one of the 128 selections of a row with ties and zeros."""
    selections = torch.tensor(list(itertools.product([False, True], repeat=7)))
    keeps = torch.zeros(7, dtype=torch.bool)
    keeps[list(forced)] = True
    rows = SCORES.expand(128, -1)
    expected = reference.top_budget(SCORES[None], budget) | keeps
    right = ~agreement.unexplained(selections, rows, rows, budget, keeps)
    assert torch.equal(right, (selections == expected).all(-1))
    assert not agreement.undecided(agreement.Bounds.certain(SCORES[None]), budget, keeps).any()


@pytest.mark.parametrize("budget", [1, 2, 3, 4])
@pytest.mark.parametrize("forced", [(), (1,), (0, 4)])
def test_explained_are_the_selections_of_scores_within_the_bounds(budget, forced):
    """By trying all scores on a lattice within the bounds."""
    middle = torch.tensor([3.0, 1.0, 4.0, 2.0, 0.5])
    width = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.5])
    keeps = torch.zeros(5, dtype=torch.bool)
    keeps[list(forced)] = True
    steps = [(value + torch.arange(-4, 5) / 4 * w).unique() for value, w in zip(middle, width, strict=True)]
    possible = reference.top_budget(torch.cartesian_prod(*steps), budget) | keeps
    selections = torch.tensor(list(itertools.product([False, True], repeat=5)))
    found = (selections[:, None] == possible[None]).all(-1).any(-1)
    bounds = agreement.Bounds(middle[None], middle - width, middle + width)
    explained = ~agreement.unexplained(
        selections, bounds.lower.expand(32, -1), bounds.upper.expand(32, -1), budget, keeps
    )
    assert torch.equal(explained, found)
    assert bool(agreement.undecided(bounds, budget, keeps)) == (int(found.sum()) > 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tile", [None, (2, 3)])
def test_bounds_hold_what_lower_precision_computes(dtype, tile):
    """What torch makes of the equations in float32, and even in bfloat16, lies within the bounds for it."""
    q, k, v = (torch.randn(2, 2, 31, 8).to(dtype) for _ in range(3))
    w_down, w_up = torch.rand(2, 7, 31).to(dtype) / 16, torch.rand(2, 7, 31).to(dtype) / 8
    members = query_groups((5, 6), 1, tile, q.device)
    group_of = agreement.groups_of_rows(members, 31, 1)
    exact = [x.double() for x in (q[:, :, 1:], k, v, w_down, w_up)]
    coefficients = agreement.coefficient_bounds(exact[0], exact[1], exact[3], 0.25, dtype)
    a_down = reference.coefficients(q[:, :, 1:], k, w_down, 0.25)
    assert bool(((coefficients.lower <= a_down) & (a_down <= coefficients.upper)).all())
    scores = agreement.score_bounds(coefficients, exact[4], 0.1, 0.02, None if tile is None else group_of, dtype)
    computed = reference.scores(a_down, w_up, 0.1, 0.02)
    if tile is not None:
        computed = reference.share_scores(computed, members, 1)
    assert bool(((scores.lower <= computed) & (computed <= scores.upper)).all())
    mask = reference.top_budget(scores.exact, 9) | agreement.forced_keys(30, 31, 1)
    for residual in (None, (coefficients, exact[4], exact[2])):
        error = agreement.output_error(exact[0], exact[1], exact[2], mask, 0.25, residual, dtype)
        if residual is None:
            wanted = reference.masked_attention(exact[0], exact[1], exact[2], mask, 0.25)
            out = reference.masked_attention(q[:, :, 1:], k, v, mask, 0.25)
        else:
            wanted = reference.residual_attention(*exact[:3], mask, 0.25, coefficients.exact, exact[4])
            out = reference.residual_attention(q[:, :, 1:], k, v, mask, 0.25, a_down, w_up)
        off = (out.double() - wanted).abs()
        assert bool((off <= error).all())
        if dtype == torch.float32:
            assert float(error.max()) < 1e-3  # a worst case, but not one that explains everything


def test_a_wrong_selection_is_unexplained_and_either_of_two_that_tie_is_not():
    w_up = torch.rand(1, 6, 40)
    w_up[..., 20:] = w_up[..., :20]  # every score twice, so that with seven one of a pair is in and the other out
    a_down = torch.rand(1, 1, 40, 6).softmax(-1)
    scores = agreement.score_bounds(agreement.Bounds.certain(a_down.double()), w_up.double(), 0.0, 0.0)
    chosen, forced = eager.top_budget(a_down @ w_up, 7), torch.zeros(40, dtype=torch.bool)
    assert bool(agreement.undecided(scores, 7, forced).all())

    def explained(selection):
        return ~agreement.unexplained(selection, scores.lower, scores.upper, 7, forced)

    assert bool(explained(chosen).all())
    lowest = torch.where(chosen, scores.exact, torch.inf).argmin(-1, keepdim=True)
    without = chosen.scatter(-1, lowest, False)
    assert not explained(without).any()
    assert bool(explained(without.scatter(-1, (lowest + 20) % 40, True)).all())
    next_best = torch.where(chosen | torch.zeros_like(chosen).scatter(-1, (lowest + 20) % 40, True), 0, scores.exact)
    assert not explained(without.scatter(-1, next_best.argmax(-1, keepdim=True), True)).any()
