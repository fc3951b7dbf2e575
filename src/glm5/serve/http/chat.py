"""OpenAI's `/v1/chat/completions`, with the fields that GLM's users know: `reasoning_content`, `thinking`,
`chat_template_kwargs`, `return_token_ids`. Read next: `conversation`, which the other chat interfaces share.
"""

from __future__ import annotations

import time
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from fastapi.responses import Response
from pydantic import Field

from glm5.serve.client import Stream
from glm5.serve.http import logprobs
from glm5.serve.http.answers import finish_fields
from glm5.serve.http.bodies import (
    OPENAI_WITHOUT_EFFECT,
    Body,
    Name,
    ResponseFormat,
    SamplingFields,
    StreamOptions,
    Strict,
    agreed,
    format_constraint,
)
from glm5.serve.http.conversation import Conversation, Reply, Thinking, ToolChoice, follow, prepare, replies_to, usage
from glm5.serve.http.errors import ApiError, Json
from glm5.serve.http.server import DONE, STREAMED, Events, EventStream, Server, event, new_id, prepared, unless_gone
from glm5.text.events import CallArguments, CallStart, Content, Event, Reasoning, fold
from glm5.text.messages import messages_from_openai, tools_from_openai

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ThinkingField(Body):
    """`thinking`, as GLM's hosted service has it."""

    type: Literal["enabled", "disabled"] | None = None
    clear_thinking: bool | None = None
    budget_tokens: int | None = Field(default=None, ge=0, le=2**31 - 1)


class TemplateArguments(Body):
    """`chat_template_kwargs`."""

    enable_thinking: bool | None = None
    clear_thinking: bool | None = None


class NamedFunction(Body):
    """The function of a named tool choice."""

    name: Name


class NamedChoice(Body):
    """`tool_choice` that names a tool."""

    type: Literal["function"] = "function"
    function: NamedFunction


class ChatBody(SamplingFields, Strict):
    """The body of `/v1/chat/completions`."""

    WITHOUT_EFFECT = OPENAI_WITHOUT_EFFECT

    model: Name | None = None
    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    max_tokens: int | None = Field(default=None, ge=1, le=2**31 - 1)
    max_completion_tokens: int | None = Field(default=None, ge=1, le=2**31 - 1)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=64)
    prompt_logprobs: int | None = Field(default=None, ge=0, le=64)
    thinking: ThinkingField | None = None
    chat_template_kwargs: TemplateArguments | None = None
    reasoning_effort: Effort | None = None
    thinking_token_budget: int | None = Field(default=None, ge=0, le=2**31 - 1)
    include_reasoning: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    continue_final_message: bool | None = None
    functions: Any = None
    function_call: Any = None

    def thinks(self) -> Thinking:
        """How to think, from all fields that can say so."""
        given, template = self.thinking or ThinkingField(), self.chat_template_kwargs or TemplateArguments()
        effort = self.reasoning_effort
        enabled = agreed(
            "whether to think",
            thinking=None if given.type is None else given.type == "enabled",
            chat_template_kwargs=template.enable_thinking,
            reasoning_effort=None if effort is None else effort not in ("none", "minimal"),
        )
        clear = agreed("clear_thinking", thinking=given.clear_thinking, chat_template_kwargs=template.clear_thinking)
        budget = agreed(
            "the budget of thinking", thinking=given.budget_tokens, thinking_token_budget=self.thinking_token_budget
        )
        return Thinking(enabled is not False, clear, budget)

    def conversation(self, server: Server) -> Conversation:
        """What to ask the backend."""
        if self.functions is not None or self.function_call is not None:
            raise ApiError(400, "functions: OpenAI's older field is not offered. Use tools", param="functions")
        if self.continue_final_message:
            raise ApiError(400, "continue_final_message is not offered. Leave it out", param="continue_final_message")
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
        choice = self.tool_choice
        sampling = self.sampling()
        if self.logprobs:
            sampling["logprobs"] = self.top_logprobs or 0
        if self.prompt_logprobs is not None:
            sampling["prompt_logprobs"] = self.prompt_logprobs
        return prepare(
            server,
            messages_from_openai(self.messages),
            tools_from_openai(self.tools),
            sampling=sampling,
            choice=ToolChoice("named", choice.function.name)
            if isinstance(choice, NamedChoice)
            else ToolChoice(choice or "auto"),
            parallel=self.parallel_tool_calls is not False,
            thinking=self.thinks(),
            constraints=[*self.constraints(), *format_constraint(self.response_format)],
            max_tokens=agreed(
                "the most tokens", max_completion_tokens=self.max_completion_tokens, max_tokens=self.max_tokens
            ),
            priority=self.priority or 0,
        )


def routes(server: Server) -> APIRouter:
    """The routes of this page."""
    router = APIRouter()

    @router.post("/v1/chat/completions", responses=STREAMED)
    async def chat_completions(body: ChatBody, http: HttpRequest) -> Response:
        """Answer a conversation."""
        model, here = server.check_model(body.model), server.of(http)
        conversation = await prepared(http, lambda: body.conversation(here))
        replies = replies_to(here, conversation)
        stream = await here.start(conversation.request)
        head = {"id": new_id("chatcmpl-"), "object": "chat.completion", "created": int(time.time()), "model": model}
        if body.stream:
            head["object"] = "chat.completion.chunk"
            return EventStream(_events(body, head, stream, replies), [stream], http.url.path, DONE)
        return await unless_gone(http, _whole(body, head, stream, replies), [stream])

    return router


async def _whole(body: ChatBody, head: dict[str, Any], stream: Stream, replies: list[Reply]) -> Response:
    async for _ in follow(stream, replies):
        pass
    told = {**head, "choices": [_choice(body, reply) for reply in replies], "usage": usage(replies)}
    first = replies[0].answer
    if body.return_token_ids:
        told["prompt_token_ids"] = list(first.request.input_ids)
    if body.prompt_logprobs is not None:
        told["prompt_logprobs"] = logprobs.of_prompt(first.tokenizer, first)
    return Json({**told, "timings": first.timings()})


def _choice(body: ChatBody, reply: Reply) -> dict[str, Any]:
    """A whole answer."""
    parsed = fold(reply.events)
    message: dict[str, Any] = {"role": "assistant", "content": parsed.content, "refusal": None}
    if body.include_reasoning is not False:
        message["reasoning_content"] = parsed.reasoning or None
    if parsed.calls:
        message["content"] = parsed.content or None
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in parsed.calls
        ]
    return {"index": reply.answer.index, "message": message, **_about(body, reply, 0)}


def _about(body: ChatBody, reply: Reply, sent: int) -> dict[str, Any]:
    """What a choice says beside its text, of the ids from number `sent` on."""
    answer = reply.answer
    out: dict[str, Any] = {"logprobs": None, **finish_fields(answer), "finish_reason": reply.finish_reason}
    if body.logprobs:
        content = logprobs.of_chat(
            answer.tokenizer, answer.ids[sent:], answer.info[sent:], bool(body.return_tokens_as_token_ids)
        )
        out["logprobs"] = {"content": content, "refusal": None}
    if body.return_token_ids:
        out["token_ids"] = answer.ids[sent:]
    return out


async def _events(body: ChatBody, head: dict[str, Any], stream: Stream, replies: list[Reply]) -> Events:
    options = body.stream_options or StreamOptions()
    sent = [0 for _ in replies]
    for reply in replies:
        opening = {"role": "assistant", "content": ""}
        choice = {"index": reply.answer.index, "delta": opening, "logprobs": None, "finish_reason": None}
        chunk = {**head, "choices": [choice]}
        if body.return_token_ids:
            chunk["prompt_token_ids"] = list(reply.answer.request.input_ids)
        yield event(chunk)
    async for reply, events in follow(stream, replies):
        i = reply.answer.index
        delta = delta_of(events, body.include_reasoning is not False)
        if not (delta or reply.done or ((body.logprobs or body.return_token_ids) and len(reply.answer.ids) > sent[i])):
            continue
        chunk = {**head, "choices": [{"index": i, "delta": delta, **_about(body, reply, sent[i])}]}
        sent[i] = len(reply.answer.ids)
        if options.continuous_usage_stats:
            chunk["usage"] = usage(replies)
        yield event(chunk)
    if options.include_usage:
        yield event({**head, "choices": [], "usage": usage(replies), "timings": replies[0].answer.timings()})


def delta_of(events: list[Event], with_reasoning: bool = True) -> dict[str, Any]:
    """What the events of one step add, as one `delta`: each call once, its name with its beginning."""
    delta: dict[str, Any] = {}
    calls: dict[int, dict[str, Any]] = {}
    for one in events:
        match one:
            case Reasoning(text) if with_reasoning:
                delta["reasoning_content"] = delta.get("reasoning_content", "") + text
            case Content(text):
                delta["content"] = delta.get("content", "") + text
            case CallStart(index, id, name):
                function = {"name": name, "arguments": ""}
                calls[index] = {"index": index, "id": id, "type": "function", "function": function}
            case CallArguments(index, text):
                call = calls.setdefault(index, {"index": index, "function": {"arguments": ""}})
                call["function"]["arguments"] += text
    if calls:
        delta["tool_calls"] = list(calls.values())
    return delta
