"""The JSON of a call's argument, from the raw text that the model wrote and the tool's schema.

GLM writes strings bare and everything else as JSON, so `7` is a number or a string by what the tool declares. The
schema is asked only for types; whether the tool accepts a value is for the tool to say. Read next: `parser`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from glm5.text.messages import Tool

JSON_TYPES = frozenset({"string", "integer", "number", "boolean", "null", "array", "object"})
STRING = frozenset({"string"})
DEEPEST = 32  # levels of a schema that are read


def argument_types(tool: Tool | None, key: str) -> frozenset[str]:
    """The JSON types that a tool declares for an argument; all of them where it declares none."""
    if tool is None:
        return JSON_TYPES
    properties = tool.parameters.get("properties")
    schema = properties.get(key) if isinstance(properties, Mapping) else None
    if schema is None:
        schema = tool.parameters.get("additionalProperties")
    return _types(schema, tool.parameters, {})


def schema_types(schema: object, root: Mapping[str, Any]) -> frozenset[str]:
    """The JSON types that a schema allows. root: where its references point into."""
    return _types(schema, root, {})


def alternatives(schema: object, root: Mapping[str, Any], most: int) -> list[object] | None:
    """The schemas of which a value must fit one: references, `anyOf` and `oneOf` opened; None if they are too many."""
    found: list[object] = []
    left, seen = [schema], set[str]()
    while left:
        one = left.pop()
        if len(left) + len(found) >= most:
            return None
        if isinstance(one, Mapping) and isinstance(one.get("$ref"), str):
            if one["$ref"] not in seen:
                seen.add(one["$ref"])
                left.append(_at(root, one["$ref"]))
            continue
        open_ = one if isinstance(one, Mapping) and "enum" not in one and "const" not in one else {}
        branches = open_.get("anyOf") or open_.get("oneOf")
        if isinstance(branches, list | tuple) and branches:
            left += reversed(branches)
        else:
            found.append(one)
    return found


def argument_json(raw: str, types: frozenset[str]) -> str:
    """Valid JSON of one argument.

    Args:
        raw: what stood between `<arg_value>` and `</arg_value>`.
        types: what may come of it. Where a string may, anything that is not one of the other types is that string,
            to the letter; where none may, text that is no JSON becomes a string all the same, since nothing that the
            model wrote is dropped.
    """
    text = raw.strip()
    if types != STRING:
        try:
            value = json.loads(text, parse_constant=_no_constant)
        except (ValueError, RecursionError):
            return as_string(raw)
        # A bare "x" in quotes would be a JSON string, but GLM writes strings without: then the quotes are part of it.
        if "string" not in types or (not isinstance(value, str) and _type_of(value) & types):
            return text
    return as_string(raw)


def as_string(text: str) -> str:
    """A text as a JSON string."""
    return json.dumps(text, ensure_ascii=False)


def _types(schema: object, root: Mapping[str, Any], known: dict[str, frozenset[str]], depth: int = 0) -> frozenset[str]:
    """The types that a schema allows. `known` holds those of references, so that no schema takes long."""
    if not isinstance(schema, Mapping) or depth > DEEPEST:
        return JSON_TYPES
    types = JSON_TYPES
    reference = schema.get("$ref")
    if isinstance(reference, str):
        if reference not in known:
            known[reference] = JSON_TYPES  # for a reference to itself
            known[reference] = _types(_at(root, reference), root, known, depth + 1)
        types &= known[reference]
    declared = schema.get("type")
    names = [declared] if isinstance(declared, str) else declared
    if isinstance(names, list | tuple):
        types &= {name for name in names if isinstance(name, str)} | ({"integer"} if "number" in names else set())
    if "const" in schema:
        types &= _type_of(schema["const"])
    if isinstance(schema.get("enum"), list | tuple):
        types &= _any(map(_type_of, schema["enum"]))
    for word in ("anyOf", "oneOf"):
        if isinstance(schema.get(word), list | tuple):
            types &= _any(_types(branch, root, known, depth + 1) for branch in schema[word])
    if isinstance(schema.get("allOf"), list | tuple):
        for branch in schema["allOf"]:
            types &= _types(branch, root, known, depth + 1)
    if schema.get("nullable") is True:
        types |= {"null"}
    return types & JSON_TYPES or JSON_TYPES  # a schema that nothing fits says nothing


def _any(choices: Iterable[frozenset[str]]) -> frozenset[str]:
    return frozenset().union(*choices)


def _at(root: Mapping[str, Any], reference: str) -> object:
    """What `#/a/b` points to; None for anything else."""
    if not reference.startswith("#/"):
        return None
    found: object = root
    for part in reference[2:].split("/"):
        found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found


def _type_of(value: object) -> frozenset[str]:
    """The names that JSON schema has for a value's type: a whole number is an integer and a number."""
    if value is None:
        return frozenset({"null"})
    if isinstance(value, bool):
        return frozenset({"boolean"})
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return frozenset({"integer", "number"})
    if isinstance(value, float):
        return frozenset({"number"})
    if isinstance(value, str):
        return STRING
    return frozenset({"array" if isinstance(value, list | tuple) else "object"})


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no value of JSON")
