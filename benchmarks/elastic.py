"""One model for every keep rate: ways to make it, chosen on training images held out, then evaluated once.

Splits imagenet-distill.tar into 3,600 images to train on and 400 to choose on. The ways: random crops with a live
teacher; from there on with smaller batches, on predictions nearly alone. Of both, the host's weights on the line from
dense (0) to trained (1) too, and of the best, budgets by layer. What diverges least from the dense model at keep 0.25
on the 400 is then run on imagenet-eval.tar, at all keep rates. Writes results/elastic.csv.

    python benchmarks/elastic.py [--folder runs] [--no-train]
"""

from __future__ import annotations

import argparse
import copy
import random
import tarfile
from pathlib import Path
from typing import Any

import torch

import sparsifiner as sp
from common import RESULTS, assets, write_csv
from sparsifiner.data.images import open_images, preprocessing
from sparsifiner.distillation.data import from_files
from sparsifiner.distillation.recipe import config_for
from sparsifiner.inspect.compare import DENSE, Form, Row, evaluate
from sparsifiner.inspect.sweep import allocate, layer_recalls
from sparsifiner.models import create_host
from sparsifiner.progress import show_progress

NAME = "deit_tiny_patch16_224"
KEEPS = (0.5, 0.25, 0.1, 0.05)
AIM = 0.25
HELD = 400
CROPS = sp.Recipe.read("two-cores").replace(
    keep=AIM, elastic="0.05:0.5", crop="random", smallest_crop=0.35, cache_teacher=False, phase2_epochs=6
)
# The way, and the one whose result it starts from.
WAYS: dict[str, tuple[sp.Recipe, str | None]] = {
    "crops": (CROPS, None),
    "predictions": (CROPS.replace(start="given", token_weight=0.1, batch_size=16, phase2_epochs=1.75), "crops"),
}


def split(folder: Path) -> tuple[Path, Path]:
    """The images to train on and those to choose on, as two files."""
    parts = folder / "train3600.tar", folder / "held400.tar"
    if not all(part.exists() for part in parts):
        with tarfile.open(assets() / "imagenet-distill.tar") as source:
            members = [member for member in source.getmembers() if member.isfile()]
            held = set(random.Random(5).sample(range(len(members)), HELD))
            for path, wanted in zip(parts, (False, True), strict=True):
                with tarfile.open(path, "w") as target:
                    for number, member in enumerate(members):
                        if (number in held) == wanted:
                            target.addfile(member, source.extractfile(member))
    return parts


def train(way: str, folder: Path, images: Path, host: Any) -> None:
    """Runs a way, or goes on with it."""
    recipe, before = WAYS[way]
    start = sp.sparsify(host, config_for(recipe, host)) if before is None else sp.load(result(before, folder))
    data = from_files(str(images), start, recipe, preprocess="crop")
    with show_progress() as bar:
        sp.distill(start, data, recipe, teacher=host, out=folder / f"elastic-{way}", bar=bar, progress=bar.start)


def result(way: str, folder: Path) -> Path:
    """Where a way's model is, once it is there."""
    return folder / f"elastic-{way}" / "student.safetensors"


def between(student: Any, host: Any, share: float) -> Any:
    """The student with its host's weights on the line from dense (0) to its own (1)."""
    result, dense = copy.deepcopy(student), host.state_dict()
    with torch.no_grad():
        for name, parameter in result.named_parameters():
            if name in dense:
                parameter.lerp_(dense[name], 1 - share)
    return result


def measure(student: Any, batches: Any, dense: Any, keep: Any) -> dict[str, Any]:
    """Of a model at a keep rate, or at one for each layer."""
    row, _ = evaluate(student, batches, Form("", {"keep": keep}, needs_keep=False), None, dense)
    return figures_of(row)


def figures_of(row: Row) -> dict[str, Any]:
    """What the table has."""
    return {field: getattr(row, field) for field in ("images", "top1", "agreement", "divergence", "kept_share")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs"))
    parser.add_argument("--no-train", action="store_true", help="of the runs that are there")
    arguments = parser.parse_args()
    arguments.folder.mkdir(exist_ok=True)
    images, held = split(arguments.folder)
    host = create_host(NAME, str(assets() / f"{NAME}.safetensors"))
    if not arguments.no_train:
        for way in WAYS:
            if not result(way, arguments.folder).exists():
                train(way, arguments.folder, images, host)

    transform = preprocessing(host, "crop")
    choosing = list(open_images(held, transform, num_classes=1000))
    calibrated = sp.sparsify(host, sp.suggest_config(host, AIM, pattern="learned"))
    sp.calibrate(calibrated, torch.cat([batch for batch, _ in open_images(images, transform, limit=256)]))
    row, logits = evaluate(calibrated, choosing, DENSE, None, None)
    rows: list[dict[str, Any]] = [{"set": "held out", "way": "dense", "keep": 1.0} | figures_of(row)]
    candidates: list[tuple[float, str, Any, Any]] = []

    def consider(name: str, student: Any, keep: Any = AIM) -> None:
        found = measure(student, choosing, logits, keep)
        rows.append({"set": "held out", "way": name, "keep": AIM} | found)
        candidates.append((found["divergence"], name, student, keep))
        print(
            f"{name:40s} KL {found['divergence']:.4f}, agreement {found['agreement']:.2f} on {HELD} held out",
            flush=True,
        )

    consider("calibrated", calibrated)
    for way in WAYS:
        if not result(way, arguments.folder).exists():
            continue
        student = sp.load(result(way, arguments.folder))
        for share in (0.25, 0.5, 0.75, 1.0):
            consider(f"{way}, host {share:g} of the way", between(student, host, share))
    _, name, student, _ = min(candidates, key=lambda found: found[0])
    recalls = layer_recalls(student, [batch for batch, _ in choosing][:4])
    consider(f"{name}, budgets by layer", student, allocate(recalls, AIM))

    evaluation = list(open_images(assets() / "imagenet-eval.tar", transform, num_classes=1000))
    row, logits = evaluate(calibrated, evaluation, DENSE, None, None)
    rows.append({"set": "evaluation", "way": "dense", "keep": 1.0} | figures_of(row))
    _, name, student, keep = min(candidates, key=lambda found: found[0])
    for rate in KEEPS:
        budget = keep if rate == AIM else rate
        found = measure(student, evaluation, logits, budget)
        rows.append({"set": "evaluation", "way": name, "keep": rate} | found)
        print(f"{name}: keep {rate:g} top-1 {found['top1']:.2f} (dense {row.top1:.2f})", flush=True)
        write_csv(rows, RESULTS / "elastic.csv")


if __name__ == "__main__":
    main()
