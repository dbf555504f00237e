"""What the inner loops of tiles would take on CPUs that are not at hand, by llvm-mca: estimates, not measurements.

Compiles the products of csrc/ by themselves, finds in the assembly the loop with the most multiply-adds, and asks
llvm-mca for its cycles where all it loads is in the first-level cache. Writes results/estimates.csv and prints a table.
It needs a C++ compiler for x86 and LLVM 19 or later (Debian: llvm-19), whose CPUs earlier ones do not know.

    python benchmarks/estimates.py [--compiler g++] [--mca llvm-mca-19]
"""

from __future__ import annotations

import argparse
import csv
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

from common import RESULTS
from sparsifiner.files import replacing

CSRC = Path(__file__).resolve().parents[1] / "src" / "sparsifiner" / "csrc"
FLAGS = "-std=c++17 -O3 -fno-math-errno -ffp-contract=fast -Wno-psabi -Wno-unused -fno-asynchronous-unwind-tables"
AVX2 = "-mavx2 -mfma -mbmi2 -mpopcnt"
AVX512 = f"{AVX2} -mavx512f -mavx512dq -mavx512bw -mavx512vl"
# As CMakeLists.txt compiles the kernels.
VARIANTS = {"avx2": AVX2, "avx512": AVX512, "avx512bf16": f"{AVX512} -mavx512bf16"}
CPUS = {
    "haswell": ("avx2",),
    "znver3": ("avx2",),
    "sapphirerapids": ("avx512", "avx512bf16"),
    "znver4": ("avx512", "avx512bf16"),
    "znver5": ("avx512", "avx512bf16"),
}

# Name, header, variants that have it, and a function that is nothing but the loop.
PLAIN = """void loop(const float* const* rows, const float* b, long depth, float* c, const int* index) {
    product_block<kBlockRows, kBlockVecs, INDEXED>(rows, 1, {b, 64, index}, depth, c, 64, true);
}"""
DOTS = """void loop(const uint16_t* rows, long width, const int* list, const float* queries, float* out) {
    dots_block<8>(rows, width, list, queries, 1.0f, out);
}"""
SUMS = """void loop(const float* weights, const uint16_t* values, const int* list, long pairs, float* out) {
    sums_block<4>(weights, 16, values, 64, list, pairs, out, 64);
}"""
LOOPS = (
    ("logits, float32", "product.hpp", ("avx2", "avx512"), PLAIN.replace("INDEXED", "false")),
    ("sums of values, float32", "product.hpp", ("avx2", "avx512"), PLAIN.replace("INDEXED", "true")),
    ("logits, bfloat16", "dots.hpp", ("avx512bf16",), DOTS),
    ("sums of values, bfloat16", "dots.hpp", ("avx512bf16",), SUMS),
)

# Multiply-adds of one instruction, by its name and register.
WORK = re.compile(r"^\s*(vfmadd\w*ps|vdpbf16ps)\s.*%(ymm|zmm)\d+\s*$")


def assembly(compiler: str, variant: str, header: str, function: str) -> str:
    """What the compiler makes of it."""
    source = f'#include <cstdint>\n#define SPARSIFINER_ISA probe\n#include "{header}"\n'
    source += f'using namespace sparsifiner::probe;\nextern "C" {function}\n'
    command = [compiler, *FLAGS.split(), *VARIANTS[variant].split(), f"-I{CSRC}", "-x", "c++", "-S", "-o", "-", "-"]
    return subprocess.run(command, input=source, capture_output=True, text=True, check=True).stdout


def multiply_adds(lines: list[str]) -> int:
    """Of one pass over some lines."""
    found = filter(None, map(WORK.match, lines))
    return sum((16 if match[2] == "zmm" else 8) * (2 if match[1] == "vdpbf16ps" else 1) for match in found)


def hottest(text: str) -> list[str]:
    """The lines of the loop with the most multiply-adds: from a label to the jump back to it."""
    lines, best = text.splitlines(), []
    labels = {line[:-1]: number for number, line in enumerate(lines) if re.fullmatch(r"\.L\w+:", line)}
    for number, line in enumerate(lines):
        jump = re.match(r"^\s*j\w+\s+(\.L\w+)$", line)
        if jump and labels.get(jump[1], number) < number:
            body = lines[labels[jump[1]] : number + 1]
            if not any(re.match(r"^\s*(j\w+|call)\s", inner) for inner in body[:-1]):
                best = max(best, body, key=multiply_adds)
    if not multiply_adds(best):
        raise SystemExit("no loop with multiply-adds in what the compiler made")
    return best


def cycles(mca: str, cpu: str, lines: list[str]) -> float | None:
    """Of one pass; None for a CPU this llvm-mca does not know."""
    command = [mca, "-mtriple=x86_64", f"-mcpu={cpu}", "-iterations=1000"]
    done = subprocess.run(command, input="\n".join(lines) + "\n", capture_output=True, text=True, check=False)
    if "not a recognized processor" in done.stderr or "unable to find" in done.stderr:
        return None
    found = re.search(r"Total Cycles:\s+(\d+)", done.stdout)
    if found is None:
        raise SystemExit(f"{mca} says: {done.stderr.strip()[:300]}")
    return int(found[1]) / 1000


def newest_mca() -> str:
    """The llvm-mca of the highest version that is installed."""
    folders = [Path(folder) for folder in os.get_exec_path()]
    found = {path.name for folder in folders for path in folder.glob("llvm-mca*")}
    numbered = [name for name in found if re.fullmatch(r"llvm-mca-\d+", name)]
    return max(numbered, key=lambda name: int(name.rsplit("-", 1)[1]), default="llvm-mca")


def estimates(compiler: str, mca: str) -> list[dict[str, Any]]:
    """A row for each loop, CPU and instruction set."""
    rows = []
    for name, header, variants, function in LOOPS:
        if not (CSRC / header).exists():
            print(f"{name}: there is no {header}")
            continue
        for variant in variants:
            loop = hottest(assembly(compiler, variant, header, function))
            for cpu in (cpu for cpu, has in CPUS.items() if variant in has):
                taken, work = cycles(mca, cpu, loop), multiply_adds(loop)
                if taken is None:
                    print(f"{mca} does not know {cpu}")
                    continue
                row = {"loop": name, "cpu": cpu, "kernels": variant, "multiply_adds": work, "cycles": round(taken, 2)}
                rows.append(row | {"per_cycle": round(work / taken, 1)})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compiler", default=os.environ.get("CXX", "g++"))
    parser.add_argument("--mca", default=newest_mca())
    arguments = parser.parse_args()
    if shutil.which(arguments.mca) is None:
        raise SystemExit(f"{arguments.mca} is not here: install LLVM 19 or later (Debian: apt install llvm-19)")
    rows = estimates(arguments.compiler, arguments.mca)
    compiler, mca = (
        subprocess.run([tool, "--version"], capture_output=True, text=True, check=True).stdout
        for tool in (arguments.compiler, arguments.mca)
    )
    versions = {"compiler": compiler.splitlines()[0]}
    versions["mca"] = next(line.strip() for line in mca.splitlines() if "version" in line)
    print(
        "| inner loop | CPU | kernels | multiply-adds | cycles | multiply-adds a cycle |\n|---|---|---|---:|---:|---:|"
    )
    for row in rows:
        print("| " + " | ".join(map(str, row.values())) + " |")
    with replacing(RESULTS / "estimates.csv") as path, path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0], *versions], lineterminator="\n")
        writer.writeheader()
        writer.writerows(row | versions for row in rows)


if __name__ == "__main__":
    main()
