"""Options and output that several verbs share."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparsifiner import config
from sparsifiner.errors import ConfigError
from sparsifiner.sides import spelled

if TYPE_CHECKING:
    from torch import Tensor, nn

    from sparsifiner.config import SparseConfig, TokenConfig
    from sparsifiner.data.images import ImageLoader
    from sparsifiner.inspect.journal import Journal
    from sparsifiner.inspect.tuning import TuningReport

CHECKPOINT = "A file written by `convert`, `calibrate` or `train`, or a folder of a run."
DATA = "A folder or a .tar of class folders, wds/SHARDS (WebDataset tars on disk), or hfds/NAME (Hugging Face)."

ModelName = Annotated[str | None, typer.Option("--model", help="A timm model name.")]
Weights = Annotated[
    str | None,
    typer.Option(help="Weights of --model: a .safetensors or official .pth file, 'hub' for timm's own, or 'random'."),
]
ImageSize = Annotated[int | None, typer.Option("--image-size", help="Make --model at this image size.")]
Keep = Annotated[str, typer.Option(help="Share of keys kept, in (0, 1]; or one per layer: 0.5,0.25,...")]
LandmarkCount = Annotated[
    int | None, typer.Option("--n-down", help="Landmarks of the low-rank attention; chosen for the grid if not given.")
]
Tau = Annotated[
    float | None,
    typer.Option(help="Coefficients up to this count as zero in the selection; 1 / n-down if not given."),
]
BasisThreshold = Annotated[
    float | None,
    typer.Option(help="Basis entries up to this count as zero in the selection; 2 / tokens if not given."),
]
Tile = Annotated[
    str | None,
    typer.Option(
        help="Share lists in tiles of the patch grid, such as 2x2, or of clips 2x4x4; 'none' for a list per query; "
        "or one per layer: none,4x4,..."
    ),
]
Pattern = Annotated[
    str | None,
    typer.Option(help="How keys are chosen: learned, cells, window, axial, strided, bigbird; or linformer."),
]
Cells = Annotated[
    str | None,
    typer.Option(
        help="For pattern cells: patches in a cell, finest level first: 2x2,4x4 rows x columns; of clips 1x2x2,2x4x4."
    ),
]
Breadth = Annotated[
    float | None,
    typer.Option(help="For pattern cells: times the keys of opened cells that those opened a level coarser hold: 3."),
]
Tolerance = Annotated[
    float | None,
    typer.Option(
        help="Of cells: open only those whose error is estimated larger; --keep is then the most. 0 for none."
    ),
]
TokenMethod = Annotated[str, typer.Option(help="How the tokens to keep are chosen: evit or dynamicvit.")]
TokenFuse = Annotated[bool, typer.Option("--token-fuse", help="EViT: the dropped tokens live on in one.")]
TokenFuseOfficial = Annotated[
    bool,
    typer.Option(
        "--token-fuse-official",
        help="EViT: as --token-fuse, but a token that was fused earlier is ranked as a patch, as in EViT's own code.",
    ),
]
Limit = Annotated[int | None, typer.Option("--limit", help="Use a random sample of this many images.")]
Seed = Annotated[int, typer.Option(help="Seed of the sample.")]
Preprocess = Annotated[
    str,
    typer.Option(help="'model' resizes and crops as the model expects; 'crop' only crops resized images."),
]
ClassMap = Annotated[
    Path | None, typer.Option(help="Text file of class folder names, one a line, in the model's order.")
]
Split = Annotated[str, typer.Option(help="Split of a Hugging Face dataset.")]
BatchSize = Annotated[int, typer.Option(min=1, help="Images per batch.")]
Workers = Annotated[int, typer.Option(min=0, help="Processes that decode images beside the model.")]
SkipUnreadable = Annotated[bool, typer.Option("--skip-unreadable", help="Pass over broken images and count them.")]
Tune = Annotated[
    bool,
    typer.Option("--tune", help="Give each layer the form that is fastest here: per query, in tiles or dense."),
]
Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads; all cores if not given.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print figures as JSON.")]


def use_threads(threads: int | None) -> None:
    """Sets torch's thread count if one was asked for."""
    if threads is not None:
        import torch

        torch.set_num_threads(threads)


def parse_keep(text: str) -> float | tuple[float, ...]:
    """``0.25`` or one value per layer, ``0.5,0.25,...``."""
    values = parse_numbers(text, "--keep")
    return values[0] if len(values) == 1 else values


def parse_numbers(text: str, option: str) -> tuple[float, ...]:
    """Numbers between commas."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"{option}: expected numbers between commas, got {text!r}") from None


def parse_tile(text: str) -> config.Tile:
    """``2x7``: rows by columns; ``none`` for a list per query."""
    return config.parse_tile(text, "--tile")


def given_form(tile: str | None, cells: str | None, breadth: float | None, tolerance: float | None) -> dict[str, Any]:
    """What --tile, --cells, --breadth and --tolerance say, those that were given."""
    found = {} if tile is None else {"tile": config.parse_tiles(tile, "--tile")}
    sizes = None if cells is None else config.parse_cells(cells, "--cells")
    return found | given(cells=sizes, breadth=breadth, tolerance=tolerance)


def parse_tokens(keep: float | None, method: str, fuse: bool = False, official: bool = False) -> TokenConfig | None:
    """What --token-keep, --token-method and --token-fuse(-official) say; keeping all is not dropping any."""
    from sparsifiner.config import TokenConfig

    return None if keep is None or keep == 1 else TokenConfig(keep, method, fuse="official" if official else fuse)


def host_model(name: str | None, weights: str | None, image_size: int | None) -> nn.Module:
    """The dense host that --model, --weights and --image-size ask for; random weights only where that is said."""
    from sparsifiner.models import create_host

    if name is None:
        raise ConfigError("no model: give --model NAME (and --weights), or a checkpoint where the verb takes one")
    if weights is None:
        raise ConfigError(
            f"--model {name} without --weights: give a file of weights, 'hub' for timm's own, or 'random' if that is "
            "meant"
        )
    return create_host(name, weights, **({} if image_size is None else {"img_size": image_size}))


def given(**settings: Any) -> dict[str, Any]:
    """Only the settings that were asked for; the others are suggested for the model."""
    return {name: value for name, value in settings.items() if value is not None}


def noise(student: nn.Module, batch: int) -> Tensor:
    """Images or clips of nothing, as a converted model takes them: for what does not depend on what they show."""
    import torch

    from sparsifiner.convert import conversion_of

    dtype = next(weight.dtype for weight in student.parameters() if weight.is_floating_point())
    return torch.randn(batch, *conversion_of(student).host.input_shape(student), dtype=dtype)


def loader(
    model: nn.Module,
    data: str,
    *,
    preprocess: str,
    labels: bool = True,
    class_map: Any = None,
    **options: Any,
) -> ImageLoader:
    """Images for a model, preprocessed as it expects."""
    from sparsifiner.convert import host_of
    from sparsifiner.data.images import open_images, preprocessing

    images = open_images(
        data,
        preprocessing(model, preprocess),  # pyright: ignore[reportArgumentType]
        num_classes=host_of(model).num_classes(model) or None if labels else None,
        class_map=class_map,
        **options,
    )
    warn_if_fewer(data, images.num_images, options.get("limit"))
    return images


def warn_if_fewer(data: str, found: int, wanted: int | None) -> None:
    """Says that there are not as many images as were asked for, or are usual."""
    if wanted is not None and found < wanted:
        typer.echo(f"{data} holds {found} images, fewer than the {wanted} wanted: all are used", err=True)


def say_random(model: str) -> None:
    """Of verbs that need no more of a model than its shape."""
    typer.echo(f"{model} has random weights here", err=True)


def names_of(checkpoints: Sequence[Path]) -> list[str]:
    """Short names that tell checkpoints apart: a run's folder, or a file; whole paths where those are not enough."""
    short = []
    for path in checkpoints:
        if path.name == "student.safetensors" and path.parent.name:
            path = path.parent
        short.append(path.stem if path.suffix == ".safetensors" else path.name)
    return short if len(set(short)) == len(short) else [str(path) for path in checkpoints]


def journal(
    out: Path | None, checkpoint: Path, data: str, images: ImageLoader, choice: dict[str, Any]
) -> Journal | None:
    """Where a long evaluation notes what it has found, ``out/measured.jsonl``; None without ``out``.

    What was found with other weights, images, options, threads or another version is not taken for this.
    """
    if out is None:
        return None
    import hashlib

    import torch

    import sparsifiner
    from sparsifiner.checkpoint import locate
    from sparsifiner.inspect.journal import Journal

    out.mkdir(parents=True, exist_ok=True)
    weights = hashlib.sha256(locate(checkpoint).read_bytes()).hexdigest()
    source = Path(data)
    state = [source.stat().st_size, source.stat().st_mtime_ns] if source.is_file() else []
    about = {"weights": weights, "data": data, "state": state, "images": images.num_images, **choice}
    about |= {"threads": torch.get_num_threads(), "version": sparsifiner.__version__}
    return Journal(out / "measured.jsonl", about)


def print_json(content: Any) -> None:
    """Figures for programs: one JSON document on standard output."""
    typer.echo(json.dumps(content, indent=2))


def describe_form(found: SparseConfig) -> str:
    """One line on how a model that opens cells does it."""
    keep = ", ".join(f"{rate:g}" for rate in (found.keep if isinstance(found.keep, Sequence) else [found.keep]))
    shared = "each query opens its own"
    if found.tiles:
        shared = f"tiles of {' and '.join(map(spelled, found.tiles))} queries open the same"
    if len(layers := config.name_tile(found.tile).split(",")) > 1:
        shared += f", by layer: {' '.join(layers)}"
    levels = ", ".join(map(spelled, found.cells))
    refined = f", breadth {found.breadth:g}" if len(found.cells) > 1 else ""
    refined += f", where the error is over {found.tolerance:g}" if found.tolerance else ""
    dense = f"; dense layers: {', '.join(map(str, found.dense))}" if found.dense else ""
    return f"keep {keep}: cells of {levels} patches{refined}; {shared}{dense}"


def say_skipped(images: ImageLoader) -> None:
    """Counts and names unreadable images that were passed over."""
    for name, reason in images.skipped:
        typer.echo(f"skipped {name}: {reason}", err=True)
    if images.skipped:
        typer.echo(f"skipped {len(images.skipped)} of {images.num_images} images", err=True)


def say_where_dense_is_faster(timing: TuningReport, already: Sequence[int] = ()) -> None:
    """One line if sparse attention does not pay somewhere here; layers that are ``already`` dense go without saying."""
    slower = set(timing.dense) - set(already)
    if slower:
        typer.echo(
            f"dense attention is as fast or faster here in {len(slower)} of {len(timing.layers)} layers "
            f"({timing.conditions}): sparsifiner.tune, or --tune of convert, calibrate and train, gives each layer the "
            "form that is fastest",
            err=True,
        )


def print_table(table: Any) -> None:
    """A rich table on standard output, as wide as it needs where that is not a terminal."""
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console = Console(width=400)  # a table takes no more of it than it needs
    console.print(table)
