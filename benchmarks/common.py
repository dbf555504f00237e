"""What the benchmarks share."""

from __future__ import annotations

import csv
import os
from pathlib import Path
from typing import Any

from sparsifiner.files import replacing
from sparsifiner.inspect.machine import environment

__all__ = ["RESULTS", "assets", "environment", "write_csv"]

RESULTS = Path(__file__).parent / "results"


def assets() -> Path:
    """The folder with the real weights and images (see CONTRIBUTING)."""
    beside = Path(__file__).resolve().parents[2] / "shared" / "assets"
    folder = Path(os.environ.get("SPARSIFINER_ASSETS", beside))
    if not (folder / "deit_tiny_patch16_224.safetensors").is_file():
        raise SystemExit("set SPARSIFINER_ASSETS to the folder with the DeiT-Tiny weights and the ImageNet images")
    return folder


def write_csv(rows: list[dict[str, Any]], path: Path) -> None:
    """Rows with the machine they were measured on; numbers to five places."""
    with replacing(path) as temporary, temporary.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0], *environment()], lineterminator="\n")
        writer.writeheader()
        writer.writerows(
            {key: round(v, 5) if isinstance(v, float) else v for key, v in (row | environment()).items()}
            for row in rows
        )
