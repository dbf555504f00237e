"""Whether sparse attention pays: measured once per layer and shape on the machine at hand, for ``backend="auto"``.

A measurement and not a model, because the crossover depends on the instruction set, the caches, the threads and on how
good this machine's dense attention is; and on how many keys a layer's queries look for, so each layer measures its own.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Hashable

REPEATS = 5
MARGIN = 0.97  # of the dense time: measurements are noisy, and a conversion must not make a model slower

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Decision:
    """The least of a few times of each, in milliseconds."""

    sparse: float
    dense: float

    @property
    def pays(self) -> bool:
        """Whether the sparse form is faster beyond doubt."""
        return self.sparse <= MARGIN * self.dense


class Decisions:
    """What one layer has measured, by shape."""

    def __init__(self) -> None:
        self._made: dict[Hashable, Decision] = {}

    def __len__(self) -> int:
        return len(self._made)

    def known(self, shape: Hashable) -> Decision | None:
        """What was measured for a shape, if anything was."""
        return self._made.get(shape)

    def decide(self, shape: Hashable, sparse: Callable[[], object], dense: Callable[[], object]) -> Decision:
        """Measures both, by turns, and remembers the outcome."""
        best = [float("inf"), float("inf")]
        for repeat in range(REPEATS + 1):
            for i, run in enumerate((sparse, dense)):
                start = time.perf_counter()
                run()
                if repeat:  # the first of each warms caches and thread pools
                    best[i] = min(best[i], 1000 * (time.perf_counter() - start))
        decision = self._made[shape] = Decision(*best)
        _log.info("%s: sparse %.3f ms, dense %.3f ms: %s", shape, *best, "sparse" if decision.pays else "dense")
        return decision
