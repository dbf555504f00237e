"""Builds selftest.cpp with the baseline's instruction set, for this machine or another, and runs it on all problems.

Without arguments here; what `make arm` does is

    python tests/native/build.py --compiler aarch64-linux-gnu-g++ --emulator "qemu-aarch64 -L /usr/aarch64-linux-gnu"
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "src" / "sparsifiner" / "csrc"
SOURCES = [Path(__file__).with_name("selftest.cpp"), CSRC / "kernels.cpp", CSRC / "scratch.cpp"]
# As CMakeLists.txt compiles the kernels, but for how long it may take.
FLAGS = "-std=c++17 -fno-math-errno -ffp-contract=fast -Wall -Wextra -Wno-psabi -fopenmp -DSPARSIFINER_ISA=baseline"


def build(compiler: str, folder: Path, *more: str) -> Path:
    """The program, in that folder."""
    program = folder / "selftest"
    command = [*compiler.split(), *FLAGS.split(), *more, f"-I{CSRC}", *map(str, SOURCES), "-o", str(program)]
    subprocess.run(command, check=True)
    return program


def vector_instructions(objdump: str, program: Path) -> int:
    """How many fused multiply-adds on vectors of four floats an AArch64 program has."""
    listing = subprocess.run([objdump, "-d", str(program)], capture_output=True, text=True, check=True).stdout
    return sum("fmla" in line and ".4s" in line for line in listing.splitlines())


def main() -> None:
    from cases import write_all

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compiler", default=os.environ.get("CXX", "c++"))
    parser.add_argument("--emulator", default="", help="what runs the program, such as 'qemu-aarch64 -L FOLDER'")
    parser.add_argument("--objdump", default="", help="also count NEON's multiply-adds, of which there must be some")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        program = build(arguments.compiler, folder, "-O3")
        if arguments.objdump:
            count = vector_instructions(arguments.objdump, program)
            print(f"{count} fmla on four floats")
            if not count:
                raise SystemExit("the kernels were compiled without NEON's multiply-adds")
        paths = map(str, write_all(folder / "cases"))
        done = subprocess.run([*arguments.emulator.split(), str(program), *paths], check=False)
    sys.exit(done.returncode)


if __name__ == "__main__":
    main()
