"""DeiT-Tiny without training, on 2,000 images: dropped tokens, fixed patterns and low rank beside learned sparsity.

Calibrated on 256 images of imagenet-distill.tar, evaluated on imagenet-eval.tar: writes results/baselines.csv and
results/baselines.md. Rows that are there already are kept, so that an interrupted run can be taken up.

    python benchmarks/baselines.py [--images 2000]
"""

from __future__ import annotations

import argparse
import csv
from typing import Any

import torch

import sparsifiner as sp
from common import RESULTS, assets, environment
from sparsifiner.config import TokenConfig
from sparsifiner.data.images import open_images, preprocessing
from sparsifiner.files import replacing
from sparsifiner.inspect.compare import DENSE, Form, evaluate
from sparsifiner.models import create_host
from sparsifiner.nn.patterns import RANKINGS

NAME = "deit_tiny_patch16_224"


def jobs() -> list[tuple[str, dict[str, Any]]]:
    """Names and settings; what is calibrated alike comes together."""
    rows: list[tuple[str, dict[str, Any]]] = []
    for token_keep, fuse in ((0.7, False), (0.7, True), (0.5, False)):
        tokens = TokenConfig(token_keep, fuse=fuse)
        name = f"EViT {token_keep:g}" + (" fused" if fuse else "")
        rows.append((name, {"keep": 1.0, "tokens": tokens}))
        rows += [(f"{name}, keep {keep:g}", {"keep": keep, "tokens": tokens}) for keep in (0.25, 0.1)]
    for keep in (0.25, 0.1):
        for residual in (True, False):
            about = f"keep {keep:g}" + (", residual" if residual else "")
            for pattern in ("learned", *RANKINGS):
                rows.append((f"{pattern}, {about}", {"keep": keep, "pattern": pattern, "residual": residual}))
    rows.append(("linformer, 49 landmarks", {"keep": 0.25, "pattern": "linformer"}))
    return rows


def earlier(images: int) -> list[dict[str, Any]]:
    path = RESULTS / "baselines.csv"
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [row for row in csv.DictReader(file) if int(row["images"]) == images]


def write(rows: list[dict[str, Any]]) -> None:
    with replacing(RESULTS / "baselines.csv") as path, path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    lines = ["| form | top-1 % | dense | agreement % | KL | attention M | model M |", "|---|" + "---:|" * 6]
    for row in rows:
        macs = [f"{float(row[k]) / 1e6:,.1f}" if row[k] else "" for k in ("attention_macs", "total_macs")]
        figures = [f"{float(row['top1']):.2f}", f"{float(row['dense_top1']):.2f}", f"{float(row['agreement']):.1f}"]
        lines.append(f"| {row['name']} | " + " | ".join([*figures, f"{float(row['divergence']):.4f}", *macs]) + " |")
    with replacing(RESULTS / "baselines.md") as path:
        path.write_text(f"{rows[0]['images']} images, DeiT-Tiny, no training.\n\n" + "\n".join(lines) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--threads", type=int)
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    source = assets()
    host = create_host(NAME, str(source / f"{NAME}.safetensors"))
    transform = preprocessing(host, "crop")
    chosen = open_images(source / "imagenet-distill.tar", transform, limit=256, batch_size=16)
    images = torch.cat([batch for batch, _ in chosen])
    evaluation = open_images(source / "imagenet-eval.tar", transform, num_classes=1000, limit=arguments.images)
    batches = list(evaluation)
    student = sp.sparsify(host, sp.suggest_config(host, 0.25, pattern="learned"))
    dense, logits = evaluate(student, batches, DENSE, None, None)
    rows = earlier(dense.images)
    done = {row["name"] for row in rows}
    fitted: tuple | None = None
    for name, settings in jobs():
        if name in done:
            continue
        whole: dict[str, Any] = {"pattern": "learned"} | settings
        config = sp.suggest_config(host, **whole)
        # Predictors are fitted to what will be dropped: to the keep rate, the residual and the pattern.
        kind = (settings["keep"], config.residual, config.pattern)
        if kind != fitted:
            student = sp.sparsify(host, config.replace(tokens=None))
            if config.pattern not in RANKINGS or config.residual:  # else nothing of the predictors is used
                sp.calibrate(student, images)
            fitted = kind
        form = Form(name, {"keep": settings["keep"], "tokens": config.tokens}, needs_keep=False)
        row, _ = evaluate(student, batches, form, None, logits)
        rows.append({"name": name} | row.to_dict() | {"dense_top1": dense.top1} | environment())
        print(f"{name:32s} top-1 {row.top1:.2f} (dense {dense.top1:.2f}) agreement {row.agreement:.1f}", flush=True)
        write(rows)


if __name__ == "__main__":
    main()
