"""Which models of timm and of transformers can be converted: every family of both registries is tried.

Of each kind of model one of random weights and of two layers is made and tried (`CHECKS`), or it is refused and says
why. Which models are of one kind, their modules and parameters tell. No weights are fetched. Writes
results/models.csv and docs/models.md; about half an hour of a core.

    python benchmarks/models.py [--only vit_] [--compile-every 8]
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import logging
import re
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor, nn

import sparsifiner as sp
from common import RESULTS, write_csv
from sparsifiner.convert import find_part, path_of
from sparsifiner.errors import UnsupportedModelError, one_line
from sparsifiner.files import replacing
from sparsifiner.hosts.huggingface import MEMBERS

DOCS = Path(__file__).parents[1] / "docs"
DEPTH, IMAGES = 2, 2
# Families of timm whose models are of transformers' kind: of each, all kinds are tried, of all others one model.
FAMILIES = ("vision_transformer", "eva", "deit", "beit", "naflexvit", "vision_transformer_hybrid")


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model to be tried: its library, family and name, and how it is made, in small where that can be."""

    library: str
    family: str
    name: str
    make: Callable[[], nn.Module]
    alike: int = 1


# Subjects


def timm_subjects(only: str = "") -> Iterator[Subject]:
    """One model for each kind, the smallest; kinds are told apart on the meta device."""
    kinds: dict[Any, tuple[int, Subject]] = {}
    for name in timm.list_models(f"*{only}*"):
        family = timm.models._registry._model_entrypoints[name].__module__.rpartition(".")[2]
        kind, size = _kind_of_timm(name) if family in FAMILIES else (None, 0)
        least, known = kinds.get((family, kind), (size, Subject("timm", family, name, nn.Identity, alike=0)))
        alike = known.alike + 1
        if size < least or not known.alike:
            known = Subject("timm", family, name, lambda name=name: _small_timm(name))
        kinds[family, kind] = min(size, least), dataclasses.replace(known, alike=alike)
    yield from (subject for _, subject in kinds.values())


def _small_timm(name: str) -> nn.Module:
    """With two layers, few patches and two heads, where it has arguments for that."""
    patch = next((int(found) for found in re.findall(r"patch(\d+)", name)), 16)
    few: dict[str, Any] = {"depth": DEPTH, "img_size": 8 * patch}
    narrow: dict[str, Any] = few | {"embed_dim": 128, "num_heads": 2}
    attempts: list[dict[str, Any]] = [narrow, narrow | {"num_kv_heads": 1}, few, {"depth": DEPTH}, {}]
    for arguments in attempts:
        with contextlib.suppress(Exception):  # whatever a model does with arguments it does not know
            return timm.create_model(name, pretrained=False, num_classes=5, **arguments).eval()
    return timm.create_model(name, pretrained=False).eval()


def _kind_of_timm(name: str) -> tuple[Any, int]:
    """What tells a kind apart, and the number of parameters."""
    with torch.device("meta"):
        model = _small_timm(name)
    modules = frozenset(type(module).__qualname__ for module in model.modules())
    parameters = frozenset(re.sub(r"\d+", "", parameter) for parameter, _ in model.named_parameters())
    kind = modules, parameters, getattr(model, "num_prefix_tokens", None), getattr(model, "global_pool", None)
    return kind, sum(parameter.numel() for parameter in model.parameters())


# Registers of transformers with models that take images.
REGISTERS = (
    "MODEL",
    "MODEL_FOR_BACKBONE",
    "MODEL_FOR_IMAGE_CLASSIFICATION",
    "MODEL_FOR_DEPTH_ESTIMATION",
    "MODEL_FOR_OBJECT_DETECTION",
    "MODEL_FOR_SEMANTIC_SEGMENTATION",
    "MODEL_FOR_KEYPOINT_DETECTION",
    "MODEL_FOR_MASK_GENERATION",
    "MODEL_FOR_UNIVERSAL_SEGMENTATION",
    "MODEL_FOR_IMAGE_MATTING",
    "MODEL_FOR_MASKED_IMAGE_MODELING",
    "MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION",
    "MODEL_FOR_ZERO_SHOT_OBJECT_DETECTION",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT",
    "MODEL_FOR_VIDEO_CLASSIFICATION",
)


def huggingface_subjects(only: str = "") -> Iterator[Subject]:
    """Every class in a register of models that take images, once; those that are encoders first."""
    yield from sorted(_registered(only), key=lambda subject: subject.name not in MEMBERS)


def _registered(only: str) -> Iterator[Subject]:
    import transformers
    from transformers.models.auto import modeling_auto

    seen: set[str] = set()
    for register in REGISTERS:
        for family, names in getattr(modeling_auto, f"{register}_MAPPING_NAMES", {}).items():
            for name in [names] if isinstance(names, str) else names:
                kind: Any = getattr(transformers, name, None) if only.lower() in name.lower() else None
                with contextlib.suppress(Exception):  # stand-ins for what another package is needed for
                    if name in seen or not {"image", "video"} & set(_modalities(kind)):
                        kind = None
                if kind is None:
                    continue
                seen.add(name)
                make = lambda kind=kind: _small_model(kind)  # noqa: E731
                yield Subject("transformers", family, name, make)


def _modalities(model: Any) -> tuple[str, ...]:
    found = getattr(model, "input_modalities", None) or ()
    found = (found,) if isinstance(found, str) else tuple(found)
    return (*found, "image") if getattr(model, "main_input_name", None) == "pixel_values" else found


# What a config says of width and size, and what it says in small, where it says so.
SMALL = {"hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 96, "mlp_ratio": 2, "vocab_size": 1000}
SMALL |= {"num_frames": 8, "frames_per_clip": 8, "pred_num_hidden_layers": 1}  # of clips


def _small_model(kind: Any) -> nn.Module:
    """Of two layers, and narrow where it can be made so."""
    with contextlib.suppress(Exception):  # some say of two parts what does not go together then
        return kind(_small_config(kind.config_class, **SMALL)).eval()
    return kind(_small_config(kind.config_class)).eval()


def _small_config(kind: Any, **smaller: int) -> Any:
    """A config of its defaults, with two layers; a model's parts too."""
    config = kind()
    parts = [config, *(getattr(config, name, None) for name in ("vision_config", "text_config", "backbone_config"))]
    for part in parts:
        for name in ("num_hidden_layers", "num_layers", "encoder_layers", "decoder_layers"):
            if isinstance(getattr(part, name, None), int):
                with contextlib.suppress(Exception):  # some are made of others
                    setattr(part, name, DEPTH)
        if getattr(part, "global_attn_indexes", None):
            part.global_attn_indexes = [DEPTH - 1]
        if hasattr(part, "stage_names") and isinstance(getattr(part, "num_hidden_layers", None), int):
            part.stage_names = ["stem", *(f"stage{number + 1}" for number in range(DEPTH))]
            part.out_features = [part.stage_names[-1]]  # a backbone gives what its last layer does
        for name, value in smaller.items():
            if isinstance(getattr(part, name, None), int):
                setattr(part, name, min(value, getattr(part, name)))
        for side in ("image_size", "crop_size"):
            size, patch = getattr(part, side, None), getattr(part, "patch_size", None)
            if smaller and isinstance(size, int) and isinstance(patch, int):
                setattr(part, side, min(size, 8 * patch))
    return config


# Checks, each of one model


@dataclasses.dataclass
class Trial:
    """What the checks share: a dense model, images, a sparse copy of it, what the dense one gives."""

    model: nn.Module
    images: Tensor
    student: nn.Module
    expected: dict[str, Tensor]

    def run(self, model: nn.Module) -> dict[str, Tensor]:
        """All tensors that a model returns, by name."""
        return _flat(model(self.images))

    def sparse(self, **changes: Any) -> nn.Module:
        """The sparse copy, with its settings changed."""
        sp.reconfigure(self.student, **({"keep": 0.25, "backend": "auto"} | changes))
        return self.student


def _flat(output: Any) -> dict[str, Tensor]:
    if isinstance(output, Tensor):
        return {"": output}
    items = output.items() if hasattr(output, "items") else enumerate(output or ())
    return {f"{name}.{key}": value for name, part in items for key, value in _flat(part).items()}


def _same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return list(one) == list(other) and all(torch.equal(one[name], other[name]) for name in one)


def _near(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    distances = [(one[name] - other[name]).norm() / other[name].norm().clamp(min=1e-6) for name in one]
    return list(one) == list(other) and max(map(float, distances)) < 1e-3


@torch.no_grad()
def keeps_all(trial: Trial) -> bool:
    """With keep=1.0 the model is the host, bit for bit."""
    return _same(trial.run(trial.sparse(keep=1.0)), trial.expected)


@torch.no_grad()
def is_dense_inside(trial: Trial) -> bool:
    """In dense_mode too, however little is kept."""
    student = trial.sparse()
    with sp.dense_mode(student):
        return _same(trial.run(student), trial.expected)


@torch.no_grad()
def restores(trial: Trial) -> bool:
    """Restored it is the host, with its state dict and bit for bit."""
    dense = sp.restore(trial.sparse())
    return _same(trial.run(dense), trial.expected) and _same(dense.state_dict(), trial.model.state_dict())


@torch.no_grad()
def is_sparse(trial: Trial) -> bool:
    """With keep=0.25 it is finite, and something else."""
    found = trial.run(trial.sparse())
    return all(bool(x.isfinite().all()) for x in found.values()) and not _same(found, trial.expected)


@torch.no_grad()
def agrees(trial: Trial) -> bool:
    """The kernels compute what the reference does."""
    return _near(trial.run(trial.sparse()), trial.run(trial.sparse(backend="reference")))


@torch.no_grad()
def comes_back(trial: Trial) -> bool:
    """Saved and loaded it is the same."""
    student = trial.sparse()
    with tempfile.TemporaryDirectory() as folder:
        sp.save(student, path := Path(folder) / "student.safetensors")
        return _same(trial.run(sp.load(path, model=trial.model)), trial.run(student))


def counts(trial: Trial) -> bool:
    """Its multiply-adds can be counted, and are fewer."""
    count = sp.count_flops(trial.sparse())
    return 0 < count.attention < count.dense_attention < count.dense_total


def learns(trial: Trial) -> bool:
    """Gradients flow: as far as they do in the host."""
    with_gradient = []
    for model in (trial.model, trial.sparse()):
        model.zero_grad()
        torch.stack([x.square().sum() for x in trial.run(model).values() if x.is_floating_point()]).sum().backward()
        with_gradient.append({name for name, p in model.named_parameters() if p.grad is not None})
        model.zero_grad()
    return bool(with_gradient[0]) and with_gradient[0] <= with_gradient[1]


@torch.no_grad()
def compiles(trial: Trial) -> bool:
    """torch.compile makes one graph of it."""
    torch.compiler.reset()
    student = trial.sparse()
    compiled = torch.compile(student, backend="aot_eager", fullgraph=not path_of(student))
    return _near(_flat(compiled(trial.images)), trial.run(student))


CHECKS = (keeps_all, is_dense_inside, restores, is_sparse, agrees, comes_back, counts, learns)


# What comes of it


def tried(subject: Subject, forms: tuple[str, ...] = ("cells", "learned"), compiled: bool = False) -> dict[str, Any]:
    """One row: it works, is refused, or fails, and at which check."""
    row: dict[str, Any] = {"library": subject.library, "family": subject.family, "model": subject.name}
    row |= {"alike": subject.alike, "class": "", "part": "", "tokens": "", "outcome": "failed", "why": ""}
    try:
        with torch.device("meta"):
            outline = subject.make()
        row["class"] = type(outline).__name__
        found = find_part(outline)
    except UnsupportedModelError as error:
        why = str(error).removeprefix(f"{row['class']} cannot be converted: ").partition(" (supported: ")[0]
        return row | {"outcome": "refused", "why": why}
    except Exception as error:  # a registry has models that only weights or another package make
        return row | {"outcome": "not made", "why": one_line(f"{type(error).__name__}: {error}", 120)}
    grid = found.host.grid(found.module)
    row |= {"part": found.path, "tokens": grid.num_tokens, "why": type(found.module).__name__}
    if found.path and row["why"] in KNOWN_TO_WORK:
        return row | {"outcome": "works"}
    for form in forms:
        if failed := _failure(subject, found.path, form, compiled):
            return row | {"why": f"{form}: {failed}"}
    KNOWN_TO_WORK.add(row["why"])
    return row | {"outcome": "works"}


# Classes of encoders that have been tried: inside a larger model they are not tried again.
KNOWN_TO_WORK: set[str] = set()


def _failure(subject: Subject, path: str, form: str, compiled: bool) -> str | None:
    """Which check fails, if any does."""
    check: Callable[[Trial], bool] | None = None
    try:
        trial = _trial(subject, path, form)
        for check in (*CHECKS, *((compiles,) if compiled else ())):
            if not check(trial):
                return check.__name__
    except Exception as error:  # that is what is looked for
        return one_line(f"{check.__name__ if check else 'making it'}: {type(error).__name__}: {error}", 160)
    return None


def _trial(subject: Subject, path: str, form: str) -> Trial:
    """Of a larger model the encoder in it, which takes images alone; timm's features-only nets take them whole."""
    torch.manual_seed(0)
    model = subject.make().get_submodule(path).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # no zeros and no ones: every weight must be in its place
            deviation = 0.2 if parameter.ndim < 2 else min(0.3, max(1, parameter[:1].numel()) ** -0.5)
            parameter.copy_((parameter if parameter.ndim < 2 else 0) + deviation * torch.randn_like(parameter))
    host = find_part(model).host
    images = torch.randn(IMAGES, *host.input_shape(model))
    student = sp.sparsify(model, sp.suggest_config(model, 0.25, pattern=form))
    with torch.no_grad():
        if form == "learned":
            sp.calibrate(student, images)
        return Trial(model, images, student, _flat(model(images)))


# The page

HEAD = """# Models

Made by `benchmarks/models.py`, which makes one model of each kind in both libraries' registries, with two layers and
random weights, and tries on it: `keep=1.0` and `dense_mode` are the host bit for bit, so is what `restore` gives;
`keep=0.25` is what the reference computes, in cells and with predictors; `save` and `load`, `count_flops`, gradients;
and of every {every}th, that `torch.compile` makes one graph of it. Or the model is refused, and says why.
Of a larger model the encoder in it is tried, once for each class of encoder.
`sparsifiner info NAME` says of one model what would be converted and how much that can gain.

"""


def page(rows: list[dict[str, Any]], every: int) -> str:
    """docs/models.md."""
    lines = [HEAD.format(every=every)]
    outcomes = ("works", "refused", "failed", "not made")
    lines.append("| library | works | refused | failed | not made without more |\n|---|---:|---:|---:|---:|\n")
    for library in ("timm", "transformers"):
        numbers = [sum(r["library"] == library and r["outcome"] == o for r in rows) for o in outcomes]
        lines.append(f"| {library} | {' | '.join(map(str, numbers))} |\n")
    for outcome, title in (
        ("works", "Converted"),
        ("failed", "Failed"),
        ("refused", "Refused"),
        ("not made", "Not made"),
    ):
        chosen = [row for row in rows if row["outcome"] == outcome]
        if not chosen:
            continue
        lines.append(f"\n## {title}\n\n")
        lines += _works(chosen) if outcome == "works" else _by_reason(chosen)
    return "".join(lines)


def _works(rows: list[dict[str, Any]]) -> Iterator[str]:
    yield "| model | kinds alike | class | what is converted | tokens, made small |\n|---|---:|---|---|---:|\n"
    for row in rows:
        part = f"its `{row['part']}`, a {row['why']}" if row["part"] else "itself"
        yield f"| {row['model']} | {row['alike']} | {row['class']} | {part} | {row['tokens']} |\n"


def _by_reason(rows: list[dict[str, Any]]) -> Iterator[str]:
    found: dict[str, list[str]] = {}
    for row in rows:
        found.setdefault(row["why"], []).append(row["model"])
    yield "| why | models |\n|---|---|\n"
    for why, names in sorted(found.items(), key=lambda item: -len(item[1])):
        yield f"| {why.replace('|', chr(92) + '|')} | {', '.join(names)} |\n"


def main() -> None:
    """Tries all, or those whose name has something in it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="models whose name has this in it; nothing is written then")
    parser.add_argument("--compile-every", type=int, default=8, help="torch.compile is tried on one model in so many")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    rows: list[dict[str, Any]] = []
    for subjects in (timm_subjects(arguments.only), huggingface_subjects(arguments.only)):
        for subject in subjects:
            with contextlib.redirect_stdout(io.StringIO()):
                rows.append(tried(subject, compiled=len(rows) % arguments.compile_every == 0))
            row = rows[-1]
            print(f"{row['outcome']:8} {row['family']:28} {row['model']:44} {row['why'][:100]}", flush=True)
    rows.sort(key=lambda row: (row["library"], row["outcome"] != "works", row["family"], row["model"]))
    if not arguments.only:
        write_csv(rows, RESULTS / "models.csv")
        with replacing(DOCS / "models.md") as temporary:
            temporary.write_text(page(rows, arguments.compile_every))
    failed = sum(row["outcome"] == "failed" for row in rows)
    print(
        {
            outcome: sum(row["outcome"] == outcome for row in rows)
            for outcome in ("works", "refused", "failed", "not made")
        }
    )
    raise SystemExit(failed > 0)


if __name__ == "__main__":
    main()
