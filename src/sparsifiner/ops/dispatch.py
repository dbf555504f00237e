"""Which backend runs, and why another cannot.

A backend is a module with `can_run`, `select` and `attend` of the same signatures, and perhaps `fused`; adding one
touches this table and its own file.
"""

from __future__ import annotations

from types import ModuleType

from torch import Tensor

from sparsifiner.config import BACKENDS
from sparsifiner.errors import BackendError
from sparsifiner.ops import cpu, eager, reference

_TABLE: dict[str, ModuleType] = {"cpu": cpu, "eager": eager, "reference": reference}
# The order in which "auto" tries them; all compute the same function. The reference is an oracle: it is only run when
# asked for.
_AUTO = ("cpu", "eager")


def reasons(q: Tensor, landmarks: int = 0) -> dict[str, str | None]:
    """For every backend, None if it can run on tensors like ``q``, or one line that says why not."""
    return {name: backend.can_run(q, landmarks) for name, backend in _TABLE.items()}


def resolve(name: str, q: Tensor, landmarks: int = 0) -> ModuleType:
    """The backend of that name, or the first that can run for ``"auto"``."""
    if name not in BACKENDS:
        raise BackendError(f"unknown backend {name!r}: choose one of {', '.join(BACKENDS)}")
    if name != "auto":
        if reason := _TABLE[name].can_run(q, landmarks):
            raise BackendError(f"backend {name!r} cannot run here: {reason}")
        return _TABLE[name]
    for candidate in _AUTO:
        if _TABLE[candidate].can_run(q, landmarks) is None:
            return _TABLE[candidate]
    raise BackendError("no backend can run: " + "; ".join(f"{n}: {r}" for n, r in reasons(q, landmarks).items() if r))
