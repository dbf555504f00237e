"""The paper's tables remade: its numbers, ours by formula, and what was measured, never one in the place of another."""

from __future__ import annotations

import csv
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from sparsifiner.config import TokenConfig
from sparsifiner.files import replacing
from sparsifiner.inspect import compare
from sparsifiner.report.paper import DEIT_S, TITLES, PaperRow
from sparsifiner.report.plots import paper_trade_off


@dataclasses.dataclass(frozen=True)
class Measured:
    """What a model at hand does in the settings of the tables.

    Attributes:
        model: its name.
        images: how many it was measured on.
        rows: by the index of a row of the tables; a setting that it cannot run is missing.
        dense: the model itself.
    """

    model: str
    images: int
    rows: dict[int, compare.Row]
    dense: compare.Row


def measure_rows(
    student: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    rows: Sequence[PaperRow],
    progress: Callable[[str, int], Callable[[int], None]] | None = None,
) -> Measured:
    """Runs a converted model in every setting of the tables that needs no other weights.

    Each setting is run once, however many rows share it. DynamicViT's rows are left out unless the model has its
    networks. Linformer's row is the model's own low-rank attention.

    Args:
        student: a converted, calibrated model.
        batches: ``(images, labels)``; gone through once per setting.
        rows: of the tables.
        progress: as in `sparsifiner.inspect.compare.compare`.
    """
    from sparsifiner.convert import config_of

    own = config_of(student).tokens
    done: dict[tuple, compare.Row] = {}

    def run(form: compare.Form, logits: Tensor | None) -> tuple[compare.Row, Tensor]:
        return compare.evaluate(student, batches, form, None, logits, progress(form.name, 0) if progress else None)

    dense, logits = run(compare.DENSE, None)
    found: dict[int, compare.Row] = {}
    for number, row in enumerate(rows):
        method = "dynamicvit" if row.method == "DynamicViT" else "evit"
        if row.token_keep < 1 and method == "dynamicvit" and (own is None or own.method != method):
            continue
        key = (row.token_keep, row.keep, method if row.token_keep < 1 else "")
        if key == (1, 1, ""):
            done[key] = dense
        if key not in done:
            tokens = None if row.token_keep == 1 else TokenConfig(row.token_keep, method)
            changes: dict[str, Any] = {"tokens": tokens}
            if row.keep is None:
                changes |= {"pattern": "linformer", "tile": None}
            else:
                changes |= {"keep": row.keep}
            name = f"{row.method}, tokens {row.token_keep:g}, keep {row.keep}"
            done[key], _ = run(compare.Form(name, changes, needs_keep=False), logits)
        found[number] = done[key]
    name = (getattr(student, "pretrained_cfg", None) or {}).get("architecture") or type(student).__name__
    return Measured(name, dense.images, found, dense)


def records(rows: Sequence[PaperRow], measured: Measured | None = None) -> list[dict[str, Any]]:
    """All figures, for JSON and CSV; those that were measured begin with ``measured``."""
    result = []
    for number, row in enumerate(rows):
        record = row.to_dict()
        if measured is not None:
            seen = measured.rows.get(number)
            record |= {"measured_model": measured.model, "measured_images": measured.images}
            for field in ("top1", "agreement", "attention_macs", "total_macs", "milliseconds"):
                record[f"measured_{field}"] = None if seen is None else getattr(seen, field)
            record["measured_dense_top1"] = measured.dense.top1
        result.append(record)
    return result


def _columns(table: int, measured: Measured | None) -> list[str]:
    titles = ["model", "method", "tokens", "keys", "paper M", "formula M", "difference", "paper top-1"]
    if table == 3:
        titles += ["paper overall G", "formula overall G", "with projections G"]
    if measured is not None:
        titles += [f"{measured.model}: top-1", "dense", "agreement", "attention M", "model M"]
    return titles


def _cells(row: PaperRow, seen: compare.Row | None, measured: Measured | None) -> list[str]:
    cells = [row.model, row.method, f"{row.token_keep:g}", "low rank" if row.keep is None else f"{row.keep:g}"]
    cells += [f"{row.paper:.1f}", f"{row.formula:.1f}", f"{row.difference:+.1%}", f"{row.paper_top1:.2f}"]
    if row.table == 3:
        cells += [f"{row.paper_overall:.2f}", f"{row.overall:.2f}", f"{row.whole:.2f}"]
    if measured is None:
        return cells
    if seen is None:
        return [*cells, "", "", "", "", ""]
    macs = [None if x is None else x / 1e6 for x in (seen.attention_macs, seen.total_macs)]
    return [
        *cells,
        "" if seen.top1 is None else f"{seen.top1:.2f}",
        "" if measured.dense.top1 is None else f"{measured.dense.top1:.2f}",
        f"{seen.agreement:.1f}",
        *("" if x is None else f"{x:,.1f}" for x in macs),
    ]


def terminal(rows: Sequence[PaperRow], measured: Measured | None = None) -> list[Any]:
    """A rich table for each of the paper's."""
    from rich.table import Table

    result = []
    for number, title in TITLES.items():
        table = Table(title=f"Table {number}: {title}")
        for column, name in enumerate(_columns(number, measured)):
            table.add_column(name, justify="left" if column < 2 else "right")
        for index, row in enumerate(rows):
            if row.table == number:
                table.add_row(*_cells(row, measured.rows.get(index) if measured else None, measured))
        result.append(table)
    return result


def claim(rows: Sequence[PaperRow]) -> str:
    """The paper's claim for both sparsities together, against the counts."""
    dense = next(row for row in rows if row.backbone is DEIT_S and row.setting == "dense")
    parts = []
    for token_keep in (0.7, 0.5):
        both = next(r for r in rows if r.backbone is DEIT_S and (r.token_keep, r.keep) == (token_keep, 0.25))
        changes = [f"{1 - own / whole:.0%}" for own, whole in (
            (both.formula, dense.formula), (both.overall, dense.overall), (both.whole, dense.whole)
        )]  # fmt: skip
        parts.append(
            f"EViT {token_keep:g} with keep 0.25 saves {changes[0]} of the attention, {changes[1]} of attention and "
            f"feed-forward parts together, {changes[2]} with the projections too"
        )
    return (
        'The paper says that both sparsities together reduce "ViT FLOPs by over 60 %". By formula, on DeiT-S: '
        + "; ".join(parts)
        + ". So it holds for the attention, and not for the whole model."
    )


def markdown(rows: Sequence[PaperRow], measured: Measured | None = None) -> str:
    """For documents."""
    lines = []
    for number, title in TITLES.items():
        columns = _columns(number, measured)
        lines += [f"### Table {number}: {title}", "", "| " + " | ".join(columns) + " |"]
        lines.append("|---|---|" + "---:|" * (len(columns) - 2))
        for index, row in enumerate(rows):
            if row.table == number:
                cells = _cells(row, measured.rows.get(index) if measured else None, measured)
                lines.append("| " + " | ".join(cells) + " |")
        lines.append("")
    notes = [
        claim(rows),
        "",
        "M: million multiply-adds of attention core and predictor, for one image. Overall: with the",
    ]
    notes[-1] += " feed-forward parts, as the paper counts."
    if measured is not None:
        notes[-1] += (
            f" The last five columns are measured, on {measured.images} images, with {measured.model}: another model "
            "than the paper's, unless it says so."
        )
    return "\n".join([*lines, *notes]) + "\n"


def write(rows: Sequence[PaperRow], measured: Measured | None, folder: Path) -> None:
    """``tables.md``, ``tables.csv`` and ``tables.png``."""
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(folder / "tables.md") as path:
        path.write_text(markdown(rows, measured))
    table = records(rows, measured)
    with replacing(folder / "tables.csv") as path, path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(table[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(table)
    paper_trade_off(rows, measured, folder / "tables.png")
