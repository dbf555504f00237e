"""What the page's server says no with."""

from __future__ import annotations

from sparsifiner.errors import SparsifinerError


class Refusal(SparsifinerError):
    """A request that cannot be answered: why, in one line for the reader, and the HTTP status that says so."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
