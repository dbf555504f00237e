"""Whether sparse attention pays: measured once per shape on the machine at hand, for ``backend="auto"``.

A measurement and not a model, because the crossover depends on the instruction set, the caches, the threads and on how
good this machine's dense attention is.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Hashable

REPEATS = 3

_log = logging.getLogger(__name__)
_decisions: dict[Hashable, Decision] = {}


@dataclasses.dataclass(frozen=True)
class Decision:
    """The least of a few times of each, in milliseconds."""

    sparse: float
    dense: float

    @property
    def pays(self) -> bool:
        """Whether the sparse form is at least as fast."""
        return self.sparse <= self.dense


def known(shape: Hashable) -> Decision | None:
    """What was measured for a shape, if anything was."""
    return _decisions.get(shape)


def decide(shape: Hashable, sparse: Callable[[], object], dense: Callable[[], object]) -> Decision:
    """Measures both, by turns, and remembers the outcome for as long as the process lives."""
    best = [float("inf"), float("inf")]
    for repeat in range(REPEATS + 1):
        for i, run in enumerate((sparse, dense)):
            start = time.perf_counter()
            run()
            if repeat:  # the first of each warms caches and thread pools
                best[i] = min(best[i], 1000 * (time.perf_counter() - start))
    decision = _decisions[shape] = Decision(*best)
    _log.info("%s: sparse %.3f ms, dense %.3f ms: %s", shape, *best, "sparse" if decision.pays else "dense")
    return decision


def forget() -> None:
    """Measures anew from now on: after a change of threads, say."""
    _decisions.clear()
