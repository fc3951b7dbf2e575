"""What the three chat interfaces share: a conversation becomes one request, its answers become events.

Whatever the interface, messages are rendered by `glm5.text.chat` and ids parsed by `glm5.text.parser`; the streamed and
the whole answer come from the same events. Read next: `chat`, `responses`, `anthropic`.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from glm5.serve.client import Stream
from glm5.serve.http.answers import Answer, usage_of
from glm5.serve.http.bodies import only
from glm5.serve.http.errors import ApiError
from glm5.serve.http.server import Server, new_id
from glm5.serve.request import Constraint, Delta, Request, SamplingParams
from glm5.text.events import CallStart, Event
from glm5.text.messages import Message, Tool
from glm5.text.parser import Parser


@dataclass(frozen=True)
class ToolChoice:
    """Whether tools are called. mode: auto, none, required, or named (then `name` alone, once)."""

    mode: str = "auto"
    name: str = ""


@dataclass(frozen=True)
class Thinking:
    """How the model thinks: at all, and whether earlier turns' thinking is taken out of the conversation (None: as the
    server does unless told)."""

    enabled: bool = True
    clear: bool | None = None
    budget: int | None = None


@dataclass(frozen=True)
class Conversation:
    """A request for chat, prepared: what the backend is asked, and what its answers are parsed with."""

    request: Request
    tools: tuple[Tool, ...]
    parallel: bool


def prepare(
    server: Server,
    messages: Sequence[Message],
    tools: tuple[Tool, ...] = (),
    *,
    sampling: dict[str, Any],
    choice: ToolChoice = ToolChoice(),
    parallel: bool = True,
    thinking: Thinking = Thinking(),
    constraints: Sequence[Constraint] = (),
    max_tokens: int | None = None,
    clamp: bool = False,
    priority: int = 0,
) -> Conversation:
    """Render a conversation and say how to go on.

    Args:
        sampling: `SamplingParams` by name, without `max_new_tokens`.
        clamp: ask for fewer tokens where the context has no room for `max_tokens`.

    Raises:
        ApiError, UserError: it cannot be served.
    """
    if choice.mode in ("required", "named") and not tools:
        raise ApiError(400, f"tool_choice asks for a call ({choice.mode}), but there are no tools", param="tool_choice")
    shown = () if choice.mode == "none" else tools
    called = shown
    if choice.mode == "named":
        called = tuple(tool for tool in tools if tool.name == choice.name)
        if not called:
            raise ApiError(400, f"tool_choice: there is no tool {choice.name[:100]!r}", param="tool_choice")
    forms = list(constraints)
    if choice.mode in ("required", "named"):
        once = choice.mode == "named" or not parallel
        text = json.dumps([tool.spec for tool in called])
        forms.append(Constraint("tools", text, max_calls=1 if once else None, where="tools"))
    parallel = parallel and choice.mode != "named"
    ids = server.prompt(
        messages, shown, enable_thinking=thinking.enabled, clear_thinking=thinking.clear, parallel=parallel
    )
    if clamp and max_tokens is not None:
        max_tokens = min(max_tokens, max(server.room(len(ids)), 1))
    params = SamplingParams(
        **sampling, max_new_tokens=max_tokens, constraint=only(forms), thinking_budget=thinking.budget
    )
    return Conversation(Request(ids, params, priority=priority), shown, parallel)


@dataclass
class Reply:
    """One answer of a conversation, as it comes.

    Attributes:
        events: all so far; folded, they are the whole answer.
    """

    conversation: Conversation
    answer: Answer
    parser: Parser
    events: list[Event] = field(default_factory=list)

    def take(self, delta: Delta) -> list[Event]:
        """What a delta adds."""
        new = self.parser.push(self.answer.take(delta))
        if self.parser.done and not self.answer.request.params.ignore_eos:
            self.answer.cut(self.parser.taken)  # what a block of drafts has beyond the turn is no part of it
        if (finish := delta.finish) is not None:
            # A stop string cuts the text where it is: what is open then was not ended by the model.
            cut = isinstance(finish.matched, str)
            new += self.parser.finish("length" if cut else finish.type)
        self.events += new
        return new

    @property
    def done(self) -> bool:
        """No more will come: it ended, or its turn did, as with the only call that it may make."""
        ended = self.parser.done and not self.answer.request.params.ignore_eos
        return ended or self.answer.finish is not None

    @property
    def called(self) -> bool:
        """Whether it calls a tool."""
        return any(isinstance(event, CallStart) for event in self.events)

    @property
    def finish_reason(self) -> str | None:
        """OpenAI's word: stop, length, tool_calls or abort; None while more will come."""
        if not self.done:
            return None
        finish = self.answer.finish
        if finish is None or finish.type == "stop":
            return "tool_calls" if self.called else "stop"
        return finish.type


def replies_to(server: Server, conversation: Conversation, call_prefix: str = "call_") -> list[Reply]:
    """An empty reply for each of the `n` answers, each with a parser of its own."""
    tokenizer, request = server.backend.tokenizer, conversation.request
    return [
        Reply(
            conversation,
            Answer(request, i, tokenizer),
            Parser(
                tokenizer,
                conversation.tools,
                prompt_ids=request.input_ids,
                parallel_tool_calls=conversation.parallel,
                new_id=lambda: new_id(call_prefix),
            ),
        )
        for i in range(request.params.n)
    ]


async def follow(stream: Stream, replies: list[Reply]) -> AsyncIterator[tuple[Reply, list[Event]]]:
    """Each delta's reply and what it adds, until every reply is done. Then the stream can be closed."""
    async for delta in stream:
        reply = replies[delta.index]
        if reply.done:
            continue
        yield reply, reply.take(delta)
        if all(one.done for one in replies):
            return


def usage(replies: list[Reply]) -> dict[str, Any]:
    """OpenAI's `usage` of all replies."""
    return usage_of((reply.answer for reply in replies), sum(reply.parser.reasoning_tokens for reply in replies))
