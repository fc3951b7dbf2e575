"""A conversation with tools, as the services here hold it: the model says, tools answer, until it says without a call.

What a model does wrong, a tool that is not there, arguments that are no JSON or of another kind, is told to it as the
call's result: it is its own doing, and it may try again. What a tool raises ends the rollout, as the environment's.
Read next: `maths`, `editing`, `terminal`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from glm5.agents.protocol import Rollout
    from glm5.agents.service import Policy

_KINDS: dict[str, type] = {"string": str, "integer": int}


@dataclass(frozen=True)
class Tool:
    """A function that the model may call.

    Args:
        name, description: what the model is told. arguments: name -> (kind, `string` or `integer`, description).
        call: arguments by name -> what the model sees.
        optional: arguments that may be left out.
    """

    name: str
    description: str
    arguments: Mapping[str, tuple[str, str]]
    call: Callable[..., str]
    optional: Sequence[str] = ()

    @property
    def told(self) -> dict[str, Any]:
        """In OpenAI's form."""
        properties = {name: {"type": kind, "description": text} for name, (kind, text) in self.arguments.items()}
        required = [name for name in self.arguments if name not in self.optional]
        parameters = {"type": "object", "properties": properties, "required": required}
        return {
            "type": "function",
            "function": {"name": self.name, "description": self.description, "parameters": parameters},
        }

    def answer(self, arguments: str) -> str:
        """The result of a call, or what is wrong with it. arguments: JSON."""
        try:
            given = json.loads(arguments or "{}")
        except ValueError as e:
            return f"Error: the arguments are no JSON: {e}"
        if not isinstance(given, dict):
            return "Error: the arguments must be an object"
        for name in given:
            if name not in self.arguments:
                return f"Error: {self.name} takes no {name!r}, but {', '.join(self.arguments)}"
        for name, (kind, _) in self.arguments.items():
            if name not in given and name not in self.optional:
                return f"Error: {self.name} needs {name!r}"
            value = given.get(name)
            if name in given and (not isinstance(value, _KINDS[kind]) or isinstance(value, bool)):
                return f"Error: {name} must be of the kind {kind}"
        return self.call(**given)


@dataclass
class Talk:
    """How a conversation went.

    Args:
        text: of the last message, which calls nothing; None where turns or time were used up before it.
        turns: messages of the model. calls: how often tools were called. wrong: how many of these could not be made.
    """

    text: str | None = None
    turns: int = 0
    calls: int = 0
    wrong: int = 0
    history: list[dict[str, Any]] = field(default_factory=list)

    @property
    def metrics(self) -> dict[str, float]:
        return {"turns": self.turns, "calls": self.calls, "wrong_calls": self.wrong, "unfinished": self.text is None}


def talk(
    asked: Rollout,
    policy: Policy,
    messages: Sequence[dict[str, Any]],
    tools: Sequence[Tool],
    turns: int,
    sampling: Mapping[str, Any] | None = None,
) -> Talk:
    """Hold a conversation of at most `turns` messages of the model, within the rollout's time. Blocks.

    Args:
        sampling: fields of each request, as max_tokens.

    Raises:
        EngineLost, ContextFull: as `Policy.chat`.
    """
    end = time.monotonic() + asked.time_s
    by_name, told = {tool.name: tool for tool in tools}, [tool.told for tool in tools]
    went = Talk(history=list(messages))
    while went.turns < turns and time.monotonic() < end:
        said = policy.chat_now(went.history, **({"tools": told} if told else {}), **(sampling or {}))
        went.turns += 1
        went.history.append(said)
        calls = said.get("tool_calls") or []
        if not calls:
            went.text = said.get("content") or ""
            return went
        for one in calls:
            name = one["function"]["name"]
            if name in by_name:
                result = by_name[name].answer(one["function"]["arguments"])
            else:
                result = f"Error: there is no tool {name!r}, but {', '.join(by_name)}"
            went.calls += 1
            went.wrong += result.startswith("Error: ")
            went.history.append({"role": "tool", "tool_call_id": one["id"], "content": result})
    return went
