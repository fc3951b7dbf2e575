"""Conversations to rows: what is learned under each way to think, rows that are refused, packing, mixing, resuming."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from glm5.data.mixing import MixedLoader, Source
from glm5.posttrain.chat_data import (
    ChatData,
    conversation_from_row,
    prepare_chat,
    read_conversations,
    renderings,
)
from glm5.utils.errors import ConfigError, DataError
from support.conversations import function, tokenizer

CALL = {"id": "c", "type": "function", "function": {"name": "ping", "arguments": "{}"}}
# A user asks, the model thinks, calls, thinks again and answers; then the same once more.
TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "u1"},
    {"role": "assistant", "content": None, "reasoning_content": "r1", "tool_calls": [CALL]},
    {"role": "tool", "content": "t1", "tool_call_id": "c"},
    {"role": "assistant", "content": "a1", "reasoning_content": "r2"},
    {"role": "user", "content": "u2"},
    {"role": "assistant", "content": "a2", "reasoning_content": "r3"},
]


def shown(messages: list[dict[str, Any]], clear: bool = False, **row: Any) -> list[str]:
    """The renderings as text, with what is learned in braces."""
    found = []
    for made in renderings(tokenizer(), conversation_from_row({"messages": messages, **row}, 1), clear):
        text, inside = "", False
        for id, learned in zip(made.ids, made.loss, strict=True):
            if learned != inside:
                text, inside = text + ("{" if learned else "}"), learned
            text += tokenizer().decode([id])
        found.append((text + ("}" if inside else "")).removeprefix("[gMASK]<sop>"))
    return found


def changed(index: int, **fields: Any) -> list[dict[str, Any]]:
    return [m | fields if i == index else m for i, m in enumerate(TALK)]


# ------------------------------------------------------------------------------------------------ ways to think
CALLED = "<tool_call>ping</tool_call><|observation|>"
RESULT = "<tool_response>t1</tool_response>"


def test_preserved_thinking_is_one_rendering() -> None:
    """Thinking before every call and answer, all of it kept; each turn's stop is learned, its <think> is not."""
    assert shown(TALK) == [
        f"<|user|>u1<|assistant|><think>{{r1</think>{CALLED}}}{RESULT}"
        "<|assistant|><think>{r2</think>a1<|user|>}u2<|assistant|><think>{r3</think>a2<|user|>}"
    ]
    assert shown(TALK, clear=True, clear_thinking=False) == shown(TALK)  # the row's own word counts


def test_interleaved_thinking_is_one_rendering_a_fork() -> None:
    """What was thought before the last user's message is gone: a rendering up to there, and one of the rest."""
    assert shown(TALK, clear=True) == [
        f"<|user|>u1<|assistant|><think>{{r1</think>{CALLED}}}{RESULT}<|assistant|><think>{{r2</think>a1<|user|>}}",
        f"<|user|>u1<|assistant|></think>{CALLED}{RESULT}<|assistant|></think>a1"
        "<|user|>u2<|assistant|><think>{r3</think>a2<|user|>}",
    ]


def test_turn_level_thinking() -> None:
    """A turn with the flag off opens with </think>, which is given and not learned, whatever was thought."""
    assert shown(changed(3, thinking=False)) == [
        f"<|user|>u1<|assistant|><think>{{r1</think>{CALLED}}}{RESULT}"
        "<|assistant|></think>{a1<|user|>}u2<|assistant|><think>{r3</think>a2<|user|>}"
    ]
    assert shown(changed(3, thinking=True)) == shown(TALK)
    assert shown(changed(3, reasoning_content=" \n")) == shown(changed(3, thinking=False))


def test_ids_and_mask_of_a_tool_conversation() -> None:
    """The same to the id, beside tools and a system message."""
    (made,) = renderings(
        tokenizer(),
        conversation_from_row({"messages": TALK[:4], "tools": [function("ping")]}, 1),
        clear_thinking=False,
    )
    t = tokenizer()
    tail = [
        *((i, False) for i in (t.user_id, *t.encode("u1"), t.assistant_id, t.think_id)),
        *((i, True) for i in (*t.encode("r1"), t.end_think_id)),
        *((i, True) for i in (t.tool_call_id, *t.encode("ping"), t.end_tool_call_id, t.observation_id)),
        *((i, False) for i in (t.tool_response_id, *t.encode("t1"), t.end_tool_response_id)),
        *((i, False) for i in (t.assistant_id, t.think_id)),
        *((i, True) for i in (*t.encode("r2"), t.end_think_id, *t.encode("a1"), t.user_id)),
    ]
    assert list(zip(made.ids, made.loss, strict=True))[-len(tail) :] == tail
    assert not any(made.loss[: -len(tail)])


def test_erroneous_segments_stay_in_the_context() -> None:
    (whole,) = shown(TALK)
    (without,) = shown(changed(1, weight=0))
    assert without.replace("{", "").replace("}", "") == whole.replace("{", "").replace("}", "")
    assert without.startswith(f"<|user|>u1<|assistant|><think>r1</think>{CALLED}{RESULT}<|assistant|><think>{{r2")
    (thought,) = shown(changed(1, weight={"reasoning_content": 0}))
    assert thought.startswith(f"<|user|>u1<|assistant|><think>r1</think>{{{CALLED}}}{RESULT}")


# ------------------------------------------------------------------------------------------------ rows
def write(path: Path, *rows: Any) -> str:
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows))
    return str(path)


def test_bad_rows_are_listed_by_line(tmp_path: Path) -> None:
    bad: list[tuple[Any, str]] = [
        ("{", "JSON"),
        ({}, "messages"),
        ({"messages": TALK[:1]}, "no assistant's turn"),
        ({"messages": [m | {"weight": 0} if m["role"] == "assistant" else m for m in TALK]}, "no assistant's turn"),
        # Nothing would be learned but the ends of turns.
        ({"messages": [TALK[0], {"role": "assistant", "content": None}]}, "no assistant's turn"),
        (
            {"messages": [TALK[0], {"role": "assistant", "content": "x", "weight": {"content": 0}}]},
            "no assistant's turn",
        ),
        (
            {"messages": [{"role": "user", "text": "u1"}, *TALK[1:]]},
            "messages[0].content: missing",
        ),
        ({"messages": changed(0, thinking=True)}, "messages[0].thinking"),
        ({"messages": changed(3, thinking="no")}, "messages[3].thinking"),
        ({"messages": changed(3, thinking=True, reasoning_content=None)}, "without any thinking"),
        ({"messages": changed(1, weight={"thoughts": 0})}, "messages[1].weight"),
        ({"messages": TALK, "clear_thinking": 1}, "clear_thinking"),
        ({"messages": TALK, "tools": {}}, "tools"),
    ]
    path = write(tmp_path / "a.jsonl", {"messages": TALK}, *(row for row, _ in bad))
    with pytest.raises(DataError) as found:
        read_conversations(path)
    lines = [line.strip() for line in found.value.what.splitlines()]
    for number, (_, reason) in enumerate(bad, 2):
        (line,) = [x for x in lines if x.startswith(f"line {number}:")]
        assert reason in line


# ------------------------------------------------------------------------------------------------ data of a run
def talk(number: int, length: int = 1) -> dict[str, Any]:
    words = " ".join(f"w{number}" for _ in range(length))
    return {"messages": [{"role": "user", "content": f"q{number}"}, {"role": "assistant", "content": words}]}


def prepare(directory: Path, *paths: str, **changes: Any) -> ChatData:
    defaults: dict[str, Any] = dict(seq_len=64, clear_thinking=False, too_long="refuse", begun=False)
    return prepare_chat(paths, tokenizer(), directory / "data", **{**defaults, **changes})


def test_every_learned_token_is_a_target_once_and_none_of_another(tmp_path: Path) -> None:
    rows = [{"messages": TALK}, *(talk(n, 1 + n % 9) for n in range(30))]
    data = prepare(tmp_path, write(tmp_path / "a.jsonl", *rows), clear_thinking=True)
    dataset = data.dataset(64, 4)
    assert dataset.rows < len(data.store.names)
    wanted: Counter[int] = Counter()
    for row in rows:
        for made in renderings(tokenizer(), conversation_from_row(row, 1), clear_thinking=True):
            wanted.update(i for i, learned in zip(made.ids, made.loss, strict=True) if learned)
    found: Counter[int] = Counter()
    for batch in dataset.batches(4):
        target_BT, weight_BT = batch.targets()
        found.update(target_BT[weight_BT > 0].tolist())
        for depth in (2, 3, 4):  # MTP's targets are masked alike, and stay in their conversation
            target_BT, weight_BT = batch.targets(depth)
            for b, t in np.argwhere(weight_BT > 0):
                assert batch.loss_BS[b, t + depth]
                assert batch.document_BS[b, t + depth] == batch.document_BS[b, t]
        for b, t in np.argwhere(batch.document_BS[:, :64] >= 0):  # and no query sees another conversation
            assert (batch.document_BS[b, batch.first_BT[b, t] : t + 1] == batch.document_BS[b, t]).all()
    assert found == wanted
    assert data.store.targets == sum(wanted.values())


def test_files_mix_by_rows_at_their_ratios(tmp_path: Path) -> None:
    a = write(tmp_path / "a.jsonl", *(talk(n, 9) for n in range(14)))
    b = write(tmp_path / "b.jsonl", *(talk(100 + n, 7) for n in range(6)))
    dataset = prepare(tmp_path, a, b).dataset(64, 2)
    loader = MixedLoader(dataset, {a: 3, b: 1}, seed=5)
    order = loader.rows(0, 80).tolist()
    (a_first, a_last), (b_first, b_last) = dataset.task_rows[a], dataset.task_rows[b]
    assert (a_first, a_last) == (0, b_first)
    assert sum(a_first <= r < a_last for r in order) == 60
    assert loader.epochs(80) == {a: 60 / a_last, b: 20 / (b_last - b_first)}
    for begin in (0, 1, 17, 63):  # a resumed run, and any batch size
        assert MixedLoader(dataset, {a: 3, b: 1}, seed=5).rows(begin, 9).tolist() == order[begin : begin + 9]
    mine = [r for r in order if r < a_last]
    assert sorted(mine[:a_last]) == list(range(a_last))  # each row once a pass
    assert mine[:a_last] != mine[a_last : 2 * a_last]
    assert MixedLoader(dataset, {a: 3, b: 1}, seed=6).rows(0, 80).tolist() != order
    names = {
        dataset.store.names[d].partition(":")[0]
        for r in range(b_first, b_last)
        for d in set(dataset.batch([r]).document_BS[0].tolist()) - {-1}
    }
    assert names == {b}


def test_conversations_that_are_too_long(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", talk(1), talk(2, 200), talk(3))
    with pytest.raises(
        DataError, match=r"1 conversations do not fit a row of 65 tokens:\s+.*a\.jsonl, line 2: \d+ tokens"
    ):
        prepare(tmp_path, path)
    data = prepare(tmp_path, path, too_long="drop")
    assert data.counts[path] == {"conversations": 3, "renderings": 2, "too_long": 1}
    only = write(tmp_path / "b.jsonl", talk(2, 200))
    with pytest.raises(DataError, match=r"b\.jsonl: every conversation has more than 65 tokens"):
        prepare(tmp_path / "x", only, too_long="drop")


def test_prepared_conversations_are_found_again(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", talk(1), talk(2))
    first = prepare(tmp_path, path)
    made = (tmp_path / "data" / "tokens" / "manifest.json").stat().st_mtime_ns
    assert prepare(tmp_path, path, begun=True).store.fingerprint == first.store.fingerprint
    assert (tmp_path / "data" / "tokens" / "manifest.json").stat().st_mtime_ns == made
    write(tmp_path / "a.jsonl", talk(1), talk(3))
    with pytest.raises(DataError, match=r"not those that .* began with"):
        prepare(tmp_path, path, begun=True)
    assert prepare(tmp_path, path).store.fingerprint != first.store.fingerprint


def test_sources() -> None:
    assert Source.parse("a.jsonl") == Source("a.jsonl")
    assert Source.parse("a.jsonl=2.5") == Source("a.jsonl", 2.5)
    assert Source.parse("a=b.jsonl") == Source("a=b.jsonl")
    with pytest.raises(ConfigError, match="count=0"):
        MixedLoader.rows(object.__new__(MixedLoader), 0, 0)
