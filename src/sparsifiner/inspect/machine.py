"""What every measurement records beside its figures, and a name for the machine it was made on."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import timm
import torch

import sparsifiner
from sparsifiner.errors import ConfigError
from sparsifiner.ops import cpu

VARIABLE = "SPARSIFINER_MACHINE"
CPUINFO = Path("/proc/cpuinfo")
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")

# What a kernel could be written for; of the other flags a CPU has, none decides how fast this library is.
FLAGS = (
    *("sse4_2", "avx", "avx2", "fma", "bmi2", "f16c", "avx_vnni", "avx_vnni_int8", "avx_ne_convert"),
    *("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni", "avx512_bf16", "avx512_fp16", "avx512_vbmi2"),
    *("amx_tile", "amx_bf16", "amx_int8", "asimd", "asimdhp", "asimddp", "bf16", "i8mm", "sve", "sve2"),
)

# Vendor and family, then the first and last model of each design: from the vendors' lists of CPUID values.
_DESIGNS: dict[tuple[str, int], Sequence[tuple[int, int, str]]] = {
    ("AuthenticAMD", 0x17): [(0x00, 0x2F, "zen1"), (0x30, 0xFF, "zen2")],
    ("AuthenticAMD", 0x19): [
        *((0x00, 0x0F, "zen3"), (0x10, 0x1F, "zen4"), (0x20, 0x5F, "zen3")),
        *((0x60, 0x7F, "zen4"), (0xA0, 0xAF, "zen4")),
    ],
    ("AuthenticAMD", 0x1A): [(0x00, 0x4F, "zen5"), (0x60, 0x7F, "zen5")],
    ("GenuineIntel", 0x06): [
        *((0x3C, 0x3C, "haswell"), (0x3F, 0x3F, "haswell"), (0x4F, 0x4F, "broadwell"), (0x56, 0x56, "broadwell")),
        *((0x55, 0x55, "skylakex"), (0x5E, 0x5E, "skylake"), (0x6A, 0x6A, "icelakex"), (0x6C, 0x6C, "icelakex")),
        *((0x8F, 0x8F, "sapphirerapids"), (0xCF, 0xCF, "emeraldrapids"), (0xAD, 0xAE, "graniterapids")),
        *((0x97, 0x97, "alderlake"), (0x9A, 0x9A, "alderlake"), (0xB7, 0xB7, "raptorlake"), (0xBA, 0xBA, "raptorlake")),
    ],
}
_ARM = {0xD08: "cortex-a72", 0xD0C: "neoverse-n1", 0xD40: "neoverse-v1", 0xD49: "neoverse-n2", 0xD4F: "neoverse-v2"}


def environment() -> dict[str, str | int | float]:
    """Machine, versions, threads and load."""
    return {
        "cpu": _processor().get("model name") or platform.processor(),
        "cores": os.cpu_count() or 0,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "kernels": _kernels(),
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "timm": timm.__version__,
        "sparsifiner": sparsifiner.__version__,
    }


def machine_name() -> str:
    """A name for machines like this one, such as ``zen4-avx512``: the CPU's design and its widest instructions.

    ``SPARSIFINER_MACHINE`` overrides it: a name may tell what no CPU says of itself.
    """
    if (given := os.environ.get(VARIABLE)) is not None:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", given):
            raise ConfigError(f"{VARIABLE} must be letters, digits and . _ -, such as zen4-avx512, got {given!r}")
        return given
    about = _processor()
    return f"{_design(about)}-{_instructions(about)}"


def machine() -> dict[str, Any]:
    """What distinguishes this machine, for people who compare figures; what cannot be found out is left out."""
    about = _processor()
    found = {
        "name": machine_name(),
        "cpu": about.get("model name") or platform.processor() or platform.machine(),
        "vendor": about.get("vendor_id") or about.get("CPU implementer"),
        "family": about.get("cpu family") or about.get("CPU architecture"),
        "model": about.get("model") or about.get("CPU part"),
        "stepping": about.get("stepping") or about.get("CPU revision"),
        "cores": os.cpu_count(),
        "flags": [flag for flag in FLAGS if flag in _flags(about)],
        "caches": _caches(),
        "memory_gib": _memory(),
        "system": f"{platform.system()} {platform.machine()}",
        "capability": torch.backends.cpu.get_cpu_capability(),
        "kernels": _kernels(),
        "torch": torch.__version__,
        "sparsifiner": sparsifiner.__version__,
    }
    return {name: value for name, value in found.items() if value}


def _kernels() -> str:
    return "none" if cpu.unavailable() else cpu.instruction_set()


def _processor() -> dict[str, str]:
    """What the system says of the first processor; nothing where it has no such file."""
    try:
        first = CPUINFO.read_text().split("\n\n")[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def _flags(about: dict[str, str]) -> set[str]:
    return set((about.get("flags") or about.get("Features") or "").split())


def _design(about: dict[str, str]) -> str:
    """The CPU's design by its numbers; where they are not known, what it calls itself."""
    family, model, part = (_number(about.get(name)) for name in ("cpu family", "model", "CPU part"))
    for first, last, name in _DESIGNS.get((about.get("vendor_id", ""), family), ()):
        if first <= model <= last:
            return name
    if about.get("CPU implementer") == "0x41" and part in _ARM:
        return _ARM[part]
    called = about.get("model name") or platform.processor() or platform.machine()
    plain = re.sub(r"\((r|tm)\)|\bcpu\b|\bprocessor\b|@.*|\d+-core", " ", called.lower())
    return re.sub(r"[^a-z0-9]+", "-", plain).strip("-")[:40] or "unknown"


def _number(text: str | None) -> int:
    try:
        return int(text or "", 0)
    except ValueError:
        return -1


def _instructions(about: dict[str, str]) -> str:
    """The widest that the CPU has."""
    flags = _flags(about)
    known = {"avx512_bf16": "avx512bf16", "avx512f": "avx512", "avx2": "avx2", "sve": "sve", "asimd": "neon"}
    found = next((name for flag, name in known.items() if flag in flags), None)
    return found or torch.backends.cpu.get_cpu_capability().lower().replace(" ", "-")


def _caches() -> dict[str, str]:
    """Sizes as the system writes them, of those the first processor sees."""
    found = {}
    for index in sorted(CACHES.glob("index*")):
        try:
            level, kind, size = ((index / name).read_text().strip() for name in ("level", "type", "size"))
        except OSError:
            continue
        found[f"L{level}" + {"Data": "d", "Instruction": "i"}.get(kind, "")] = size
    return found


def _memory() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (AttributeError, ValueError, OSError):
        return None
