"""A few hundred spoilt files of every kind; benchmarks/fuzz.py does ten thousand, and says what a finding is."""

import csv
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from sparsifiner.errors import ConfigError
from sparsifiner.inspect.journal import Journal

SCRIPT = Path(__file__).resolve().parents[1] / "benchmarks" / "fuzz.py"


@pytest.fixture(scope="module")
def fuzz():
    spec = importlib.util.spec_from_file_location("fuzz", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def run(fuzz, tmp_path_factory):
    """225 cases, of which one was run before."""
    folder = tmp_path_factory.mktemp("fuzz")
    journal = Journal(folder / "journal.jsonl", {"sources": fuzz.sources(), "seed": 14})
    journal.put("config:3", {"outcome": "refused", "said": "some time ago", "trace": "", "seconds": 0, "peak": 0})
    command = [sys.executable, str(SCRIPT), "--cases", "225", "--seed", "14", "--journal", str(journal.path)]
    command += ["--out", str(folder / "fuzz.csv")]
    return folder, subprocess.run(command, check=False, capture_output=True, text=True)


def test_spoilt_files_end_in_success_or_in_one_clear_line(run):
    _, done = run
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_kind_was_both_spoilt_and_counted(run):
    folder, _ = run
    with (folder / "fuzz.csv").open(newline="") as file:
        rows = {row["kind"]: row for row in csv.DictReader(file)}
    assert rows["all"]["cases"] == "225"
    assert len(rows) == 10
    assert all(int(row["refused"]) > 0 for row in rows.values())


def test_a_run_that_was_stopped_goes_on(run):
    folder, _ = run
    lines = [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]
    assert len({line["key"] for line in lines}) == len(lines) == 225
    assert lines[0]["found"]["said"] == "some time ago"


# The fuzzer itself: what it would say if something were wrong.


def stumble():
    raise KeyError("a")


def refuse(text="no"):
    raise ConfigError(text)


def refuse_for_want_of_memory():
    try:
        bytearray(3 << 30)
    except MemoryError:
        refuse()


@pytest.mark.parametrize(
    ("run", "outcome"),
    [
        (lambda marker: None, "accepted"),
        (lambda marker: refuse(), "refused"),
        (lambda marker: refuse(""), "message"),
        (lambda marker: stumble(), "foreign"),
        (lambda marker: sys.exit(2), "foreign"),
        (lambda marker: bytearray(3 << 30), "memory"),
        (lambda marker: refuse_for_want_of_memory(), "memory"),
        (lambda marker: marker.mkdir(), "executed"),
    ],
)
def test_what_is_a_finding(fuzz, tmp_path, run, outcome):
    marker = tmp_path / "sprung"
    target = SimpleNamespace(run=lambda case: run(marker), marker=marker)
    assert fuzz.attempt(target, None)["outcome"] == outcome
    assert not marker.exists()


CHILD = """
import os, sys
for line in sys.stdin:
    print("begin", flush=True)
    what = line.split()[0]
    if what == "crash": os.abort()
    while what == "hang": pass
    print('{"outcome": "accepted"}', flush=True)
"""


def test_a_case_that_ends_the_process_is_a_finding_and_the_next_is_run(fuzz, tmp_path, monkeypatch):
    monkeypatch.setattr(fuzz, "SECONDS", 0.3)
    worker = fuzz.Worker(tmp_path, [sys.executable, "-c", CHILD])
    try:
        found = [worker.run(kind, 0)["outcome"] for kind in ("good", "crash", "good", "hang", "good")]
    finally:
        worker.close()
    assert found == ["accepted", "crash", "accepted", "hang", "accepted"]


def test_a_case_is_the_same_whenever_its_number_is(fuzz):
    target = SimpleNamespace(make=lambda draw: draw.randbytes(20))
    assert fuzz.draw_case(target, 1, "tar", 5) == fuzz.draw_case(target, 1, "tar", 5)
    others = [(2, "tar", 5), (1, "shard", 5), (1, "tar", 6)]
    assert all(fuzz.draw_case(target, 1, "tar", 5) != fuzz.draw_case(target, *other) for other in others)
