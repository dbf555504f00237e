"""Recipe: everything that decides how a model is distilled, in one place. Light: imports no torch.

The defaults are the paper's. Each field is an option of `sparsifiner train` under its own name, and a line of a recipe
file (TOML). Named recipes are the files in ``recipes/``.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
import typing
from pathlib import Path
from typing import Any, Literal

from sparsifiner.config import SparseConfig, TokenConfig, parse_cells, parse_tiles
from sparsifiner.errors import ConfigError, reason_of
from sparsifiner.files import parse_json

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pyright: ignore[reportMissingImports]

FOLDER = Path(__file__).parent / "recipes"


def _option(default: Any, help: str, *, low: float | None = None, high: float | None = None) -> Any:
    return dataclasses.field(default=default, metadata={"help": help, "low": low, "high": high})


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How to distil. See the help text of each field, or `sparsifiner train --help`."""

    # Sparsity
    keep: float = _option(0.25, "Share of keys kept.", low=0, high=1)
    residual: bool = _option(True, "Add back the low-rank estimate of what is dropped; off is the paper's form.")
    n_down: int | None = _option(None, "Landmarks; chosen for the grid if not given.", low=1)
    tau: float | None = _option(None, "Coefficients up to this count as zero; 1 / n-down if not given.", low=0, high=1)
    basis_threshold: float | None = _option(
        None, "Basis entries up to this count as zero; 2 / tokens if not given.", low=0
    )
    tile: str | None = _option(
        None,
        "Share lists in tiles of the grid, such as 2x2; none for a list per query; or one per layer, between commas. "
        "The model's own if not given.",
    )
    pattern: Literal["learned", "cells", "window", "axial", "strided", "bigbird", "linformer"] | None = _option(
        None,
        "How keys are chosen; those after the first two are baselines to compare with. The model's own if not given, "
        "the paper's, learned, where it is made from a dense one.",
    )
    cells: str | None = _option(
        None, "For pattern cells: their sizes, finest level first, such as 2x2,4x4. The model's own if not given."
    )
    breadth: float | None = _option(
        None, "For pattern cells: how many times the keys of opened cells those opened a level coarser hold.", low=1
    )
    tolerance: float | None = _option(
        None, "For pattern cells: open only those whose error is estimated larger; keep is then the most.", low=0
    )
    token_keep: float | None = _option(
        None, "Drop tokens too: the share of the patches that a block keeps.", low=0, high=1
    )
    token_method: Literal["evit", "dynamicvit"] = _option("evit", "How the tokens to keep are chosen.")
    token_fuse: bool = _option(False, "EViT: the dropped tokens live on in one.")
    token_fuse_official: bool = _option(
        False, "EViT: as --token-fuse, but a token that was fused earlier is ranked as a patch, as in EViT's own code."
    )
    elastic: str | None = _option(
        None, "Draw the keep rate of each step of phase 2 from this range, such as 0.05:0.5: one model for all of them."
    )
    straight_through: bool = _option(
        False, "In phase 2, give the predictor a straight-through gradient of which keys are kept."
    )

    # Start
    start: Literal["calibrated", "random", "given"] = _option(
        "calibrated", "Predictors start calibrated, random, or as they are in the model given."
    )
    calibration_images: int = _option(256, "Images to calibrate on at the start.", low=1)

    # Phase 1: the predictors, on the attention loss
    phase1_epochs: float = _option(5, "Epochs of phase 1; 0 leaves it out.", low=0)
    phase1_learning_rate: float = _option(3e-4, "Highest learning rate of phase 1.", low=0)
    phase1_final_learning_rate: float = _option(2e-6, "Learning rate at the end of phase 1.", low=0)
    phase1_warmup_epochs: float = _option(3, "Epochs until the learning rate of phase 1 is reached.", low=0)

    # Phase 2: all weights
    phase2_epochs: float = _option(40, "Epochs of phase 2; 0 leaves it out.", low=0)
    phase2_learning_rate: float = _option(8e-5, "Highest learning rate of phase 2.", low=0)
    phase2_final_learning_rate: float = _option(2e-6, "Learning rate at the end of phase 2.", low=0)
    phase2_warmup_epochs: float = _option(3, "Epochs until the learning rate of phase 2 is reached.", low=0)
    predictor_learning_rate: float = _option(
        1.0, "Learning rate of the predictors in phase 2, relative to the rest.", low=0
    )
    freeze_host: bool = _option(
        False, "In phase 2 too, the model's own weights stay as they are: what is added to it learns, no more."
    )
    scorer_learning_rate: float = _option(
        100.0,
        "Learning rate of DynamicViT's networks in phase 2, relative to the rest; they start from nothing.",
        low=0,
    )
    label_weight: float = _option(1.0, "Weight of the cross-entropy with the labels.", low=0)
    token_weight: float = _option(0.5, "Weight of the squared error of the last tokens.", low=0)
    prediction_weight: float = _option(0.5, "Weight of the divergence of the predictions.", low=0)
    attention_weight: float = _option(0.0, "Weight of the attention loss in phase 2.", low=0)
    ratio_weight: float = _option(
        2.0, "Weight of DynamicViT's loss for keeping more or fewer tokens than asked.", low=0
    )

    # Optimiser (AdamW)
    batch_size: int = _option(168, "Images per process and pass.", low=1)
    accumulate: int = _option(1, "Passes per step.", low=1)
    weight_decay: float = _option(0.05, "L2 on matrices and w_up (Eq. 11), not on norms and biases.", low=0)
    l1: float = _option(0.0, "L1 penalty on w_up, which the paper tried and rejected.", low=0)
    clip: float | None = _option(None, "Clip the norm of the gradients to this.", low=0)
    ema: float | None = _option(None, "Decay of a moving average of the weights, which is then saved.", low=0, high=1)
    autocast: bool = _option(False, "Compute in bfloat16 where that is safe.")

    # Images
    crop: Literal["random", "centre"] = _option("random", "Random resized crops, or the whole centre.")
    smallest_crop: float = _option(0.08, "Least share of an image in a random crop.", low=0, high=1)
    flip: float = _option(0.5, "Probability of mirroring an image.", low=0, high=1)
    auto_augment: str = _option("rand-m9-mstd0.5-inc1", "timm's name of an augmentation policy; empty for none.")
    colour_jitter: float = _option(0.3, "Strength of colour jitter, where there is no policy.", low=0)
    erase: float = _option(0.25, "Probability of random erasing.", low=0, high=1)
    mixup: float = _option(0.8, "Alpha of mixup; 0 for none.", low=0)
    cutmix: float = _option(1.0, "Alpha of cutmix; 0 for none.", low=0)
    label_smoothing: float = _option(0.1, "Share of the labels spread over all classes.", low=0, high=1)
    repeats: int = _option(
        1, "Copies of an image in a batch, each augmented anew (repeated augmentation); epochs stay as long.", low=1
    )
    cache_teacher: bool = _option(
        False, "Keep the teacher's outputs in a file; needs images that do not vary (centre crop, flips at most)."
    )

    # Running
    seed: int = _option(0, "Of everything random.", low=0)
    log_every: int = _option(10, "Steps between lines of the log.", low=1)
    save_every: int = _option(500, "Steps between checkpoints.", low=1)
    keep_last: int = _option(2, "Checkpoints kept beside the best.", low=1)

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            object.__setattr__(self, field.name, _checked(field, getattr(self, field.name)))
        if not 0 < self.keep <= 1:
            raise ConfigError(f"keep must be a share of the keys in (0, 1], got {self.keep!r}")
        self.sparsity()
        if self.elastic is not None:
            self.elastic_range()
        for phase in (1, 2):
            top, end = (getattr(self, f"phase{phase}_{name}learning_rate") for name in ("", "final_"))
            if end > top:
                raise ConfigError(
                    f"phase{phase}_final_learning_rate ({end}) is above phase{phase}_learning_rate ({top})"
                )
        if not self.phase1_epochs and not self.phase2_epochs:
            raise ConfigError("both phases have 0 epochs: nothing to do")
        if self.straight_through and self.attention_weight:
            raise ConfigError("straight_through and attention_weight are two ways to train the predictors: choose one")
        if self.cache_teacher and (reason := self.varies()):
            raise ConfigError(f"cache_teacher needs images that are the same in every epoch, but {reason}")

    def tokens(self) -> TokenConfig | None:
        """Which tokens are dropped."""
        if self.token_keep is None:
            return None
        fuse = "official" if self.token_fuse_official else self.token_fuse
        return TokenConfig(self.token_keep, self.token_method, fuse=fuse)

    def elastic_range(self) -> tuple[float, float] | None:
        """``elastic`` as lowest and highest keep rate."""
        if self.elastic is None:
            return None
        low, _, high = self.elastic.partition(":")
        try:
            ends = float(low), float(high)
        except ValueError:
            raise ConfigError(f"elastic: expected LOW:HIGH, such as 0.05:0.5, got {self.elastic!r}") from None
        if not 0 < ends[0] <= ends[1] < 1:
            raise ConfigError(f"elastic: the keep rates must ascend within (0, 1), got {self.elastic!r}")
        return ends

    def varies(self) -> str | None:
        """Why a training image is not the same in every epoch, or None if it is, but for being mirrored."""
        if self.crop != "centre":
            return "crop is random"
        for name in ("auto_augment", "erase", "mixup", "cutmix"):
            if getattr(self, name):
                return f"{name} is on"
        if self.colour_jitter and not self.auto_augment:
            return "colour_jitter is on"
        return None

    def sparsity(self) -> dict[str, Any]:
        """Settings of `SparseConfig` that are given; the others are the model's, or suggested for it."""
        names = ("n_down", "tau", "basis_threshold", "pattern", "cells", "breadth", "tolerance", "tile")
        chosen = {name: value for name in names if (value := getattr(self, name)) is not None}
        if self.tile is not None:
            chosen["tile"] = parse_tiles(self.tile)
        if self.cells is not None:
            chosen["cells"] = parse_cells(self.cells)
        return chosen | {"tokens": self.tokens(), "residual": self.residual}

    def replace(self, **changes: Any) -> Recipe:
        """A copy with some settings changed, validated anew."""
        _refuse_unknown(changes)
        return dataclasses.replace(self, **changes)

    def to_json(self) -> str:
        """From which `from_json` makes an equal recipe."""
        return json.dumps(dataclasses.asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> Recipe:
        """Reads what `to_json` wrote."""
        try:
            settings = parse_json(text)
        except ValueError as error:
            raise ConfigError(f"not a recipe in JSON: {reason_of(error)}") from None
        if not isinstance(settings, dict):
            raise ConfigError("a recipe in JSON must be an object with a value for each setting")
        _refuse_unknown(settings)
        return cls(**settings)

    @classmethod
    def read(cls, name: str | os.PathLike[str]) -> Recipe:
        """A recipe by name (`names` lists them), or from a TOML file of one's own."""
        path = FOLDER / f"{name}.toml"
        if not path.is_file():
            path = Path(name)
        if not path.is_file():
            raise ConfigError(f"no recipe {str(name)!r}: give a TOML file, or one of {', '.join(names())}")
        try:
            settings = tomllib.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:  # also of bytes that are no text, and of too many digits
            raise ConfigError(f"{path} is not TOML: {reason_of(error)}") from None
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {reason_of(error)}") from None
        _refuse_unknown(settings, f"{path}: ")
        return cls(**settings)


def names() -> list[str]:
    """The recipes that come with the package."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def config_for(recipe: Recipe, model: Any) -> SparseConfig:
    """The settings of the sparse model a recipe asks for: the paper's form, unless it says another."""
    from sparsifiner.convert import suggest_config

    return suggest_config(model, recipe.keep, **({"pattern": "learned"} | recipe.sparsity()))


def _refuse_unknown(settings: dict[str, Any], where: str = "") -> None:
    known = {field.name for field in dataclasses.fields(Recipe)}
    if unknown := sorted(set(settings) - known):
        raise ConfigError(f"{where}unknown setting {unknown[0]!r} of a recipe: choose from {', '.join(sorted(known))}")


def kind_of(field: dataclasses.Field) -> tuple[type | tuple[str, ...], bool]:
    """A field's type, or its choices, and whether it may be None."""
    hint = typing.get_type_hints(Recipe)[field.name]
    optional = type(None) in typing.get_args(hint)
    if optional:
        hint = next(part for part in typing.get_args(hint) if part is not type(None))
    if typing.get_origin(hint) is Literal:
        return typing.get_args(hint), optional
    return hint, optional


def _checked(field: dataclasses.Field, value: Any) -> Any:
    """The value in its field's type and range, or a clear error."""
    kind, optional = kind_of(field)
    if value is None and optional:
        return None
    if isinstance(kind, tuple):
        if value not in kind:
            raise ConfigError(f"{field.name} must be one of {', '.join(kind)}, got {value!r}")
        return value
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value) if abs(value) <= sys.float_info.max else math.inf
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ConfigError(f"{field.name} must be of type {kind.__name__}, got {value!r}")
    low, high = field.metadata["low"], field.metadata["high"]
    if (low is not None and not value >= low) or (high is not None and not value <= high):
        bounds = f"at least {low:g}" + (f" and at most {high:g}" if high is not None else "")
        raise ConfigError(f"{field.name} must be {bounds}, got {value!r}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{field.name} must be a finite number, got {value!r}")
    return value
