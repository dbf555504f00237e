"""What every benchmark records beside its figures."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import timm
import torch

import sparsifiner

RESULTS = Path(__file__).parent / "results"


def assets() -> Path:
    """The folder with the real weights and images (see CONTRIBUTING)."""
    beside = Path(__file__).resolve().parents[2] / "shared" / "assets"
    folder = Path(os.environ.get("SPARSIFINER_ASSETS", beside))
    if not (folder / "deit_tiny_patch16_224.safetensors").is_file():
        raise SystemExit("set SPARSIFINER_ASSETS to the folder with the DeiT-Tiny weights and the ImageNet images")
    return folder


def environment() -> dict[str, str | int | float]:
    """Machine, versions, threads and load."""
    names = [line.split(":")[1].strip() for line in _cpu_lines() if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": os.cpu_count() or 0,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "timm": timm.__version__,
        "sparsifiner": sparsifiner.__version__,
    }


def _cpu_lines() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []
