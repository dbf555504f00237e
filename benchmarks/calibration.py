"""What calibrate() costs and gives with many tokens: a sample of the queries against all of them.

DeiT-Tiny on the calibration photos of imagenet-hires.tar. Every third is held out: on these quality is measured, as
divergence from the dense model and agreement with it at keep 0.1. Each row is from a process of its own, whose peak
resident size holds the photos too. Writes results/MACHINE/calibration.csv row by row; rows that
are there are not run again.

    python benchmarks/calibration.py
    python benchmarks/calibration.py 512:64 512:64:all --threads 2
"""

from __future__ import annotations

import argparse
import io
import json
import resource
import subprocess
import sys
import tarfile
import time
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torchvision import transforms

import sparsifiner as sp
from common import assets, environment, machine_results, read_csv, write_csv
from sparsifiner import calibration
from sparsifiner.inspect import compare
from sparsifiner.models import create_host

NAME = "deit_tiny_patch16_224"
CASES = ("512:64", "512:64:all", "512:128", "1024:32")
KEEP = 0.1
FORMS = {"query": compare.RESIDUAL, "tile": compare.tiled((4, 4))}


def photos(pixels: int, data: dict[str, Any], *, held_out: bool, limit: int) -> Tensor:
    """So many of the photos to calibrate on, or of those held out, spread over the file."""
    ready = transforms.Compose(
        [
            transforms.Resize(pixels, interpolation=transforms.InterpolationMode.BICUBIC),
            transforms.CenterCrop(pixels),
            transforms.ToTensor(),
            transforms.Normalize(data["mean"], data["std"]),
        ]
    )
    with tarfile.open(assets() / "imagenet-hires.tar") as tar:
        names = sorted(m.name for m in tar.getmembers() if m.isfile() and m.name.startswith("calibrate/"))
        names = [name for number, name in enumerate(names) if (number % 3 == 2) == held_out]
        files = [tar.extractfile(name) for name in names[:: max(1, len(names) // limit)][:limit]]
        pictures: list[Any] = [ready(Image.open(io.BytesIO(file.read())).convert("RGB")) for file in files if file]
    return torch.stack(pictures)


def measure(pixels: int, images: int, queries: str, held_out: int) -> dict[str, Any]:
    """In the child: one calibration, and what came of it."""
    if queries == "all":
        calibration.QUERIES = sys.maxsize
    host = create_host(NAME, str(assets() / f"{NAME}.safetensors"), img_size=pixels)
    data: dict[str, Any] = host.pretrained_cfg  # pyright: ignore[reportAssignmentType]
    student = sp.sparsify(host, sp.suggest_config(host, KEEP, pattern="learned"))
    chosen = photos(pixels, data, held_out=False, limit=images)
    start, cpu_start = time.perf_counter(), time.process_time()
    report = sp.calibrate(student, chosen)
    found: dict[str, Any] = {
        "seconds": time.perf_counter() - start,
        "cpu_seconds": time.process_time() - cpu_start,
        "fit_seconds": report.seconds,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "load": environment()["load"],
    }
    others = photos(pixels, data, held_out=True, limit=held_out)
    with torch.inference_mode():
        with sp.dense_mode(student):
            dense = torch.cat([student(batch) for batch in others.split(4)])
        for name, form in FORMS.items():
            with compare.running_as(student, form, KEEP):
                logits = torch.cat([student(batch) for batch in others.split(4)])
            found[f"{name}_divergence"] = compare.divergence(logits, dense)
            found[f"{name}_agreement"] = compare.agreement(logits, dense)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=CASES, help="pixels:images, and :all for all queries")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--held-out", type=int, default=100, help="photos that quality is measured on")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    path = machine_results() / "calibration.csv"
    rows: list[dict[str, Any]] = list(read_csv(path))
    for case in arguments.cases:
        pixels, images, queries = (*case.split(":"), str(calibration.QUERIES))[:3]
        if arguments.child:
            print(json.dumps(measure(int(pixels), int(images), queries, arguments.held_out)))
            return
        about = {"pixels": pixels, "images": images, "queries": queries, "held_out": str(arguments.held_out)}
        about["threads"] = str(arguments.threads)
        if any(about.items() <= row.items() for row in rows):
            continue
        settings = [f"--threads={arguments.threads}", f"--held-out={arguments.held_out}"]
        command = [sys.executable, __file__, case, *settings, "--child"]
        child = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        rows.append(about | json.loads(child.stdout))
        write_csv(rows, path)
        print(", ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)


if __name__ == "__main__":
    main()
