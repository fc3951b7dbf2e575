"""Structured output: which ids may follow, so that the answer is JSON, fits a schema, a regex, a grammar or a tool.

The parsing is llguidance's (an Earley parser over derivatives of regular expressions; no dependencies, CPU only). What
this module adds is the tokenizer, the errors, and GLM-5's native form of a tool call as a grammar:

    <tool_call>name<arg_key>k</arg_key><arg_value>v</arg_value>...</tool_call>

whose markers are special tokens, so that no text can imitate them. Special tokens are never text. Regexes have the
syntax of Rust's regex crate and match the whole answer; their digits are ASCII's. Source: the chat template that is
published with GLM-5. Read next: `sampler`.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

import numpy as np

from glm5.serve.request import Constraint
from glm5.text.arguments import STRING, alternatives, schema_types
from glm5.text.messages import Tool, tools_from_openai
from glm5.text.tokenizer import Tokenizer
from glm5.utils.errors import UserError

# Blank space between JSON's tokens is bounded: a model that repeats itself could otherwise fill its whole budget.
BLANK = r"[\x20\x0A\x0D\x09]{1,32}"
FUEL = 200_000  # of the lexer's construction: half a second, in which no other request gets on
LONGEST = 500_000  # characters of a constraint: the largest take a second to compile
MOST_ALTERNATIVES = 256  # of a value's schema; where there are more, and a string is among them, any text is taken
MOST_PARAMETERS = 64  # the parser marks which were given in a word of 64 bits


class GrammarCompiler:
    """Compiles constraints for one tokenizer, and remembers the last ones.

    Raises:
        UserError: llguidance is not installed.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        try:
            import llguidance
        except ImportError as error:
            raise UserError("structured output needs llguidance", "pip install 'glm5[serve]'") from error
        self._library, self._tokenizer = llguidance, tokenizer
        self._vocabulary = llguidance.LLTokenizer(_Vocabulary(tokenizer))  # type: ignore[arg-type]
        self._limits = llguidance.LLParserLimits(initial_lexer_fuel=FUEL, verbose_errors=False)
        self.compile = lru_cache(maxsize=128)(self._compile)

    def _compile(self, constraint: Constraint) -> Grammar:
        """Raises: UserError: the constraint cannot be read, or is too large. It names the field."""
        what = constraint.name
        if len(constraint.text) > LONGEST:
            raise UserError(f"{what}: {len(constraint.text)} characters", f"Give at most {LONGEST}")
        try:
            source = self._source(constraint)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{what}: {error}", "Give one that can be read") from error
        matcher = self._library.LLMatcher(self._vocabulary, source, log_level=0, limits=self._limits)
        if not matcher.is_error():
            matcher.compute_bitmask()  # what is too large shows here at the latest
        if matcher.is_error():
            raise UserError(f"{what}: {_first_line(matcher.get_error())}", "Mend or simplify it")
        grammar = Grammar(matcher, self._tokenizer)
        first = grammar.matcher()
        ids = first.allowed().nonzero()[0]
        if len(ids) and not first.advance(int(ids[0])):  # what the lexer gave up on shows only here
            raise UserError(f"{what}: {first.error}", "Mend or simplify it")
        return grammar

    def _source(self, constraint: Constraint) -> str:
        make = self._library.LLMatcher
        match constraint.kind:
            case "json" | "json_schema":
                schema = json.loads(constraint.text) if constraint.kind == "json_schema" else {"type": "object"}
                if not isinstance(schema, dict):
                    raise ValueError(f"{constraint.text[:80]!r} is not an object")
                return make.grammar_from_json_schema(schema, overrides={"whitespace_pattern": BLANK})
            case "regex":
                return make.grammar_from_lark(f"start: /{self._library.regex_to_lark(constraint.text, 'd')}/")
            case "ebnf":
                return self._library.grammar_from("ebnf", constraint.text)
            case "tools":
                return make.grammar_from_lark(tool_grammar(constraint, self._tokenizer))


class Grammar:
    """A compiled constraint. It is shared; every answer takes a `Matcher` of its own."""

    def __init__(self, prototype: Any, tokenizer: Tokenizer) -> None:
        self._prototype = prototype
        self._vocab_size, self._end = tokenizer.vocab_size, tokenizer.end_of_text_id

    def matcher(self) -> Matcher:
        return Matcher(self._prototype.deep_copy(), self._vocab_size, self._end)


class Matcher:
    """Where one answer stands in its grammar."""

    def __init__(self, inner: Any, vocab_size: int, end: int) -> None:
        self._inner, self._vocab_size = inner, vocab_size
        self._end = end  # the parser takes this id for the end of the answer; here that is the sampler's business

    def allowed(self) -> np.ndarray:
        """Which ids may follow as text or markers, bool [tokenizer's vocabulary].

        All False where nothing may follow, or the parser gave up (see `error`).
        """
        words = np.frombuffer(self._inner.compute_bitmask(), dtype=np.uint8)
        allowed = np.unpackbits(words, count=self._vocab_size, bitorder="little").astype(bool)
        allowed[self._end] = False
        return allowed if not self._inner.is_error() else np.zeros_like(allowed)

    def advance(self, id: int) -> bool:
        """Take one id. False, and nothing has changed, where the grammar does not allow it."""
        return id != self._end and self._inner.validate_tokens([id]) == 1 and self._inner.consume_token(id)

    def rollback(self, n: int) -> None:
        """Forget the last n ids."""
        if n and not self._inner.rollback(n):
            raise RuntimeError(f"the grammar cannot go back {n} ids: {self.error}")

    @property
    def complete(self) -> bool:
        """What was taken has the form: the answer may end here."""
        return self._inner.is_accepting()

    @property
    def finished(self) -> bool:
        """It has the form, and nothing may follow."""
        return self._inner.is_stopped() and not self._inner.is_error()

    @property
    def error(self) -> str:
        """Why the parser gave up (a step was too complex), else empty."""
        return _first_line(self._inner.get_error())


class _Vocabulary:
    """The tokenizer in the shape that llguidance reads."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.eos_token_id = tokenizer.end_of_text_id
        self.special_token_ids = sorted(tokenizer.special.values())
        special, lengths = set(self.special_token_ids), tokenizer.text_bytes_per_id()
        self.tokens = [tokenizer.decode_bytes([i]) if n or i in special else b"" for i, n in enumerate(lengths)]
        self._tokenizer = tokenizer

    def __call__(self, text: str | bytes) -> list[int]:
        return self._tokenizer.encode(text)


def tool_grammar(constraint: Constraint, tokenizer: Tokenizer) -> str:
    """One or more calls of the given tools in the native form, as a Lark grammar.

    Parameters come in any order, each at most once, the required ones always; others than the declared ones where
    `additionalProperties` says so. A value whose schema admits a string is text as it stands (of an enum, also behind a
    reference or in `anyOf`: one of its members; of a string alone: within its `minLength` and `maxLength`, whatever its
    `pattern`), any other is JSON that fits its schema.

    Raises:
        UserError: the tools cannot be read.
        ValueError: they are no JSON, or cannot be written as a grammar. The message names the place.
    """
    tools = tools_from_openai(json.loads(constraint.text))
    most = constraint.max_calls
    if not tools or (most is not None and most < 1):
        raise ValueError("there is none to call")
    mark = {name: f"<[{tokenizer.special_id(f'<{name}>')}]>" for name in _MARKERS}
    lines = [
        f"start: call{{1,{most or ''}}}",
        "call: " + " | ".join(f"call_{t}" for t in range(len(tools))),
        r"TEXT: /(.|\n)*/",
    ]

    def pair(key: str, value: str) -> str:
        return f"{mark['arg_key']} {key} {mark['/arg_key']} {mark['arg_value']} ({value}) {mark['/arg_value']}"

    for t, tool in enumerate(tools):
        properties, required = _parameters(tool, f"{tool.name}.parameters")
        keys = sorted(properties, key=lambda key: key not in required)  # required ones first: their bits are one run
        rest = tool.parameters.get("additionalProperties")
        more = isinstance(rest, dict) or rest is True
        pairs = f"pairs_{t}::0x0" if keys else f"more_{t}*" if more else ""
        lines.append(f"call_{t}: {mark['tool_call']} {_literal(tool.name)} {pairs} {mark['/tool_call']}")
        if keys:  # the word that goes along marks the parameters that were given
            lines.append(f'pairs_{t}::_: "" ' + (f"%if is_ones([0:{len(required)}])" if required else ""))
            lines += [f"  | pair_{t}_{k} pairs_{t}::set_bit({k}) %if bit_clear({k})" for k in range(len(keys))]
            lines += [f"  | more_{t} pairs_{t}::_"] if more else []
        for k, key in enumerate(keys):
            lines.append(f"pair_{t}_{k}: " + pair(_literal(key), _value(properties[key], tool, key)))
        if more:
            declared = " | ".join(map(_literal, keys))
            lines.append(rf"OTHER_{t}: /(.|\n)+/" + (f" & ~({declared})" if keys else ""))
            lines.append(f"more_{t}: " + pair(f"OTHER_{t}", _value(rest, tool, "")))
    return "\n".join(lines) + "\n"


_MARKERS = ("tool_call", "/tool_call", "arg_key", "/arg_key", "arg_value", "/arg_value")


def _parameters(tool: Tool, place: str) -> tuple[dict[str, Any], set[str]]:
    """The declared parameters of a tool, and the names of the required ones."""
    properties, required = tool.parameters.get("properties", {}), tool.parameters.get("required", [])
    if not isinstance(properties, dict):
        raise ValueError(f"{place}.properties: must be an object")
    if not isinstance(required, list) or not all(name in properties for name in required):
        raise ValueError(f"{place}.required: {required!r} must be names of properties")
    if len(properties) > MOST_PARAMETERS:
        raise ValueError(f"{place}.properties: {len(properties)} of at most {MOST_PARAMETERS}")
    return properties, set(required)


def _value(schema: Any, tool: Tool, key: str) -> str:
    """The rule of one value. Its types are those by which the parser of answers reads it."""
    if isinstance(schema, dict) and "string" not in schema_types(schema, tool.parameters):
        return _members(schema) or _json(schema, tool)
    each = alternatives(schema, tool.parameters, MOST_ALTERNATIVES)
    rules = [_alternative(one, tool, key) for one in each or (None,)]
    return "TEXT" if "TEXT" in rules else " | ".join(dict.fromkeys(rules))


def _alternative(schema: Any, tool: Tool, key: str) -> str:
    """The rule of a value's schema without references and choices of its own."""
    if not isinstance(schema, dict):
        return "TEXT"
    types = schema_types(schema, tool.parameters)
    if rule := _members(schema):
        return rule
    if "string" not in types:
        return _json(schema, tool)
    return _text(schema, key) if types == STRING else "TEXT"


def _members(schema: dict[str, Any]) -> str:
    """The rule of the values that a schema names one by one; empty if it names none."""
    members = schema.get("enum", [schema["const"]] if "const" in schema else None)
    return " | ".join(_literal(m if isinstance(m, str) else json.dumps(m, ensure_ascii=False)) for m in members or ())


def _json(schema: dict[str, Any], tool: Tool) -> str:
    shared = {name: tool.parameters[name] for name in ("$defs", "definitions") if name in tool.parameters}
    return "%json " + json.dumps({**shared, **schema, "x-guidance": {"whitespace_pattern": BLANK}})


def _text(schema: dict[str, Any], key: str) -> str:
    """Text of the lengths, in characters, that a string's schema allows."""
    place = key or "additionalProperties"
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    for name, bound in (("minLength", least), ("maxLength", 0 if most is None else most)):
        if isinstance(bound, bool) or not isinstance(bound, int) or bound < 0:
            raise ValueError(f"{place}.{name}: {bound!r} must be a whole number, at least 0")
    if most is None:
        return rf"/(.|\n){{{least},}}/" if least else "TEXT"
    if least > most:
        raise ValueError(f"{place}: no text has at least {least} and at most {most} characters")
    return rf"/(.|\n){{{least},{most}}}/"


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _first_line(text: str) -> str:
    said = text.split("\n<state>")[0].replace("<non-verbose/>", "").strip().replace("\n", " ")[:300]
    return "no text fits it" if said == "NoExtensionBias" else said
