from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
from pathlib import Path

import pytest

from sparsifiner import processor

# Tests write nowhere but in temporary folders, and caches of this user's are not theirs. Workers inherit the folder.
if "PYTEST_XDIST_WORKER" not in os.environ:
    _caches = tempfile.TemporaryDirectory(prefix="sparsifiner-tests-")
    os.environ["XDG_CACHE_HOME"] = _caches.name
# Before torch, whose bfloat16 would take the tests' process along where it faults.
processor.limit()

import torch

# `make sanitize` puts its own build of the kernels in place of the installed one; after torch, as always.
if path := os.environ.get("SPARSIFINER_NATIVE"):
    spec = importlib.util.spec_from_file_location("sparsifiner._native", path)
    sys.modules["sparsifiner._native"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["sparsifiner._native"])

from timm.models.vision_transformer import VisionTransformer
from torch import nn

from .toys import make_vit
from .untouched import pytest_sessionfinish, pytest_sessionstart, pytest_terminal_summary  # noqa: F401 - hooks

# Set here so that every test process, also one started by hand, leaves the other core to its neighbour.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def vit() -> VisionTransformer:
    return make_vit()


@pytest.fixture
def photos() -> torch.Tensor:
    return torch.randn(6, 3, 20, 20)


@pytest.fixture(scope="session")
def assets() -> Path:
    """The folder with real DeiT-Tiny weights and ImageNet images, which are not part of the project."""
    beside = Path(__file__).resolve().parents[2] / "shared" / "assets"
    folder = Path(os.environ.get("SPARSIFINER_ASSETS", beside))
    if not (folder / "deit_tiny_patch16_224.safetensors").is_file():
        pytest.skip("no real weights and images: set SPARSIFINER_ASSETS to the folder that holds them")
    return folder


@pytest.fixture(scope="session")
def deit(assets: Path) -> nn.Module:
    from sparsifiner.models import create_host

    return create_host("deit_tiny_patch16_224", str(assets / "deit_tiny_patch16_224.safetensors"))
