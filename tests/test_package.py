"""What is shipped: the files that a wheel and a source distribution hold."""

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def shipped(tmp_path_factory):
    """Names in a wheel without kernels, which need a compiler, and in a source distribution."""
    copy = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE", "CMakeLists.txt", ".gitignore"):
        shutil.copy(ROOT / name, copy)
    shutil.copytree(ROOT / "src", copy / "src", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    code = (
        "from scikit_build_core.build import build_sdist, build_wheel;"
        "build_sdist('dist'); build_wheel('dist', {'wheel.cmake': 'false'})"
    )
    subprocess.run([sys.executable, "-c", code], cwd=copy, check=True, capture_output=True)
    (wheel,), (source,) = (copy / "dist").glob("*.whl"), (copy / "dist").glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as archive, tarfile.open(source) as files:
        in_source = {name.partition("/src/")[2] for name in files.getnames()}
        return {"wheel": set(archive.namelist()), "source": in_source}


@pytest.mark.parametrize("kind", ["wheel", "source"])
@pytest.mark.parametrize(
    "name",
    [
        "py.typed",  # type checkers believe our annotations only beside it
        "__init__.py",
        "ready/deit_tiny_patch16_224.safetensors",
        "distillation/recipes/digits.toml",
        "explorer/static/index.html",
    ],
)
def test_it_is_shipped(shipped, kind, name):
    assert f"sparsifiner/{name}" in shipped[kind]


def test_the_kernels_sources_are_in_the_source_distribution(shipped):
    assert "sparsifiner/csrc/kernels.cpp" in shipped["source"]
