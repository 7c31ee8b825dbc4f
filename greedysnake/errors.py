"""Errors that a person can act on.

Every message names the thing, the value found, the value needed and what to change. The command line
prints the message alone; a traceback is kept for mistakes of this package.
"""


def first_line(error: BaseException) -> str:
    """The first line of what an error of another library says, for a message of ours; empty if it says nothing."""
    return (str(error).splitlines() or [""])[0].strip()


class GreedySnakeError(Exception):
    """Base of every error that a user can mend."""


class ConfigError(GreedySnakeError):
    """A setting is wrong; the message lists every wrong setting at once."""


class ModelError(GreedySnakeError):
    """A model folder, config or structure cannot be used."""


class DataError(GreedySnakeError):
    """Training data is missing, empty, or does not fit the model."""


class StorageError(GreedySnakeError):
    """A storage folder is too small, in use, damaged or not writable."""


class StorageInUseError(StorageError):
    """A storage folder is held by another process."""


class MemoryBudgetError(GreedySnakeError):
    """The plan does not fit in the memory that it may use."""


class NonFiniteError(GreedySnakeError):
    """Losses or gradients were not finite for too many steps in a row."""
