"""The parser over answers drawn at random: what was rendered comes back, and no ids break it."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from glm5.text import Message, Parser, ToolCall, parse, render
from glm5.text.events import CallEnd, CallStart, fold
from glm5.text.special import SPECIAL_TOKENS
from support.conversations import HOSTILE, bytes_of, function, ids_of, pieces, texts, tokenizer, tools, values

TYPES = ("string", "integer", "number", "boolean", "null", "array", "object")
SIZES = st.lists(st.integers(1, 6), min_size=1, max_size=4)


def type_name(value: Any) -> str:
    names = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}
    return names.get(type(value), "null")


@st.composite
def turns(draw: st.DrawFn) -> tuple[Message, list[dict[str, Any]]]:
    """A turn as a model gives it, and tools that declare its arguments' types."""
    specs, calls = [], []
    for n in range(draw(st.integers(0, 3))):
        arguments = draw(st.dictionaries(texts(HOSTILE), values(HOSTILE), max_size=3))
        calls.append(ToolCall(f"f{n}", arguments))
        specs.append(function(f"f{n}", **{key: {"type": type_name(value)} for key, value in arguments.items()}))
    reasoning = draw(st.none() | texts(HOSTILE).map(str.strip).filter(bool))
    return Message("assistant", draw(texts(HOSTILE)).strip(), reasoning, tuple(calls)), specs or [function("other")]


@given(turn=turns(), sizes=SIZES)
@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
def test_what_is_rendered_comes_back(turn: tuple[Message, list[dict[str, Any]]], sizes: list[int]) -> None:
    message, given = turn[0], tools(*turn[1])
    user = Message("user", "u")
    prompt = render(
        tokenizer(), [user], given, enable_thinking=message.reasoning is not None, add_generation_prompt=True
    )
    whole = render(tokenizer(), [user, message, Message("tool", "1")], given)
    assert whole.ids[: len(prompt.ids)] == prompt.ids
    answer = whole.ids[len(prompt.ids) :]
    parser = Parser(tokenizer(), given, prompt_ids=prompt.ids)
    events = [event for piece in pieces(answer, sizes) for event in parser.push(piece)]
    assert parser.done  # the next tag is a stop
    parsed = fold(events).message()
    assert (parsed.content, parsed.reasoning) == (message.content, message.reasoning)
    assert [(call.name, dict(call.arguments)) for call in parsed.tool_calls] == [
        (call.name, dict(call.arguments)) for call in message.tool_calls
    ]
    assert json.dumps([c.arguments for c in parsed.tool_calls]) == json.dumps([c.arguments for c in message.tool_calls])


@given(
    raw=st.lists(st.sampled_from((*SPECIAL_TOKENS, *HOSTILE, "f", "g", "x", "1", "null", "[1]")), max_size=25),
    opened=st.booleans(),
    with_tools=st.booleans(),
    parallel=st.booleans(),
    reason=st.sampled_from(("stop", "length")),
    sizes=SIZES,
)
@settings(max_examples=400, deadline=None)
def test_no_ids_break_it_and_no_split_changes_it(
    raw: list[str], opened: bool, with_tools: bool, parallel: bool, reason: str, sizes: list[int]
) -> None:
    given = tools(function("f", x={"type": "string"}), function("g", x={"type": "integer"})) if with_tools else ()
    prompt = ids_of("<|assistant|><think>" if opened else "<|assistant|></think>")
    text = "".join(raw)
    known = None
    for ids in (ids_of(text), bytes_of(text)):
        parser = Parser(tokenizer(), given, prompt_ids=prompt, parallel_tool_calls=parallel, new_id=lambda: "id")
        events = [event for piece in pieces(ids, sizes) for event in parser.push(piece)] + parser.finish(reason)
        streamed = fold(events)
        once = Parser(tokenizer(), given, prompt_ids=prompt, parallel_tool_calls=parallel, new_id=lambda: "id")
        assert fold(once.push(ids) + once.finish(reason)) == streamed
        assert parser.done
        known = known or streamed
        assert streamed == known
        starts = [event.index for event in events if isinstance(event, CallStart)]
        ends = [event.index for event in events if isinstance(event, CallEnd)]
        assert starts == ends == list(range(len(starts)))
        assert len(starts) <= (99 if with_tools and parallel else int(with_tools))
        for call in streamed.calls:
            assert call.name
            assert not call.complete or isinstance(json.loads(call.arguments), dict)
            assert call.complete or call.fault
        streamed.message()


@given(ids=st.lists(st.integers(0, 339), max_size=40), sizes=SIZES)
@settings(max_examples=200, deadline=None)
def test_without_tools_and_tags_nothing_is_lost(ids: list[int], sizes: list[int]) -> None:
    text = [id for id in ids if id not in tokenizer().special.values()]
    parser = Parser(tokenizer(), prompt_ids=ids_of("<|assistant|></think>"))
    events = [event for piece in pieces(text, sizes) for event in parser.push(piece)] + parser.finish()
    assert fold(events).content == tokenizer().decode(text)
    assert parse(tokenizer(), text).content == tokenizer().decode(text)
