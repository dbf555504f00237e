"""What every measurement records beside its figures."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import timm
import torch

import sparsifiner
from sparsifiner.ops import cpu


def environment() -> dict[str, str | int | float]:
    """Machine, versions, threads and load."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": os.cpu_count() or 0,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "kernels": "none" if cpu.unavailable() else cpu.instruction_set(),
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "timm": timm.__version__,
        "sparsifiner": sparsifiner.__version__,
    }
