"""A small tokenizer, tools, and conversations drawn at random in OpenAI's form, for the tests of the chat format."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from typing import Any

from hypothesis import strategies as st

from glm5.text import Tokenizer, Tool, tools_from_openai
from glm5.text.special import SPECIAL_TOKENS


@cache
def tokenizer() -> Tokenizer:
    words = [
        "def",
        "return",
        "weather",
        "Größe",
        "数据",
        "模型",
        "true",
        "null",
        "{}",
        "[1, 2]",
        '"a": 1',
        "\n\n",
        "path/to",
    ]
    return Tokenizer.train([" ".join(words[i:] + words[:i]) + "." for i in range(len(words))] * 20, 340)


def function(name: str, **properties: Any) -> dict[str, Any]:
    """OpenAI's object of a function whose arguments have these schemas."""
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "description": f"{name}, 数据", "parameters": parameters}}


def tools(*specs: dict[str, Any]) -> tuple[Tool, ...]:
    return tools_from_openai(list(specs))


def ids_of(raw: str) -> list[int]:
    """What a model that means this gives: tags are tags."""
    return tokenizer().encode(raw, allow_special=True)


def bytes_of(raw: str) -> list[int]:
    """The same with one id a byte: another way to spell the text, in which characters arrive in parts."""
    special = set(tokenizer().special.values())
    spelled = []
    for id in ids_of(raw):
        parts = [id] if id in special else tokenizer().decode_bytes([id])
        spelled += [id] if id in special else [tokenizer().encode(bytes([byte]))[0] for byte in parts]
    return spelled


def pieces(ids: Sequence[int], sizes: Sequence[int]) -> list[list[int]]:
    """The ids cut into runs of these sizes, over and over."""
    cut, start, turn = [], 0, 0
    while start < len(ids):
        size = sizes[turn % len(sizes)]
        cut.append(list(ids[start : start + size]))
        start, turn = start + size, turn + 1
    return cut


# ------------------------------------------------------------------------------------------------ at random
PLAIN = (
    "a",
    " b",
    "weather",
    "\n",
    "  ",
    "é",
    "数据",
    "{",
    "}",
    '"',
    "1",
    "\\",
    "<",
    "|",
    ">",
    "🙂",
    "\t",
    "None",
    "%}",
    "{{ x }}",
)
# Text that looks like the format, or breaks a careless renderer.
HOSTILE = (*PLAIN, *SPECIAL_TOKENS, "</tools>", "{%- endif %}", "\u00a0", "\x00")


def texts(words: Sequence[str]) -> st.SearchStrategy[str]:
    return st.lists(st.sampled_from(words), max_size=5).map("".join)


def values(words: Sequence[str]) -> st.SearchStrategy[Any]:
    leaves = (
        st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.floats(allow_nan=False, allow_infinity=False)
    )
    return st.recursive(
        leaves | texts(words),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts(words), inner, max_size=3),
        max_leaves=5,
    )


def contents(words: Sequence[str]) -> st.SearchStrategy[Any]:
    part = texts(words) | texts(words).map(lambda text: {"type": "text", "text": text})
    return st.none() | texts(words) | st.lists(part, max_size=3)


@st.composite
def calls(draw: st.DrawFn, words: Sequence[str]) -> dict[str, Any]:
    arguments = draw(st.dictionaries(texts(words), values(words), max_size=3))
    name = draw(st.sampled_from(("ping", "get_weather", "数据", "a b")))
    return {
        "id": draw(st.sampled_from(("", "call_1"))),
        "type": "function",
        "function": {"name": name, "arguments": draw(st.sampled_from((arguments, json.dumps(arguments))))},
    }


@st.composite
def messages(draw: st.DrawFn, words: Sequence[str]) -> dict[str, Any]:
    role = draw(st.sampled_from(("system", "developer", "user", "assistant", "assistant", "tool")))
    message: dict[str, Any] = {"role": role, "content": draw(contents(words))}
    if role == "assistant":
        thinking = draw(st.none() | texts(words))
        if thinking is not None or draw(st.booleans()):
            message[draw(st.sampled_from(("reasoning_content", "reasoning")))] = thinking
        if draw(st.booleans()):
            message["tool_calls"] = draw(st.lists(calls(words), max_size=3))
    return message


def conversations(words: Sequence[str]) -> st.SearchStrategy[list[dict[str, Any]]]:
    return st.lists(messages(words), min_size=1, max_size=7)


def tool_lists(words: Sequence[str]) -> st.SearchStrategy[list[dict[str, Any]]]:
    tool = st.builds(function, st.sampled_from(("ping", "get_weather", "数据")), x=values(words))
    return st.lists(tool, max_size=2, unique_by=lambda spec: spec["function"]["name"])


def decoded(conversation: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same conversation with arguments as objects, as whoever calls a Jinja template has to give them."""
    made = []
    for message in conversation:
        calls = []
        for call in message.get("tool_calls") or []:
            given = call["function"]["arguments"]
            arguments = json.loads(given) if isinstance(given, str) else given
            calls.append({**call, "function": {**call["function"], "arguments": arguments}})
        made.append({**message, "tool_calls": calls} if calls else dict(message))
    return made
