"""A trajectory as a list of messages: the one form in which those of all tasks can be read, whatever agent made them.

Read from the ids alone, tools included. An assistant's message keeps the ids that were sampled, so that rendering the
list again gives the trajectory's ids. Source: the report, section 4.1 (one message-list form for all tasks). Read next:
`glm5.text.chat`, the way there.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from glm5.posttrain.record import Record
from glm5.text.messages import Message, Tool, tools_from_openai
from glm5.text.parser import parse
from glm5.text.tokenizer import Tokenizer

_TOOLS = re.compile(r"<tools>\n(.*?)\n</tools>", re.DOTALL)


@dataclass(frozen=True)
class Transcript:
    """What was said. tools: that the prompt offered."""

    tools: tuple[Tool, ...]
    messages: tuple[Message, ...]


def transcript(record: Record, tokenizer: Tokenizer) -> Transcript:
    """The messages of a trajectory that was rendered by `glm5.text.chat`.

    Raises:
        DataError: its list of tools is none.
    """
    ids, prefix = list(record.ids), len(tokenizer.prefix_ids)
    tags = {
        tokenizer.system_id: "system",
        tokenizer.user_id: "user",
        tokenizer.assistant_id: "assistant",
        tokenizer.observation_id: "tool",
    }
    # A tag that was sampled begins a message only where it ends a turn; any other is part of an answer.
    told = [not record.drawn[place] or ids[place] in tokenizer.stop_ids for place in range(len(ids))]
    starts = [place for place in range(prefix, len(ids)) if ids[place] in tags and told[place]]
    tools: tuple[Tool, ...] = ()
    messages: list[Message] = []
    for start, end in zip(starts, [*starts[1:], len(ids)], strict=True):
        role, inside = tags[ids[start]], ids[start + 1 : end]
        if role == "assistant":
            stop = ids[end : end + 1]
            answer = parse(tokenizer, [*inside[1:], *stop], tools, prompt_ids=ids[start : start + 2])
            messages.append(answer.message([*inside, *stop]))
        elif role == "tool":
            messages += [Message("tool", text) for text in _results(inside, tokenizer)]
        elif end == len(ids) and not inside:
            break  # what the last answer ended with
        elif role == "system" and not messages and (found := _TOOLS.search(tokenizer.decode(inside))):
            tools = tools_from_openai([json.loads(line) for line in found[1].split("\n")])
        else:
            messages.append(Message(role, tokenizer.decode(inside)))  # type: ignore[arg-type]
    return Transcript(tools, tuple(messages))


def _results(ids: list[int], tokenizer: Tokenizer) -> list[str]:
    """The texts of tools' results that stand in a row."""
    texts: list[list[int]] = []
    for id in ids:
        if id == tokenizer.tool_response_id:
            texts.append([])
        elif id != tokenizer.end_tool_response_id and texts:
            texts[-1].append(id)
    return [tokenizer.decode(text) for text in texts]
