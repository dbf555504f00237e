"""What the benchmarks share."""

from __future__ import annotations

import os
from pathlib import Path

from sparsifiner.inspect.machine import environment

__all__ = ["RESULTS", "assets", "environment"]

RESULTS = Path(__file__).parent / "results"


def assets() -> Path:
    """The folder with the real weights and images (see CONTRIBUTING)."""
    beside = Path(__file__).resolve().parents[2] / "shared" / "assets"
    folder = Path(os.environ.get("SPARSIFINER_ASSETS", beside))
    if not (folder / "deit_tiny_patch16_224.safetensors").is_file():
        raise SystemExit("set SPARSIFINER_ASSETS to the folder with the DeiT-Tiny weights and the ImageNet images")
    return folder
