import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from .untouched import differences, listing

RUN = [sys.executable, "-m", "pytest", "-q", "--import-mode=importlib"]


@pytest.fixture
def checkout(tmp_path):
    """A project of its own with the same hooks."""
    (tmp_path / "tests").mkdir()
    shutil.copy(Path(__file__).parent / "untouched.py", tmp_path / "tests" / "conftest.py")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "kept.txt").write_text("as it was")
    return tmp_path


def run(checkout, body, *options):
    (checkout / "tests" / "test_it.py").write_text(f"from pathlib import Path\ndef test_it(tmp_path):\n    {body}\n")
    return subprocess.run([*RUN, *options], cwd=checkout, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("options", [(), ("-n", "2")], ids=["alone", "with workers"])
def test_a_run_that_writes_into_the_checkout_fails(checkout, options):
    result = run(checkout, "Path('report.html').write_text('x')", *options)
    assert result.returncode == 1
    assert "1 passed" in result.stdout
    assert "but report.html was written" in result.stdout


def test_one_that_writes_into_its_own_folder_does_not(checkout):
    result = run(checkout, "(tmp_path / 'report.html').write_text('x')")
    assert result.returncode == 0, result.stdout


def test_what_counts(checkout):
    before = listing(checkout)
    assert "kept.txt" in before
    for cache in ("__pycache__", ".hypothesis", ".pytest_cache"):
        (checkout / cache).mkdir()
        (checkout / cache / "file").touch()
    (checkout / "environment").mkdir()
    (checkout / "environment" / "pyvenv.cfg").touch()
    assert differences(before, listing(checkout)) == []
    (checkout / "kept.txt").write_text("as it is now")
    (checkout / "pytest.ini").unlink()
    (checkout / "tests" / "new").touch()
    assert differences(before, listing(checkout)) == [
        "kept.txt was changed",
        "pytest.ini is gone",
        "tests/new was written",
    ]
