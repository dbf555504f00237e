"""Measurements in a CSV, row by row, so that what was stopped goes on and what is known is not measured again."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from sparsifiner.files import replacing


class Table:
    """Rows of a CSV, found by the columns that name them."""

    NAMES = ("size", "form", "training", "keep", "scenes")

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[dict[str, Any]] = []
        if path.exists():
            with path.open(newline="") as file:
                self.rows = list(csv.DictReader(file))

    def find(self, row: dict[str, Any]) -> dict[str, Any] | None:
        """The row of the same name, if there is one."""
        return next((one for one in self.rows if self._named(one) == self._named(row)), None)

    def put(self, row: dict[str, Any]) -> None:
        """Adds a row, in the place of one of the same name, and writes the file."""
        rounded = {key: round(value, 5) if isinstance(value, float) else value for key, value in row.items()}
        self.rows = [one for one in self.rows if self._named(one) != self._named(row)] + [rounded]
        self.rows.sort(key=lambda one: int(one["tokens"]))  # stable: within a size as they were measured
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(self.path) as temporary, temporary.open("w", newline="") as file:
            columns = list(dict.fromkeys(column for one in self.rows for column in one))
            writer = csv.DictWriter(file, columns, lineterminator="\n")
            writer.writeheader()
            writer.writerows(self.rows)

    def _named(self, row: dict[str, Any]) -> tuple[str, ...]:
        return tuple(str(row.get(name)) for name in self.NAMES)
