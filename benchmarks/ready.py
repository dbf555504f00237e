"""Makes the predictors that come with the package, and measures them: src/sparsifiner/ready/, results/ready.csv.

Calibrated on 1,024 images of imagenet-distill.tar, stored in bfloat16, and as such evaluated on imagenet-eval.tar.

    python benchmarks/ready.py [--no-make]
"""

from __future__ import annotations

import argparse

import torch

import sparsifiner as sp
from common import RESULTS, assets, write_csv
from sparsifiner import checkpoint
from sparsifiner.data.images import open_images, preprocessing
from sparsifiner.inspect.compare import PAPER, RESIDUAL, compare
from sparsifiner.models import create_host

NAME = "deit_tiny_patch16_224"
KEEPS = (0.5, 0.25, 0.1, 0.05)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-make", action="store_true", help="measure what is there")
    arguments = parser.parse_args()
    source = assets()
    host = create_host(NAME, str(source / f"{NAME}.safetensors"))
    transform = preprocessing(host, "crop")
    if not arguments.no_make:
        student = sp.sparsify(host, sp.suggest_config(host, 0.1, pattern="learned"))
        images = open_images(source / "imagenet-distill.tar", transform, limit=1024)
        print(sp.calibrate(student, images))
        checkpoint.READY.mkdir(exist_ok=True)
        path = checkpoint.READY / f"{NAME}.safetensors"
        sp.save(student, path, host_weights=False, dtype=torch.bfloat16)
        print(f"{path.name}: {path.stat().st_size / 2**20:.2f} MiB")
    student = sp.load(NAME, model=host)
    batches = list(open_images(source / "imagenet-eval.tar", transform, num_classes=1000))
    rows = compare(student, batches, [RESIDUAL, PAPER], KEEPS)
    write_csv([row.to_dict() for row in rows], RESULTS / "ready.csv")
    for row in rows:
        print(row.form, row.keep, f"top-1 {row.top1:.2f}, agreement {row.agreement:.1f}, {row.images} images")


if __name__ == "__main__":
    main()
