"""The right loop goes to llvm-mca, and its answer is read; what it says of a CPU is its own affair."""

import importlib.util
import platform
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
TEXT = """
loop:
.L2:
\tvfmadd231ps\t%ymm2, %ymm1, %ymm0
\tjne\t.L2
.L3:
\tvmovups\t(%rdx), %zmm1
\tvfmadd231ps\t(%rax){1to16}, %zmm1, %zmm3
\tvdpbf16ps\t%zmm2, %zmm1, %zmm18
\taddq\t$1, %rax
\tjne\t.L3
.L4:
\tcall\tsomething
\tvdpbf16ps\t%zmm2, %zmm1, %zmm18
\tvdpbf16ps\t%zmm2, %zmm1, %zmm19
\tjne\t.L4
\tje\t.L5
.L5:
\tret
"""


@pytest.fixture
def estimates(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    spec = importlib.util.spec_from_file_location("benchmarks_estimates", FOLDER / "estimates.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_loop_with_the_most_work_is_found(estimates):
    loop = estimates.hottest(TEXT)
    assert loop[0] == ".L3:"
    assert loop[-1] == "\tjne\t.L3"
    assert estimates.multiply_adds(loop) == 16 + 2 * 16
    with pytest.raises(SystemExit, match="no loop"):
        estimates.hottest("loop:\n\tret\n")


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the host's compiler is not one for x86")
def test_the_kernels_own_loops_compile(estimates):
    for _, header, variants, function in estimates.LOOPS:
        if (estimates.CSRC / header).exists():
            loop = estimates.hottest(estimates.assembly("c++", variants[0], header, function))
            assert estimates.multiply_adds(loop) >= 64


def test_what_llvm_mca_says_is_read(estimates, tmp_path):
    tool = tmp_path / "mca"
    tool.write_text(
        f"#!{sys.executable}\nimport sys\nlines = sys.stdin.read()\n"
        "if '-mcpu=old' in sys.argv:\n    sys.exit('error: unable to find target cpu')\n"
        "if '-mcpu=bad' in sys.argv:\n    sys.exit('error: no instructions')\n"
        "print('Iterations:        1000\\nTotal Cycles:      ' + str(1500 * lines.count('vfmadd')))\n"
    )
    tool.chmod(0o755)
    loop = estimates.hottest(TEXT)
    assert estimates.cycles(str(tool), "new", loop) == 1.5
    assert estimates.cycles(str(tool), "old", loop) is None
    with pytest.raises(SystemExit, match="no instructions"):
        estimates.cycles(str(tool), "bad", loop)
