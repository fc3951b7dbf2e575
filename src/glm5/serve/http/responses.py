"""OpenAI's `/v1/responses`: items in, items out, and a stream of named events.

Answers are kept in memory (the last `KEPT`, in `KEPT_BYTES`) for `previous_response_id` unless `store` is false.
Thinking is an item of type `reasoning` whose `content` is its text. Tools are functions; none runs here. Read next:
`conversation`.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import Any, Literal, NamedTuple

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from fastapi.responses import Response
from pydantic import Field

from glm5.serve.client import Stream
from glm5.serve.http.bodies import (
    OPENAI_WITHOUT_EFFECT,
    Body,
    JsonSchemaFormat,
    Name,
    ResponseFormat,
    SamplingFields,
    Strict,
    format_constraint,
)
from glm5.serve.http.chat import Effort
from glm5.serve.http.conversation import Conversation, Reply, Thinking, ToolChoice, follow, prepare, replies_to, usage
from glm5.serve.http.errors import (
    CALL,
    MESSAGE,
    ApiError,
    Json,
    as_api_error,
    check_call,
    check_message,
    dumps,
    renamed,
)
from glm5.serve.http.server import STREAMED, Events, EventStream, Server, event, new_id, prepared, unless_gone
from glm5.text.events import CallArguments, CallEnd, CallStart, Content, Event, Reasoning
from glm5.text.messages import Tool, messages_from_openai, tools_from_openai
from glm5.utils.errors import UserError

KEPT, KEPT_BYTES = 1024, 256 << 20
Item = dict[str, Any]


class Kept(NamedTuple):
    """A response that was given: all items before it, itself, and the bytes of both as JSON."""

    items: list[Item]
    response: dict[str, Any]
    size: int


class ReasoningField(Body):
    """`reasoning`."""

    effort: Effort | None = None
    summary: Any = None


class TextFormat(JsonSchemaFormat):
    """`text.format`."""

    type: Literal["text", "json_object", "json_schema"]


class TextField(Body):
    """`text`."""

    format: TextFormat | None = None


class NamedTool(Body):
    """`tool_choice` that names a tool."""

    type: Literal["function"]
    name: Name


class ResponsesBody(SamplingFields, Strict):
    """The body of `/v1/responses`."""

    WITHOUT_EFFECT = OPENAI_WITHOUT_EFFECT - {"store", "metadata"} | frozenset(
        "truncation max_tool_calls stream_options client_metadata".split()
    )

    model: Name | None = None
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    previous_response_id: Name | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: int | None = Field(default=None, ge=1, le=2**31 - 1)
    reasoning: ReasoningField | None = None
    text: TextField | None = None
    stream: bool | None = None
    store: bool | None = None
    background: bool | None = None
    metadata: dict[str, Any] | None = None
    include: list[Name] | None = None

    def items(self) -> list[Item]:
        """The input as items."""
        if isinstance(self.input, str):
            return [{"type": "message", "role": "user", "content": self.input}]
        if not self.input:
            raise ApiError(400, "input: empty. Give a text, or at least one item", param="input")
        return self.input

    def conversation(self, server: Server, items: list[Item]) -> Conversation:
        """What to ask the backend about these items."""
        if self.background:
            raise ApiError(400, "background: true is not offered. Leave it out", param="background")
        if self.n not in (None, 1):
            raise ApiError(400, "n: a response has one answer. Leave it out", param="n")
        if "message.output_text.logprobs" in (self.include or ()):  # the rest is of tools and thinking of others
            raise ApiError(400, "include: no log-probabilities here. Ask /v1/chat/completions", param="include")
        messages = [{"role": "system", "content": self.instructions}] if self.instructions else []
        given = self.text.format if self.text else None
        form = None
        if given is not None:
            form = ResponseFormat(type=given.type, json_schema=JsonSchemaFormat(name=given.name, schema=given.schema_))
        effort = self.reasoning.effort if self.reasoning else None
        choice = self.tool_choice
        return prepare(
            server,
            messages_from_openai([*messages, *_messages(items, len(items) - len(self.items()))], "input"),
            _tools(self.tools),
            sampling=self.sampling(),
            choice=ToolChoice("named", choice.name) if isinstance(choice, NamedTool) else ToolChoice(choice or "auto"),
            parallel=self.parallel_tool_calls is not False,
            thinking=Thinking(effort not in ("none", "minimal")),
            constraints=[*self.constraints(), *format_constraint(form, "text.format", ".schema")],
            max_tokens=self.max_output_tokens,
            priority=self.priority or 0,
        )


# ---------------------------------------------------------------------------------------------------- their items
def _messages(items: list[Item], kept: int) -> list[Item]:
    """Items as chat messages: thinking and calls that stand together are one assistant's message. The first `kept` are
    of earlier responses, so that the client counts from there."""
    out: list[Item] = []

    def assistant(*without: str) -> Item:
        """The assistant's message that goes on, or a new one if it has one of these already."""
        if not out or out[-1]["role"] != "assistant" or any(out[-1].get(name) for name in without):
            out.append({"role": "assistant", "content": "", "reasoning_content": "", "tool_calls": []})
        return out[-1]

    for i, item in enumerate(items):
        where = f"input[{i - kept}]"
        match item.get("type", "message"):
            case "message":
                text = _text(item.get("content"), f"{where}.content")
                check_message({"role": item.get("role"), "content": text}, {MESSAGE: where})
                if item.get("role") == "assistant":
                    assistant("content", "tool_calls")["content"] = text
                else:
                    out.append({"role": item.get("role"), "content": text})
            case "reasoning":
                parts = item.get("content") or []
                text = _text(parts, f"{where}.content")
                names = {f"{MESSAGE}.reasoning_content": f"{where}.content"}
                check_message({"role": "assistant", "reasoning_content": text}, names)
                assistant("content", "tool_calls", "reasoning_content")["reasoning_content"] = text
            case "function_call":
                function = {"name": item.get("name"), "arguments": item.get("arguments")}
                id = item.get("call_id")
                check_call(function, id, {f"{CALL}.id": f"{where}.call_id", f"{CALL}.function": where})
                assistant()["tool_calls"].append({"id": id, "function": function})
            case "function_call_output":
                output = _text(item.get("output"), f"{where}.output")
                answer = {"role": "tool", "tool_call_id": item.get("call_id"), "content": output}
                names = {f"{MESSAGE}.content": f"{where}.output", f"{MESSAGE}.tool_call_id": f"{where}.call_id"}
                check_message(answer, names)
                out.append(answer)
            case kind:
                message = f"{where}.type: {str(kind)[:80]!r} is not offered. Send text and functions"
                raise ApiError(400, message, param=f"{where}.type")
    return out


def _text(content: Any, where: str) -> Any:
    """The text of parts; what is no list is left for the check that every conversation has."""
    if not isinstance(content, list):
        return content
    for k, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("input_text", "output_text", "text", "reasoning_text", "summary_text"):
            message = f"{where}[{k}].type: {str(kind)[:80]!r} is no text; the model reads nothing else"
            raise ApiError(400, message, param=f"{where}[{k}].type")
        if not isinstance(part.get("text"), str):
            raise ApiError(400, f"{where}[{k}].text must be a string", param=f"{where}[{k}].text")
    return "".join(part["text"] for part in content)


def _tools(raw: list[Item] | None) -> tuple[Tool, ...]:
    """Tools in the form of chat completions, which the model was trained on."""
    out = []
    for i, tool in enumerate(raw or []):
        if tool.get("type") != "function":
            message = f"tools[{i}].type: {str(tool.get('type'))[:80]!r}: only functions are offered"
            raise ApiError(400, message, param=f"tools[{i}].type")
        function = {name: tool[name] for name in ("name", "description", "parameters") if tool.get(name) is not None}
        out.append({"type": "function", "function": function})
    try:
        return tools_from_openai(out)
    except UserError as error:
        raise renamed(error, {"].function": "]"}) from None


# ---------------------------------------------------------------------------------------------------- our items
class _Writer:
    """The output items of a response as they grow, and the events that tell of it.

    The events' names and fields are OpenAI's. An item is open at most one at a time.
    """

    def __init__(self) -> None:
        self.items: list[Item] = []
        self._open = ""
        self._number = 0

    def event(self, kind: str, **data: Any) -> bytes:
        """One event, numbered."""
        told = event({"type": kind, "sequence_number": self._number, **data}, kind)
        self._number += 1
        return told

    def take(self, one: Event) -> list[bytes]:
        """What an event of the parser adds."""
        match one:
            case Reasoning(text):
                return [*self._text_item("reasoning"), *self._more(text)]
            case Content(text):
                return [*self._text_item("message"), *self._more(text)]
            case CallStart(_, id, name):
                item = {"type": "function_call", "call_id": id, "name": name, "arguments": ""}
                return [*self.close("completed"), *self._add("function_call", "fc_", item)]
            case CallArguments(_, text):
                self.items[-1]["arguments"] += text
                kind = "response.function_call_arguments.delta"
                return [self.event(kind, **self._place(), delta=text)]
            case CallEnd(_, complete):
                return self.close("completed" if complete else "incomplete")
        return []

    def _place(self) -> dict[str, Any]:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}

    def _add(self, kind: str, prefix: str, item: Item) -> list[bytes]:
        self._open = kind
        self.items.append({"id": new_id(prefix), "status": "in_progress", **item})
        return [self.event("response.output_item.added", output_index=len(self.items) - 1, item=self.items[-1])]

    def _text_item(self, kind: str) -> list[bytes]:
        """Open a message or a thinking item, unless it is open."""
        if self._open == kind:
            return []
        told = self.close("completed")
        if kind == "message":
            part = {"type": "output_text", "text": "", "annotations": []}
            told += self._add(kind, "msg_", {"type": kind, "role": "assistant", "content": []})
        else:
            part = {"type": "reasoning_text", "text": ""}
            told += self._add(kind, "rs_", {"type": kind, "summary": [], "content": []})
        told.append(self.event("response.content_part.added", **self._place(), content_index=0, part=part))
        self.items[-1]["content"].append(part)
        return told

    def _more(self, text: str) -> list[bytes]:
        part = self.items[-1]["content"][0]
        part["text"] += text
        extra: dict[str, Any] = {"logprobs": []} if self._open == "message" else {}
        kind = f"response.{part['type']}.delta"
        return [self.event(kind, **self._place(), content_index=0, delta=text, **extra)]

    def close(self, status: str) -> list[bytes]:
        """End the open item, if there is one."""
        kind, self._open = self._open, ""
        if not kind:
            return []
        item = self.items[-1]
        item["status"] = status
        if kind == "function_call":
            done = {"name": item["name"], "arguments": item["arguments"]}
            told = [self.event("response.function_call_arguments.done", **self._place(), **done)]
        else:
            part = item["content"][0]
            extra: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
            where = {**self._place(), "content_index": 0}
            told = [
                self.event(f"response.{part['type']}.done", **where, text=part["text"], **extra),
                self.event("response.content_part.done", **where, part=part),
            ]
        return [*told, self.event("response.output_item.done", output_index=len(self.items) - 1, item=item)]


def routes(server: Server) -> APIRouter:
    """The routes of this page."""
    router = APIRouter()
    kept: OrderedDict[str, Kept] = OrderedDict()
    kept_bytes = 0

    def find(id: str) -> Kept:
        if id not in kept:
            raise ApiError(404, f"there is no response {id[:100]!r}, or no longer", code="not_found")
        return kept[id]

    @router.post("/v1/responses", responses=STREAMED)
    async def responses(body: ResponsesBody, http: HttpRequest) -> Response:
        """Answer a conversation of items."""
        model, here = server.check_model(body.model), server.of(http)
        items = body.items()
        if body.previous_response_id is not None:
            before = find(body.previous_response_id)
            items = [*before.items, *before.response["output"], *items]
        conversation = await prepared(http, lambda: body.conversation(here, items))
        reply = replies_to(here, conversation)[0]
        stream = await here.start(conversation.request)
        head = _head(body, model)

        def keep(told: dict[str, Any]) -> None:
            nonlocal kept_bytes
            if body.store is False:
                return
            size = len(dumps(items)) + len(dumps(told))
            kept[told["id"]] = Kept(items, told, size)
            kept_bytes += size
            while len(kept) > KEPT or kept_bytes > KEPT_BYTES:
                kept_bytes -= kept.popitem(last=False)[1].size

        if body.stream:
            return EventStream(_events(head, stream, reply, keep), [stream], http.url.path)
        return await unless_gone(http, _whole(head, stream, reply, keep), [stream])

    @router.get("/v1/responses/{response_id}")
    async def retrieve(response_id: str) -> Response:
        """A response that was kept."""
        return Json(find(response_id).response)

    @router.delete("/v1/responses/{response_id}")
    async def delete(response_id: str) -> Response:
        """Forget a response."""
        nonlocal kept_bytes
        kept_bytes -= find(response_id).size
        del kept[response_id]
        return Json({"id": response_id, "object": "response", "deleted": True})

    return router


def _head(body: ResponsesBody, model: str) -> dict[str, Any]:
    """The response before anything was said."""
    choice = body.tool_choice
    return {
        "id": new_id("resp_"),
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "model": model,
        "output": [],
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "max_output_tokens": body.max_output_tokens,
        "tool_choice": choice.model_dump() if isinstance(choice, NamedTool) else choice or "auto",
        "tools": body.tools or [],
        "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
        "store": body.store is not False,
        "truncation": "disabled",
        "usage": None,
    }


def _finished(head: dict[str, Any], reply: Reply, items: list[Item]) -> dict[str, Any]:
    told = usage([reply])
    reason = {"length": "max_output_tokens", "abort": "aborted"}.get(reply.finish_reason or "")
    return {
        **head,
        "status": "incomplete" if reason else "completed",
        "incomplete_details": {"reason": reason} if reason else None,
        "output": items,
        "usage": {
            "input_tokens": told["prompt_tokens"],
            "input_tokens_details": told["prompt_tokens_details"],
            "output_tokens": told["completion_tokens"],
            "output_tokens_details": told["completion_tokens_details"],
            "total_tokens": told["total_tokens"],
        },
    }


async def _whole(head: dict[str, Any], stream: Stream, reply: Reply, keep: Any) -> Response:
    async for _ in follow(stream, [reply]):
        pass
    writer = _Writer()
    for one in reply.events:
        writer.take(one)
    writer.close("completed" if reply.finish_reason in ("stop", "tool_calls") else "incomplete")
    told = _finished(head, reply, writer.items)
    keep(told)
    return Json(told)


async def _events(head: dict[str, Any], stream: Stream, reply: Reply, keep: Any) -> Events:
    writer = _Writer()
    yield writer.event("response.created", response=head)
    yield writer.event("response.in_progress", response=head)
    try:
        async for _, events in follow(stream, [reply]):
            for one in events:
                for told in writer.take(one):
                    yield told
    except Exception as error:
        message = as_api_error(error).message
        failed = {**head, "status": "failed", "error": {"code": "server_error", "message": message}}
        yield writer.event("response.failed", response=failed)
        return
    for told in writer.close("completed" if reply.finish_reason in ("stop", "tool_calls") else "incomplete"):
        yield told
    response = _finished(head, reply, writer.items)
    keep(response)
    yield writer.event(f"response.{response['status']}", response=response)
