"""What models and clients do, and what must come of it: every row under every split, whole and streamed alike."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from glm5.text import Message, Parsed, Parser, Tool, messages_from_openai, parse, render
from glm5.text.events import CallArguments, CallEnd, CallStart, Content, Event, Reasoning, fold
from support.conversations import bytes_of, function, ids_of, pieces, tokenizer, tools

INT, STR = {"type": "integer"}, {"type": "string"}
PING = function("ping")
THINK = "[gMASK]<sop><|user|>u<|assistant|><think>"
ANSWER = "[gMASK]<sop><|user|>u<|assistant|></think>"


def stream(ids: list[int], given: tuple[Tool, ...], sizes: list[int], reason: str, **options: Any) -> list[Event]:
    parser = Parser(tokenizer(), given, new_id=lambda: "id", **options)
    events = [event for piece in pieces(ids, sizes) for event in parser.push(piece)]
    return events + parser.finish(reason)


def every_way(raw: str, *specs: dict[str, Any], prompt: str = ANSWER, reason: str = "stop", **options: Any) -> Parsed:
    """What comes of an answer, which must be the same for each spelling and split."""
    given, options = tools(*specs), {**options, "prompt_ids": ids_of(prompt)}
    results = []
    for ids in (ids_of(raw), bytes_of(raw)):
        whole = parse(tokenizer(), ids, given, reason=reason, **options)
        results.append(replace(whole, calls=tuple(replace(call, id="id") for call in whole.calls)))
        assert all(call.id for call in whole.calls)
        assert len({call.id for call in whole.calls}) == len(whole.calls)
        for sizes in ([1], [2], [3], [5], [1, 4, 2], [len(ids) or 1]):
            events = stream(ids, given, sizes, reason, **options)
            check_order(events)
            results.append(fold(events))
    for result in results:
        assert result == results[0]
    for call in results[0].calls:
        assert not call.complete or isinstance(json.loads(call.arguments), dict)
    return results[0]


def check_order(events: list[Event]) -> None:
    """A call starts once, with the next number, then come its arguments, then its end; nothing is empty."""
    opened, begun = None, 0
    for event in events:
        match event:
            case CallStart(index, id, name):
                assert (opened, index) == (None, begun)
                assert id
                assert name
                opened, begun = index, begun + 1
            case CallArguments(index, text):
                assert index == opened
                assert text
            case CallEnd(index):
                assert index == opened
                opened = None
            case Reasoning(text) | Content(text):
                assert opened is None
                assert text
    assert opened is None


def arguments(parsed: Parsed) -> list[tuple[str, Any]]:
    assert all(call.complete and not call.fault for call in parsed.calls)
    return [(call.name, json.loads(call.arguments)) for call in parsed.calls]


def call(name: str, **values: str) -> str:
    inside = "".join(f"<arg_key>{k}</arg_key><arg_value>{v}</arg_value>" for k, v in values.items())
    return f"<tool_call>{name}{inside}</tool_call>"


# ------------------------------------------------------------------------------------------------ calls
@pytest.mark.parametrize(
    ("raw", "specs", "expected"),
    [
        (call("dim", lvl="3"), [function("dim", lvl=INT)], [("dim", {"lvl": 3})]),
        (call("ping"), [PING], [("ping", {})]),
        (call("ping") * 2, [PING], [("ping", {}), ("ping", {})]),
        (
            call("cp", a="a/b/a/b.txt", b="a/b"),
            [function("cp", a=STR, b=STR)],
            [("cp", {"a": "a/b/a/b.txt", "b": "a/b"})],
        ),
        (call("f", o='{"a":1}'), [function("f", o={"type": "object"})], [("f", {"o": {"a": 1}})]),
        # The same raw text, typed by two tools.
        (
            call("A", v="7") + call("B", v="7"),
            [function("A", v=STR), function("B", v=INT)],
            [("A", {"v": "7"}), ("B", {"v": 7})],
        ),
        (
            call("f", n="5", b="true", l="[1]"),
            [function("f", n=INT, b={"type": "boolean"}, l={"type": "array"})],
            [("f", {"n": 5, "b": True, "l": [1]})],
        ),
        # Strings are taken to the letter, whatever they look like.
        (call("f", s='{"k":1}'), [function("f", s=STR)], [("f", {"s": '{"k":1}'})]),
        (call("f", s="001"), [function("f", s=STR)], [("f", {"s": "001"})]),
        (call("f", s=' "q" \\ \n\t数据🙂 '), [function("f", s=STR)], [("f", {"s": ' "q" \\ \n\t数据🙂 '})]),
        (call("f", s=""), [function("f", s=STR)], [("f", {"s": ""})]),
        # An unknown name is passed on and ruins nothing; its values are typed by how they look.
        (
            call("ping") + call("ghost", n="1", s="x y") + call("ping"),
            [PING],
            [("ping", {}), ("ghost", {"n": 1, "s": "x y"}), ("ping", {})],
        ),
        # The older form, with line ends between the parts.
        (
            "<tool_call>f\n<arg_key>n</arg_key>\n<arg_value>5</arg_value>\n</tool_call>\n",
            [function("f", n=INT)],
            [("f", {"n": 5})],
        ),
        # Tags inside a value are text of it.
        (
            call("f", s="<think><tool_call>x</tool_call></think><arg_key>"),
            [function("f", s=STR)],
            [("f", {"s": "<think><tool_call>x</tool_call></think><arg_key>"})],
        ),
    ],
)
def test_calls(raw: str, specs: list[dict[str, Any]], expected: list[tuple[str, Any]]) -> None:
    for prompt, before in ((ANSWER, ""), (THINK, "hm</think>"), (THINK, "hm")):
        parsed = every_way(before + raw + "<|observation|>", *specs, prompt=prompt)
        assert arguments(parsed) == expected
        assert parsed.content == ""
        assert parsed.reasoning == ("hm" if before else "")
        assert not parsed.skipped_thinking


ANY_OF = {"anyOf": [{"type": "integer"}, {"type": "null"}]}
OPTIONAL = {"anyOf": [{"type": "string"}, {"type": "null"}]}


@pytest.mark.parametrize(
    ("schema", "raw", "expected"),
    [
        (INT, "7", 7),
        (INT, " 7\n", 7),
        (INT, "-3", -3),
        (INT, "seven", "seven"),
        (INT, "", ""),
        (INT, "7.5", 7.5),
        (INT, "[1]", [1]),
        (INT, "NaN", "NaN"),
        (INT, "1" * 5000, "1" * 5000),
        ({"type": "number"}, "1e3", 1000.0),
        ({"type": "number"}, "7", 7),
        ({"type": "boolean"}, "false", False),
        ({"type": "boolean"}, "False", "False"),
        ({"type": "array"}, '["a", {"b": null}]', ["a", {"b": None}]),
        ({"type": "array"}, "[" * 100_000, "[" * 100_000),
        ({"type": "object"}, '{"数": "据"}', {"数": "据"}),
        ({"properties": {"a": INT}}, '{"a": 1}', {"a": 1}),
        (ANY_OF, "null", None),
        (ANY_OF, "3", 3),
        (OPTIONAL, "null", None),
        (OPTIONAL, "nullable", "nullable"),
        (OPTIONAL, "nul", "nul"),
        (OPTIONAL, " null", " null"),
        (OPTIONAL, "null ", "null "),
        (OPTIONAL, "7", "7"),
        (OPTIONAL, "", ""),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": "string", "nullable": True}, "null", None),
        ({"type": "integer", "nullable": True}, "null", None),
        ({"type": ["string", "integer"]}, "7", 7),
        ({"type": ["string", "integer"]}, "7.5", "7.5"),
        ({"type": ["string", "integer"]}, '"7"', '"7"'),
        ({"type": ["string", "integer"]}, "true", "true"),
        ({"type": ["string", "boolean"]}, "true", True),
        ({"type": ["string", "number"]}, "7", 7),
        ({"oneOf": [{"type": "string"}, {"type": "array"}]}, "[1]", [1]),
        ({"oneOf": [{"type": "string"}, {"type": "array"}]}, '{"a": 1}', '{"a": 1}'),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"enum": [1, 2]}, "1", 1),
        ({"const": "true"}, "true", "true"),
        ({"allOf": [{"type": ["string", "integer"]}, {"type": "string"}]}, "1", "1"),
        ({"$ref": "#/$defs/name"}, "1", "1"),
        ({"$ref": "#/$defs/loop"}, "1", 1),
        ({"$ref": "#/$defs/none"}, "1", 1),
        ({"type": 3, "enum": 4, "anyOf": "x"}, "1", 1),
        # No schema: by its looks.
        ({}, "7", 7),
        ({}, "007", "007"),
        (True, "true", True),
        ({}, "plain words", "plain words"),
        ({}, '{"a": 1}', {"a": 1}),
        ({}, '"quoted"', '"quoted"'),
    ],
)
def test_values_have_the_type_that_the_tool_declares(schema: Any, raw: str, expected: Any) -> None:
    spec = function("f", x=schema)
    spec["function"]["parameters"]["$defs"] = {"name": STR, "loop": {"anyOf": [{"$ref": "#/$defs/loop"}]}}
    ids = ids_of(call("f", x=raw))
    for sizes in ([1], [3], [len(ids)]):
        (found,) = fold(stream(ids, tools(spec), sizes, "stop")).calls
        value = json.loads(found.arguments, parse_int=str if len(raw) > 4000 else int)["x"]
        assert value == expected
        assert type(value) is type(expected)


def test_arguments_that_the_schema_does_not_list() -> None:
    spec = function("f")
    spec["function"]["parameters"]["additionalProperties"] = STR
    assert arguments(every_way(call("f", x="7"), spec)) == [("f", {"x": "7"})]
    assert arguments(every_way(call("f", x="7"), PING, function("f"))) == [("f", {"x": 7})]


def test_a_schema_of_many_references_is_read_at_once() -> None:
    spec = function("f", x={"$ref": "#/$defs/0"})
    branches = {str(n): {"anyOf": [{"$ref": f"#/$defs/{n + 1}"}] * 50} for n in range(2000)}
    spec["function"]["parameters"]["$defs"] = branches
    assert arguments(every_way(call("f", x="7"), spec)) == [("f", {"x": 7})]


def test_long_strings_arrive_while_they_are_written() -> None:
    for schema in (STR, OPTIONAL):
        parser = Parser(tokenizer(), tools(function("f", s=schema)), prompt_ids=ids_of(ANSWER))
        text = "weather 数据\n" * 200
        ids = ids_of(call("f", s=text))
        arrived = 0
        for n, id in enumerate(ids):
            new = [e for e in parser.push([id]) if isinstance(e, CallArguments)]
            arrived += sum(len(e.text) for e in new)
            if n == len(ids) // 2:
                assert arrived > len(text) // 3
        assert parser.push([]) == []


def test_one_call_where_the_client_wants_one() -> None:
    raw = "a" + call("ping") * 2 + "b"
    assert len(every_way(raw, PING).calls) == 2
    one = every_way(raw, PING, parallel_tool_calls=False)
    assert (len(one.calls), one.content) == (1, "a")
    parser = Parser(tokenizer(), tools(PING), prompt_ids=ids_of(ANSWER), parallel_tool_calls=False)
    parser.push(ids_of(call("ping")))
    assert parser.done


@pytest.mark.parametrize(
    ("raw", "reason", "name", "text"),
    [
        ("<tool_call>f<arg_key>s</arg_key><arg_value>half a st", "length", "f", '{"s": "half a st'),
        ("<tool_call>f<arg_key>n</arg_key><arg_value>12", "length", "f", ""),
        ("<tool_call>f<arg_key>n</arg_key><arg_value>12</arg_value>", "length", "f", '{"n": 12'),
        ("<tool_call>f<arg_key>n</arg_key><arg_value>12</arg_value><arg_key>m", "length", "f", '{"n": 12'),
        ("<tool_call>f<arg_key>n</arg_key><arg_value>12<|observation|>", "stop", "f", ""),
        ("<tool_call>f<arg_key>s</arg_key><arg_value>half", "abort", "f", '{"s": "half'),
    ],
)
def test_a_call_that_is_cut_stays_open(raw: str, reason: str, name: str, text: str) -> None:
    parsed = every_way("a" + call("ping") + raw, PING, function("f", s=STR, n=INT), reason=reason)
    whole, cut = parsed.calls
    assert whole.complete
    assert (cut.name, cut.arguments, cut.complete, cut.fault) == (name, text, False, "the answer ended inside it")
    assert [made.name for made in parsed.message().tool_calls] == ["ping"]


def test_a_name_that_is_cut_is_no_call() -> None:
    parsed = every_way("a<tool_call>pi", PING, reason="length")
    assert (parsed.content, parsed.calls) == ("a", ())


@pytest.mark.parametrize(
    ("raw", "calls", "fault"),
    [
        ("<tool_call>ping<|observation|>", [{}], "no </tool_call>"),
        ("<tool_call>ping<tool_call>ping</tool_call>", [{}, {}], "no </tool_call>"),
        ("<tool_call>f<arg_key>n</arg_key><arg_value>1</arg_value><|user|>", [{"n": 1}], "no </tool_call>"),
        (call("f", n="1").replace("</arg_key>", "</arg_key>junk"), [{"n": 1}], "text between its arguments"),
        ("<tool_call>f<arg_key>n</arg_key></tool_call>", [{}], "a key without a value"),
        (
            "<tool_call>f<arg_key>n</arg_key><arg_key>m</arg_key><arg_value>1</arg_value></tool_call>",
            [{"m": 1}],
            "a key without a value",
        ),
        (
            "<tool_call>f<arg_key>m</arg_key><arg_value>1</arg_value><arg_value></tool_call>",
            [{"m": 1}],
            "a value without a key",
        ),
    ],
)
def test_faulty_calls_are_mended_and_named(raw: str, calls: list[dict[str, Any]], fault: str) -> None:
    parsed = every_way(raw, PING, function("f", n=INT))
    assert [json.loads(found.arguments) for found in parsed.calls] == calls
    assert all(found.complete for found in parsed.calls)
    assert parsed.calls[0].fault == fault


def test_a_tag_that_is_written_twice_is_text_once() -> None:
    parsed = every_way("<tool_call>" + call("ping"), PING)
    assert (parsed.content, arguments(parsed)) == ("<tool_call>", [("ping", {})])


@pytest.mark.parametrize("raw", ["<tool_call></tool_call>", "<tool_call> <arg_key>x</arg_key>", "<tool_call>"])
def test_a_call_without_a_name_is_text(raw: str) -> None:
    parsed = every_way(raw, PING)
    assert (parsed.content, parsed.calls) == (raw, ())


# ------------------------------------------------------------------------------------------------ thinking and text
@pytest.mark.parametrize(
    ("raw", "prompt", "reasoning", "content"),
    [
        ("</think>a < b", THINK, "", "a < b"),
        ("a < b", ANSWER, "", "a < b"),
        ("x</think>y", THINK, "x", "y"),
        (" x\n</think>\n\ny \n", THINK, " x\n", "\n\ny \n"),
        ("ok<|user|>more", ANSWER, "", "ok"),
        ("ok<|endoftext|>more", ANSWER, "", "ok"),
        ("ok<|assistant|>more", ANSWER, "", "ok"),
        ("x<|user|></think>y", THINK, "x", "x"),  # skipped thinking
        # Without tools a call's tags are text, and so is what looks like them anywhere.
        ("x</think>a" + call("ping", n="1"), THINK, "x", "a" + call("ping", n="1")),
        ("hm<tool_call>ping</tool_call></think>b", THINK, "hm<tool_call>ping</tool_call>", "b"),
        # A prompt that opens nothing: the model does it itself.
        ("<think>x</think>y", "[gMASK]<sop><|user|>u<|assistant|>", "x", "y"),
        ("</think>y", "[gMASK]<sop><|user|>u<|assistant|>", "", "y"),
        ("<think>x</think>y", THINK, "x", "y"),
        ("a<think>x</think>b", ANSWER, "x", "ab"),
        # A prompt that ends inside an answer that was begun for the model.
        ("more</think>y", THINK + "so far ", "more", "y"),
        ("more", THINK + "done</think>so far ", "", "more"),
        ("[gMASK]a<sop>b", ANSWER, "", "ab"),  # prefixes are no text
        ("", ANSWER, "", ""),
        ("🙂数据é", ANSWER, "", "🙂数据é"),
    ],
)
def test_thinking_and_text(raw: str, prompt: str, reasoning: str, content: str) -> None:
    parsed = every_way(raw, prompt=prompt)
    assert (parsed.reasoning, parsed.content, parsed.calls) == (reasoning, content, ())


def test_third_turn_does_not_leak_its_thinking() -> None:
    talk = [
        {"role": "user", "content": "u"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "function": {"name": "ping", "arguments": ""}}],
        },
        {"role": "tool", "content": "pong"},
        {"role": "user", "content": "and now?"},
    ]
    prompt = render(tokenizer(), messages_from_openai(talk), tools(PING), add_generation_prompt=True)
    parsed = parse(tokenizer(), ids_of("x</think>y"), tools(PING), prompt_ids=prompt.ids)
    assert (parsed.reasoning, parsed.content) == ("x", "y")


def test_an_answer_where_thinking_was_due_comes_as_content_too() -> None:
    """A stream can't take back what it passed on as thinking, so both ways give it twice, and say so."""
    parsed = every_way("42<|user|>", PING, prompt=THINK)
    assert (parsed.reasoning, parsed.content, parsed.skipped_thinking) == ("42", "42", True)
    assert parsed.message() == Message("assistant", "42")
    parser = Parser(tokenizer(), prompt_ids=ids_of(THINK))
    events = parser.push(ids_of("42"))
    assert events == [Reasoning("42")]
    assert parser.finish("stop") == [Content("42", repeated=True)]
    assert parser.reasoning_tokens == 0


@pytest.mark.parametrize(("raw", "reason"), [("42", "length"), ("42", "abort"), (" \n", "stop")])
def test_thinking_that_is_cut_or_blank_stays_thinking(raw: str, reason: str) -> None:
    parsed = every_way(raw, prompt=THINK, reason=reason)
    assert (parsed.reasoning, parsed.content, parsed.skipped_thinking) == (raw, "", False)


def test_blank_text_beside_calls_is_left_out() -> None:
    parsed = every_way("x</think>\n\n" + call("ping") + "\n" + call("ping") + "\n", PING, prompt=THINK)
    assert (parsed.content, len(parsed.calls)) == ("", 2)
    parsed = every_way("\nLet me see.\n\n" + call("ping") + "\nDone.", PING)
    assert parsed.content == "\nLet me see.\nDone."
    # A model that writes nothing but line ends is not waited for.
    parsed = every_way("a" + "\n" * 100 + call("ping"), PING)
    assert parsed.content == "a" + "\n" * 36


def test_thinking_is_counted_id_by_id() -> None:
    for sizes in ([1], [3], [100]):
        parser = Parser(tokenizer(), tools(PING), prompt_ids=ids_of(THINK))
        thought = ids_of("weather 数据 hm")
        for piece in pieces([*thought, *ids_of("</think>a" + call("ping"))], sizes):
            parser.push(piece)
        parser.finish("stop")
        assert parser.reasoning_tokens == len(thought)


def test_characters_in_parts_are_held_back() -> None:
    parser = Parser(tokenizer(), prompt_ids=ids_of(ANSWER))
    first, second, third = bytes_of("数")
    assert parser.push([first, second]) == []
    assert parser.push([third]) == [Content("数")]
    parser.push([first])
    assert parser.finish("length") == [Content("\ufffd")]
    broken = Parser(tokenizer(), tools(function("f", s=STR)), prompt_ids=ids_of(THINK))
    events = broken.push(
        [first, *ids_of("</think>"), first, *ids_of(call("f", s="x")[:-12]), first, *ids_of("</tool_call>")]
    )
    assert fold(events + broken.finish()).reasoning == "\ufffd"


def test_parsers_share_nothing() -> None:
    given = tools(PING, function("f", s=STR))
    answers = [call("ping"), "a" + call("f", s="x"), "b"]
    parsers = [Parser(tokenizer(), given, prompt_ids=ids_of(ANSWER)) for _ in answers]
    spelled = [ids_of(answer) for answer in answers]
    events: list[list[Event]] = [[] for _ in answers]
    for step in range(max(map(len, spelled))):
        for n, ids in enumerate(spelled):
            events[n] += parsers[n].push(ids[step : step + 1])
    for n, parser in enumerate(parsers):
        events[n] += parser.finish()
    assert [arguments(fold(made)) for made in events] == [[("ping", {})], [("f", {"s": "x"})], []]
    assert [fold(made).content for made in events] == ["", "a", "b"]


def test_nothing_comes_after_the_end() -> None:
    parser = Parser(tokenizer(), prompt_ids=ids_of(ANSWER))
    assert parser.push(ids_of("a<|user|>")) == [Content("a")]
    assert parser.done
    assert parser.push(ids_of("b")) == parser.finish("length") == parser.finish() == []
