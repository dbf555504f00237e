"""What is timed lies with the machine it was timed on, and what the docs link to is there."""

import csv
import importlib.util
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
MACHINES = sorted(path.parent for path in RESULTS.glob("*/machine.json"))


@pytest.fixture
def common():
    spec = importlib.util.spec_from_file_location("benchmarks_common", ROOT / "benchmarks" / "common.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_machine_gets_a_folder(common, monkeypatch, tmp_path):
    monkeypatch.setattr(common, "RESULTS", tmp_path / "results")
    monkeypatch.setenv("SPARSIFINER_MACHINE", "rack-7")
    folder = common.machine_results()
    assert folder == tmp_path / "results" / "rack-7"
    about = json.loads((folder / "machine.json").read_text())
    assert about["name"] == "rack-7"
    assert about["torch"]
    common.machine_results()  # again, over it
    assert [path.name for path in folder.iterdir()] == ["machine.json"]


def test_every_folder_says_what_machine_it_is():
    folders = [path for path in RESULTS.iterdir() if path.is_dir()]
    assert folders
    assert sorted(folders) == MACHINES
    for folder in MACHINES:
        about = json.loads((folder / "machine.json").read_text())
        assert about["name"] == folder.name
        for path in folder.glob("*.csv"):
            with path.open(newline="") as file:
                rows = list(csv.DictReader(file))
            assert {row["cpu"] for row in rows} == {about["cpu"]}, path
            assert {row["capability"] for row in rows} == {about["capability"]}, path


def test_links_to_results():
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for link in re.findall(r"\]\((?:\.\./)?(benchmarks/[^)#]+)", page.read_text()):
            assert (ROOT / link).exists(), f"{page.name}: {link}"
