"""The paper's tables remade: its numbers, ours by formula, and what was measured, never one in the place of another."""

from __future__ import annotations

import csv
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from sparsifiner.config import SparseConfig, TokenConfig
from sparsifiner.convert import config_of, conversion_of
from sparsifiner.files import replacing
from sparsifiner.inspect import compare
from sparsifiner.report.paper import DEIT_S, DEIT_T_384, TITLES, PaperRow
from sparsifiner.report.plots import paper_trade_off


@dataclasses.dataclass(frozen=True)
class Measured:
    """What a model at hand does in the settings of the tables.

    Attributes:
        name: what the tables call it.
        model: which model it is.
        tokens: how many it has before any are dropped.
        landmarks: of its low-rank attention.
        rows: by the index of a row of the tables; a setting that it is not for is missing.
        dense: the same weights with all keys and tokens.
    """

    name: str
    model: str
    tokens: int
    landmarks: int
    rows: dict[int, compare.Row]
    dense: compare.Row

    def __str__(self) -> str:
        top1 = "" if self.dense.top1 is None else f", top-1 {self.dense.top1:.2f} with all keys and tokens"
        shape = f"{self.tokens} tokens, {self.landmarks} landmarks"
        return f"{self.name}: {self.model}, {shape}, {self.dense.images:,} images{top1}"


def measure_rows(student: nn.Module, name: str, evaluation: compare.Evaluation, rows: Sequence[PaperRow]) -> Measured:
    """Runs a converted model in every setting of the tables that it is for, each once however many rows share it.

    A model of as many tokens as the paper's at high resolution is for the third table, others for the other tables.
    Of these, one that was trained to drop tokens is for the rows that drop them its way, and a Linformer for
    Linformer's; any other is for all rows but DynamicViT's, which need networks of its own. The paper does not say how
    the Sparsifiner of its first table drops tokens where it is not with EViT: taken to be DynamicViT's way.

    Args:
        student: a converted, calibrated model.
        name: what to call it.
        evaluation: of that model.
        rows: of the tables.
    """
    config, tokens = config_of(student), conversion_of(student).grid.num_tokens
    dense = evaluation.row(compare.DENSE)
    found: dict[int, compare.Row] = {}
    for number, row in enumerate(rows):
        form = None if (row.table == 3) != (tokens >= DEIT_T_384.tokens) else _form(row, config)
        if form is not None:
            found[number] = evaluation.row(form)
    model = (getattr(student, "pretrained_cfg", None) or {}).get("architecture") or type(student).__name__
    return Measured(name, model, tokens, config.n_down, found, dense)


def _form(row: PaperRow, config: SparseConfig) -> compare.Form | None:
    """A row's setting for a model that was made with ``config``; None if it is not for the row."""
    own = None if config.tokens is None else config.tokens.method
    method = None if row.token_keep == 1 else "evit" if "EViT" in row.method else "dynamicvit"
    if config.pattern == "linformer" and row.keep is not None:
        return None
    if method != own and (own is not None or method == "dynamicvit"):
        return None
    if (row.token_keep, row.keep) == (1, 1):
        return compare.DENSE
    tokens = None if method is None else TokenConfig(row.token_keep, method)
    if row.keep is None:
        return compare.Form("low rank", {"pattern": "linformer", "tile": None, "tokens": tokens}, needs_keep=False)
    parts = [f"keep {row.keep:g}", *([] if method is None else [f"{method} {row.token_keep:g}"])]
    return compare.Form(", ".join(parts), {"keep": row.keep, "tokens": tokens}, needs_keep=False)


def records(rows: Sequence[PaperRow], measured: Sequence[Measured] = ()) -> list[dict[str, Any]]:
    """All figures, for JSON and CSV: a row of the paper for each model that was measured in it, or alone.

    Figures that were measured begin with ``measured``.
    """
    fields = ("images", "top1", "agreement", "divergence", "attention_macs", "total_macs")
    result = []
    for number, row in enumerate(rows):
        seen = [model for model in measured if number in model.rows]
        for model in seen:
            about = {"measured_with": model.name, "measured_model": model.model, "measured_tokens": model.tokens}
            about |= {f"measured_{field}": getattr(model.rows[number], field) for field in fields}
            result.append(row.to_dict() | about | {"measured_dense_top1": model.dense.top1})
        if not seen:
            result.append(row.to_dict())
    return result


def _columns(table: int, measured: Sequence[Measured]) -> list[str]:
    titles = ["model", "method", "tokens", "keys", "paper M", "formula M", "difference", "paper top-1"]
    if table == 3:
        titles += ["paper overall G", "formula overall G", "with projections G"]
    for model in measured:
        titles += [f"{model.name}: M", f"{model.name}: top-1"]
    return titles


def _cells(number: int, row: PaperRow, measured: Sequence[Measured]) -> list[str]:
    cells = [row.model, row.method, f"{row.token_keep:g}", "low rank" if row.keep is None else f"{row.keep:g}"]
    cells += [f"{row.paper:.1f}", f"{row.formula:.1f}", _percent(row.difference), f"{row.paper_top1:.2f}"]
    if row.table == 3:
        cells += [f"{row.paper_overall:.2f}", f"{row.overall:.2f}", f"{row.whole:.2f}"]
    for model in measured:
        seen = model.rows.get(number)
        macs, top1 = (None, None) if seen is None else (seen.attention_macs, seen.top1)
        cells += ["" if macs is None else f"{macs / 1e6:,.1f}", "" if top1 is None else f"{top1:.2f}"]
    return cells


def _percent(difference: float) -> str:
    return "0.0%" if abs(difference) < 0.0005 else f"{difference:+.1%}"


def _tables(rows: Sequence[PaperRow], measured: Sequence[Measured]) -> list[tuple[str, list[str], list[list[str]]]]:
    """Title, names of columns, and cells of each of the paper's tables, with the models that were measured in it."""
    result = []
    for table, title in TITLES.items():
        own = [(number, row) for number, row in enumerate(rows) if row.table == table]
        models = [model for model in measured if any(number in model.rows for number, _ in own)]
        cells = [_cells(number, row, models) for number, row in own]
        result.append((f"Table {table}: {title}", _columns(table, models), cells))
    return result


def terminal(rows: Sequence[PaperRow], measured: Sequence[Measured] = ()) -> list[Any]:
    """A rich table for each of the paper's."""
    from rich.table import Table

    result = []
    for title, columns, lines in _tables(rows, measured):
        table = Table(title=title)
        for column, name in enumerate(columns):
            table.add_column(name, justify="left" if column < 2 else "right")
        for cells in lines:
            table.add_row(*cells)
        result.append(table)
    return result


def claim(rows: Sequence[PaperRow], measured: Sequence[Measured] = ()) -> str:
    """The paper's claim for both sparsities together, against the counts and what was measured."""
    dense = next(row for row in rows if row.backbone is DEIT_S and row.setting == "dense")
    parts = []
    seen: dict[str, list[str]] = {}  # models by what they save
    for number, row in enumerate(rows):
        if row.method != "Sparsifiner + EViT":
            continue
        setting = f"EViT {row.token_keep:g} with keep {row.keep:g}"
        counts = (row.formula, dense.formula), (row.overall, dense.overall), (row.whole, dense.whole)
        saved = [f"{1 - own / whole:.0%}" for own, whole in counts]
        parts.append(
            f"{setting} saves {saved[0]} of the attention, {saved[1]} of attention and feed-forward parts together, "
            f"{saved[2]} with the projections too"
        )
        for model in measured:
            own, whole = model.rows.get(number), model.dense
            if own is not None and own.attention_macs and own.total_macs and whole.attention_macs and whole.total_macs:
                attention, total = own.attention_macs / whole.attention_macs, own.total_macs / whole.total_macs
                seen.setdefault(f"{setting} {1 - attention:.0%} and {1 - total:.0%}", []).append(model.name)
    text = (
        'The paper says that both sparsities together reduce "ViT FLOPs by over 60 %". By formula, on DeiT-S: '
        + "; ".join(parts)
        + ". So it holds for the attention, and not for the whole model."
    )
    if seen:
        found = "; ".join(f"{saved} ({', '.join(names)})" for saved, names in seen.items())
        text += f" Measured, of the attention and of the whole model with all its parts: {found}."
    return text


def dynamicvit(rows: Sequence[PaperRow]) -> str:
    """DynamicViT's rows as it runs, dropping tokens before a block's attention; the paper counts as if after."""
    parts = []
    for row in rows:
        if row.method == "DynamicViT":
            count = row.backbone.attention(1.0, TokenConfig(row.token_keep, "dynamicvit"))
            parts.append(f"{count:.1f} M at {row.token_keep:g} on {row.model}")
    return (
        "DynamicViT drops tokens before a block's attention; the paper counts it like EViT, which drops them after, "
        f"and so do the rows above. Counted as it runs: {', '.join(parts)}."
    )


def notes(rows: Sequence[PaperRow], measured: Sequence[Measured] = ()) -> list[str]:
    """What a reader of the tables should know."""
    found = [claim(rows, measured), dynamicvit(rows)]
    if measured:
        found.append(
            "Columns with a name are measured, with the model of that name in the row's setting: other models than the "
            "paper's, unless they say so. Linformer's row has their own landmarks; the paper's has 68. "
            "Sparsifiner with fewer tokens is taken to drop them as DynamicViT does: the paper does not say. Measured "
            "multiply-adds are counted on images, residual included where the model has it."
        )
        found.append("\n".join(f"- {model}" for model in measured))
    found.append(
        "M: million multiply-adds of attention core and predictor, for one image. Overall: with the feed-forward "
        "parts, as the paper counts."
    )
    return found


def markdown(rows: Sequence[PaperRow], measured: Sequence[Measured] = ()) -> str:
    """For documents."""
    lines = []
    for title, columns, cells in _tables(rows, measured):
        lines += [f"### {title}", "", "| " + " | ".join(columns) + " |", "|---|---|" + "---:|" * (len(columns) - 2)]
        lines += ["| " + " | ".join(line) + " |" for line in cells] + [""]
    return "\n".join(lines) + "\n" + "\n\n".join(notes(rows, measured)) + "\n"


def write(rows: Sequence[PaperRow], measured: Sequence[Measured], folder: Path) -> None:
    """``tables.md``, ``tables.csv`` and ``tables.png``."""
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(folder / "tables.md") as path:
        path.write_text(markdown(rows, measured))
    table = records(rows, measured)
    with replacing(folder / "tables.csv") as path, path.open("w", newline="") as file:
        writer = csv.DictWriter(file, max(map(list, table), key=len), lineterminator="\n")
        writer.writeheader()
        writer.writerows(table)
    paper_trade_off(rows, measured, folder / "tables.png")
