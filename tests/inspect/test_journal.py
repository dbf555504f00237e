import pytest
import torch

import sparsifiner as sp
from sparsifiner.inspect import compare
from sparsifiner.inspect.journal import Journal


def test_findings_outlive_the_run(tmp_path):
    path = tmp_path / "found.jsonl"
    Journal(path, {"model": 1}).put("a", {"x": 0.1})
    again = Journal(path, {"model": 1})
    assert again.get("a") == {"x": 0.1}
    assert again.get("b") is None
    other = Journal(path, {"model": 2})  # another model: not these findings, and it does not lose them
    assert other.get("a") is None
    other.put("a", {"x": 0.2})
    assert Journal(path, {"model": 1}).get("a") == {"x": 0.1}
    assert Journal(path, {"model": 2}).get("a") == {"x": 0.2}


def test_a_line_that_was_cut_off_costs_only_itself(tmp_path):
    path = tmp_path / "found.jsonl"
    first = Journal(path, {})
    first.put("a", {"x": 1})
    first.put("b", {"x": 2})
    path.write_text(path.read_text()[:-9])
    second = Journal(path, {})
    assert (second.get("a"), second.get("b")) == ({"x": 1}, None)
    second.put("b", {"x": 3})
    second.put("c", {"x": 4})
    third = Journal(path, {})
    assert [third.get(key) for key in "abc"] == [{"x": 1}, {"x": 3}, {"x": 4}]


@pytest.fixture
def student(vit, photos):
    student = sp.sparsify(vit, sp.suggest_config(vit, 0.3, pattern="learned", n_down=9))
    sp.calibrate(student, photos)
    return student


class Passes:
    """Batches that count how often they were gone through, and can end in the middle."""

    def __init__(self, photos):
        self.batches = [(photos[:4], torch.arange(4)), (photos[4:], torch.arange(2))]
        self.done, self.fails = 0, False

    def __iter__(self):
        yield self.batches[0]
        if self.fails:
            raise KeyboardInterrupt
        yield self.batches[1]
        self.done += 1


def test_an_evaluation_that_was_stopped_goes_on(student, photos, tmp_path):
    forms = [(compare.DENSE, None), (compare.RESIDUAL, 0.3), (compare.PAPER, 0.3)]
    straight = compare.Evaluation(student, Passes(photos))
    expected = [straight.row(form, keep) for form, keep in forms]

    def go_on(passes):
        evaluation = compare.Evaluation(student, passes, journal=Journal(tmp_path / "found.jsonl", {"of": "this"}))
        return [evaluation.row(form, keep) for form, keep in forms]

    passes = Passes(photos)
    stopped = compare.Evaluation(student, passes, journal=Journal(tmp_path / "found.jsonl", {"of": "this"}))
    stopped.row(compare.DENSE)
    stopped.row(compare.RESIDUAL, 0.3)
    passes.fails = True
    with pytest.raises(KeyboardInterrupt):
        stopped.row(compare.PAPER, 0.3)
    passes = Passes(photos)
    found = go_on(passes)
    assert passes.done == 3  # the dense model's predictions, to compare with; those that were missing; their statistics
    for own, other in zip(found, expected, strict=True):
        mine, its = own.to_dict(), other.to_dict()
        del mine["milliseconds"], its["milliseconds"]
        assert mine == its
    passes = Passes(photos)
    go_on(passes)
    assert passes.done == 0


def test_another_models_dense_self_can_be_compared_with(student, vit, photos):
    batches = Passes(photos)
    with torch.no_grad():
        other = sp.sparsify(vit, sp.suggest_config(vit, 0.3, pattern="learned", n_down=9))
        other.head.weight.neg_()
    own = compare.Evaluation(student, batches).row(compare.RESIDUAL, 0.3)
    against = compare.Evaluation(student, batches, dense=other).row(compare.RESIDUAL, 0.3)
    assert against.top1 == own.top1
    assert against.divergence > own.divergence
    assert compare.Evaluation(student, batches, dense=other).row(compare.DENSE).agreement < 100


def test_lines_that_are_damaged_cost_only_themselves(tmp_path):
    path = tmp_path / "found.jsonl"
    first = Journal(path, {})
    first.put("a", {"x": 1})
    about = first.about
    damaged = [
        "[" * 100_000,
        "9" * 5000,
        f'{{"about": "{about}"}}',
        f'{{"about": "{about}", "key": [], "found": {{}}}}',
    ]
    with path.open("ab") as file:
        file.write("\n".join([*damaged, ""]).encode() + b"\xff\xfe\n")
    assert Journal(path, {}).found == {"a": {"x": 1}}
