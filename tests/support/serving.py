"""A real server on a port of this machine, for tests that use real clients."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fastapi import FastAPI

from glm5.serve.client import Backend
from glm5.serve.http.app import create_app
from glm5.serve.http.connection import connection_class
from glm5.serve.http.server import HttpOptions
from support.listening import listening

PING = {"type": "function", "function": {"name": "ping", "parameters": {"type": "object", "properties": {}}}}
HI = [{"role": "user", "content": "hi"}]


def tool(name: str, **types: Any) -> dict[str, Any]:
    """A tool in OpenAI's form, its arguments by JSON type (or schema)."""
    properties = {key: {"type": kind} if isinstance(kind, str) else kind for key, kind in types.items()}
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


def call(name: str, **arguments: str) -> str:
    """A call as the model writes it."""
    inner = "".join(f"<arg_key>{k}</arg_key><arg_value>{v}</arg_value>" for k, v in arguments.items())
    return f"<tool_call>{name}{inner}</tool_call>"


def events(text: str) -> list[dict[str, Any]]:
    """The JSON of every server-sent event; the closing [DONE] must be there for OpenAI's and SGLang's streams."""
    lines = [line[6:] for line in text.split("\n") if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


@contextmanager
def served(app: FastAPI | Backend, options: HttpOptions | None = None) -> Iterator[str]:
    """The address of a server, of an application or a backend, that runs for the length of the block."""
    made = app if isinstance(app, FastAPI) else create_app(app, options)
    connection = connection_class((options or HttpOptions()).head_timeout_s)
    with listening(made, http=connection) as address:
        yield address
