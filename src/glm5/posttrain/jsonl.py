"""Rows of JSONL, every bad one named by its line, and the conversations in them. Read next: `chat_data`, `prompts`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from glm5.text import Message, messages_from_openai
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


def messages_of(raw: object, where: str) -> list[Message]:
    """A row's messages. What a server may leave out, the content of what is not an assistant's, must be written here:
    a misspelled field would be learned from as an empty message.

    Raises:
        DataError: names the field, its value and the mend.
    """
    messages = messages_from_openai(raw, where)
    assert isinstance(raw, list | tuple)
    for i, (message, given) in enumerate(zip(messages, raw, strict=True)):
        if message.role != "assistant" and "content" not in given:
            raise DataError(f"{where}[{i}].content: missing, of fields {', '.join(given)}", "Give a text")
    return messages


def asked(row: Mapping[str, Any]) -> list[Message]:
    """A row's `prompt`: a text, or messages that end with what is to be answered.

    Raises:
        DataError: it is neither.
    """
    given = row.get("prompt")
    if not given or not isinstance(given, str | list):
        raise DataError(f"prompt: {given!r}", "It must be a text, or a list of messages")
    messages = messages_of([{"role": "user", "content": given}] if isinstance(given, str) else given, "prompt")
    if messages[-1].role not in ("user", "tool"):
        raise DataError(f"prompt: ends with a message of role {messages[-1].role}", "End with what is to be answered")
    return messages
