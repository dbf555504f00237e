"""Where a CPU's flags promise what it does not keep: torch's own bfloat16 can end the process.

oneDNN multiplies bfloat16 matrices for torch, and takes AMX instructions where the CPU's flags promise them. On some
machines the first of these faults, and no process can catch that for itself. So a child tries, before this process has
imported torch; where the child dies, oneDNN is told to do without AMX. Only where AMX is promised is there anything to
try: it alone was seen to fault, and what else oneDNN goes by serves float32 too, which would not have got far without.

Light: nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from sparsifiner.files import cache_folder, replacing

# oneDNN reads it once, before its first product.
VARIABLE = "ONEDNN_MAX_CPU_ISA"
WITHOUT_AMX = "AVX512_CORE_BF16"

# What the child does; no core dump, which nobody would read, and no torch.py that lies in the working directory.
COMMAND = [
    sys.executable,
    "-c",
    "import resource, sys; resource.setrlimit(resource.RLIMIT_CORE, (0, 0)); sys.path.remove(''); import torch; "
    "x = torch.ones(64, 64, dtype=torch.bfloat16); torch.nn.functional.linear(x, x, x[0]); torch.bmm(x[None], x[None])",
]
SECONDS = 120.0  # importing torch takes one to twelve of them
SLOW = "did not end in time"  # which is not noted: the machine may only have been busy

CPUINFO = Path("/proc/cpuinfo")
BOOT = Path("/proc/sys/kernel/random/boot_id")


def promises_amx() -> bool:
    """Whether the CPU's flags say that it multiplies matrices by AMX; elsewhere there is nothing to try."""
    try:
        lines = CPUINFO.read_text().splitlines()
    except OSError:
        return False
    return any("amx" in line for line in lines if line.startswith("flags"))


def probe(command: Sequence[str] | None = None, seconds: float = SECONDS) -> str | None:
    """Tries bfloat16 in a child process: what became of it, or None if it did well.

    A child that does not answer counts as one that dies: without AMX bfloat16 is slower, with it there may be no
    process left. One that fails otherwise, for want of a torch, says nothing about the CPU.
    """
    silent = subprocess.DEVNULL
    try:
        child = subprocess.run(
            command or COMMAND, stdin=silent, stdout=silent, stderr=silent, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired:
        return SLOW
    except OSError:
        return None
    faults = {-number: number.name for number in (signal.SIGILL, signal.SIGSEGV, signal.SIGBUS)}
    return f"ended in {faults[child.returncode]}" if child.returncode in faults else None


def fault() -> str | None:
    """What torch's bfloat16 does to a process on this machine; None if nothing.

    Asked once a process and, because importing torch takes seconds, once between two starts of the machine: the answer
    is kept in this user's cache folder.
    """
    if "fault" not in _known:
        _known["fault"] = _ask() if promises_amx() else None
    return _known["fault"]


def is_sound() -> bool:
    """Whether torch's bfloat16 can be used in this process: it does no harm here, or somebody has limited it."""
    return VARIABLE in os.environ or fault() is None


def limit() -> None:
    """Tells oneDNN to do without AMX where that faults; call it before torch is imported. A user's own limit stays."""
    if VARIABLE not in os.environ and (found := fault()) is not None:
        os.environ[VARIABLE] = WITHOUT_AMX
        _known["limited"] = found


def describe() -> str:
    """One line for people: how it stands with torch's bfloat16 in this process."""
    if found := _known.get("limited"):
        return f"a trial of AMX {found} here, so {VARIABLE}={WITHOUT_AMX} is set for this process"
    if VARIABLE in os.environ:
        return f"limited by {VARIABLE}={os.environ[VARIABLE]}"
    return "can run" if fault() is None else _warning()


def warn() -> None:
    """Once, where a model is in bfloat16 and the process is not ours to change."""
    if not is_sound() and "warned" not in _known:
        _known["warned"] = _warning()
        warnings.warn(_known["warned"], stacklevel=4)


# What this process knows: "fault", None if there is none; "limited" and "warned" once that was done.
_known: dict[str, str | None] = {}


def _warning() -> str:
    return (
        f"torch's own bfloat16 {fault()} in a trial on this machine, by AMX: set {VARIABLE}={WITHOUT_AMX} before torch "
        "is imported, or use float32"
    )


def _ask() -> str | None:
    path = about = None
    # No home, no such file, a damaged one, a torch that no package has brought: then it is tried.
    with contextlib.suppress(OSError, RuntimeError, ValueError, TypeError, KeyError, ImportError):
        about = [BOOT.read_text().strip(), importlib.metadata.version("torch"), sys.executable]
        path = cache_folder() / "bfloat16.json"
        noted = json.loads(path.read_text())
        if noted["about"] == about:
            return None if noted["fault"] is None else str(noted["fault"])
    found = probe()
    if path is not None and found != SLOW:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path) as temporary:
                temporary.write_text(json.dumps({"about": about, "fault": found}))
    return found
