"""Messages, tool calls and tools, and the one border at which OpenAI's JSON becomes them.

A conversation is a sequence of `Message`; serving, fine-tuning and agents all use this type. What arrives from outside
passes `messages_from_openai` and `tools_from_openai`, whose errors name the field (`messages[3].tool_calls[0]...`), so
nothing behind them meets a wrong type. Read next: `chat`, which renders messages to ids.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from glm5.utils.errors import DataError

Role = Literal["system", "user", "assistant", "tool"]
Segment = Literal["reasoning", "content", "tool_calls"]
# OpenAI's newer name of a system message is read as one.
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


@dataclass(frozen=True)
class ToolCall:
    """A call that an assistant made. `arguments` are decoded values of JSON, by name and in the order written."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    id: str = ""


@dataclass(frozen=True)
class Message:
    """One message of a conversation.

    Args:
        reasoning: an assistant's thinking; None is a turn without. tool_calls: what it called, after the content.
        tool_call_id: the call that a tool's message answers. The rendered form has no place for it: results stand in
            the order of their calls.
        trained: False keeps an assistant's turn in the context but out of the loss, as a mistaken step should be.
        unlearned: segments of a turn that is trained which are kept out of the loss by themselves.
        ids: an assistant's turn as it was sampled: the prompt's last id (`<think>` or `</think>`), then every id that
            the model gave, its stop included. They are rendered instead of the text, so that a conversation grows by
            exact ids, whatever its text would be encoded to.
    """

    role: Role
    content: str = ""
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    trained: bool = True
    unlearned: frozenset[Segment] = frozenset()
    ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Tool:
    """A function that the model may call.

    Args:
        parameters: JSON schema of its arguments, by which the parser types them.
        spec: OpenAI's whole object, as the client wrote it: the model is shown this.
    """

    name: str
    parameters: Mapping[str, Any]
    spec: Mapping[str, Any]


# ---------------------------------------------------------------------------------------------------- from outside
def messages_from_openai(raw: object, where: str = "messages") -> list[Message]:
    """Check and take over a conversation in OpenAI's form.

    Content is a string, null, or a list of strings and `{"type": "text"}` parts, which are joined. Thinking is read
    from `reasoning_content` or `reasoning`; an assistant's text with `</think>` in it, without them, is split there.
    Arguments are a JSON string or an object. `weight: 0` keeps an assistant's message out of the loss, and
    `weight: {"reasoning_content": 0}` a segment of it (or "content", "tool_calls"). Other fields are ignored.

    Raises:
        DataError: names the field, its value and the mend.
    """
    if not isinstance(raw, list | tuple) or not raw:
        raise DataError(f"{where}: {_shown(raw)}", "Give a list of at least one message")
    return [_message(item, f"{where}[{index}]") for index, item in enumerate(raw)]


def tools_from_openai(raw: object) -> tuple[Tool, ...]:
    """Check and take over OpenAI's list of tools; None and an empty list are none.

    Raises:
        DataError: names the field, its value and the mend.
    """
    if raw is None:
        return ()
    if not isinstance(raw, list | tuple):
        raise DataError(f"tools: {_shown(raw)}", "Give a list of tools")
    tools = tuple(_tool(item, f"tools[{index}]") for index, item in enumerate(raw))
    names = set[str]()
    for index, tool in enumerate(tools):
        if tool.name in names:
            raise DataError(
                f"tools[{index}].function.name: {tool.name!r} is there twice", "Give each tool its own name"
            )
        names.add(tool.name)
    return tools


def split_thinking(content: str) -> tuple[str | None, str]:
    """Thinking and content of an assistant's text that has both in one, as the published template splits it."""
    if "</think>" not in content:
        return None, content
    before, after = content.split("</think>")[0], content.split("</think>")[-1]
    return before.rstrip("\n").split("<think>")[-1].lstrip("\n"), after.lstrip("\n")


def _message(raw: object, where: str) -> Message:
    item = _mapping(raw, where)
    role = item.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise DataError(f"{where}.role: {_shown(role)} is no role", f"Use one of {', '.join(ROLES)}")
    content = _content(item.get("content"), f"{where}.content")
    calls = item.get("tool_calls") or ()
    if not isinstance(calls, list | tuple):
        raise DataError(f"{where}.tool_calls: {_shown(calls)}", "It must be a list")
    if role != "assistant":
        if calls:
            raise DataError(f"{where}.tool_calls: a message of role {role} has calls", "Only an assistant calls tools")
        call_id = _optional_text(item, "tool_call_id", where) if role == "tool" else None
        return Message(cast(Role, ROLES[role]), content, tool_call_id=call_id or "")
    trained, unlearned = _weight(item.get("weight", 1), f"{where}.weight")
    reasoning, other = (_optional_text(item, name, where) for name in ("reasoning_content", "reasoning"))
    if reasoning is None:
        reasoning = other
    elif other is not None and other != reasoning:
        raise DataError(f"{where}: reasoning_content and reasoning differ", "Give one of them")
    if reasoning is None:
        reasoning, content = split_thinking(content)
    made = tuple(_call(call, f"{where}.tool_calls[{index}]") for index, call in enumerate(calls))
    return Message("assistant", content, reasoning, made, trained=trained, unlearned=unlearned)


_SEGMENTS: dict[str, Segment] = {"reasoning_content": "reasoning", "content": "content", "tool_calls": "tool_calls"}


def _weight(raw: object, where: str) -> tuple[bool, frozenset[Segment]]:
    """Whether a turn is learned, and which segments of it are not."""
    for name, value in raw.items() if isinstance(raw, Mapping) else ():
        if name not in _SEGMENTS:
            raise DataError(f"{where}: {_shown(name)} is no segment", f"The segments are {', '.join(_SEGMENTS)}")
        if value not in (0, 1):
            raise DataError(f"{where}.{name}: {_shown(value)}", "It must be 0 (not trained on) or 1")
    if isinstance(raw, Mapping):
        return True, frozenset(_SEGMENTS[name] for name, value in raw.items() if not value)
    if raw not in (0, 1):
        raise DataError(
            f"{where}: {_shown(raw)}", "It must be 0 (not trained on) or 1, or an object of them by segment"
        )
    return bool(raw), frozenset()


def _content(raw: object, where: str) -> str:
    if raw is None:
        return ""
    if isinstance(raw, str):
        return _text(raw, where)
    if not isinstance(raw, list | tuple):
        raise DataError(f"{where}: {_shown(raw)}", "It must be a string, null, or a list of text parts")
    parts = []
    for index, part in enumerate(raw):
        place = f"{where}[{index}]"
        if isinstance(part, str):
            parts.append(_text(part, place))
            continue
        kind = _mapping(part, place).get("type")
        if kind != "text":
            raise DataError(f"{place}.type: {_shown(kind)}", 'It must be "text": the model reads nothing else')
        parts.append(_text(part.get("text"), f"{place}.text"))
    return "".join(parts)


def _call(raw: object, where: str) -> ToolCall:
    item = _mapping(raw, where)
    function = _mapping(item.get("function"), f"{where}.function")
    name = _name(function.get("name"), f"{where}.function.name")
    place, arguments = f"{where}.function.arguments", function.get("arguments")
    if isinstance(arguments, str):
        try:
            # A call without arguments is sent as an empty string by some clients.
            arguments = json.loads(arguments or "{}", parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{place}: not JSON: {error}", "Send the arguments as one JSON object") from error
    if not isinstance(arguments, Mapping):
        raise DataError(f"{place}: {_shown(arguments)}", "It must be a JSON object, or a string that holds one")
    _check_json(arguments, place)
    return ToolCall(name, arguments, _optional_text(item, "id", where) or "")


def _tool(raw: object, where: str) -> Tool:
    item = _mapping(raw, where)
    if item.get("type") != "function":
        raise DataError(f"{where}.type: {_shown(item.get('type'))}", 'It must be "function"')
    function = _mapping(item.get("function"), f"{where}.function")
    name = _name(function.get("name"), f"{where}.function.name")
    parameters = function.get("parameters")
    schema = {} if parameters is None else _mapping(parameters, f"{where}.function.parameters")
    _check_json(item, where)
    return Tool(name, schema, item)


def _mapping(raw: object, where: str) -> Mapping[str, Any]:
    if not isinstance(raw, Mapping):
        raise DataError(f"{where}: {_shown(raw)}", "It must be an object")
    return raw


def _name(raw: object, where: str) -> str:
    name = _text(raw, where)
    if not name or name != name.strip():
        raise DataError(f"{where}: {_shown(raw)}", "It must be a name, without blanks around it")
    return name


def _optional_text(item: Mapping[str, Any], name: str, where: str) -> str | None:
    raw = item.get(name)
    return None if raw is None else _text(raw, f"{where}.{name}")


def _text(raw: object, where: str) -> str:
    if not isinstance(raw, str):
        raise DataError(f"{where}: {_shown(raw)}", "It must be a string")
    try:
        raw.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{where}: a lone surrogate at character {error.start}", "Send Unicode text") from error
    return raw


def _check_json(value: object, where: str) -> None:
    """Refuse what could not be written as JSON, or not as UTF-8."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{where}: a string in it has a lone surrogate", "Send Unicode text") from error
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(f"{where}: cannot be written as JSON: {error}", "Send plain JSON values") from error


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no value of JSON")


def _shown(value: object) -> str:
    """A value for a message, not at any length."""
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


# ---------------------------------------------------------------------------------------------------- to outside
def messages_to_openai(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages in OpenAI's form: arguments as JSON strings, null for the content of a bare call."""
    return [_to_openai(message) for message in messages]


def _to_openai(message: Message) -> dict[str, Any]:
    made: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.role == "tool" and message.tool_call_id:
        made["tool_call_id"] = message.tool_call_id
    if message.reasoning is not None:
        made["reasoning_content"] = message.reasoning
    if message.tool_calls:
        made["content"] = message.content or None
        made["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
            }
            for call in message.tool_calls
        ]
    if not message.trained:
        made["weight"] = 0
    elif message.unlearned:
        made["weight"] = {name: 0 for name, segment in _SEGMENTS.items() if segment in message.unlearned}
    return made
