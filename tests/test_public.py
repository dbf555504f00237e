"""The names other people rely on, and how little importing them costs."""

import subprocess
import sys

import pytest

import sparsifiner


def test_public_names():
    assert sorted(sparsifiner.__all__) == [
        "CalibrationReport",
        "Connectivity",
        "Recipe",
        "SparseConfig",
        "SparsifinerError",
        "TokenConfig",
        "TuningReport",
        "__version__",
        "calibrate",
        "capture",
        "config_of",
        "count_flops",
        "dense_mode",
        "distill",
        "feature_map",
        "load",
        "predict",
        "reconfigure",
        "restore",
        "save",
        "sparse_attention",
        "sparsify",
        "suggest_config",
        "tune",
    ]
    for name in sparsifiner.__all__:
        assert getattr(sparsifiner, name) is not None
    assert dir(sparsifiner) == sorted(sparsifiner.__all__)


def test_unknown_names_are_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'sparsiffy'"):
        sparsifiner.sparsiffy  # noqa: B018


@pytest.mark.parametrize("module", ["sparsifiner", "sparsifiner.cli.main"])
def test_importing_is_light(module):
    code = f"import sys, {module}; print([m for m in ('torch', 'timm', 'sklearn') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_version_is_the_packages():
    from importlib.metadata import version

    assert version("sparsifiner") == sparsifiner.__version__
