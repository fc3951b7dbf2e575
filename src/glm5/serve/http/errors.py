"""What a client is told when something is wrong: one exception, and the two shapes in which it is sent.

OpenAI's shape is `{"error": {message, type, param, code}}`; paths under `/v1/messages` use Anthropic's. A fault of the
client is always a 4xx that names the field; a 500 is a bug of ours, and is logged. Read next: `server`.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from glm5.serve.client import Unavailable
from glm5.text.messages import messages_from_openai
from glm5.utils.errors import UserError

log = logging.getLogger(__name__)

# Status: OpenAI's type, Anthropic's type.
TYPES = {
    400: ("invalid_request_error", "invalid_request_error"),
    401: ("authentication_error", "authentication_error"),
    403: ("permission_error", "permission_error"),
    404: ("not_found_error", "not_found_error"),
    405: ("invalid_request_error", "invalid_request_error"),
    408: ("timeout_error", "timeout_error"),
    413: ("invalid_request_error", "request_too_large"),
    429: ("rate_limit_error", "rate_limit_error"),
    500: ("server_error", "api_error"),
    503: ("service_unavailable_error", "overloaded_error"),
    504: ("timeout_error", "timeout_error"),
}


# A message that names a field begins with it: `stop: ...`, `messages[1].content: ...`, `rid='a' is in use`.
FIELD = re.compile(r"[a-z_]\w*(\[\d+\]|\.\w+)*(?==|: )")

MESSAGE, CALL = "messages[0]", "messages[0].tool_calls[0]"  # what checks of one message or call name


class ApiError(Exception):
    """An answer that is not 200.

    Args:
        status: of HTTP. message: what is wrong and how to mend it. param: the field. code: a word for programs.
    """

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        self.status, self.message, self.param, self.code = status, message, param, code
        super().__init__(message)


class ClientGone(Exception):
    """The client closed the connection before it was answered."""


class ErrorBody(BaseModel):
    """What is wrong, in OpenAI's shape."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    """An answer that is not 200."""

    error: ErrorBody


class AnthropicErrorBody(BaseModel):
    """What is wrong, in Anthropic's shape."""

    type: str
    message: str


class AnthropicErrorAnswer(BaseModel):
    """An answer that is not 200, under `/v1/messages`."""

    type: str
    error: AnthropicErrorBody


class Json(JSONResponse):
    """Compact JSON. Lone surrogates, which UTF-8 cannot hold, stay JSON escapes; NaN cannot be sent."""

    def render(self, content: Any) -> bytes:
        return dumps(content)


def dumps(content: Any) -> bytes:
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "backslashreplace")


def as_api_error(error: Exception) -> ApiError:
    """Any exception as what the client is told of it; what is not the client's fault is logged."""
    match error:
        case ApiError():
            return error
        case RequestValidationError():
            return _of_validation(error)
        case UserError():
            named = FIELD.match(error.what)
            return ApiError(400, str(error), param=named[0] if named else None)
        case Unavailable():
            return ApiError(503, str(error), code="unavailable")
        case HTTPException():
            return ApiError(error.status_code, str(error.detail))
        case ClientGone():
            return ApiError(499, "the client is gone")
        case RecursionError():
            return ApiError(400, "the body is nested too deeply. Flatten it")
    log.error("a request failed", exc_info=error)
    return ApiError(500, f"a fault of the server: {type(error).__name__}")


def renamed(error: UserError, names: Mapping[str, str]) -> ApiError:
    """A fault of what was put into another interface's form, under the names that the client wrote: ours by theirs."""
    what = error.what
    for name, written in names.items():
        what = what.replace(name, written)
    return as_api_error(UserError(what, error.mend))


def check_message(message: Mapping[str, Any], names: Mapping[str, str]) -> None:
    """Refuse a message that no conversation can have, under the names that the client wrote for those of `MESSAGE`."""
    try:
        messages_from_openai([message])
    except UserError as error:
        raise renamed(error, names) from None


def check_call(function: Mapping[str, Any], id: Any, names: Mapping[str, str]) -> None:
    """The same of an assistant's call; names: of its parts in `CALL`."""
    check_message({"role": "assistant", "tool_calls": [{"id": id, "function": function}]}, names)


def body_of(error: ApiError, path: str) -> dict[str, Any]:
    """The error in the shape that clients of this path expect."""
    openai, anthropic = TYPES.get(error.status, TYPES[400 if error.status < 500 else 500])
    if path.startswith("/v1/messages"):
        return {"type": "error", "error": {"type": anthropic, "message": error.message}}
    return {"error": {"message": error.message, "type": openai, "param": error.param, "code": error.code}}


def response_of(error: Exception, path: str) -> Json:
    """The error as a response."""
    told = as_api_error(error)
    headers = dict(error.headers or {}) if isinstance(error, HTTPException) else {}  # such as the methods allowed
    if told.status in (429, 503):
        headers["Retry-After"] = "1"
    return Json(body_of(told, path), told.status, headers=headers)


def install(app: FastAPI) -> None:
    """Let every exception leave through `response_of`."""

    async def handle(request: Request, error: Exception) -> Json:
        return response_of(error, request.url.path)

    kinds = (ApiError, UserError, Unavailable, ClientGone, HTTPException, RequestValidationError, RecursionError)
    for kind in (*kinds, Exception):
        app.add_exception_handler(kind, handle)


def _of_validation(error: RequestValidationError) -> ApiError:
    """The first thing that is wrong with a body, by its path, without repeating the client's values."""
    first = error.errors()[0]
    _, *path = first["loc"]  # `body`
    where = ".".join(_fields(path))
    reason = first["msg"].removeprefix("Value error, ")
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON: {first.get('ctx', {}).get('error', reason)}")
    if first["type"] == "extra_forbidden":
        name = ".".join([*_fields(path[:-1]), str(path[-1])])[:200]
        return ApiError(
            400, f"{name}: this interface has no such field. Leave it out", param=name, code="unknown_field"
        )
    if not where:
        return ApiError(400, f"the body must be a JSON object, sent as application/json: {reason}")
    return ApiError(400, f"{where}: {reason}", param=where)


def _fields(path: list[str | int]) -> list[str]:
    """The path's fields and places, without the classes and types of which a union has a choice: pydantic names the
    branch, too, which says nothing to the client."""
    named = [str(part) for part in path if isinstance(part, int) or re.fullmatch(r"[a-z]\w*", part)]
    return [part for part in named if part not in ("str", "int", "float", "bool", "list", "dict")]
