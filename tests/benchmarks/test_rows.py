"""A small piece of what benchmarks/rows.py does by the million, and that it finds what is wrong."""

import dataclasses
import importlib.util
import json
import sys
from pathlib import Path

import pytest

from sparsifiner.ops import cpu

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def rows():
    sys.path.insert(0, str(FOLDER))  # as when it is run: it imports its neighbour
    try:
        spec = importlib.util.spec_from_file_location("rows", FOLDER / "rows.py")
        module = sys.modules["rows"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield module
    finally:
        sys.path.remove(str(FOLDER))
        sys.modules.pop("rows")


def small(rows, kind, most=8):
    """The first few cases of a kind that take no time."""
    cases = (rows.draw(number, 0) for number in range(rows.KINDS.index(kind), 10_000, len(rows.KINDS)))
    found = (case for case in cases if 6 < case.known < 90 and case.budget < case.known)
    return [next(found) for _ in range(most)]


@pytest.mark.parametrize("kind", [
    "random", "exact ties", "near ties", "equal columns", "all zero", "few scores", "large logits", "small", "denormal",
    "many octaves", "equal tokens", "bfloat16", "narrow",
])  # fmt: skip
def test_every_variant_agrees_on_every_row(rows, kind):
    variants = cpu.native().instruction_sets()
    for case in small(rows, kind):
        lines = list(rows.run(case, variants))
        assert len(lines) == 2 * len(variants)
        assert not any(map(rows.failures, lines)), (case, lines)


@pytest.mark.parametrize("kind", ["random", "exact ties", "equal columns", "narrow"])
def test_a_key_too_few_is_found(rows, kind, monkeypatch):
    true = cpu.fused

    def one_less(*arguments, budget, **settings):
        return true(*arguments, budget=max(1, budget - 1), **settings)

    case = next(case for case in small(rows, kind, 30) if 2 < case.budget < case.known / 4 and not case.dropped)
    given = rows.tensors(case)
    oracle = rows.solve(case, given)
    assert not rows.failures(rows.fused(case, given, oracle))
    monkeypatch.setattr(cpu, "fused", one_less)
    found = rows.fused(case, given, oracle)
    assert found["unexplained"] > 0


def test_an_output_that_is_off_is_found(rows, monkeypatch):
    true = cpu.fused
    monkeypatch.setattr(cpu, "fused", lambda *a, **k: true(*a, **k) * (1 + 1e-4))
    case = small(rows, "random")[0]
    given = rows.tensors(case)
    assert rows.fused(case, given, rows.solve(case, given))["outside"] > 0


def test_a_run_that_was_stopped_goes_on(rows, tmp_path, monkeypatch):
    cases = [small(rows, kind, 1)[0] for kind in rows.KINDS[:3]]
    monkeypatch.setattr(rows, "draw", lambda number, seed: dataclasses.replace(cases[number % 3], number=number))
    journal, out = tmp_path / "rows.jsonl", tmp_path / "rows.csv"

    def main(*arguments):
        monkeypatch.setattr(sys, "argv", ["rows.py", "--journal", str(journal), "--out", str(out), *arguments])
        with pytest.raises(SystemExit) as ended:
            rows.main()
        return ended.value.code

    assert not main("--rows", "1")
    first = journal.read_text()
    journal.write_text(first + first[: len(first) // 2])  # stopped in the middle of a case, and of a line
    total = 1 + json.loads(first.splitlines()[0])["rows"] * len(cpu.native().instruction_sets())
    assert not main("--rows", str(total))
    text = journal.read_text()
    assert text.startswith(first)
    assert {json.loads(line)["case"] for line in text.splitlines()} == {0, 1}
    table = sys.modules["common"].read_csv(out)
    assert all(row["unexplained"] == row["outside"] == "0" and row["torch"] for row in table)
    assert sum(int(row["rows"]) for row in table if (row["path"], row["kind"]) == ("fused", "all")) >= total
    assert "another seed" in main("--rows", str(total), "--seed", "1")
    true = cpu.fused
    monkeypatch.setattr(cpu, "fused", lambda *a, **k: true(*a, **k) * 1.01)
    assert main("--rows", str(10 * total + 10_000)) == 1
    assert main("--case", "0") == 1
