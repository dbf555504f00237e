"""Segmentation with a Vision Transformer: a dense model, made sparse, distilled and measured.

    python examples/segmentation/segment.py train --data camvid.tar       # the head, on a frozen backbone
    python examples/segmentation/segment.py evaluate --data camvid.tar    # dense and sparse models: mIoU and time
    python examples/segmentation/segment.py distil --data camvid.tar      # then evaluate again
    python examples/segmentation/segment.py pictures --data camvid.tar

--data is a folder or a tar with the parts train/ and val/: images, and PNGs whose pixels are class numbers, beside them
or in folders images/ and maps/ (--classes and --void say which numbers count). --weights is timm's hub, or a file.
Everything goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw
from segmenter import (
    Head,
    Score,
    cache_features,
    load_head,
    predict_maps,
    prediction_size,
    predictor,
    read,
    save_head,
    train_head,
)
from torch import Tensor, nn
from torch.nn import functional

import sparsifiner as sp
from results import Table
from sparsifiner.config import SparseConfig
from sparsifiner.data.scenes import IGNORED, Scenes
from sparsifiner.distillation.data import TrainingSet
from sparsifiner.distillation.loop import TrainingInterrupted
from sparsifiner.errors import ConfigError, DataError
from sparsifiner.files import replacing
from sparsifiner.inspect.machine import environment
from sparsifiner.inspect.speed import problem_from, take_turns
from sparsifiner.models import create_host

# What is compared: settings in the place of those that suggest_config has for the grid.
FORMS: dict[str, dict[str, Any]] = {
    "cells": {},
    "finer cells": {"cells": ((1, 2), (2, 4), (4, 8)), "breadth": 2.5},
    "finest cells": {"cells": ((1, 2), (2, 4)), "breadth": 3.0},
    "cells per query": {"tile": None, "cells": ((2, 2),)},
    "predictors": {"pattern": "learned", "tile": (4, 4)},
    "predictors per query": {"pattern": "learned"},
}
CALIBRATION_SCENES = 32
# Sky, building, pole, road, pavement, tree, sign, fence, car, pedestrian, bicyclist, as CamVid is usually drawn.
COLOURS = (
    *((128, 128, 128), (128, 0, 0), (192, 192, 128), (128, 64, 128), (60, 40, 222), (128, 128, 0)),
    *((192, 128, 128), (64, 64, 128), (64, 0, 128), (64, 64, 0), (0, 128, 192)),
)
PICTURE = (240, 180)  # width and height of each in the figure


@dataclasses.dataclass
class Work:
    """What all commands work on."""

    options: argparse.Namespace
    backbone: Any

    @property
    def folder(self) -> Path:
        """Where everything of this size is kept."""
        return Path(self.options.out) / self.options.size

    def scenes(self, part: str, **settings: Any) -> Scenes:
        """Those to train on, or those to evaluate on."""
        o = self.options
        return Scenes(o.data, self.backbone, o.classes, void=o.void, part=part, limit=o.limit, **settings)

    def head(self) -> Head:
        """The head that `train` made for this backbone."""
        return load_head(self.folder / f"head-{digest(self.backbone)}.safetensors", self.width, self.options.classes)

    @property
    def width(self) -> int:
        """Features of each patch."""
        return self.backbone.embed_dim

    def distilled(self, form: str) -> Path:
        """Folder of a distillation."""
        return self.folder / f"distilled-{form.replace(' ', '-')}-keep-{self.options.keep:g}"


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def digest(*modules: nn.Module) -> str:
    """Of all weights, short: what is kept in files belongs to these and no others."""
    found = hashlib.sha256()
    for module in modules:
        for name, tensor in module.state_dict().items():
            found.update(name.encode())
            found.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy())
    return found.hexdigest()[:10]


def train(work: Work) -> None:
    o = work.options
    path = work.folder / f"head-{digest(work.backbone)}.safetensors"
    if path.exists() and not o.again:
        print(f"{path} is there already: --again makes it anew")
        return
    scenes = work.scenes(o.train_part, map_size=prediction_size(work.backbone))
    names = hashlib.sha256("\n".join(scenes.name(number) for number in range(len(scenes))).encode()).hexdigest()[:10]
    kept = work.folder / f"features-{digest(work.backbone)}-{names}-{o.classes}-{o.void}"
    start = time.perf_counter()
    paths = cache_features(work.backbone, scenes, kept, say)
    middle = time.perf_counter()
    head = train_head(paths, o.classes, o.epochs, say)
    save_head(head, path)
    print(f"{path}: {len(scenes)} scenes, features {middle - start:.0f} s, head {time.perf_counter() - middle:.0f} s")


def config_of_form(work: Work, form: str) -> SparseConfig:
    """Settings of a form, without levels whose cells are larger than the grid."""
    rows, columns = work.backbone.patch_embed.grid_size
    changes = dict(FORMS[form])
    if "cells" in changes:
        changes["cells"] = tuple(cell for cell in changes["cells"] if cell[0] <= rows and cell[1] <= columns)
    return sp.suggest_config(work.backbone, work.options.keep, **changes)


def make_students(work: Work, wanted: Iterable[str]) -> dict[tuple[str, str], tuple[SparseConfig, nn.Module]]:
    """Sparse models by form and training; the distilled ones that are there."""
    found: dict[tuple[str, str], tuple[SparseConfig, nn.Module]] = {}
    for form in wanted:
        config = config_of_form(work, form)
        student = sp.sparsify(work.backbone, config)
        # The same weights in memory, not copies: where they lie changes times by up to a tenth.
        student.load_state_dict(work.backbone.state_dict(), strict=False, assign=True)
        found[form, "none"] = config, student
        path = work.distilled(form) / "student.safetensors"
        if path.exists():
            trained = sp.load(path)
            found[form, "distilled"] = sp.config_of(trained), trained
    return found


def settings_of(config: SparseConfig) -> str:
    """What differs from the defaults, in JSON."""
    usual = dataclasses.asdict(SparseConfig(config.keep))
    return json.dumps({key: value for key, value in dataclasses.asdict(config).items() if value != usual[key]})


def evaluate(work: Work) -> None:
    o = work.options
    head, scenes = work.head(), work.scenes(o.val_part)
    table = Table(Path(o.csv or Path(o.out) / "results.csv"))
    names = {"size": o.size, "scenes": len(scenes)}
    waiting = {}
    for (form, training), (config, student) in make_students(work, o.forms).items():
        about = names | {"form": form, "training": training, "keep": o.keep, "settings": settings_of(config)}
        about |= {"weights": digest(student if training == "distilled" else work.backbone, head)}
        known = table.find(about)
        if o.again or known is None or any(known[key] != about[key] for key in ("settings", "weights")):
            waiting[form, training] = about, student
    if waiting:
        measure(work, head, scenes, table, names, waiting)
    for row in table.rows:
        if row["size"] == o.size:
            print(
                f"{row['form']:22s} {row['training']:10s} keep {row['keep']}: mIoU {float(row['miou']):.2f} "
                f"({float(row['against_dense']):+.2f}), {float(row['ms']):.0f} ms, {float(row['speed_up']):.2f}x of "
                f"{float(row['ceiling']):.2f}x at most"
            )


def measure(work: Work, head: Head, scenes: Scenes, table: Table, names: dict[str, Any], waiting: dict) -> None:
    """Dense and the forms that wait: times by turns in one process, then every scene; a row as soon as it is known."""
    o = work.options
    for (form, training), (_, student) in waiting.items():
        if training == "none" and sp.config_of(student).asks_predictor:
            calibrate(work, student, form)
    tokens = 1 + work.backbone.patch_embed.num_patches
    times, ceiling = whole_times(work, head, read(scenes, 0)[0][None], {key: one for key, (_, one) in waiting.items()})
    truth = [read(scenes, number)[1] for number in range(len(scenes))]
    about = names | {"form": "dense", "training": "none", "keep": 1.0, "settings": "", "weights": ""}
    candidates = {("dense", "none"): (about, work.backbone)} | waiting
    dense, reference = [], Score.of(o.classes)
    for (form, training), (about, model) in candidates.items():
        say(f"{form}, {training}")
        maps = predict_maps(model, head, scenes, say)
        found = score(maps, truth, o.classes)
        if form == "dense":
            dense, reference = maps, found
        same = sum(int((one == two).sum()) for one, two in zip(maps, dense, strict=True))
        timing, usual = times[form, training], times["dense", "none"]
        row = about | {"tokens": tokens, "miou": found.miou, "against_dense": found.miou - reference.miou}
        row |= {"accuracy": found.accuracy, "agreement": 100 * same / sum(one.numel() for one in dense)}
        row |= {"ms": timing.minimum, "median_ms": timing.p50, "speed_up": usual.minimum / timing.minimum}
        row |= {"speed_up_median": usual.p50 / timing.p50, "ceiling": ceiling}
        table.put(row | {"ious": " ".join(f"{iou:.1f}" for iou in found.ious)} | environment())


def whole_times(
    work: Work, head: Head, image: Tensor, students: dict[tuple[str, str], nn.Module]
) -> tuple[dict[tuple[str, str], Any], float]:
    """Backbone and head of each model on one image, and what is the most that sparse attention can give (Amdahl)."""
    predict = predictor(head)
    plain = sp.sparsify(work.backbone, sp.suggest_config(work.backbone, work.options.keep))
    problem = problem_from(plain, image, (0,)).to(image.dtype)

    def run(model: nn.Module) -> Callable[[], object]:
        return lambda: predict(model, image)

    candidates: dict[str, Callable[[], object]] = {"dense/none": run(work.backbone)}
    candidates |= {"/".join(key): run(model) for key, model in students.items()}
    attention = functional.scaled_dot_product_attention
    candidates["attention"] = lambda: attention(problem.q, problem.k, problem.v, scale=problem.scale)
    with torch.inference_mode():
        times = take_turns(candidates, work.options.seconds)
    layers = len(work.backbone.blocks)
    share = layers * times.pop("attention").minimum / times["dense/none"].minimum
    return {(key.split("/")[0], key.split("/")[1]): timing for key, timing in times.items()}, 1 / (1 - share)


def calibrate(work: Work, student: nn.Module, form: str) -> None:
    """Predictors, on scenes to train on; distilled models come with theirs."""
    scenes = work.scenes(work.options.train_part)
    chosen = range(0, len(scenes), max(1, len(scenes) // CALIBRATION_SCENES))
    say(f"{form}: calibrating on {len(chosen)} scenes")
    sp.calibrate(student, torch.stack([read(scenes, number)[0] for number in chosen]))


def score(maps: list[Tensor], truth: list[Tensor], num_classes: int) -> Score:
    found = Score.of(num_classes)
    for predicted, labels in zip(maps, truth, strict=True):
        found.add(predicted.long(), labels)
    return found


def distil(work: Work) -> None:
    o = work.options
    head = work.head()
    for form in o.forms:
        config = config_of_form(work, form)
        recipe = sp.Recipe.read("large-predictors" if config.asks_predictor else "large-cells").replace(
            keep=o.keep, phase2_epochs=o.epochs, label_weight=o.label_weight, calibration_images=CALIBRATION_SCENES
        )
        scenes = work.scenes(o.train_part, map_size=prediction_size(work.backbone))
        student = sp.sparsify(work.backbone, config)
        say(f"{form}: distilling on {len(scenes)} scenes")
        report = sp.distill(
            student,
            TrainingSet(scenes, recipe, varies=False),
            recipe,
            teacher=work.backbone,
            predict=predictor(head),
            out=work.distilled(form),
            on_log=lambda line: say(" ".join(f"{key} {value:.4g}" for key, value in line.items())),
        )
        print(f"{report.result}: `segment.py evaluate` measures it beside the others")


def pictures(work: Work) -> None:
    """Image, truth, dense, sparse and where these two differ, a row for each of a few scenes."""
    o = work.options
    head, form = work.head(), o.forms[0]
    scenes = work.scenes(o.val_part)
    students = make_students(work, [form])
    training = "distilled" if (form, "distilled") in students else "none"
    student = students[form, training][1]
    if sp.config_of(student).asks_predictor and training == "none":
        calibrate(work, student, form)
    sparse_title = f"{form}{', distilled' if training == 'distilled' else ''}"
    titles = ("image", "truth", "dense", sparse_title, "differences")[2 if o.without_data else 0 :]
    width, height = PICTURE
    canvas = Image.new("RGB", (len(titles) * width, 16 + len(scenes) * height), "white")
    pen = ImageDraw.Draw(canvas)
    for column, title in enumerate(titles):
        pen.text((column * width + 4, 2), title, fill="black")
    maps = [predict_maps(model, head, scenes, say) for model in (work.backbone, student)]
    for row in range(len(scenes)):
        photo, labels = scenes.picture(row), read(scenes, row)[1]
        dense, sparse = maps[0][row].long(), maps[1][row].long()
        changed = Image.fromarray(((dense != sparse) & (labels != IGNORED)).byte().mul(255).numpy())
        under = Image.new("L", photo.size, 235) if o.without_data else photo.convert("L")
        differences = Image.composite(Image.new("RGB", photo.size, "red"), under.convert("RGB"), changed)
        shown = {"image": photo, "truth": paint(labels), "dense": paint(dense), sparse_title: paint(sparse)}
        for column, title in enumerate(titles):
            picture = shown.get(title, differences)
            how = Image.Resampling.BICUBIC if title in ("image", "differences") else Image.Resampling.NEAREST
            canvas.paste(picture.resize(PICTURE, how), (column * width, 16 + row * height))
    path = Path(o.picture or work.folder / "pictures.webp")
    with replacing(path) as temporary:
        canvas.save(temporary, format=path.suffix[1:].upper().replace("JPG", "JPEG"), quality=80)
    print(path)


def paint(labels: Tensor) -> Image.Image:
    """Classes in colours; what is not counted is black."""
    colours = torch.tensor(COLOURS, dtype=torch.uint8)
    painted = colours[labels.clamp(min=0) % len(colours)]
    painted[labels == IGNORED] = 0
    return Image.fromarray(painted.numpy())


def parse_size(text: str) -> tuple[int, int]:
    try:
        height, width = map(int, text.split("x"))
    except ValueError:
        raise ConfigError(f"--size: expected HEIGHTxWIDTH, such as 480x640, got {text!r}") from None
    if height < 1 or width < 1:
        raise ConfigError(f"--size must be positive, got {text!r}")
    return height, width


def parse_forms(text: str) -> list[str]:
    forms = text.split(",")
    if unknown := [form for form in forms if form not in FORMS]:
        raise ConfigError(f"--forms: no form {unknown[0]!r}: choose from {', '.join(FORMS)}, between commas")
    return forms


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--data", required=True, help="folder or .tar of images and class maps")
    shared.add_argument("--model", default="deit_tiny_patch16_224", help="a timm name")
    shared.add_argument("--weights", default="hub", help="a file, 'hub' or 'random'")
    shared.add_argument("--size", default="480x640", help="height x width that images are resized to")
    shared.add_argument("--classes", type=int, default=11, help="numbered from 0")
    shared.add_argument("--void", type=int, default=11, help="number in the maps of what is not counted")
    shared.add_argument("--train-part", default="train", help="folder in --data to learn from")
    shared.add_argument("--val-part", default="val", help="folder in --data to evaluate on")
    shared.add_argument("--limit", type=int, default=None, help="only so many scenes")
    shared.add_argument("--threads", type=int, default=None)
    shared.add_argument("--out", default="segmentation-output", help="folder for all that is made")
    commands = parser.add_subparsers(dest="command", required=True)
    sparse = argparse.ArgumentParser(add_help=False)
    sparse.add_argument("--keep", type=float, default=0.1)

    def add(name: str, run: Callable[[Work], None], help: str, *parents: Any) -> argparse.ArgumentParser:
        command = commands.add_parser(name, parents=[shared, *parents], help=help)
        command.set_defaults(run=run)
        return command

    command = add("train", train, "the head, on features of the frozen backbone")
    command.add_argument("--epochs", type=int, default=12)
    command.add_argument("--again", action="store_true", help="though there is one")
    command = add("evaluate", evaluate, "mIoU and time of dense and sparse models", sparse)
    command.add_argument("--forms", default=",".join(FORMS), help=f"of {', '.join(FORMS)}, between commas")
    command.add_argument("--csv", default=None, help="file of results; in --out if not given")
    command.add_argument("--seconds", type=float, default=5.0, help="of timing for each model")
    command.add_argument("--again", action="store_true", help="also what is in the file")
    command = add("distil", distil, "sparse models from their dense self", sparse)
    command.add_argument("--forms", default="cells")
    command.add_argument("--epochs", type=float, default=2.0)
    command.add_argument(
        "--label-weight", type=float, default=0.0, help="of the class maps; 0 learns from the dense alone"
    )
    command = add("pictures", pictures, "image, truth, dense, sparse, differences", sparse)
    command.add_argument("--forms", default="cells", help="one")
    command.add_argument("--picture", default=None, help="file, in --out if not given")
    command.add_argument("--without-data", action="store_true", help="no image and no truth: predictions alone")
    return parser


def main(arguments: list[str] | None = None) -> None:
    options = make_parser().parse_args(arguments)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    if hasattr(options, "forms"):
        options.forms = parse_forms(options.forms)
    if options.command == "pictures" and options.limit is None:
        options.limit = 3
    size = parse_size(options.size)
    backbone: Any = create_host(options.model, options.weights, img_size=size)
    patch = backbone.patch_embed.patch_size
    if size[0] % patch[0] or size[1] % patch[1]:  # timm would cut the rest off, and maps would not fit
        raise ConfigError(f"--size must be a multiple of the patches of {patch[0]} x {patch[1]}, got {options.size}")
    work = Work(options, backbone)
    try:
        work.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"cannot make the folder {work.folder}: {error.strerror}") from None
    options.run(work)


if __name__ == "__main__":
    try:
        main()
    except TrainingInterrupted as error:
        say(str(error))
        sys.exit(error.exit_code)
    except sp.SparsifinerError as error:
        say(f"error: {error}")
        sys.exit(2)
