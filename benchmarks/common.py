"""What the benchmarks share."""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path
from typing import Any

from sparsifiner.files import replacing
from sparsifiner.inspect.machine import environment, machine, machine_name

__all__ = ["RESULTS", "assets", "environment", "machine_results", "read_csv", "write_csv"]

RESULTS = Path(__file__).parent / "results"  # for what depends on no machine; times go to `machine_results()`


def assets() -> Path:
    """The folder with the real weights and images (see CONTRIBUTING)."""
    beside = Path(__file__).resolve().parents[2] / "shared" / "assets"
    folder = Path(os.environ.get("SPARSIFINER_ASSETS", beside))
    if not (folder / "deit_tiny_patch16_224.safetensors").is_file():
        raise SystemExit("set SPARSIFINER_ASSETS to the folder with the DeiT-Tiny weights and the ImageNet images")
    return folder


def machine_results() -> Path:
    """The folder for what is measured on this machine, in which ``machine.json`` says what it is."""
    folder = RESULTS / machine_name()
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(folder / "machine.json") as path:
        path.write_text(json.dumps(machine(), indent=2) + "\n")
    return folder


def write_csv(rows: list[dict[str, Any]], path: Path) -> None:
    """Rows with the machine they were measured on, unless they say so themselves; numbers to five places."""
    table = [environment() | row for row in rows]
    columns = list(dict.fromkeys([*rows[0], *(column for row in table for column in row)]))
    with replacing(path) as temporary, temporary.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(
            {key: round(value, 5) if isinstance(value, float) else value for key, value in row.items()} for row in table
        )


def read_csv(path: Path) -> list[dict[str, Any]]:
    """What `write_csv` wrote; nothing if it has not yet."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))
