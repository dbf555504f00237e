"""A CPU that promises AMX and faults, played by children that really die, hang or do well."""

import json
import os
import subprocess
import sys
import warnings
from importlib.metadata import version

import pytest
import torch

import sparsifiner as sp
from sparsifiner import processor

from .toys import make_vit

DIES = [sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGILL)"]
HANGS = [sys.executable, "-c", "import time; time.sleep(600)"]
IS_FINE = [sys.executable, "-c", ""]
FAILS = [sys.executable, "-c", "import a_torch_that_is_not_there"]

# A process of its own, as a user starts it, on a machine whose flags promise AMX.
AMX = """
import os, sys
from sparsifiner import processor
processor.promises_amx = lambda: True
processor.COMMAND = {command!r}
"""


@pytest.fixture(autouse=True)
def _fresh(monkeypatch, tmp_path):
    """A process that knows nothing, with a cache folder of its own and no limit."""
    monkeypatch.setattr(processor, "_known", {})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv(processor.VARIABLE, "")  # so that it is put back as it was
    monkeypatch.delenv(processor.VARIABLE)


@pytest.fixture
def promised(monkeypatch):
    monkeypatch.setattr(processor, "promises_amx", lambda: True)

    def with_child(command):
        monkeypatch.setattr(processor, "COMMAND", command)

    return with_child


def in_a_process(code, command, tmp_path, **environment):
    own = {name: value for name, value in os.environ.items() if name != processor.VARIABLE}
    own |= {"XDG_CACHE_HOME": str(tmp_path / "cache")} | environment
    run = [sys.executable, "-c", AMX.format(command=command) + code]
    return subprocess.run(run, capture_output=True, text=True, env=own, cwd=tmp_path, check=True).stdout


def test_what_becomes_of_the_child():
    assert processor.probe(DIES) == "ended in SIGILL"
    assert processor.probe(HANGS, seconds=0.2) == processor.SLOW
    assert processor.probe(IS_FINE) is None
    assert processor.probe(FAILS) is None  # no torch: nothing is known of the CPU
    assert processor.probe(["a-command-that-is-not-there"]) is None


def test_the_real_trial_multiplies_bfloat16(tmp_path):
    """It must not pass by failing early: told to die after its last step, it does."""
    told = [*processor.COMMAND[:2], processor.COMMAND[2] + "; import os, signal; os.kill(os.getpid(), signal.SIGILL)"]
    assert "bfloat16" in told[2]
    assert processor.probe(told) == "ended in SIGILL"


@pytest.mark.parametrize(
    ("flags", "promised"),
    [
        ("flags\t\t: fpu avx2 avx512f avx512_bf16 amx_bf16 avx512_fp16 amx_tile amx_int8", True),
        ("flags\t\t: fpu avx2 avx512f avx512_bf16", False),
        ("model name\t: amx\nFeatures\t: fp asimd", False),
    ],
)
def test_flags(flags, promised, tmp_path, monkeypatch):
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\n{flags}\n")
    monkeypatch.setattr(processor, "CPUINFO", tmp_path / "cpuinfo")
    assert processor.promises_amx() is promised
    monkeypatch.setattr(processor, "CPUINFO", tmp_path / "nothing")
    assert processor.promises_amx() is False


def test_without_the_promise_nothing_is_tried(monkeypatch):
    monkeypatch.setattr(processor, "promises_amx", lambda: False)
    monkeypatch.setattr(processor, "probe", lambda: pytest.fail("a child was started"))
    processor.limit()
    processor.warn()
    assert processor.VARIABLE not in os.environ
    assert processor.describe() == "can run"


def test_the_limit_is_set_where_the_child_dies(promised):
    promised(DIES)
    processor.limit()
    assert os.environ[processor.VARIABLE] == "AVX512_CORE_BF16"
    assert "ended in SIGILL here, so ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 is set" in processor.describe()


def test_and_not_where_it_does_well(promised):
    promised(IS_FINE)
    processor.limit()
    assert processor.VARIABLE not in os.environ
    assert processor.describe() == "can run"


def test_a_users_own_limit_is_respected(promised, monkeypatch):
    promised(DIES)
    monkeypatch.setenv(processor.VARIABLE, "AVX2")
    monkeypatch.setattr(processor, "probe", lambda: pytest.fail("a child was started"))
    processor.limit()
    processor.warn()
    assert os.environ[processor.VARIABLE] == "AVX2"
    assert processor.describe() == "limited by ONEDNN_MAX_CPU_ISA=AVX2"


def test_the_answer_is_kept_until_the_machine_starts_again(promised, tmp_path, monkeypatch):
    promised(DIES)
    file = tmp_path / "cache" / "sparsifiner" / "bfloat16.json"
    assert processor.fault() == "ended in SIGILL"
    noted = json.loads(file.read_text())
    about = [processor.BOOT.read_text().strip(), version("torch"), sys.executable]
    assert noted == {"about": about, "fault": "ended in SIGILL"}

    def ask(command):
        promised(command)
        processor._known.clear()
        return processor.fault()

    assert ask(IS_FINE) == "ended in SIGILL"  # by the note
    (tmp_path / "boot").write_text("another")
    monkeypatch.setattr(processor, "BOOT", tmp_path / "boot")
    assert ask(IS_FINE) is None
    assert ask(DIES) is None  # by the note
    for damage in ("", "[]", '{"about": 3}', "{"):
        file.write_text(damage)
        assert ask(DIES) == "ended in SIGILL"


def test_what_took_too_long_is_not_kept(promised, tmp_path, monkeypatch):
    promised(IS_FINE)
    monkeypatch.setattr(processor, "probe", lambda: processor.SLOW)
    processor.limit()
    assert os.environ[processor.VARIABLE] == "AVX512_CORE_BF16"
    assert not (tmp_path / "cache").exists()


def test_a_folder_that_cannot_be_written_does_not_matter(promised, tmp_path):
    (tmp_path / "cache").write_text("a file in its place")
    promised(DIES)
    assert processor.fault() == "ended in SIGILL"


def test_converting_a_bfloat16_model_warns_once(promised):
    promised(DIES)
    config = sp.SparseConfig(0.5, n_down=4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sp.sparsify(make_vit(), config)
    message = "ended in SIGILL.*set ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 before torch"
    with pytest.warns(UserWarning, match=message) as seen:
        [sp.sparsify(make_vit().bfloat16(), config) for _ in range(2)]
    assert len(seen) == 1
    assert seen[0].filename == __file__
    assert processor.VARIABLE not in os.environ  # a library changes nothing


def test_and_not_where_bfloat16_can_run(promised):
    promised(IS_FINE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        student = sp.sparsify(make_vit().bfloat16(), sp.SparseConfig(0.5, n_down=4))
    assert student(torch.randn(1, 3, 20, 20, dtype=torch.bfloat16)).dtype is torch.bfloat16


def test_the_command_line_sets_it_before_torch_and_says_so(tmp_path):
    code = """
processor.probe = lambda found=processor.probe: (print("torch" in sys.modules), found())[1]
sys.argv = ["sparsifiner", "info"]
from sparsifiner.cli.main import run
try:
    run()
except SystemExit as end:
    assert not end.code
print(os.environ.get("ONEDNN_MAX_CPU_ISA"))
"""
    first, *lines, last = in_a_process(code, DIES, tmp_path).splitlines()
    assert first == "False"
    assert last == "AVX512_CORE_BF16"
    (line,) = [line for line in lines if line.startswith("bfloat16 of torch: ")]
    assert "ended in SIGILL here, so ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 is set for this process" in line


def test_help_and_a_plain_import_try_nothing(tmp_path):
    code = """
processor.probe = lambda: sys.exit("a child was started")
import sparsifiner
sys.argv = ["sparsifiner", "eval", "--help"]
from sparsifiner.cli.main import run
run()
"""
    assert "Example" in in_a_process(code, DIES, tmp_path)
    assert list(tmp_path.iterdir()) == []
