"""What long measurements have found so far, in a file, so that one that was stopped goes on where it was."""

from __future__ import annotations

import contextlib
import hashlib
import json
from pathlib import Path
from typing import Any

from sparsifiner.files import parse_json


class Journal:
    """Findings by key, one JSON object a line, written as they are found.

    Findings of other circumstances (another model, other images, another version) may be in the same file: they are
    kept, and not taken for these.

    Args:
        path: the file; made when the first finding is.
        about: what the findings hang on beside their key.
    """

    def __init__(self, path: Path, about: dict[str, Any]) -> None:
        self.path = path
        self.about = hashlib.sha256(json.dumps(about, sort_keys=True, default=str).encode()).hexdigest()[:16]
        self.found: dict[str, dict[str, Any]] = {}
        text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
        self._cut = bool(text) and not text.endswith("\n")
        for line in text.splitlines():
            with contextlib.suppress(ValueError):  # cut off when the last run ended, or damaged
                entry = parse_json(line)
                whole = isinstance(entry, dict) and isinstance(entry.get("key"), str)
                if whole and entry.get("about") == self.about and isinstance(entry.get("found"), dict):
                    self.found[entry["key"]] = entry["found"]

    def get(self, key: str) -> dict[str, Any] | None:
        """What was found, or None."""
        return self.found.get(key)

    def put(self, key: str, found: dict[str, Any]) -> None:
        """Adds a finding."""
        self.found[key] = found
        with self.path.open("a") as file:
            line = json.dumps({"about": self.about, "key": key, "found": found})
            file.write(("\n" if self._cut else "") + line + "\n")
        self._cut = False
