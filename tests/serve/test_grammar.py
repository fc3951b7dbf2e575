"""Structured output: whatever the masks allow has the form, by random walks through them with drafts taken back."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from typing import Any

import llguidance
import numpy as np
import pytest

from glm5.serve.grammar import Grammar, GrammarCompiler, tool_grammar
from glm5.serve.request import Constraint
from glm5.text import Tokenizer
from glm5.text.messages import tools_from_openai
from glm5.text.parser import parse
from glm5.utils.errors import UserError

TEXTS = ['{"key": [1, 2.5, true], "na me": null} <b>get_weather</b> é 日本語 0123456789 abc\n   fin'] * 3


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(TEXTS, 330)


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer)


def walk(
    grammar: Grammar,
    seed: int,
    likes: Callable[[list[int]], list[int]] | None = None,
    length: int = 3000,
    drafts: bool = True,
) -> list[int]:
    """Ids of a random answer. Now and then some ids are taken on trial and taken back, as refused drafts are.

    Args:
        likes: of the allowed ids those to take from, most of the time; without any, from all.
    """
    draw, matcher, ids = random.Random(seed), grammar.matcher(), []  # noqa: S311
    while not matcher.finished:
        allowed = np.flatnonzero(matcher.allowed()).tolist()
        if matcher.complete and (not allowed or draw.random() < 0.2):
            break
        assert allowed, matcher.error
        if drafts and draw.random() < 0.3:
            tried = 0
            while tried < 3 and (next_ids := np.flatnonzero(matcher.allowed())).size:
                assert matcher.advance(int(draw.choice(next_ids)))
                tried += 1
            assert not matcher.advance(draw.choice([0, 1]))  # a control token changes nothing
            matcher.rollback(tried)
            assert np.flatnonzero(matcher.allowed()).tolist() == allowed
        liked = likes(allowed) if likes is not None else []
        ids.append(draw.choice(liked if liked and draw.random() < 0.7 else allowed))
        assert matcher.advance(ids[-1])
        assert len(ids) < length
    return ids


def markers_first(tokenizer: Tokenizer, share: float = 0.5) -> Callable[[list[int]], list[int]]:
    """A taste for special tokens and closing signs, without which a random walk through free text would not end."""
    closing = set(tokenizer.special.values()) | {tokenizer.encode(sign)[0] for sign in '"]}0'}
    return lambda allowed: [id for id in allowed if id in closing]


# ------------------------------------------------------------------------------------------------ regex, EBNF, JSON
@pytest.mark.parametrize(
    "pattern", ["[0-9]+", r"[a-c]{2,4}(-\d+)?x", "yes|no|né", "(é|日){1,5}", r"a\.b*", r"/[x-z]/\n[^\"/]{2}"]
)
def test_a_regex_matches_the_whole_answer(compiler: GrammarCompiler, tokenizer: Tokenizer, pattern: str) -> None:
    grammar = compiler.compile(Constraint("regex", pattern))
    texts = {tokenizer.decode_bytes(walk(grammar, seed)).decode() for seed in range(25)}
    assert all(re.fullmatch(pattern, text) for text in texts), texts
    assert len(texts) > 1


def test_an_ebnf_nests(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    grammar = compiler.compile(Constraint("ebnf", 'root ::= "(" (root | [a-b]+)? ")"'))
    for seed in range(25):
        text = tokenizer.decode(walk(grammar, seed))
        assert re.fullmatch(r"\(+[ab]*\)+", text)
        assert text.count("(") == text.count(")")


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["x", "y", 7, None]}, "maxItems": 3},
        "where": {"$ref": "#/$defs/place"},
    },
    "required": ["name", "tags"],
    "additionalProperties": False,
    "$defs": {"place": {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}},
}


def test_a_schema_holds(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    grammar = compiler.compile(Constraint("json_schema", json.dumps(SCHEMA)))
    optional = set()
    for seed in range(40):
        value = json.loads(tokenizer.decode_bytes(walk(grammar, seed, markers_first(tokenizer))))
        assert {"name", "tags"} <= set(value) <= set(SCHEMA["properties"])
        assert isinstance(value["name"], str)
        assert len(value["name"]) <= 6
        assert type(value.get("age", 0)) is int
        assert 0 <= value.get("age", 0) <= 150
        assert len(value["tags"]) <= 3
        assert all(tag in ("x", "y", 7, None) for tag in value["tags"])
        assert type(value.get("where", {"ok": True})["ok"]) is bool
        optional |= set(value)
    assert optional == set(SCHEMA["properties"])


def test_json_is_an_object_with_bounded_blanks(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    grammar = compiler.compile(Constraint("json"))
    for seed in range(25):
        assert isinstance(json.loads(tokenizer.decode_bytes(walk(grammar, seed, markers_first(tokenizer)))), dict)
    blanks = [tokenizer.encode(blank)[0] for blank in " \n\t"]
    matcher = grammar.matcher()
    assert matcher.advance(tokenizer.encode("{")[0])
    taken = 0
    while any(matcher.advance(blank) for blank in blanks):
        taken += 1
        assert taken <= 32
    assert taken > 0


# ------------------------------------------------------------------------------------------------ tools
TOOLS: list[dict[str, Any]] = [
    {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {
                "days": {"type": "integer", "minimum": 1, "maximum": 14},
                "city": {"type": "string"},
                "unit": {"enum": ["c", 'f"\\\n', 3]},
                "more": {"type": "object", "properties": {"p": {"$ref": "#/$defs/p"}}, "additionalProperties": False},
                "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                "any": {},
            },
            "required": ["city", "more"],
            "$defs": {"p": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}},
        },
    },
    {"name": "get"},
    {
        "name": "gets",
        "parameters": {"properties": {"q": {"type": "null"}}, "additionalProperties": {"type": "boolean"}},
    },
    {"name": "free", "parameters": {"type": "object", "additionalProperties": True}},
]


def tools(*names: str, most: int | None = None) -> Constraint:
    chosen = [{"type": "function", "function": tool} for tool in TOOLS if tool["name"] in names or not names]
    return Constraint("tools", json.dumps(chosen), max_calls=most)


CALL = re.compile(r"<tool_call>(\w+?)((?:<arg_key>.+?</arg_key><arg_value>.*?</arg_value>)*)</tool_call>", re.DOTALL)
PAIR = re.compile(r"<arg_key>(.+?)</arg_key><arg_value>(.*?)</arg_value>", re.DOTALL)


def calls_of(tokenizer: Tokenizer, ids: list[int]) -> list[tuple[str, list[tuple[str, str]]]]:
    """Names and raw arguments; free text of these walks holds no spelled-out marker."""
    text, end, out = tokenizer.decode_bytes(ids).decode(), 0, []
    for match in CALL.finditer(text):
        assert match.start() == end
        end = match.end()
        out.append((match[1], PAIR.findall(match[2])))
    assert end == len(text)
    return out


def check_call(name: str, pairs: list[tuple[str, str]]) -> None:
    keys = [key for key, _ in pairs]
    values = dict(pairs)
    if name == "get_weather":
        assert len(keys) == len(set(keys))
        assert {"city", "more"} <= set(keys) <= {"days", "city", "unit", "more", "note", "any"}
        assert 1 <= json.loads(values.get("days", "1")) <= 14
        assert values.get("unit", "c") in ("c", 'f"\\\n', "3")
        more = json.loads(values["more"])
        assert set(more) <= {"p"}
        assert all(type(flag) is bool for flag in more.get("p", []))
    elif name == "get":
        assert not keys
    elif name == "gets":
        assert keys.count("q") <= 1
        assert all(value == "null" if key == "q" else value in ("true", "false") for key, value in pairs)
    else:
        assert name == "free"


def test_calls_have_the_native_form(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    grammar, orders, names = compiler.compile(tools()), set(), set()
    known = tools_from_openai(json.loads(tools().text))
    for seed in range(60):
        ids = walk(grammar, seed, markers_first(tokenizer))
        found = calls_of(tokenizer, ids)
        assert found
        parsed = parse(tokenizer, ids, known)
        assert [(call.name, call.complete, call.fault) for call in parsed.calls] == [(n, True, "") for n, _ in found]
        assert [set(json.loads(call.arguments)) for call in parsed.calls] == [set(dict(p)) for _, p in found]
        for name, pairs in found:
            check_call(name, pairs)
            names.add(name)
            if name == "get_weather":
                orders.add(tuple(key for key, _ in pairs if key in ("city", "more")))
    assert names == {tool["name"] for tool in TOOLS}
    assert orders == {("city", "more"), ("more", "city")}


def test_a_named_tool_is_called_once(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    for seed in range(10):
        ids = walk(compiler.compile(tools("get_weather", most=1)), seed, markers_first(tokenizer))
        assert [name for name, _ in calls_of(tokenizer, ids)] == ["get_weather"]


def test_text_of_a_value_is_verbatim_and_never_a_marker(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    matcher = compiler.compile(tools("get_weather")).matcher()
    special = tokenizer.special
    start = [special["<tool_call>"], *tokenizer.encode("get_weather"), special["<arg_key>"]]
    start += [*tokenizer.encode("city"), special["</arg_key>"], special["<arg_value>"]]
    spelled = tokenizer.encode('{"a": 1}</arg_value> "\\ é\n<|user|>')
    assert all(matcher.advance(id) for id in [*start, *spelled])
    allowed = {id for id in np.flatnonzero(matcher.allowed()) if id in special.values()}
    assert allowed == {special["</arg_value>"]}
    # The call cannot end yet: a required parameter is missing.
    assert matcher.advance(special["</arg_value>"])
    assert np.flatnonzero(matcher.allowed()).tolist() == [special["<arg_key>"]]


def tool_of(schema: dict[str, Any]) -> Constraint:
    return Constraint(
        "tools",
        json.dumps([{"type": "function", "function": {"name": "say", "parameters": {"properties": {"x": schema}}}}]),
    )


@pytest.mark.parametrize(
    ("bounds", "fits", "more"),
    [
        ({"minLength": 2, "maxLength": 3}, {"": False, "é": False, "é€": True, "é€\n": True}, False),
        ({"maxLength": 0}, {"": True}, False),
        ({"minLength": 1}, {"": False, "a": True}, True),
        ({"maxLength": 1_000_000}, {"": True, "aaa": True}, True),
    ],
)
def test_text_of_a_value_has_the_lengths_of_its_schema(
    compiler: GrammarCompiler, tokenizer: Tokenizer, bounds: dict[str, int], fits: dict[str, bool], more: bool
) -> None:
    special = tokenizer.special
    start = [special["<tool_call>"], *tokenizer.encode("say"), special["<arg_key>"], *tokenizer.encode("x")]
    for text, whole in fits.items():
        matcher = compiler.compile(tool_of({"type": "string", **bounds})).matcher()
        ids = [*start, special["</arg_key>"], special["<arg_value>"], *tokenizer.encode(text)]
        assert all(matcher.advance(id) for id in ids)
        allowed = set(np.flatnonzero(matcher.allowed()).tolist())
        assert (special["</arg_value>"] in allowed) == whole, text
    assert (allowed != {special["</arg_value>"]}) == more  # after the longest of them


COLOUR = {"enum": ["red", "dark red"], "title": "Colour", "type": "string"}
LOOP = {"anyOf": [{"$ref": "#/$defs/loop"}, {"$ref": "#/$defs/colour"}]}


@pytest.mark.parametrize(
    ("schema", "fits", "not_"),
    [
        ({"$ref": "#/$defs/colour", "default": "red"}, ["red", "dark red"], ["re", "blue", "null"]),
        ({"anyOf": [{"$ref": "#/$defs/colour"}, {"type": "null"}]}, ["red", "null"], ["blue", "nul", '"red"']),
        ({"oneOf": [COLOUR, {"type": "integer", "maximum": 9}]}, ["dark red", "7"], ["blue", "10", "7.5"]),
        ({"anyOf": [{"const": "on"}, {"type": "array", "items": COLOUR}]}, ["on", '["red"]'], ["off", "red"]),
        ({"anyOf": [{"type": "string", "maxLength": 2}, {"type": "null"}]}, ["ab", "null", ""], ["abc"]),
        ({"anyOf": [{"type": "string"}, COLOUR]}, ["blue", "null", "7"], []),
        ({"$ref": "#/$defs/loop"}, ["red"], ["blue"]),
        ({"$ref": "#/$defs/none"}, ["anything"], []),
        ({"anyOf": [{"const": f"{n}"} for n in range(300)]}, ["299", "anything"], []),
        ({"anyOf": []}, ["anything"], []),
    ],
)
def test_choices_of_a_schema_are_kept_wherever_they_stand(
    compiler: GrammarCompiler, tokenizer: Tokenizer, schema: dict[str, Any], fits: list[str], not_: list[str]
) -> None:
    """As pydantic writes them: enums as references, optional ones in `anyOf`."""
    parameters = {"properties": {"x": schema}, "$defs": {"colour": COLOUR, "loop": LOOP}}
    spec = {"type": "function", "function": {"name": "say", "parameters": parameters}}
    grammar, special = compiler.compile(Constraint("tools", json.dumps([spec]))), tokenizer.special
    start = [special["<tool_call>"], *tokenizer.encode("say"), special["<arg_key>"], *tokenizer.encode("x")]
    for text, whole in [*((text, True) for text in fits), *((text, False) for text in not_)]:
        matcher = grammar.matcher()
        assert all(matcher.advance(id) for id in [*start, special["</arg_key>"], special["<arg_value>"]])
        taken = all(matcher.advance(id) for id in tokenizer.encode(text))
        assert (taken and matcher.advance(special["</arg_value>"])) == whole, text


def test_a_declared_parameter_is_not_taken_for_another(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    special = tokenizer.special
    for key, first in (("q", b"n"), ("r", b"tf")):
        matcher = compiler.compile(tools("gets")).matcher()
        ids = [special["<tool_call>"], *tokenizer.encode("gets"), special["<arg_key>"], *tokenizer.encode(key)]
        assert all(matcher.advance(id) for id in [*ids, special["</arg_key>"], special["<arg_value>"]])
        allowed = np.flatnonzero(matcher.allowed()).tolist()
        assert {tokenizer.decode_bytes([id])[0] for id in allowed} == set(first)


# ------------------------------------------------------------------------------------------------ matchers, errors
def test_answers_share_a_grammar_but_not_their_place(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    grammar = compiler.compile(Constraint("regex", "[0-9]{2}"))
    assert compiler.compile(Constraint("regex", "[0-9]{2}")) is grammar
    one, two = grammar.matcher(), grammar.matcher()
    digit = tokenizer.encode("1")[0]
    assert one.advance(digit)
    assert one.advance(digit)
    assert (one.complete, one.finished, two.complete, two.finished) == (True, True, False, False)
    assert not one.advance(digit)
    one.rollback(1)
    assert (one.complete, one.finished, bool(one.allowed()[digit])) == (False, False, True)
    assert not two.allowed()[tokenizer.end_of_text_id]


@pytest.mark.parametrize(
    ("constraint", "field", "why"),
    [
        (Constraint("regex", "(a"), "regex", "unclosed group"),
        (Constraint("regex", "(?=a)b"), "regex", "look-around"),
        (Constraint("regex", "a" * 500_001), "regex: 500001", "characters"),
        (Constraint("regex", "((a{1000}){1000}){1000}"), "regex", "too many"),
        (Constraint("ebnf", 'root ::= ("a"'), "ebnf", "Expected"),
        (Constraint("ebnf", ""), "ebnf", "root"),
        (Constraint("json_schema", "{"), "json_schema", "line 1"),
        (Constraint("json_schema", "[]"), "json_schema", "not an object"),
        (Constraint("json_schema", '{"type": "strin"}'), "json_schema", "strin"),
        (Constraint("json_schema", '{"$ref": "#/$defs/a"}'), "json_schema", "$defs"),
        (Constraint("json_schema", '{"$ref": "#"}'), "json_schema", "no text fits it"),
        (Constraint("ebnf", "root ::= root"), "ebnf", "no text fits it"),
        (Constraint("tools", "[]"), "tools", "none to call"),
        (tools("get", most=0), "tools", "none to call"),
        (Constraint("tools", '[{"type": "function"}]'), "tools[0].function", ""),
        (tool_of({"type": "string", "maxLength": "5"}), "tools: x.maxLength", "whole number"),
        (tool_of({"type": "string", "minLength": 2, "maxLength": 1}), "tools: x", "at least 2 and at most 1"),
        (
            Constraint("tools", '[{"type":"function","function":{"name":"a","parameters":{"required":["b"]}}}]'),
            "tools: a.parameters.required",
            "b",
        ),
    ],
)
def test_what_cannot_be_compiled_names_its_field(
    compiler: GrammarCompiler, constraint: Constraint, field: str, why: str
) -> None:
    with pytest.raises(UserError) as caught:
        compiler.compile(constraint)
    assert caught.value.what.startswith(field)
    assert why in caught.value.what
    assert caught.value.mend


def test_what_is_too_large_is_refused(tokenizer: Tokenizer) -> None:
    compiler = GrammarCompiler(tokenizer)
    compiler._limits = llguidance.LLParserLimits(initial_lexer_fuel=100, verbose_errors=False)
    with pytest.raises(UserError, match=r"regex: .*too big"):
        compiler.compile(Constraint("regex", "[a-z]{1,50}x|" * 50))


def test_more_parameters_than_can_be_marked(tokenizer: Tokenizer) -> None:
    properties = {f"p{i}": {"type": "integer"} for i in range(65)}
    tool = {"type": "function", "function": {"name": "a", "parameters": {"properties": properties}}}
    with pytest.raises(ValueError, match="65 of at most 64"):
        tool_grammar(Constraint("tools", json.dumps([tool])), tokenizer)
