"""Attaching observers to layers for as long as a block runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator

from sparsifiner.nn.attention import Observation, SparseAttention


@contextlib.contextmanager
def observing(layers: Iterable[SparseAttention], observer: Callable[[Observation], None]) -> Iterator[None]:
    """Within it, ``observer`` is shown every forward pass of the layers."""
    layers = list(layers)
    for layer in layers:
        layer.observers.append(observer)
    try:
        yield
    finally:
        for layer in layers:
            layer.observers.remove(observer)
