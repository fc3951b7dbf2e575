"""GLM-5's chat format: messages to ids, with the mask of what is learned and the place of every message.

The form is the published one: `[gMASK]<sop>`, tools in a system block, role tags without line ends, thinking in
`<think>…</think>`, calls as `<tool_call>name<arg_key>…`, results under one `<|observation|>` a run. A turn has no
end of its own: the next role tag is what the model stops with, so that tag is learned. `chat_template.jinja` beside
this file says the same to other programs; docs/chat.md says where the form comes from and where it differs.

Ids are made directly: text is encoded as text, so `<|user|>` written by a user stays text.

Three ways to think (report, SFT): interleaved, before every answer and call; preserved (`clear_thinking=False`), where
old thinking stays; turn-level, where `enable_thinking=False` opens the next turn with `</think>`, and a past turn
without thinking has `reasoning=None`. Read next: `parser`, the way back.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from glm5.text.messages import Message, Tool
from glm5.text.tokenizer import Tokenizer

_TOOLS_HEAD = (
    "\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
)
_TOOLS_TAIL = (
    "</tools>\n\nFor each function call, output the function name and arguments within the following XML format:\n"
)


@dataclass(frozen=True)
class Rendered:
    """A conversation as ids.

    Args:
        ids: L token ids.
        loss: L flags: True where an id is one that the model gives, False where it is given to the model.
        spans: for each message the half-open range of its ids, its role tag first.
        cleared: the messages whose thinking was left out.
    """

    ids: tuple[int, ...]
    loss: tuple[bool, ...]
    spans: tuple[tuple[int, int], ...]
    cleared: frozenset[int]


@dataclass(frozen=True)
class Fork:
    """Where a later rendering stops repeating an earlier one: the first id, the message it is in, and why."""

    position: int
    message: int | None
    reason: str


def render(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    tools: Sequence[Tool] = (),
    *,
    enable_thinking: bool = True,
    clear_thinking: bool = True,
    add_generation_prompt: bool = False,
) -> Rendered:
    """The ids of a conversation.

    Args:
        messages: in any order of roles.
        enable_thinking: what the generation prompt opens: thinking, or an answer without. Past turns are as they were.
        clear_thinking: leave out the thinking of turns before the last user's message. Such a turn is not learned
            either, since nobody answers like that: see `render_for_training`.
        add_generation_prompt: end with `<|assistant|><think>`, or `<|assistant|></think>`.

    Raises:
        DataError: a text is not Unicode, or the tokenizer lacks one of GLM's special tokens.
    """
    writer = _Writer(tokenizer)
    for id in tokenizer.prefix_ids:
        writer.special(id)
    if tools:
        _write_tools(writer, tools)
    last_user = max((i for i, message in enumerate(messages) if message.role == "user"), default=-1)
    spans: list[tuple[int, int]] = []
    cleared: set[int] = set()
    before: Message | None = None
    learned = False  # of the turn before, and so of the tag that ends it
    for index, message in enumerate(messages):
        start = len(writer.ids)
        tag = _tag(tokenizer, message)
        if before is not None and before.ids and writer.ids[-1] == tag:
            start -= 1  # the turn before was sampled with its stop, which is this tag
            spans[-1] = (spans[-1][0], start)
        elif message.role != "tool" or before is None or before.role != "tool":
            writer.special(tag, learned and before is not None and tag == _stop_of(tokenizer, before))
        learned = False
        if message.role == "assistant":
            clears = bool(message.reasoning) and clear_thinking and index < last_user
            if clears:
                cleared.add(index)
            learned = message.trained and not clears
            if message.ids and not clears:
                _write_sampled(writer, message.ids, learned)
                learned = False  # what ended the turn is among its ids
            else:
                _write_assistant(writer, message, keep=not clears, learned=learned)
        elif message.role == "tool":
            writer.special(tokenizer.tool_response_id)
            writer.text(message.content)
            writer.special(tokenizer.end_tool_response_id)
        else:
            writer.text(message.content)
        writer.flush()
        spans.append((start, len(writer.ids)))
        before = message
    if add_generation_prompt:
        writer.special(tokenizer.assistant_id)
        writer.special(tokenizer.think_id if enable_thinking else tokenizer.end_think_id)
    return Rendered(tuple(writer.ids), tuple(writer.loss), tuple(spans), frozenset(cleared))


def render_for_training(
    tokenizer: Tokenizer, messages: Sequence[Message], tools: Sequence[Tool] = (), *, clear_thinking: bool
) -> list[Rendered]:
    """Renderings in which every assistant's turn is learned once, each in the context that it is sampled in.

    With preserved thinking one rendering holds them all. Where thinking is cleared, the conversation forks (`forks`):
    there is one rendering up to each fork and one of the whole, and each learns the turns that those before it did
    not. Behind a last turn that is learned stands the tag that the model must stop with. A rendering with nothing to
    learn is left out.
    """
    made = []
    done = 0
    for end in [*(forks(messages) if clear_thinking else ()), len(messages)]:
        part = [replace(m, trained=m.trained and i >= done) for i, m in enumerate(messages[:end])]
        rendered = render(tokenizer, part, tools, clear_thinking=clear_thinking)
        last = part[-1] if part else None
        if last is not None and last.role == "assistant" and last.trained and not last.ids:
            stop = _stop_of(tokenizer, last)
            rendered = replace(rendered, ids=(*rendered.ids, stop), loss=(*rendered.loss, True))
        if any(rendered.loss):
            made.append(rendered)
        done = end
    return made


def forks(messages: Sequence[Message]) -> list[int]:
    """The user's messages that change the ids before them when `clear_thinking` is on: some thinking goes.

    Between them, and everywhere with `clear_thinking=False`, rendering only appends.
    """
    found = []
    thought = False
    for index, message in enumerate(messages):
        if message.role == "assistant" and message.reasoning:
            thought = True
        elif message.role == "user" and thought:
            found.append(index)
            thought = False
    return found


def fork(before: Rendered, after: Rendered) -> Fork | None:
    """Where `after` leaves `before`; None if it repeats all of it and goes on, so that every cached id can be used.

    To compare with what a model saw, `before` is the prompt with the ids that it gave.
    """
    pairs = zip(before.ids, after.ids, strict=False)
    position = next((i for i, (old, new) in enumerate(pairs) if old != new), min(len(before.ids), len(after.ids)))
    if position == len(before.ids):
        return None
    if position == len(after.ids):
        return Fork(position, None, "the later one ends here")
    message = next((i for i, (start, end) in enumerate(after.spans) if start <= position < end), None)
    if message is None:
        return Fork(position, None, "the tools differ, or the generation prompt stands here")
    if message in after.cleared - before.cleared:
        return Fork(position, message, "its thinking is cleared: a user's message follows (see clear_thinking)")
    if message >= len(before.spans):
        return Fork(position, message, "its text is not encoded as it was sampled (see Message.ids)")
    return Fork(position, message, "it was edited")


class _Writer:
    """Collects ids and their flags. Text between two special tokens is encoded as a whole, as a tokenizer would."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.ids: list[int] = []
        self.loss: list[bool] = []
        self._text: list[str] = []
        self._learned = False

    def special(self, id: int, learned: bool = False) -> None:
        self.flush()
        self.ids.append(id)
        self.loss.append(learned)

    def text(self, text: str, learned: bool = False) -> None:
        self._text.append(text)
        self._learned = learned

    def flush(self) -> None:
        new = self.tokenizer.encode("".join(self._text))
        self.ids += new
        self.loss += [self._learned] * len(new)
        self._text = []


def _write_tools(writer: _Writer, tools: Iterable[Tool]) -> None:
    tokenizer = writer.tokenizer
    writer.special(tokenizer.system_id)
    writer.text(_TOOLS_HEAD)
    for tool in tools:
        writer.text(json.dumps(tool.spec, ensure_ascii=False) + "\n")
    writer.text(_TOOLS_TAIL)
    # The example call is written with the tokens of a real one.
    writer.special(tokenizer.tool_call_id)
    writer.text("{function-name}")
    for n in (1, 2):
        _write_argument(writer, f"{{arg-key-{n}}}", f"{{arg-value-{n}}}", learned=False)
    writer.text("...")
    writer.special(tokenizer.end_tool_call_id)


def _write_assistant(writer: _Writer, message: Message, keep: bool, learned: bool) -> None:
    """A turn from its text. The prompt gives its first id, whatever that is; the model gives the rest."""
    tokenizer = writer.tokenizer
    if message.reasoning and keep:
        thought = learned and "reasoning" not in message.unlearned
        writer.special(tokenizer.think_id)
        writer.text(message.reasoning.strip(), thought)
        writer.special(tokenizer.end_think_id, thought)
    else:
        writer.special(tokenizer.end_think_id)
    writer.text(message.content.strip(), learned and "content" not in message.unlearned)
    learned = learned and "tool_calls" not in message.unlearned
    for call in message.tool_calls:
        writer.special(tokenizer.tool_call_id, learned)
        writer.text(call.name, learned)
        for key, value in call.arguments.items():
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            _write_argument(writer, key, text, learned)
        writer.special(tokenizer.end_tool_call_id, learned)


def _write_argument(writer: _Writer, key: str, value: str, learned: bool) -> None:
    tokenizer = writer.tokenizer
    writer.special(tokenizer.arg_key_id, learned)
    writer.text(key, learned)
    writer.special(tokenizer.end_arg_key_id, learned)
    writer.special(tokenizer.arg_value_id, learned)
    writer.text(value, learned)
    writer.special(tokenizer.end_arg_value_id, learned)


def _write_sampled(writer: _Writer, ids: Sequence[int], learned: bool) -> None:
    writer.special(ids[0])
    for id in ids[1:]:
        writer.special(id, learned)


def _tag(tokenizer: Tokenizer, message: Message) -> int:
    """The tag that opens a message."""
    return {
        "system": tokenizer.system_id,
        "user": tokenizer.user_id,
        "assistant": tokenizer.assistant_id,
        "tool": tokenizer.observation_id,
    }[message.role]


def _stop_of(tokenizer: Tokenizer, message: Message) -> int:
    """The tag that a model ends this turn with: a result is awaited after calls, else a user."""
    return tokenizer.observation_id if message.tool_calls else tokenizer.user_id
