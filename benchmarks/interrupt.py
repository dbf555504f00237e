"""Kills a run with SIGKILL at random moments and resumes it, until it ends; then compares with one that nobody touched.

    python benchmarks/interrupt.py [--kills 20]

Writes results/interrupt.csv: the moments, the checkpoints that were there, and whether the weights are the same bits.
"""

from __future__ import annotations

import argparse
import csv
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import load_file

from common import RESULTS, environment
from sparsifiner.distillation import state
from sparsifiner.files import replacing

# A ViT of 65 tokens on digits: steps of some 50 ms, so that kills fall into steps, saves and starts alike.
RUN = """
import sys, torch
import sparsifiner as sp
from sparsifiner import digits
torch.manual_seed(0)
torch.set_num_threads(1)
import timm
(images, labels), _ = digits.load_digits()
host = timm.create_model(digits.NAME).eval()
student = sp.sparsify(host, sp.suggest_config(host, 0.2, pattern="learned"))
recipe = sp.Recipe.read("digits").replace(
    keep=0.2, residual=True, elastic="0.1:0.5", ema=0.99, batch_size=32, save_every=4, flip=0.5
)
sp.distill(student, (images[:1024], labels[:1024]), recipe, out=sys.argv[1])
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    draw = random.Random(arguments.seed)
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", RUN, str(folder / "whole")], check=True)
        whole = time.perf_counter() - start
        cut = folder / "cut"
        for number in range(arguments.kills):
            process = subprocess.Popen([sys.executable, "-c", RUN, str(cut)])
            before = state.newest(cut)
            # Starting takes longer than training: half of the kills wait until something was trained.
            while number % 2 and state.newest(cut) == before and process.poll() is None:
                time.sleep(0.005)
            time.sleep(draw.uniform(0, whole / 8))
            finished = process.poll() is not None
            process.kill()
            process.wait()
            newest = state.newest(cut)
            rows.append({"kill": number + 1, "finished_before": finished, "checkpoint": newest.name if newest else ""})
            print(f"kill {number + 1:2d}: {rows[-1]['checkpoint'] or 'nothing saved yet'}", flush=True)
        subprocess.run([sys.executable, "-c", RUN, str(cut)], check=True)
        one, other = (load_file(folder / run / "student.safetensors") for run in ("whole", "cut"))
        same = all(torch.equal(one[key], other[key]) for key in one)
    print("the same weights, bit for bit" if same else "DIFFERENT WEIGHTS")
    with replacing(RESULTS / "interrupt.csv") as path, path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0], "same_bits", *environment()], lineterminator="\n")
        writer.writeheader()
        writer.writerows(row | {"same_bits": same} | environment() for row in rows)
    if not same:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
