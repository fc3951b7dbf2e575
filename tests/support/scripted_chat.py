"""A model behind OpenAI's interface that says what it is told to, and rollouts that ask it. Needs no torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from glm5.agents.protocol import Rollout
from support.listening import listening

Says = Callable[[list[dict[str, Any]]], dict[str, Any]]


def rollout(url: str, index: int = 0, seed: int = 1, time_s: float = 120.0, **others: Any) -> Rollout:
    """A rollout whose session is behind this address."""
    names = {"sample": f"s{index}", "group": "g", "task": "t", "session": f"s{index}", "member": 0, "attempt": 0}
    base_url = f"{url}/sessions/s{index}/v1"
    return Rollout.from_json({**names, "index": index, "seed": seed, "base_url": base_url, "time_s": time_s, **others})


def call(name: str, number: int = 0, **arguments: Any) -> dict[str, Any]:
    """An assistant's message that calls one tool."""
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": f"c{number}", "type": "function", "function": function}],
    }


def say(text: str) -> dict[str, Any]:
    """An assistant's message without a call."""
    return {"role": "assistant", "content": text}


@contextmanager
def scripted(says: Says) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Its address, and the requests that it got. `says`: history -> the assistant's message."""
    requests: list[dict[str, Any]] = []

    async def answer(request: Request) -> JSONResponse:
        body = await request.json()
        requests.append(body)
        message = says(body["messages"])
        reason = "tool_calls" if message.get("tool_calls") else "stop"
        choice = {"index": 0, "finish_reason": reason, "message": message}
        return JSONResponse({"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]})

    with listening(Starlette(routes=[Route("/{path:path}", answer, methods=["POST"])])) as url:
        yield url, requests
