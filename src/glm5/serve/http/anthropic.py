"""Anthropic's `/v1/messages`, which coding agents speak, and `/v1/messages/count_tokens`.

As with Anthropic, thinking comes only if asked for (`thinking.type` enabled or adaptive), `input_tokens` leaves out
what was read from the cache, and `max_tokens` above what the context has room for is lowered. A thinking block's
signature is empty: whoever sends it back is believed. Read next: `conversation`.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from fastapi.responses import Response
from pydantic import Field

from glm5.serve.client import Stream
from glm5.serve.http.bodies import Body, Name, Strict, stops
from glm5.serve.http.conversation import Conversation, Reply, Thinking, ToolChoice, follow, prepare, replies_to
from glm5.serve.http.errors import CALL, AnthropicErrorAnswer, ApiError, Json, check_call, renamed
from glm5.serve.http.server import STREAMED, Events, EventStream, Server, event, new_id, prepared, unless_gone
from glm5.serve.request import Constraint
from glm5.text.events import CallArguments, CallEnd, CallStart, Content, Event, Reasoning, fold
from glm5.text.messages import Message, Tool, ToolCall, messages_from_openai, tools_from_openai
from glm5.utils.errors import UserError

STOP_REASONS = {"stop": "end_turn", "tool_calls": "tool_use", "length": "max_tokens", "abort": "pause_turn"}


class ThinkingConfig(Body):
    """Anthropic's `thinking`."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(default=None, ge=0, le=2**31 - 1)


class Choice(Body):
    """Anthropic's `tool_choice`."""

    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool | None = None


class OutputFormat(Body):
    """Anthropic's `output_config.format`."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    """Anthropic's `output_config`. The model knows no effort."""

    effort: Name | None = None
    format: OutputFormat | None = None


class CountBody(Strict):
    """The body of `/v1/messages/count_tokens`."""

    WITHOUT_EFFECT = frozenset(
        "metadata service_tier cache_control context_management inference_geo speed container user_profile_id "
        "workspace_id".split()
    )

    model: Name | None = None
    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Choice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None

    def conversation(self, server: Server, sampling: dict[str, Any], max_tokens: int | None) -> Conversation:
        """What to ask the backend."""
        choice = self.tool_choice or Choice(type="auto")
        if choice.type == "tool" and choice.name is None:
            raise ApiError(400, "tool_choice.name is missing", param="tool_choice.name")
        modes = {"auto": "auto", "any": "required", "tool": "named", "none": "none"}
        thinking = self.thinking or ThinkingConfig(type="disabled")
        messages = messages_of(self.messages)
        if messages and messages[-1].role == "assistant":  # which Anthropic takes for the beginning of the answer
            raise ApiError(400, "messages: the last one is an assistant's. End with a user's message", param="messages")
        form = self.output_config.format if self.output_config else None
        at = "output_config.format.schema"
        return prepare(
            server,
            [*_system(self.system), *messages],
            _tools(self.tools),
            sampling=sampling,
            choice=ToolChoice(modes[choice.type], choice.name or ""),
            parallel=choice.disable_parallel_tool_use is not True,
            thinking=Thinking(thinking.type != "disabled", budget=thinking.budget_tokens),
            constraints=[Constraint("json_schema", json.dumps(form.schema_), where=at)] if form else (),
            max_tokens=max_tokens,
            clamp=True,
        )


class MessagesBody(CountBody):
    """The body of `/v1/messages`."""

    max_tokens: int = Field(ge=1, le=2**31 - 1)
    stop_sequences: list[str] | None = None
    temperature: float | None = Field(default=None, ge=0, le=1)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=0, le=2**31 - 1)
    stream: bool | None = None

    def sampling(self) -> dict[str, Any]:
        """What of it was given, under the names of `SamplingParams`."""
        names = ("temperature", "top_p", "top_k")
        out = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        if self.stop_sequences:
            out["stop"] = stops(self.stop_sequences)
        return out


# ---------------------------------------------------------------------------------------------------- their messages
def messages_of(raw: list[dict[str, Any]]) -> list[Message]:
    """Anthropic's messages: blocks of text, thinking, tool_use and tool_result; a turn's results come before its text.

    Raises:
        ApiError: names the block.
    """
    out: list[Message] = []
    for i, message in enumerate(raw):
        where, role, content = f"messages[{i}]", message.get("role"), message.get("content")
        if role not in ("user", "assistant", "system"):
            raise _wrong(f"{where}.role", role, "user or assistant")
        if isinstance(content, str):
            content = [{"type": "text", "text": content}]
        if not isinstance(content, list):
            raise _wrong(f"{where}.content", content, "a string or a list of blocks")
        text: list[str] = []
        thinking: list[str] = []
        calls: list[ToolCall] = []
        for j, block in enumerate(content):
            place = f"{where}.content[{j}]"
            match (role, block.get("type") if isinstance(block, dict) else None):
                case (_, "text"):
                    text.append(_text(block, "text", place))
                case ("assistant", "thinking"):
                    thinking.append(_text(block, "thinking", place))
                case ("assistant", "redacted_thinking"):
                    pass  # nobody here could read it
                case ("assistant", "tool_use"):
                    if not isinstance(block.get("input", {}), dict):
                        raise _wrong(f"{place}.input", block["input"], "an object")
                    name, id = _text(block, "name", place), _text(block, "id", place)
                    calls.append(ToolCall(name, block.get("input", {}), id))
                    names = {f"{CALL}.function.arguments": f"{place}.input", f"{CALL}.function": place}
                    check_call({"name": name, "arguments": block.get("input", {})}, id, names)
                case ("user", "tool_result"):
                    out.append(Message("tool", _result(block, place), tool_call_id=_text(block, "tool_use_id", place)))
                case (_, kind):
                    raise _wrong(
                        f"{place}.type", kind, f"a block that a message of {role} may have; the model reads text"
                    )
        if role == "assistant":
            out.append(Message("assistant", "".join(text), "".join(thinking) or None, tuple(calls)))
        elif text:
            out.append(Message(role, "\n".join(text)))
    # The same checks as every conversation has: names, and text that is Unicode.
    return messages_from_openai(_as_openai(out)) if out else out


def _as_openai(messages: list[Message]) -> list[dict[str, Any]]:
    return [
        {
            "role": m.role,
            "content": m.content,
            "tool_call_id": m.tool_call_id,
            **({"reasoning_content": m.reasoning or ""} if m.role == "assistant" else {}),
            "tool_calls": [{"id": c.id, "function": {"name": c.name, "arguments": c.arguments}} for c in m.tool_calls],
        }
        for m in messages
    ]


def _system(raw: str | list[dict[str, Any]] | None) -> list[Message]:
    blocks = [{"type": "text", "text": raw}] if isinstance(raw, str) else raw or []
    texts = [_text(block, "text", f"system[{i}]") for i, block in enumerate(blocks)]
    return messages_from_openai([{"role": "system", "content": "\n".join(texts)}]) if any(texts) else []


def _tools(raw: list[dict[str, Any]] | None) -> tuple[Tool, ...]:
    """Anthropic's tools in OpenAI's form, which the model was trained on."""
    out = []
    for i, tool in enumerate(raw or []):
        if tool.get("type") not in (None, "custom"):
            raise _wrong(f"tools[{i}].type", tool["type"], "custom: no tool runs on this server")
        function = {"name": tool.get("name"), "parameters": tool.get("input_schema")}
        if tool.get("description") is not None:
            function["description"] = tool["description"]
        out.append({"type": "function", "function": function})
    try:
        return tools_from_openai(out)
    except UserError as error:
        raise renamed(error, {"].function.parameters": "].input_schema", "].function": "]"}) from None


def _result(block: dict[str, Any], place: str) -> str:
    content = block.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise _wrong(f"{place}.content", content, "a string or a list of text blocks")
    for k, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, dict) else part
            raise _wrong(f"{place}.content[{k}].type", kind, "text: the model reads nothing else")
    return "\n".join(_text(part, "text", f"{place}.content[{k}]") for k, part in enumerate(content))


def _text(block: Any, name: str, place: str) -> str:
    value = block.get(name) if isinstance(block, dict) else None
    if not isinstance(value, str):
        raise _wrong(f"{place}.{name}", value, "a string")
    return value


def _wrong(where: str, value: object, rule: str) -> ApiError:
    shown = repr(value)[:80]
    return ApiError(400, f"{where}: {shown} is not {rule}", param=where)


# ---------------------------------------------------------------------------------------------------- our answers
def routes(server: Server) -> APIRouter:
    """The routes of this page."""
    errors: dict[int | str, dict[str, Any]] = {
        status: {"model": AnthropicErrorAnswer} for status in (400, 401, 403, 404, 408, 413, 500, 503, 504)
    }
    router = APIRouter(responses=errors)

    @router.post("/v1/messages", responses=STREAMED)
    async def messages(body: MessagesBody, http: HttpRequest) -> Response:
        """Answer a conversation."""
        model, here = server.check_model(body.model), server.of(http)
        conversation = await prepared(http, lambda: body.conversation(here, body.sampling(), body.max_tokens))
        reply = replies_to(here, conversation, "toolu_")[0]
        stream = await here.start(conversation.request)
        head = {"id": new_id("msg_"), "type": "message", "role": "assistant", "model": model}
        if body.stream:
            return EventStream(_events(body, head, stream, reply), [stream], http.url.path)
        return await unless_gone(http, _whole(body, head, stream, reply), [stream])

    @router.post("/v1/messages/count_tokens")
    async def count_tokens(body: CountBody, http: HttpRequest) -> Response:
        """How many tokens a conversation has."""
        server.check_model(body.model)
        conversation = await prepared(http, lambda: body.conversation(server, {}, None))
        return Json({"input_tokens": len(conversation.request.input_ids)})

    return router


async def _whole(body: MessagesBody, head: dict[str, Any], stream: Stream, reply: Reply) -> Response:
    async for _ in follow(stream, [reply]):
        pass
    parsed = fold(reply.events)
    blocks: list[dict[str, Any]] = []
    if parsed.reasoning:
        blocks.append({"type": "thinking", "thinking": parsed.reasoning, "signature": ""})
    if parsed.content or not (parsed.calls or parsed.reasoning):
        blocks.append({"type": "text", "text": parsed.content})
    for call in parsed.calls:
        # A call that was cut has no valid input; its text would be taken for one.
        made = json.loads(call.arguments) if call.complete else {}
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": made})
    return Json({**head, "content": blocks, **_ending(body, reply), "usage": _usage(reply)})


def _ending(body: MessagesBody, reply: Reply) -> dict[str, Any]:
    """`stop_reason` and `stop_sequence`."""
    finish, params = reply.answer.finish, reply.answer.request.params
    if finish is not None and finish.type == "stop" and isinstance(finish.matched, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": finish.matched}
    reason = STOP_REASONS[reply.finish_reason or "stop"]
    if reason == "max_tokens" and (params.max_new_tokens or 0) < body.max_tokens:
        reason = "model_context_window_exceeded"
    return {"stop_reason": reason, "stop_sequence": None}


def _usage(reply: Reply) -> dict[str, Any]:
    answer = reply.answer
    return {
        "input_tokens": len(answer.request.input_ids) - answer.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": answer.cached_tokens,
        "output_tokens": len(answer.ids),
    }


async def _events(body: MessagesBody, head: dict[str, Any], stream: Stream, reply: Reply) -> Events:
    started = {**head, "content": [], "stop_reason": None, "stop_sequence": None, "usage": _usage(reply)}
    yield _named("message_start", message=started)
    blocks = _Blocks()
    async for _, events in follow(stream, [reply]):
        for one in events:
            for told in blocks.take(one):
                yield told
    for told in blocks.close():
        yield told
    yield _named("message_delta", delta=_ending(body, reply), usage=_usage(reply))
    yield _named("message_stop")


class _Blocks:
    """The content blocks of a stream: one is open at a time."""

    def __init__(self) -> None:
        self._index, self._kind = -1, ""

    def take(self, one: Event) -> list[bytes]:
        """The events of Anthropic's that an event of the parser becomes."""
        match one:
            case Reasoning(text):
                return [
                    *self._open("thinking", thinking="", signature=""),
                    self._delta("thinking_delta", thinking=text),
                ]
            case Content(text):
                return [*self._open("text", text=""), self._delta("text_delta", text=text)]
            case CallStart(_, id, name):
                return [*self.close(), *self._open("tool_use", id=id, name=name, input={})]
            case CallArguments(_, text):
                return [self._delta("input_json_delta", partial_json=text)]
            case CallEnd():
                return self.close()
        return []

    def _open(self, kind: str, **block: Any) -> list[bytes]:
        if kind == self._kind:
            return []
        told = self.close()
        self._index, self._kind = self._index + 1, kind
        return [*told, _named("content_block_start", index=self._index, content_block={"type": kind, **block})]

    def _delta(self, kind: str, **delta: Any) -> bytes:
        return _named("content_block_delta", index=self._index, delta={"type": kind, **delta})

    def close(self) -> list[bytes]:
        """End the open block, if there is one."""
        kind, self._kind = self._kind, ""
        return [_named("content_block_stop", index=self._index)] if kind else []


def _named(name: str, **data: Any) -> bytes:
    return event({"type": name, **data}, name)
