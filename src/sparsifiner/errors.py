"""What can go wrong, as types a caller can catch.

Every message is one line that says what was wrong, what was expected and what to do. The command
line prints it and exits with code 2.
"""


class SparsifinerError(Exception):
    """The base of all errors this library raises on purpose."""


class ConfigError(SparsifinerError, ValueError):
    """A setting is impossible in itself or for this model."""


class UnsupportedModelError(SparsifinerError, TypeError):
    """A model cannot be converted; the message names the reason and what is supported."""


class BackendError(SparsifinerError, RuntimeError):
    """The backend asked for cannot run here; the message gives its reason."""


class CheckpointError(SparsifinerError, RuntimeError):
    """A file is not what it should be: truncated, foreign, for another host or another size."""


class DataError(SparsifinerError, ValueError):
    """Images or labels are unusable: unreadable, empty, not finite, of the wrong size or class."""


class TrainingError(SparsifinerError, RuntimeError):
    """Training cannot go on: a loss that is not finite, or an interruption; the last checkpoint is whole."""
