"""What parsing an answer gives: events while it streams, and the whole that they make.

There is one way to the whole, `fold`, so that an answer at once and the same answer streamed can't differ. Read next:
`parser`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from glm5.text.messages import Message, ToolCall


@dataclass(frozen=True)
class Reasoning:
    """More of the thinking."""

    text: str


@dataclass(frozen=True)
class Content:
    """More of the answer. `repeated`: it was passed on as thinking before (see the head of `parser`)."""

    text: str
    repeated: bool = False


@dataclass(frozen=True)
class CallStart:
    """A call begins: the first is number 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class CallArguments:
    """More of a call's arguments. All fragments of a complete call, joined, are one JSON object."""

    index: int
    text: str


@dataclass(frozen=True)
class CallEnd:
    """A call ends. `complete` is False where its JSON stays open; `fault` says what was not as it should be."""

    index: int
    complete: bool
    fault: str = ""


Event = Reasoning | Content | CallStart | CallArguments | CallEnd


@dataclass(frozen=True)
class ParsedCall:
    """One call: its arguments as JSON text, which is an object if the call is complete."""

    id: str
    name: str
    arguments: str
    complete: bool
    fault: str = ""


@dataclass(frozen=True)
class Parsed:
    """A parsed answer.

    Args:
        skipped_thinking: the model answered where it should have thought; its text is in `reasoning` and `content`.
    """

    reasoning: str = ""
    content: str = ""
    calls: tuple[ParsedCall, ...] = ()
    skipped_thinking: bool = False

    def message(self, ids: Sequence[int] = ()) -> Message:
        """The answer as a message for the conversation, with its complete calls; `ids` are those of `Message`."""
        calls = tuple(ToolCall(call.name, json.loads(call.arguments), call.id) for call in self.calls if call.complete)
        reasoning = None if self.skipped_thinking else self.reasoning or None
        return Message("assistant", self.content, reasoning, calls, ids=tuple(ids))


def fold(events: Iterable[Event]) -> Parsed:
    """The whole that the events of one answer make."""
    reasoning: list[str] = []
    content: list[str] = []
    starts: list[CallStart] = []
    arguments: list[list[str]] = []
    ends: dict[int, CallEnd] = {}
    skipped = False
    for event in events:
        match event:
            case Reasoning(text):
                reasoning.append(text)
            case Content(text, repeated):
                content.append(text)
                skipped |= repeated
            case CallStart():
                starts.append(event)
                arguments.append([])
            case CallArguments(index, text):
                arguments[index].append(text)
            case CallEnd(index):
                ends[index] = event
    calls = tuple(
        ParsedCall(start.id, start.name, "".join(texts), end.complete, end.fault)
        for start, texts, end in zip(starts, arguments, (ends[i] for i in range(len(starts))), strict=True)
    )
    return Parsed("".join(reasoning), "".join(content), calls, skipped)
