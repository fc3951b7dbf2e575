"""Conversations from outside: what is taken over, and that every fault names its field and the mend."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm5.text import Message, ToolCall, messages_from_openai, messages_to_openai, tools_from_openai
from glm5.utils.errors import UserError
from support.conversations import HOSTILE, conversations, function


def call(arguments: Any, name: Any = "f", **more: Any) -> dict[str, Any]:
    return {
        "role": "assistant",
        "tool_calls": [{"type": "function", "function": {"name": name, "arguments": arguments}, **more}],
    }


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ({"role": "user", "content": "a"}, Message("user", "a")),
        ({"role": "developer", "content": "a"}, Message("system", "a")),
        ({"role": "user", "content": None}, Message("user")),
        ({"role": "user"}, Message("user")),
        ({"role": "user", "content": ["a", {"type": "text", "text": "b"}], "name": "ignored"}, Message("user", "ab")),
        ({"role": "tool", "content": "1", "tool_call_id": "x"}, Message("tool", "1", tool_call_id="x")),
        ({"role": "assistant", "content": None, "reasoning": "r"}, Message("assistant", "", "r")),
        ({"role": "assistant", "content": "c", "reasoning_content": ""}, Message("assistant", "c", "")),
        ({"role": "assistant", "content": "c", "weight": 0}, Message("assistant", "c", trained=False)),
        # Thinking inside the content, with and without its first tag; given apart, the content is left alone.
        ({"role": "assistant", "content": "<think>\nr\n</think>\n\nc"}, Message("assistant", "c", "r")),
        ({"role": "assistant", "content": "r</think>c"}, Message("assistant", "c", "r")),
        ({"role": "assistant", "content": "r</think>lost</think>c"}, Message("assistant", "c", "r")),
        (
            {"role": "assistant", "content": "r</think>c", "reasoning_content": "x"},
            Message("assistant", "r</think>c", "x"),
        ),
        # Arguments as a JSON string, as an object, and left empty.
        (call('{"x": 1}'), Message("assistant", tool_calls=(ToolCall("f", {"x": 1}),))),
        (call({"x": [1]}, id="i"), Message("assistant", tool_calls=(ToolCall("f", {"x": [1]}, "i"),))),
        (call(""), Message("assistant", tool_calls=(ToolCall("f", {}),))),
    ],
)
def test_messages_are_taken_over(raw: dict[str, Any], expected: Message) -> None:
    assert messages_from_openai([raw]) == [expected]


@pytest.mark.parametrize(
    ("raw", "named"),
    [
        (None, r"messages: nothing"),
        ([], r"messages: \[\]"),
        ({"role": "user"}, r"messages: \{'role'"),
        ([{"role": "user"}, "x"], r"messages\[1\]: 'x'.*object"),
        ([{"content": "x"}], r"messages\[0\]\.role: nothing.*system, developer"),
        ([{"role": "function"}], r"messages\[0\]\.role: 'function'"),
        ([{"role": ["user"]}], r"messages\[0\]\.role: \['user'\]"),
        ([{"role": "user", "content": 3}], r"messages\[0\]\.content: 3"),
        ([{"role": "user", "content": [3]}], r"messages\[0\]\.content\[0\]: 3"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], r"content\[0\]\.type: 'image_url'.*nothing else"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"content\[0\]\.text: nothing"),
        ([{"role": "user", "content": "\ud800"}], r"content: a lone surrogate at character 0"),
        ([{"role": "user", "tool_calls": [{}]}], r"messages\[0\]\.tool_calls: .*Only an assistant"),
        ([{"role": "assistant", "tool_calls": "x"}], r"messages\[0\]\.tool_calls: 'x'"),
        ([{"role": "assistant", "tool_calls": [{}]}], r"tool_calls\[0\]\.function: nothing"),
        ([call("{}", name=" ")], r"tool_calls\[0\]\.function\.name: ' '"),
        ([call("{}", name=None)], r"function\.name: nothing"),
        ([call('{"x": ')], r"messages\[0\]\.tool_calls\[0\]\.function\.arguments: not JSON"),
        ([call('{"x": NaN}')], r"function\.arguments: not JSON: NaN"),
        ([call("[" * 100_000)], r"function\.arguments: not JSON"),
        ([call("[1]")], r"function\.arguments: \[1\].*JSON object"),
        ([call({"x": float("nan")})], r"function\.arguments: cannot be written as JSON"),
        ([call('{"x": "\\ud800"}')], r"function\.arguments: .*surrogate"),
        ([call("{}", id=3)], r"tool_calls\[0\]\.id: 3"),
        ([{"role": "assistant", "reasoning": 1}], r"messages\[0\]\.reasoning: 1"),
        (
            [{"role": "assistant", "reasoning": "a", "reasoning_content": "b"}],
            r"and reasoning differ",
        ),
        ([{"role": "assistant", "weight": 2}], r"messages\[0\]\.weight: 2"),
    ],
)
def test_faults_of_messages_name_their_field(raw: object, named: str) -> None:
    with pytest.raises(UserError, match=named) as caught:
        messages_from_openai(raw)
    assert caught.value.mend


@pytest.mark.parametrize(
    ("raw", "named"),
    [
        ("x", r"tools: 'x'"),
        ([3], r"tools\[0\]: 3"),
        ([{"type": "web_search"}], r"tools\[0\]\.type: 'web_search'"),
        ([{"type": "function"}], r"tools\[0\]\.function: nothing"),
        ([{"type": "function", "function": {"name": ""}}], r"tools\[0\]\.function\.name: ''"),
        ([{"type": "function", "function": {"name": "f", "parameters": []}}], r"function\.parameters: \[\]"),
        ([function("f", x=float("inf"))], r"tools\[0\]: cannot be written as JSON"),
        ([function("f"), function("g"), function("f")], r"tools\[2\]\.function\.name: 'f' is there twice"),
    ],
)
def test_faults_of_tools_name_their_field(raw: object, named: str) -> None:
    with pytest.raises(UserError, match=named) as caught:
        tools_from_openai(raw)
    assert caught.value.mend


def test_no_tools_and_tools_without_parameters() -> None:
    assert tools_from_openai(None) == tools_from_openai([]) == ()
    (tool,) = tools_from_openai([{"type": "function", "function": {"name": "f"}}])
    assert (tool.name, tool.parameters) == ("f", {})


@given(conversation=conversations(HOSTILE))
@settings(max_examples=100, deadline=None)
def test_messages_come_back_from_their_own_form(conversation: list[dict[str, Any]]) -> None:
    messages = messages_from_openai(conversation)
    again = messages_from_openai(json.loads(json.dumps(messages_to_openai(messages))))
    # A turn without thinking whose text has the tag in it is the one thing that this form cannot tell apart.
    assert [m for m in again if m.role != "assistant"] == [m for m in messages if m.role != "assistant"]
    for old, new in zip(messages, again, strict=True):
        if old.reasoning is not None or "</think>" not in old.content:
            assert old == new


@given(
    raw=st.recursive(
        st.none() | st.integers() | st.text(max_size=3),
        lambda x: (
            st.lists(x)
            | st.dictionaries(
                st.sampled_from(("role", "content", "tool_calls", "function", "arguments", "name", "type", "text")), x
            )
        ),
    )
)
@settings(max_examples=200, deadline=None)
def test_no_input_is_anything_but_messages_or_a_users_fault(raw: object) -> None:
    for read in (messages_from_openai, tools_from_openai):
        try:
            read([raw])
        except UserError as error:
            assert error.what.startswith(("messages[0]", "tools[0]"))  # noqa: PT017
