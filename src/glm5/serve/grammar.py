"""Structured output: which ids may follow, so that the answer is JSON, fits a schema, a regex, a grammar or a tool.

The parsing is llguidance's (an Earley parser over derivatives of regular expressions; no dependencies, CPU only). What
this module adds is the tokenizer, the errors, and GLM-5's native form of a tool call as a grammar:

    <tool_call>name<arg_key>k</arg_key><arg_value>v</arg_value>...</tool_call>

whose markers are special tokens, so that no text can imitate them. Special tokens are never text. Source: the chat
template that is published with GLM-5. Read next: `sampler`.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

import numpy as np

from glm5.serve.request import Constraint
from glm5.text.tokenizer import Tokenizer
from glm5.utils.errors import UserError

# Blank space between JSON's tokens is bounded: a model that repeats itself could otherwise fill its whole budget.
BLANK = r"[\x20\x0A\x0D\x09]{1,32}"
FIELDS = {
    "json": "response_format",
    "json_schema": "response_format.json_schema",
    "regex": "regex",
    "ebnf": "ebnf",
    "tools": "tools",
}
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
        self._limits = llguidance.LLParserLimits(verbose_errors=False)
        self.compile = lru_cache(maxsize=128)(self._compile)

    def _compile(self, constraint: Constraint) -> Grammar:
        """Raises: UserError: the constraint cannot be read, or is too large. It names the field."""
        what = FIELDS[constraint.kind]
        try:
            source = self._source(constraint)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{what}: {error}", "give one that can be read") from error
        matcher = self._library.LLMatcher(self._vocabulary, source, log_level=0, limits=self._limits)
        if not matcher.is_error():
            matcher.compute_bitmask()  # what is too large shows here at the latest
        if matcher.is_error():
            raise UserError(f"{what}: {_first_line(matcher.get_error())}", "mend or simplify it")
        return Grammar(matcher, self._tokenizer)

    def _source(self, constraint: Constraint) -> str:
        make = self._library.LLMatcher
        match constraint.kind:
            case "json":
                return make.grammar_from_json_schema({}, overrides={"whitespace_pattern": BLANK})
            case "json_schema":
                schema = json.loads(constraint.text)
                if not isinstance(schema, dict | bool):
                    raise ValueError(f"{constraint.text[:80]!r} is not an object")
                schema = schema if isinstance(schema, dict) else ({} if schema else {"enum": []})
                return make.grammar_from_json_schema(schema, overrides={"whitespace_pattern": BLANK})
            case "regex":
                return make.grammar_from_regex(constraint.text)
            case "ebnf":
                return self._library.grammar_from("ebnf", constraint.text)
            case "tools":
                return make.grammar_from_lark(tool_grammar(constraint, self._tokenizer))


class Grammar:
    """A compiled constraint. It is shared; every answer takes a `Matcher` of its own."""

    def __init__(self, prototype: Any, tokenizer: Tokenizer) -> None:
        self._prototype = prototype
        self._ends = np.array([tokenizer.end_of_text_id])

    def matcher(self) -> Matcher:
        return Matcher(self._prototype.deep_copy(), self._ends)


class Matcher:
    """Where one answer stands in its grammar."""

    def __init__(self, inner: Any, ends: np.ndarray) -> None:
        self._inner, self._ends = inner, ends

    def allowed(self) -> np.ndarray:
        """Which ids may follow as text or markers, bool [tokenizer's vocabulary]. Stop ids are the sampler's business.

        All False where nothing may follow, or the parser gave up (see `error`).
        """
        words = np.frombuffer(self._inner.compute_bitmask(), dtype=np.uint8)
        allowed = np.unpackbits(words, bitorder="little").astype(bool)
        allowed[self._ends] = False
        return allowed if not self._inner.is_error() else np.zeros_like(allowed)

    def advance(self, id: int) -> bool:
        """Take one id. False, and nothing has changed, where the grammar does not allow it."""
        return self._inner.validate_tokens([id]) == 1 and self._inner.consume_token(id)

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

    Parameters come in any order, each at most once, the required ones always; only declared ones. A value whose schema
    admits a string is text as it stands (of an enum: one of its members), any other is JSON that fits its schema.

    Raises:
        ValueError: the tools cannot be read. The message names the place.
    """
    tools = json.loads(constraint.text)
    if not isinstance(tools, list) or not tools:
        raise ValueError("must be a list of at least one tool")
    mark = {name: f"<[{tokenizer.special_id(f'<{name}>')}]>" for name in _MARKERS}
    most = constraint.max_calls or ""
    lines = [f"start: call{{1,{most}}}", "TEXT: /(.|\\n)*/"]
    lines.append("call: " + " | ".join(f"call_{t}" for t in range(len(tools))))
    for t, tool in enumerate(tools):
        name, parameters = _tool(tool, f"[{t}]")
        properties, required = parameters.get("properties", {}), set(parameters.get("required", ()))
        keys = sorted(properties, key=lambda key: key not in required)  # required ones first: their bits are one run
        if len(keys) > MOST_PARAMETERS:
            raise ValueError(f"[{t}]: {len(keys)} parameters, of at most {MOST_PARAMETERS}")
        if missing := required - set(keys):
            raise ValueError(f"[{t}]: required parameter {min(missing)!r} is not among its properties")
        pairs = f"pairs_{t}::0x0" if keys else ""
        lines.append(f"call_{t}: {mark['tool_call']} {_literal(name)} {pairs} {mark['/tool_call']}")
        if not keys:
            continue
        lines.append(f'pairs_{t}::_: "" ' + (f"%if is_ones([0:{len(required)}])" if required else ""))
        for k in range(len(keys)):
            lines.append(f"  | pair_{t}_{k} pairs_{t}::set_bit({k}) %if bit_clear({k})")
        for k, key in enumerate(keys):
            value = _value(properties[key], parameters)
            lines.append(
                f"pair_{t}_{k}: {mark['arg_key']} {_literal(key)} {mark['/arg_key']} "
                f"{mark['arg_value']} ({value}) {mark['/arg_value']}"
            )
    return "\n".join(lines) + "\n"


_MARKERS = ("tool_call", "/tool_call", "arg_key", "/arg_key", "arg_value", "/arg_value")


def _tool(tool: Any, place: str) -> tuple[str, dict[str, Any]]:
    """Name and parameters of a tool, bare or wrapped as {"type": "function", "function": ...}."""
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise ValueError(f"{place}: has no name")
    parameters = function.get("parameters") or {}
    if not isinstance(parameters, dict) or not isinstance(parameters.get("properties", {}), dict):
        raise ValueError(f"{place}.parameters: must be a schema of an object")
    return function["name"], parameters


def _value(schema: Any, parameters: dict[str, Any]) -> str:
    """A value's rule."""
    members = schema.get("enum", [schema["const"]] if "const" in schema else None) if isinstance(schema, dict) else None
    if members:
        return " | ".join(_literal(m if isinstance(m, str) else json.dumps(m, ensure_ascii=False)) for m in members)
    if _admits_text(schema, parameters, 0):
        return "TEXT"
    shared = {name: parameters[name] for name in ("$defs", "definitions") if name in parameters}
    return "%json " + json.dumps({**shared, **schema, "x-guidance": {"whitespace_pattern": BLANK}})


def _admits_text(schema: Any, parameters: dict[str, Any], depth: int) -> bool:
    """Whether a string may fit the schema."""
    if not isinstance(schema, dict) or depth > 16:
        return schema is not False
    if "$ref" in schema:
        target: Any = parameters
        for part in str(schema["$ref"]).removeprefix("#/").split("/"):
            target = target.get(part) if isinstance(target, dict) else None
        if target is None:
            raise ValueError(f"$ref {schema['$ref']!r} leads nowhere")
        return _admits_text(target, parameters, depth + 1)
    for name in ("anyOf", "oneOf"):
        if name in schema:
            return any(_admits_text(part, parameters, depth + 1) for part in schema[name])
    if "allOf" in schema:
        return all(_admits_text(part, parameters, depth + 1) for part in schema["allOf"])
    members = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if members is not None:
        return any(isinstance(member, str) for member in members)
    kinds = schema.get("type", "string")
    return "string" in ([kinds] if isinstance(kinds, str) else kinds)


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _first_line(text: str) -> str:
    return text.split("\n<state>")[0].strip().replace("\n", " ")[:300]
