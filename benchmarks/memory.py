"""Peak memory of one attention layer at high resolution, beyond its inputs: sparse, dense (SDPA) and dense with a mask.

Each figure is from a process of its own: the growth of its peak resident size while the layer runs once.
Writes results/MACHINE/memory.csv and prints a table.

    python benchmarks/memory.py
"""

from __future__ import annotations

import csv
import resource
import subprocess
import sys
from typing import Any

import torch
from torch.nn import functional

from common import environment, machine_results
from sparsifiner.config import budget as budget_of
from sparsifiner.files import replacing
from sparsifiner.inspect import speed
from sparsifiner.nn.grid import landmark_pooling

SIDES = (32, 64, 96, 128)  # 512 to 2048 pixels in patches of 16
FORMS = ("dense (SDPA)", "sparse", "sparse, tile 4x4", "dense + mask")
HEADS, HEAD_DIM, N_DOWN, KEEP = 3, 64, 32, 0.1


def problem(side: int) -> speed.Problem:
    """Random inputs: memory does not depend on what they are."""
    n = 1 + side * side
    q, k, v = torch.randn(1, n, 3, HEADS, HEAD_DIM).permute(2, 0, 3, 1, 4).unbind(0)
    weights = landmark_pooling(N_DOWN, (side, side), 1).expand(HEADS, -1, -1).contiguous()
    return speed.Problem(q, k, v, weights, weights, (side, side), 1, 0.0, 0.0, "random")


def measure(form: str, side: int) -> None:
    """In the child: prints MiB."""
    p = problem(side)
    budget = budget_of(KEEP, p.q.shape[2])
    small = problem(8)
    runs = {
        "dense (SDPA)": lambda p: functional.scaled_dot_product_attention(p.q, p.k, p.v),
        "dense + mask": lambda p: speed.masked_dense(p, min(budget, p.q.shape[2])),
        "sparse": lambda p: speed.fused(p, min(budget, p.q.shape[2]), None, True)(),
        "sparse, tile 4x4": lambda p: speed.fused(p, min(budget, p.q.shape[2]), (4, 4), True)(),
    }
    with torch.inference_mode():
        runs[form](small)  # libraries, thread pools
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        out = runs[form](p)
        print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024, tuple(out.shape))


def main() -> None:
    if len(sys.argv) == 3:
        measure(sys.argv[1], int(sys.argv[2]))
        return
    rows = []
    for side in SIDES:
        for form in FORMS:
            # Scores, logits, weights and estimates of n x n floats, several at once.
            needed = 5 * HEADS * (1 + side * side) ** 2 * 4 / 2**30 if form == "dense + mask" else 0
            row: dict[str, Any] = {"n": 1 + side * side, "form": form, "mib": None}
            if needed > 14:
                print(f"n={row['n']:6d}  {form:18s} not run: it needs about {needed:.0f} GiB", flush=True)
            else:
                command = [sys.executable, __file__, form, str(side)]
                child = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
                row["mib"] = float(child.stdout.split()[0])
                print(f"n={row['n']:6d}  {form:18s} {row['mib']:9.1f} MiB", flush=True)
            about = {"heads": HEADS, "head_dim": HEAD_DIM, "n_down": N_DOWN, "keep": KEEP}
            rows.append(row | about | environment())
    with replacing(machine_results() / "memory.csv") as path, path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
