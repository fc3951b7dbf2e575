"""Rows of JSONL, every bad one named by its line. Read next: `chat_data`, `prompts`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from glm5.utils.errors import DataError, UserError
from glm5.utils.files import file_errors

T = TypeVar("T")

SHOWN = 20  # bad rows that a message lists


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no value of JSON")


def read_rows(path: str | Path, make: Callable[[Mapping[str, Any], int], T]) -> list[T]:
    """What `make` makes of every row's object and its line number, from 1. Blank lines are no rows.

    Raises:
        FileError: the file cannot be read.
        DataError: it has no row; or rows are no JSON objects, or `make` raised a UserError for them: their lines are
            listed with the reasons, and none of the file is used.
    """
    made: list[T] = []
    bad: list[str] = []
    with file_errors(path, "read"), Path(path).open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode("utf-8"), parse_constant=_no_constant)
                if not isinstance(row, dict):
                    raise DataError(f"{type(row).__name__} in place of an object")
                made.append(make(row, number))
            except UserError as e:
                bad.append(f"line {number}: {e}")
            except (ValueError, RecursionError) as e:
                bad.append(f"line {number}: not JSON in UTF-8 ({e})")
    if bad:
        listed = "\n  ".join(bad[:SHOWN]) + (f"\n  and {len(bad) - SHOWN} more" if len(bad) > SHOWN else "")
        total = len(made) + len(bad)
        raise DataError(f"{path}: {len(bad)} of {total} rows cannot be used:\n  {listed}\n", "Correct or remove them")
    if not made:
        raise DataError(f"{path} has no rows", "Give at least one")
    return made
