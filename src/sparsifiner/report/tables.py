"""Comparisons as tables: for the terminal, for Markdown, for CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

from sparsifiner.inspect.compare import Row
from sparsifiner.inspect.gain import Gain

if TYPE_CHECKING:
    from rich.table import Table

TITLES = ("form", "keep", "top-1 %", "agreement %", "KL", "connections", "attention", "model", "ms/image")


def cells(row: Row) -> tuple[str, ...]:
    """A row as text, empty where a figure does not apply."""

    def million(value: float | None) -> str:
        return "" if value is None else f"{value / 1e6:,.2f}"

    return (
        row.form,
        _share(row.keep),
        "" if row.top1 is None else f"{row.top1:.2f}",
        f"{row.agreement:.2f}",
        f"{row.divergence:.4f}",
        "" if row.kept_share is None else f"{row.kept_share:.1%}",
        million(row.attention_macs),
        million(row.total_macs),
        f"{row.milliseconds:.2f}",
    )


def _share(keep: float | list[float] | None) -> str:
    if isinstance(keep, list):
        return f"mean {sum(keep) / len(keep):.3g}"  # a dozen numbers are too many for a cell
    return "" if keep is None else f"{keep:g}"


def comparison(rows: Sequence[Row]) -> Table:
    """For the terminal."""
    from rich.table import Table

    table = Table(title=f"{rows[0].images} images; agreement and KL are to the dense model")
    for index, title in enumerate(TITLES):
        table.add_column(title, justify="left" if index == 0 else "right")
    previous = rows[0].form
    for row in rows:
        if row.form != previous:
            table.add_section()
        previous = row.form
        table.add_row(*cells(row))
    return table


GAIN_TITLES = ("tokens", "dense ms", "sparse ms", "faster", "at most", "attention", "dense %", "sparse %", "images")


def gain_cells(gain: Gain) -> tuple[str, ...]:
    """What was gained at one number of tokens, as text."""

    def percent(value: float | None) -> str:
        return "" if value is None else f"{value:.1f}"

    return (
        f"{gain.tokens:,}",
        f"{gain.dense:.2f}",
        f"{gain.sparse:.2f}",
        f"{gain.speed_up:.2f}x",
        f"{gain.ceiling:.2f}x",
        f"{gain.attention_speed_up:.2f}x",
        percent(gain.dense_top1),
        percent(gain.sparse_top1),
        str(gain.images),
    )


def gain_note(gains: Sequence[Gain]) -> str:
    """What the columns of such a table mean."""
    first = gains[0]
    threads = f"{first.threads} thread" + "s" * (first.threads > 1)
    return (
        f"Time per image, whole model, batch {first.batch}, {threads}, least of many runs by turns. At most: if "
        "attention took no time. Attention: alone. %: right answers."
    )


def growth(gains: Sequence[Gain]) -> Table:
    """Gains by number of tokens, for the terminal."""
    from rich.table import Table

    table = Table()
    for title in GAIN_TITLES:
        table.add_column(title, justify="right")
    for gain in gains:
        table.add_row(*gain_cells(gain))
    return table


def markdown(rows: Sequence[Row]) -> str:
    """For documents."""
    lines = ["| " + " | ".join(TITLES) + " |", "|---|" + "---:|" * (len(TITLES) - 1)]
    lines += ["| " + " | ".join(cells(row)) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def as_csv(rows: Sequence[Row]) -> str:
    """For programs: every figure at full precision."""
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, fieldnames=list(rows[0].to_dict()), lineterminator="\n")
    writer.writeheader()
    writer.writerows(row.to_dict() for row in rows)
    return buffer.getvalue()
