"""`sparsifiner bench`: is it faster, here, and by how much of what the multiply-adds promise?"""

from __future__ import annotations

import csv
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparsifiner.cli import common
from sparsifiner.config import budget as budget_of
from sparsifiner.errors import ConfigError
from sparsifiner.sides import Sides, short

if TYPE_CHECKING:
    from sparsifiner.inspect.speed import Problem


def bench(
    context: typer.Context,
    everything: Annotated[
        bool,
        typer.Option(
            "--all",
            help="The README's table for this machine, as Markdown: DeiT-Tiny at 1,025 and 4,097 tokens, the attention "
            "alone and the whole model, float32 and bfloat16, as suggested for keep 0.1. Takes up to about three "
            "minutes; what a slow machine has no time for is left out, and named. Only with --threads, --out, --json.",
        ),
    ] = False,
    tokens: Annotated[
        str, typer.Option(help="Sides of square patch grids, comma separated: 14 is 197 tokens with the class token.")
    ] = "14,24,32",
    keep: Annotated[str, typer.Option(help="Shares of keys kept, comma separated.")] = "0.25,0.1,0.05",
    tile: Annotated[
        str, typer.Option(help="Also with lists shared in tiles of this size; 'none' to leave out.")
    ] = "4x4",
    residual: Annotated[
        bool | None,
        typer.Option(
            "--residual/--no-residual", help="Add back the estimate of what is dropped; on where cells are opened only."
        ),
    ] = None,
    pattern: Annotated[
        str | None,
        typer.Option(
            help="Of a whole model: learned, cells, ...; the checkpoint's own, or what is suggested, if not given."
        ),
    ] = None,
    cells: common.Cells = None,
    breadth: common.Breadth = None,
    tolerance: common.Tolerance = None,
    narrow: Annotated[bool, typer.Option("--narrow", help="Also with keys and values held in 16 bits.")] = False,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    batch: Annotated[int, typer.Option(min=1)] = 2,
    heads: Annotated[int, typer.Option(min=1)] = 6,
    head_dim: Annotated[int, typer.Option("--head-dim", min=1, max=256)] = 64,
    n_down: Annotated[int, typer.Option("--n-down", min=1, max=128)] = 32,
    baselines: Annotated[
        bool, typer.Option("--baselines", help="Also the slow ways: naive, dense and mask, gather, flex.")
    ] = False,
    backward: Annotated[bool, typer.Option("--backward", help="Time the backward pass instead.")] = False,
    model: common.ModelName = None,
    checkpoint: Annotated[Path | None, typer.Option(help="Time this model instead of the operator.")] = None,
    image_size: common.ImageSize = None,
    seconds: Annotated[float, typer.Option(min=0.01, help="For each candidate.")] = 0.5,
    threads: common.Threads = None,
    out: Annotated[Path | None, typer.Option(help="Write the figures to this CSV file; of --all, the table.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the speed-ups to this PNG file.")] = None,
    as_json: common.AsJson = False,
) -> None:
    """Times sparse attention against torch's dense attention, by turns in one process.

    The operator on simulated inputs of any size, or with --model or --checkpoint a whole model.

    Example: `sparsifiner bench --all --threads 1`, `sparsifiner bench --tokens 14,32,64 --keep 0.1 --threads 1`, or
    `sparsifiner bench --model deit_tiny_patch16_224 --image-size 512 --pattern cells --cells 2x2,4x4 --keep 0.1`
    """
    import torch

    import sparsifiner as sp

    common.use_threads(threads)
    if everything:
        _refuse_others(context)
        _all(out, as_json)
        return
    kinds = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    if dtype not in kinds:
        raise ConfigError(f"dtype must be float32 or bfloat16, got {dtype!r}")
    keeps = common.parse_numbers(keep, "--keep")
    tiles: list[Sides | None] = [None]
    if tile != "none":
        tiles.append(common.parse_tile(tile))
    form = common.given(pattern=pattern) | common.given_form(None, cells, breadth, tolerance)
    if model is not None or checkpoint is not None:
        student = _student(model, checkpoint, image_size, keeps[0], form)
        images = common.noise(student, batch)
        residual = residual if residual is not None else not sp.config_of(student).asks_predictor
        rows = model_rows(student, images, keeps, tiles, residual, seconds, narrow=narrow)
    elif form:
        raise ConfigError(f"--{next(iter(form))} is of a whole model: give --model or --checkpoint")
    else:
        sides = [int(side) for side in common.parse_numbers(tokens, "--tokens")]
        rows = []
        for side in sides:
            from sparsifiner.inspect.speed import simulate

            problem = simulate(batch, heads, (side, side), head_dim, n_down).to(kinds[dtype])
            found = (
                backward_rows(problem, keeps, tiles, bool(residual), seconds)
                if backward
                else operator_rows(problem, keeps, tiles, bool(residual), seconds, narrow=narrow, baselines=baselines)
            )
            rows += found
            if not as_json:
                _print(found)
        if not as_json:
            typer.echo(crossover(rows))
    if as_json:
        common.print_json(rows)
    elif model is not None or checkpoint is not None:
        _print(rows)
    if out is not None:
        write_csv(rows, out)
    if plot is not None:
        from sparsifiner.report.plots import speed_ups

        speed_ups(rows, plot)


def _refuse_others(context: typer.Context) -> None:
    """An option that --all would take no notice of is an error."""
    for name in context.params:
        given = context.get_parameter_source(name)
        if name not in ("everything", "threads", "out", "as_json") and given is not None and given.name != "DEFAULT":
            raise ConfigError(f"--all measures what the README does: leave out --{name.replace('_', '-')}")


def _all(out: Path | None, as_json: bool) -> None:
    from sparsifiner.files import replacing
    from sparsifiner.inspect.overview import overview
    from sparsifiner.progress import show_progress

    with show_progress() as bars:
        found = overview(progress=bars.start)
    if as_json:
        common.print_json(found.to_dict())
    else:
        typer.echo(found.markdown())
    if out is not None:
        with replacing(out) as path:
            path.write_text(found.markdown() + "\n")


def operator_rows(
    p: Problem,
    keeps: tuple[float, ...],
    tiles: list[Sides | None],
    residual: bool,
    seconds: float,
    *,
    narrow: bool = False,
    baselines: bool = False,
) -> list[dict[str, Any]]:
    """One row per candidate, dense first."""
    import torch
    from torch.nn import functional

    from sparsifiner.inspect import speed

    n = p.q.shape[2]
    runs: dict[str, Any] = {
        "dense (SDPA)": lambda: functional.scaled_dot_product_attention(p.q, p.k, p.v, scale=p.scale)
    }
    settings: dict[str, dict[str, Any]] = {"dense (SDPA)": {}}

    def add(name: str, run: Any, **about: Any) -> None:
        runs[name] = run
        settings[name] = about

    if baselines:
        add("dense, naive", lambda: torch.softmax(p.q @ p.k.mT * p.scale, -1) @ p.v)
    for keep in keeps:
        budget = budget_of(keep, n)
        if baselines:
            add(f"dense + mask, keep {keep:g}", lambda budget=budget: speed.masked_dense(p, budget), keep=keep)
            gather = lambda budget=budget: speed.gathered(p, budget, None, residual, "eager")  # noqa: E731
            add(f"torch gather, keep {keep:g}", gather, keep=keep, residual=residual)
            flex = speed.flex(p, budget)
            if isinstance(flex, str):
                typer.echo(f"FlexAttention cannot run here: {flex}", err=True)
            else:
                add(f"FlexAttention, block mask, keep {keep:g}", flex, keep=keep)
        for tile in tiles:
            for held in (False, True) if narrow else (False,):
                name = f"sparse, keep {keep:g}" + (f", tile {short(tile)}" if tile else "")
                name += ", 16-bit K/V" if held else ""
                about = {"keep": keep, "tile": tile, "residual": residual, "narrow": held}
                add(name, speed.fused(p, budget, tile, residual, held), **about)
    with torch.inference_mode():
        times = speed.take_turns(runs, seconds)
        rows = []
        for name, timing in times.items():
            about = settings[name]
            row = _row(name, p, about, timing, times["dense (SDPA)"])
            if "tile" in about:
                dense, sparse = speed.multiply_adds(p, budget_of(about["keep"], n), about["tile"], residual)
                row["macs_ratio"] = dense / sparse
                row["achieved"] = row["speed_up"] / row["macs_ratio"]
            rows.append(row)
    return rows


def backward_rows(p: Problem, keeps, tiles, residual: bool, seconds: float) -> list[dict[str, Any]]:
    """The backward passes alone."""
    from sparsifiner.inspect import speed

    rows = []
    for keep in keeps:
        for tile in tiles:
            runs = speed.backward_runs(p, budget_of(keep, p.q.shape[2]), tile, residual)
            times = speed.take_turns(runs, seconds)
            about = {"keep": keep, "tile": tile, "residual": residual}
            name = f"backward, keep {keep:g}" + (f", tile {short(tile)}" if tile else "")
            rows.append(_row("backward, dense (SDPA)", p, {}, times["dense"], times["dense"]))
            rows.append(_row(name, p, about, times["sparse"], times["dense"]))
    return rows


def _row(name: str, p: Problem, about: dict[str, Any], timing, dense) -> dict[str, Any]:
    batch, heads, n, head_dim = p.q.shape
    tile = about.get("tile")
    return {
        "name": name,
        "inputs": p.source,
        "n": n,
        "batch": batch,
        "heads": heads,
        "head_dim": head_dim,
        "n_down": p.w_down.shape[1],
        "dtype": str(p.q.dtype).removeprefix("torch."),
        "keep": about.get("keep"),
        "tile": None if tile is None else f"{short(tile)}",
        "residual": about.get("residual"),
        "narrow": about.get("narrow"),
        **dataclasses.asdict(timing),
        "speed_up": dense.minimum / timing.minimum,
        "speed_up_p50": dense.p50 / timing.p50,
        "macs_ratio": None,
        "achieved": None,
    }


def _student(model, checkpoint, image_size, keep: float, form: dict[str, Any]) -> Any:
    """The model that is timed, at the size asked for."""
    import sparsifiner as sp

    if checkpoint is None:
        host = common.host_model(model, "random", image_size)
        common.say_random(model)
        return sp.sparsify(host, sp.suggest_config(host, keep, **form)).eval()
    student: Any = sp.load(checkpoint)
    if image_size:
        student.set_input_size((image_size, image_size))
    sp.reconfigure(student, **form)
    return student


def model_rows(
    student, images, keeps, tiles, residual: bool, seconds: float, *, narrow: bool = False, tuned: bool = False
) -> list[dict[str, Any]]:
    """A whole model in several forms, with the ceiling that Amdahl's law sets; all layers sparse, or where it pays."""
    from sparsifiner.convert import config_of, reconfigure
    from sparsifiner.inspect import speed
    from sparsifiner.inspect.tuning import time_layers

    pattern = config_of(student).pattern
    kind = "sparse" if pattern == "learned" else pattern
    forms = {}
    for keep in keeps:
        for tile in tiles:
            name = f"{kind}, keep {keep:g}" + (f", tile {short(tile)}" if tile else "")
            forms[name] = {"keep": keep, "tile": tile, "residual": residual, "narrow": narrow, "dense": ()}
            if tuned:
                reconfigure(student, **forms[name])
                forms[name]["dense"] = time_layers(student, images).dense
    times = speed.take_turns(speed.model_runs(student, images, forms), seconds, least=3)
    share = speed.core_share(student, images, seconds)
    p = speed.problem_from(student, images[:1], (0,))
    rows = []
    for name, timing in times.items():
        row = _row(f"model, {name}", p, forms.get(name, {}), timing, times["dense"])
        row |= {"batch": len(images), "ceiling": 1 / (1 - share)}
        rows.append(row)
    return rows


def crossover(rows: list[dict[str, Any]]) -> str:
    """For each setting, the fewest tokens of those measured at which sparse is the faster."""
    lines = []
    sparse = [row for row in rows if (row["keep"] is not None and row["tile"] is not None) or "sparse" in row["name"]]
    for name in dict.fromkeys(row["name"] for row in sparse):
        wins = [row["n"] for row in sparse if row["name"] == name and row["speed_up"] >= 1]
        lines.append(f"{name}: faster than dense from {min(wins)} tokens" if wins else f"{name}: slower than dense")
    return "\n".join(lines)


def _print(rows: list[dict[str, Any]]) -> None:
    from rich.table import Table

    first = rows[0]
    import torch

    title = f"{first['n']} tokens, batch {first['batch']}, {first['heads']} heads of {first['head_dim']}, "
    title += f"{first['dtype']}, {torch.get_num_threads()} threads, {first['inputs']} inputs"
    table = Table(title=title)
    for column in ("", "min ms", "p20", "p50", "p80", "speed-up", "multiply-adds saved", "achieved", "ceiling"):
        table.add_column(column, justify="left" if not column else "right")
    for row in rows:
        table.add_row(
            row["name"],
            *(f"{row[field]:.2f}" for field in ("minimum", "p20", "p50", "p80")),
            f"{row['speed_up']:.2f}x",
            f"{row['macs_ratio']:.2f}x" if row["macs_ratio"] else "",
            f"{row['achieved']:.0%}" if row["achieved"] else "",
            f"{row['ceiling']:.2f}x" if row.get("ceiling") else "",
        )
    common.print_table(table)


def write_csv(rows: list[dict[str, Any]], path: Path) -> None:
    """All figures, with machine, versions, threads and load."""
    from sparsifiner.files import replacing
    from sparsifiner.inspect.machine import environment

    about = environment()
    fields = list(dict.fromkeys(name for row in rows for name in row))
    with replacing(path) as temporary, temporary.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*fields, *about], lineterminator="\n")
        writer.writeheader()
        for row in rows:
            rounded = {key: round(value, 5) if isinstance(value, float) else value for key, value in row.items()}
            writer.writerow(about | rounded)
