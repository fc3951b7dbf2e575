"""What reward models learn from: JSONL rows of two answers of which one is better, or of one answer with its score.

    {"prompt": "…" or a list of messages, "chosen": "…", "rejected": "…"}        pairwise
    {"prompt": "…" or a list of messages, "response": "…", "score": 0.7}         pointwise

An answer is what the assistant says, without its thinking: that is what a reward model will be asked about. `tools` may
stand beside the prompt. Bad rows are listed by line, and nothing runs. Needs no torch. Read next: `model`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from glm5.posttrain.jsonl import SHOWN, asked, read_rows
from glm5.text import Message, Tokenizer, Tool, render, tools_from_openai
from glm5.utils.errors import ConfigError, DataError

Kind = Literal["pairwise", "pointwise"]
ANSWERS = {"pairwise": ("chosen", "rejected"), "pointwise": ("response",)}


@dataclass(frozen=True)
class Example:
    """One row, as ids. texts: the answers with their prompt, the better one first of two. score: in [0, 1], of one."""

    texts: tuple[tuple[int, ...], ...]
    score: float = 0.0


def answered(
    tokenizer: Tokenizer, messages: Sequence[Message], response: str, tools: Sequence[Tool] = ()
) -> tuple[int, ...]:
    """A conversation and the answer to it as ids, up to the tag that ends the turn: where an answer's value is read."""
    spoken = [*messages, Message("assistant", response)]
    return (*render(tokenizer, spoken, tools, clear_thinking=False).ids, tokenizer.user_id)


def read_examples(
    path: str, kind: Kind, tokenizer: Tokenizer, longest: int, score_range: tuple[float, float] = (0.0, 1.0)
) -> list[Example]:
    """All rows of a file.

    Args:
        longest: tokens that an answer may have with its prompt. score_range: the lowest and the highest score.

    Raises:
        FileError: the file cannot be read.
        DataError: rows cannot be used, or are too long; their lines are listed, and none of the file is used.
    """
    low, high = score_range
    if not -float("inf") < low < high < float("inf"):
        raise ConfigError("score_range", score_range, "must be two finite numbers, the lower one first")
    long: list[str] = []

    def example(row: Mapping[str, Any], number: int) -> Example:
        made = _example(row, kind, tokenizer, low, high)
        most = max(map(len, made.texts))
        if most > longest:
            long.append(f"line {number}: {most:,} tokens")
        return made

    made = read_rows(path, example)
    if long:
        more = f"\n  and {len(long) - SHOWN} more" if len(long) > SHOWN else ""
        listed = "\n  ".join(long[:SHOWN]) + more
        raise DataError(
            f"{path}: {len(long)} of {len(made)} rows have more than {longest:,} tokens:\n  {listed}\n",
            "Shorten or remove them: an answer that is cut would be judged by its beginning",
        )
    return made


def _example(row: Mapping[str, Any], kind: Kind, tokenizer: Tokenizer, low: float, high: float) -> Example:
    fields = ("prompt", "tools", *ANSWERS[kind], *(("score",) if kind == "pointwise" else ()))
    for name in row:
        if name not in fields:
            other = next((k for k, names in ANSWERS.items() if name in names or (name == "score" and k != kind)), "")
            mend = f"Give --kind {other}" if other and other != kind else f"The fields are {', '.join(fields)}"
            raise DataError(f"{name}: no field of {kind} rows", mend)
    messages = asked(row)
    tools, answers = tools_from_openai(row.get("tools")), [_answer(row, name) for name in ANSWERS[kind]]
    texts = tuple(answered(tokenizer, messages, answer, tools) for answer in answers)
    if kind == "pairwise":
        if texts[0] == texts[1]:
            raise DataError("chosen, rejected: the same", "Give two answers that differ")
        return Example(texts)
    score = row.get("score")
    if isinstance(score, bool) or not isinstance(score, int | float) or not low <= score <= high:
        raise DataError(f"score: {score!r}", f"It must be a number in [{low:g}, {high:g}], or give --score-range")
    return Example(texts, (score - low) / (high - low))


def _answer(row: Mapping[str, Any], name: str) -> str:
    given = row.get(name)
    if isinstance(given, dict) and given.get("role") == "assistant":
        given = given.get("content")
    if not isinstance(given, str) or not given.strip():
        raise DataError(f"{name}: {given!r}", "It must be a text, or an assistant's message with content")
    return given


def digest(examples: Sequence[Example]) -> str:
    """Of all that a run learns from."""
    values = [[e.texts, e.score] for e in examples]
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()
