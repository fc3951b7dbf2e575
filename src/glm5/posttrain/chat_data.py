"""Conversations to fine-tune on: JSONL rows to packed rows with masks, several files at stated ratios.

    {"messages": [OpenAI's messages], "tools": [OpenAI's tools], "clear_thinking": false}

Of an assistant's message: `reasoning_content` is its thinking; `thinking: false` answers without it, `thinking: true`
insists on it; `weight: 0` keeps the message in the context and out of the loss, and `weight: {"content": 0}` a segment
of it. `clear_thinking` chooses between the report's ways to think: false is preserved thinking, where a conversation is
one rendering; true leaves out what was thought before the last user's message, and a conversation becomes one rendering
for each of its forks. Other fields are ignored. Source: report, section 3.1. Read next: `glm5.text.chat`, `sft`.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from glm5.data.mixing import TaskDataset
from glm5.data.packing import Plan, plan_rows
from glm5.data.shards import Encoded, TokenStore, write_encoded
from glm5.posttrain.jsonl import SHOWN, messages_of, read_rows
from glm5.text import Message, Rendered, Tokenizer, Tool, render_for_training, tools_from_openai
from glm5.utils.errors import DataError
from glm5.utils.files import file_errors, read_json, require_writable, sha256_file, write_json

_VERSION = 1  # of what happens between the rows and the tokens

TooLong = Literal["refuse", "drop"]


@dataclass(frozen=True)
class Conversation:
    """One row. line: its number in the file. clear_thinking: None is the run's."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...]
    clear_thinking: bool | None
    line: int


# ---------------------------------------------------------------------------------------------------- rows
def read_conversations(path: str | Path) -> list[Conversation]:
    """All rows of a file. Errors as `read_rows`: every bad row by its line."""
    return read_rows(path, conversation_from_row)


def conversation_from_row(row: Mapping[str, Any], number: int) -> Conversation:
    """Check and take over one row.

    Raises:
        DataError: names the field, its value and the mend; or nothing in it is to be learned.
    """
    raw = row.get("messages")
    messages = messages_of(raw, "messages")
    assert isinstance(raw, list | tuple)
    messages = [_with_thinking(m, r, f"messages[{i}]") for i, (m, r) in enumerate(zip(messages, raw, strict=True))]
    if not any(_teaches(m) for m in messages):
        what = "messages: no assistant's turn to learn from"
        raise DataError(what, "Add one with content, thinking or calls, or give one a weight of 1")
    clear = row.get("clear_thinking")
    if clear is not None and not isinstance(clear, bool):
        raise DataError(f"clear_thinking: {clear!r}", "It must be true or false")
    return Conversation(tuple(messages), tools_from_openai(row.get("tools")), clear, number)


def _teaches(message: Message) -> bool:
    """Whether anything of a turn is learned besides its end."""
    said = {"content": message.content.strip(), "reasoning": message.reasoning, "tool_calls": message.tool_calls}
    return message.role == "assistant" and message.trained and any(said[k] for k in said.keys() - message.unlearned)


def _with_thinking(message: Message, raw: Mapping[str, Any], where: str) -> Message:
    """The message as its own flag wants it: turn-level thinking."""
    flag = raw.get("thinking")
    if message.reasoning is not None and not message.reasoning.strip():
        message = replace(message, reasoning=None)  # blank thinking is none: `<think></think>` is no form of GLM-5's
    if flag is None:
        return message
    if message.role != "assistant" or not isinstance(flag, bool):
        raise DataError(f"{where}.thinking: {flag!r}", "It must be true or false, and of an assistant's message")
    if flag and message.reasoning is None:
        raise DataError(f"{where}.thinking: true, without any thinking", "Give reasoning_content, or set it to false")
    return message if flag else replace(message, reasoning=None)


def renderings(tokenizer: Tokenizer, conversation: Conversation, clear_thinking: bool) -> list[Rendered]:
    """Ids and masks of a conversation in which each turn is learned once; see `render_for_training`."""
    own = conversation.clear_thinking
    clear = clear_thinking if own is None else own
    return render_for_training(tokenizer, conversation.messages, conversation.tools, clear_thinking=clear)


# ---------------------------------------------------------------------------------------------------- datasets
class ChatDataset(TaskDataset):
    """Renderings in rows, best fit first. A row holds those of one task, and none is ever cut.

    Args:
        store: tokens and masks. seq_len, ahead: as `TokenDataset`.
        tasks: for each task the half-open range of its documents, which follow each other.

    `task_rows` has the same of rows.
    """

    def __init__(self, store: TokenStore, seq_len: int, ahead: int, tasks: Mapping[str, tuple[int, int]]) -> None:
        self.store, self.seq_len, self.ahead, self.strategy = store, seq_len, ahead, "best-fit"
        self.task_rows = {}
        plans: list[Plan] = []
        for task, (first, last) in tasks.items():
            plan = plan_rows(store.lengths[first:last], seq_len, ahead)
            before = sum(p.rows for p in plans)
            self.task_rows[task] = (before, before + plan.rows)
            plans.append(replace(plan, document=plan.document + first))
        pieces = np.cumsum([0, *(len(p.document) for p in plans)])
        starts = [p.row_starts[:-1] + start for p, start in zip(plans, pieces[:-1], strict=True)]
        self._plan = Plan(
            document=np.concatenate([p.document for p in plans]),
            start=np.concatenate([p.start for p in plans]),
            slots=np.concatenate([p.slots for p in plans]),
            row_starts=np.append(np.concatenate(starts), pieces[-1]),
        )


# ---------------------------------------------------------------------------------------------------- on disk
@dataclass(frozen=True)
class ChatData:
    """Conversations of a run. counts: by file, what became of them, in JSON values."""

    store: TokenStore
    tasks: dict[str, tuple[int, int]]
    counts: dict[str, dict[str, int]]

    def dataset(self, seq_len: int, ahead: int) -> ChatDataset:
        """Rows of `seq_len` predictions, or of fewer where that holds all of every file: padding costs as tokens do."""
        most = max(int(self.store.lengths[first:last].sum()) - 1 for first, last in self.tasks.values())
        return ChatDataset(self.store, min(seq_len, most), ahead, self.tasks)


def prepare_chat(
    paths: Sequence[str],
    tokenizer: Tokenizer,
    directory: Path,
    *,
    seq_len: int,
    clear_thinking: bool,
    too_long: TooLong,
    begun: bool,
) -> ChatData:
    """The files' conversations as tokens in `directory`: made if missing or, before the run has begun, out of date.

    Args:
        begun: checkpoints depend on this data, which must then be what it was.

    Raises:
        FileError, DataError: a file cannot be read, has bad rows (all are listed), or rows that are too long; or the
            files are not those that the run began with.
    """
    settings = [_VERSION, tokenizer.fingerprint, seq_len, clear_thinking, too_long]
    fingerprint = hashlib.sha256(json.dumps([settings, [sha256_file(p) for p in paths]]).encode()).hexdigest()
    source = directory / "source.json"
    before = read_json(source) if source.exists() else None
    if before is None or before["fingerprint"] != fingerprint:
        if begun and before is not None:
            what = f"the conversations, or how they are rendered, are not those that {directory.parent} began with"
            raise DataError(what, "Restore them, or choose another --run directory")
        files = {p: read_conversations(p) for p in paths}  # all bad rows are known before the first is tokenized
        with file_errors(directory, "replace"):
            shutil.rmtree(directory, ignore_errors=True)
        require_writable(directory)
        counts = {p: {"conversations": len(c), "renderings": 0, "too_long": 0} for p, c in files.items()}
        encoded = _encoded(files, tokenizer, seq_len, clear_thinking, too_long, counts)
        write_encoded(encoded, tokenizer, directory / "tokens")
        write_json(source, {"fingerprint": fingerprint, "counts": counts})
        before = {"counts": counts}
    counts, tasks, first = before["counts"], {}, 0
    for path in paths:
        last = first + counts[path]["renderings"]
        tasks[path], first = (first, last), last
    return ChatData(TokenStore(directory / "tokens"), tasks, counts)


def _encoded(
    files: Mapping[str, Sequence[Conversation]],
    tokenizer: Tokenizer,
    seq_len: int,
    clear_thinking: bool,
    too_long: TooLong,
    counts: Mapping[str, dict[str, int]],
) -> Iterator[Encoded]:
    """All renderings in their order. Too long ones are counted, and refused when all are known: none is cut, for what
    an answer follows from must stand before it."""
    sizes = tokenizer.text_bytes_per_id()
    refused: list[str] = []
    for path, conversations in files.items():
        for conversation in conversations:
            for number, made in enumerate(renderings(tokenizer, conversation, clear_thinking)):
                if len(made.ids) > seq_len + 1:
                    counts[path]["too_long"] += 1
                    refused.append(f"{path}, line {conversation.line}: {len(made.ids):,} tokens")
                    continue
                counts[path]["renderings"] += 1
                learned_bytes = sum(sizes[i] for i, learned in zip(made.ids, made.loss, strict=True) if learned)
                yield Encoded(f"{path}:{conversation.line}#{number}", made.ids, learned_bytes, made.loss)
        if too_long == "drop" and not counts[path]["renderings"]:
            raise DataError(f"{path}: every conversation has more than {seq_len + 1:,} tokens", "Raise --seq-len")
    if refused and too_long == "refuse":
        more = f"\n  and {len(refused) - SHOWN} more" if len(refused) > SHOWN else ""
        listed = "\n  ".join(refused[:SHOWN]) + more
        what = f"{len(refused)} conversations do not fit a row of {seq_len + 1:,} tokens:\n  {listed}\n"
        raise DataError(what, "Raise --seq-len, or leave them out with --too-long drop")
