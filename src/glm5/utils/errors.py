"""Errors that a user can act on. Every one says what is wrong and how to mend it.

The command line prints these as one line and exits with status 2; anything else is a bug and keeps its
traceback. Read next: `glm5.cli.main`.
"""

from __future__ import annotations

import re

_SMALLER = "Use a smaller model, batch (train.micro_batch) or context, or a machine with more memory"


class UserError(Exception):
    """Something that the user can mend: a bad option, file, corpus or checkpoint.

    Args:
        what: what is wrong, naming the file, option or tensor: a clause in lower case.
        mend: what to do about it: an instruction, without its full stop.
    """

    def __init__(self, what: str, mend: str = "") -> None:
        self.what, self.mend = what, mend
        super().__init__(f"{what}. {mend}" if mend else what)


class ConfigError(UserError, ValueError):
    """A field or option has a value that it does not allow. The message names both; the rule says what it allows."""

    def __init__(self, field: str, value: object, rule: str) -> None:
        self.field, self.value, self.rule = field, value, rule
        super().__init__(f"{field}={value!r}: {rule}")


class CheckpointError(UserError):
    """A checkpoint is missing, damaged, or does not fit the model."""


class DataError(UserError):
    """A corpus, file or sequence cannot be used."""


class NumericalError(UserError):
    """A NaN or infinity appeared. The message names the first bad tensor and where the state was saved."""


class FileError(UserError):
    """A file or directory cannot be read or written: missing, read-only, full, or held by another process."""


def out_of_memory(error: BaseException) -> UserError | None:
    """What to tell of a full memory; None for another error. torch tells it by text alone, and need not be there."""
    full = isinstance(error, RuntimeError) and re.search("out of memory|allocate memory|enough memory", str(error))
    if not full and not isinstance(error, MemoryError):
        return None
    return UserError(f"out of memory: {' '.join(str(error).split())[:200]}", _SMALLER)
