"""The kernels' own test program, which `make arm` runs for AArch64, built and run on this machine."""

import importlib.util
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

FOLDER = Path(__file__).parent


def script(name):
    spec = importlib.util.spec_from_file_location(f"native_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


cases, build = script("cases"), script("build")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return cases.write_all(tmp_path_factory.mktemp("cases"))


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    return build.build(os.environ.get("CXX", "c++"), tmp_path_factory.mktemp("native"), "-O1")


def run(program, *paths):
    return subprocess.run([program, *paths], capture_output=True, text=True, check=False)


def test_every_kernel_as_the_reference_has_it(program, files):
    done = run(program, *files)
    assert done.returncode == 0, done.stdout + done.stderr
    kernels = {path.name.partition("-")[0] for path in files}
    assert kernels == {"fused", "open_cells", "select", "attend"}
    runs = len(files) + sum(path.name.startswith("open_cells") for path in files)  # of these the lists too
    assert done.stdout == f"{runs} of {runs} runs as expected, baseline, 4 lanes\n"


@pytest.mark.parametrize(
    ("name", "array", "said"),
    [
        ("fused-query", "v", "out["),
        ("fused-bf16", "expected_out", "out["),
        ("open_cells-tile", "lists", "lists differ"),
        ("select-tile", "counts", "counts differ"),
        ("attend-residual", "expected_w_up_grad", "w_up_grad["),
    ],
)
def test_what_is_wrong_is_found(program, files, tmp_path, name, array, said):
    """The last number of one array is another."""
    good = next(path for path in files if path.stem == name).read_bytes()
    before, _, after = good.partition(f"{array} ".encode())
    line, _, rest = after.partition(b"\n")
    kind, _, *sides = line.decode().split()
    size = 4 * int(np.prod([int(side) for side in sides]))
    last = np.frombuffer(rest[size - 4 : size], dtype="<f4" if kind == "f" else "<i4") + 1
    spoilt = before + f"{array} ".encode() + line + b"\n" + rest[: size - 4] + last.tobytes() + rest[size:]
    path = tmp_path / f"{name}.case"
    path.write_bytes(spoilt)
    done = run(program, path)
    assert done.returncode == 1
    assert done.stdout.startswith(f"{name}.case, ")
    assert said in done.stdout


def test_no_files_no_success(program, tmp_path):
    assert run(program).returncode == 2
    assert run(program, tmp_path / "none.case").returncode == 2
