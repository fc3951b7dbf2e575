"""What request bodies have in common: strict types, and the fields that say how to sample.

A known field of a wrong type or out of its range is refused, and so are two fields that contradict each other. null is
the same as leaving a field out. A name that the interface does not know is treated as that interface does (`Strict`):
OpenAI's and Anthropic's refuse it, and so do SGLang's `sampling_params`; the rest of `/generate` and of the control
plane ignore it, since routers add names of their own. Read next: `chat`.
"""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from glm5.serve.http.errors import ApiError
from glm5.serve.request import Constraint, Form

Id = Annotated[int, Field(ge=0, le=2**31 - 1)]
Name = Annotated[str, Field(max_length=256)]
MAX_STOPS, MAX_BATCH = 64, 1024


class Body(BaseModel):
    """A JSON object whose values have the types they claim: "1" is no number, and 1 is no truth value."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, populate_by_name=True)


class Strict(Body):
    """The body of an interface that refuses names it does not know.

    `WITHOUT_EFFECT` has those that it knows, or that clients send to every engine, and that ask for nothing here.
    """

    model_config = ConfigDict(extra="forbid")
    WITHOUT_EFFECT: ClassVar[frozenset[str]] = frozenset()

    @model_validator(mode="before")
    @classmethod
    def _without_those(cls, given: Any) -> Any:
        return {k: v for k, v in given.items() if k not in cls.WITHOUT_EFFECT} if isinstance(given, dict) else given


# OpenAI's fields about accounts, caches and hints, and what other engines' clients add.
OPENAI_WITHOUT_EFFECT = frozenset(
    "user store metadata service_tier safety_identifier prompt_cache_key prompt_cache_options prompt_cache_retention "
    "prediction verbosity modalities session_id routed_dp_rank separate_reasoning stream_reasoning skip_special_tokens "
    "spaces_between_special_tokens".split()
)


class StreamOptions(Body):
    """What a stream carries beside the answer."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchemaFormat(Body):
    """OpenAI's `response_format.json_schema`."""

    name: Name | None = None
    schema_: dict[str, Any] | bool | None = Field(default=None, alias="schema")


class ResponseFormat(Body):
    """OpenAI's `response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(Body):
    """vLLM's `structured_outputs`: one of them."""

    json_: dict[str, Any] | str | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: list[str] | None = Field(default=None, min_length=1)
    grammar: str | None = None
    json_object: bool | None = None


class SamplingFields(Body):
    """How to sample: OpenAI's fields, and those that other engines added. None leaves the default."""

    n: int | None = Field(default=None, ge=1, le=128)
    temperature: float | None = Field(default=None, ge=0, le=100)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, le=2**31 - 1)
    min_p: float | None = Field(default=None, ge=0, le=1)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    repetition_penalty: float | None = Field(default=None, gt=0, le=10)
    logit_bias: dict[str, Annotated[float, Field(ge=-1000, le=1000)]] | None = Field(default=None, max_length=4096)
    seed: int | None = Field(default=None, ge=-(2**63), le=2**63 - 1)
    stop: str | list[str] | None = None
    stop_token_ids: list[Id] | None = Field(default=None, max_length=MAX_STOPS)
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    min_tokens: int | None = Field(default=None, ge=0, le=2**31 - 1)
    priority: int | None = Field(default=None, ge=-(2**31), le=2**31 - 1)
    regex: str | None = None
    ebnf: str | None = None
    json_schema: str | dict[str, Any] | None = None
    structured_outputs: StructuredOutputs | None = None

    def sampling(self) -> dict[str, Any]:
        """What of it was given, under the names of `SamplingParams`; no maximum of tokens yet.

        Raises:
            ApiError: a field cannot be meant.
        """
        names = (
            "n", "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty",
            "repetition_penalty", "seed", "ignore_eos",
        )  # fmt: skip
        out = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        if self.logit_bias:
            out["logit_bias"] = {_id(key): value for key, value in self.logit_bias.items()}
        if self.stop is not None:
            out["stop"] = stops(self.stop)
        if self.stop_token_ids:
            out["stop_token_ids"] = tuple(self.stop_token_ids)
        if self.include_stop_str_in_output:
            out["no_stop_trim"] = True
        if self.min_tokens is not None:
            out["min_new_tokens"] = self.min_tokens
        return out

    def constraints(self, where: str = "") -> list[Constraint]:
        """The forms that the answer must have, of all fields that can ask for one.

        Args:
            where: the client's path to these fields, with its full stop.
        """
        found = []

        def add(kind: Form, text: str, name: str) -> None:
            found.append(Constraint(kind, text, where=where + name))

        if self.regex is not None:
            add("regex", self.regex, "regex")
        if self.ebnf is not None:
            add("ebnf", self.ebnf, "ebnf")
        if self.json_schema is not None:
            add("json_schema", as_schema(self.json_schema, f"{where}json_schema"), "json_schema")
        if (given := self.structured_outputs) is not None:
            at = "structured_outputs"
            if given.json_ is not None:
                add("json_schema", as_schema(given.json_, f"{where}{at}.json"), f"{at}.json")
            if given.regex is not None:
                add("regex", given.regex, f"{at}.regex")
            if given.choice is not None:
                add("regex", "|".join(re.escape(one) for one in given.choice), f"{at}.choice")
            if given.grammar is not None:
                add("ebnf", given.grammar, f"{at}.grammar")
            if given.json_object:
                add("json", "", f"{at}.json_object")
        return found


def format_constraint(
    given: ResponseFormat | None, where: str = "response_format", schema_at: str = ".json_schema.schema"
) -> list[Constraint]:
    """What OpenAI's `response_format` asks for, as a list of none or one.

    Args:
        where: the client's path to it. schema_at: from there to the schema.
    """
    if given is None or given.type == "text":
        return []
    if given.type == "json_object":
        return [Constraint("json", where=where)]
    at = where + schema_at
    if given.json_schema is None or given.json_schema.schema_ is None:
        raise ApiError(400, f"{at} is missing", param=where)
    return [Constraint("json_schema", as_schema(given.json_schema.schema_, at), where=at)]


def only(constraints: list[Constraint]) -> Constraint | None:
    """The one constraint of a request, if it has any."""
    if len(constraints) > 1:
        fields = ["tool_choice" if c.kind == "tools" else c.name for c in constraints]
        message = f"the answer cannot have {len(fields)} forms at once ({', '.join(fields)}). Ask for one"
        raise ApiError(400, message, param=fields[0])
    return constraints[0] if constraints else None


def as_schema(given: str | dict[str, Any] | bool, where: str) -> str:
    """A JSON schema as text."""
    if not isinstance(given, str):
        return json.dumps(given)
    try:
        json.loads(given)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"{where}: not JSON: {error}", param=where) from error
    return given


def stops(given: str | list[str]) -> tuple[str, ...]:
    """Stop strings; an empty one is refused where requests are checked."""
    found = (given,) if isinstance(given, str) else tuple(given)
    if len(found) > MAX_STOPS:
        raise ApiError(400, f"stop: {len(found)} strings. Give at most {MAX_STOPS}", param="stop")
    for one in found:
        if not one or len(one) > 1024:
            raise ApiError(400, f"stop: a string of {len(one)} characters. Give 1 to 1024", param="stop")
        try:
            one.encode()
        except UnicodeEncodeError:
            raise ApiError(400, "stop: a lone surrogate. Send Unicode text", param="stop") from None
        if "\N{REPLACEMENT CHARACTER}" in one:
            raise ApiError(400, "stop: U+FFFD, which stands for bytes that are no text. Leave it out", param="stop")
    return found


def agreed(what: str, **given: Any) -> Any:
    """The one value that several names of one thing were given; None if none was.

    Raises:
        ApiError: two of them differ.
    """
    named = {name: value for name, value in given.items() if value is not None}
    if len({repr(value) for value in named.values()}) > 1:
        raise ApiError(400, f"{' and '.join(named)} differ, and both are {what}. Give one", param=next(iter(named)))
    return next(iter(named.values()), None)


def _id(key: str) -> int:
    if not key.isdecimal() or len(key) > 9:
        raise ApiError(400, f"logit_bias: {key[:40]!r} is no token id. Give ids as keys", param="logit_bias")
    return int(key)
