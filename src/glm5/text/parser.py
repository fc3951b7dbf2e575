"""Ids that a model gives, to thinking, text and tool calls: one grammar over ids, the same streamed and whole.

Every marker of GLM is one token, so the grammar never looks for markers in text, and no split of the ids can fall
inside one. An answer is thinking (if the prompt left it open) up to `</think>`, then text, then calls:
`<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value>…</tool_call>`. What is not streamed is the stream,
folded (`parse`). Policies, where a model or a client does otherwise:

- A stop id or any role tag ends the turn. What follows is ignored.
- A call inside thinking ends the thinking. Without tools no call is looked for: its tags are text.
- A name that no tool has is passed on, its values typed by how they look: whoever runs calls can tell the model.
- Strings are passed on as they arrive, to the letter; other values when complete, as the JSON that the tool declares.
- Inside a key or a value only its closing tag counts; other tags are text of it.
- A call that is cut is not complete: its JSON stays open. A call whose `</tool_call>` is missing before a stop id or
  the next call is complete, with its fault named; so is one with text between its arguments, which is left out.
- A tag without a name in it is text. Blank text beside calls (up to 64 characters) is left out, as rendering strips it.
- Thinking that the prompt opened and that ends with the turn, without `</think>`, is the answer of a model that skipped
  thinking. A stream has passed it on as thinking by then, so it comes once more, as content. Cut by `length`, it stays
  thinking.

Read next: `arguments`, which types a value.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Sequence
from enum import Enum

from glm5.text.arguments import JSON_TYPES, STRING, argument_json, argument_types, as_string
from glm5.text.events import CallArguments, CallEnd, CallStart, Content, Event, Parsed, Reasoning, fold
from glm5.text.messages import Tool
from glm5.text.stream import StreamDecoder
from glm5.text.tokenizer import Tokenizer

LONGEST_BLANK = 64  # characters of blank text that are held back, in case a call follows


def parse(
    tokenizer: Tokenizer,
    ids: Iterable[int],
    tools: Sequence[Tool] = (),
    *,
    prompt_ids: Sequence[int] = (),
    parallel_tool_calls: bool = True,
    reason: str = "stop",
) -> Parsed:
    """A whole answer at once: what `Parser` gives, folded. See there."""
    parser = Parser(tokenizer, tools, prompt_ids=prompt_ids, parallel_tool_calls=parallel_tool_calls)
    return fold([*parser.push(ids), *parser.finish(reason)])


class _State(Enum):
    """What text belongs to: thinking, the answer, a call's name, nothing (between arguments), a key, a value."""

    THINK, TEXT, NAME, BETWEEN, KEY, VALUE = range(6)


class Parser:
    """Parses the ids of one answer as they come. Each answer needs a parser of its own.

    Args:
        tools: those of the request; none means that nothing is a call.
        prompt_ids: the ids before the answer. Whether it begins with thinking is read off them, never off an option.
        parallel_tool_calls: False ends the answer after its first call.
        new_id: gives the id of each call.

    After an answer `reasoning_tokens` is the count of ids that were thinking, its tags apart. Once `done`, more ids
    change nothing, and whoever generates may stop; `taken` is how many ids came until then.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        tools: Sequence[Tool] = (),
        *,
        prompt_ids: Sequence[int] = (),
        parallel_tool_calls: bool = True,
        new_id: Callable[[], str] = lambda: f"call_{uuid.uuid4().hex}",
    ) -> None:
        t = tokenizer
        self._ends = {*t.stop_ids, t.system_id, t.assistant_id}
        # What each state does at which id. Any other id is text there.
        self._marks: dict[_State, dict[int, Callable[[], None]]] = {
            _State.THINK: {t.think_id: lambda: None, t.end_think_id: self._end_thinking},
            _State.TEXT: {t.think_id: self._think_again, t.end_think_id: lambda: None},
            _State.NAME: {
                t.arg_key_id: self._begin_key,
                t.tool_call_id: self._begin_call,
                t.end_tool_call_id: self._end_call,
            },
            _State.BETWEEN: {
                t.arg_key_id: self._begin_key,
                t.arg_value_id: self._begin_value,
                t.tool_call_id: self._begin_call,
                t.end_tool_call_id: self._end_call,
            },
            _State.KEY: {t.end_arg_key_id: self._end_key},
            _State.VALUE: {t.end_arg_value_id: self._end_value},
        }
        if tools:
            self._marks[_State.THINK][t.tool_call_id] = self._begin_call
            self._marks[_State.TEXT][t.tool_call_id] = self._begin_call
        self._tokenizer, self._decoder = t, StreamDecoder(t, skip_control=True)
        self._tools = {tool.name: tool for tool in tools}
        self._parallel, self._new_id = parallel_tool_calls, new_id

        self.done = False
        self.taken = 0
        self.reasoning_tokens = 0
        self._events: list[Event] = []
        self._held = ""  # blank text that is kept back
        self._calls = 0  # begun so far
        # The call that is open.
        self._name = self._key = self._raw = self._fault = ""
        self._has_key = self._any_argument = False
        self._types, self._streams = JSON_TYPES, False

        openers = {*self._ends, t.think_id, t.end_think_id}
        last = next((id for id in reversed(prompt_ids) if id in openers), None)
        # Where the prompt opened thinking, whether it is still open: the text so far, to give again as an answer.
        self._opened: list[str] | None = [] if last == t.think_id else None
        self._state = _State.THINK if last == t.think_id else _State.TEXT

    def push(self, ids: Iterable[int]) -> list[Event]:
        """What more ids make certain.

        Raises:
            DataError: an id has no token.
        """
        run: list[int] = []
        marks = self._marks[self._state]
        for id in ids:
            if self.done:
                break
            self.taken += 1
            if id not in self._ends and id not in marks:
                run.append(id)
                continue
            self._text(run, last=True)
            run = []
            if id in self._ends:
                self._end_turn()
            else:
                self._marks[self._state][id]()
            marks = self._marks[self._state]
        if not self.done:
            self._text(run)
        return self._taken()

    def finish(self, reason: str = "stop") -> list[Event]:
        """The end of the answer: stop, or whatever cut it (length, abort, error)."""
        if not self.done:
            self._text([], last=True)
            self._end_turn(cut=reason != "stop")
        return self._taken()

    def _taken(self) -> list[Event]:
        taken, self._events = self._events, []
        return taken

    # ------------------------------------------------------------------------------------------ text of each state
    def _text(self, ids: list[int], last: bool = False) -> None:
        """Text of the present state; `last` says that nothing can complete a character any more."""
        text = self._decoder.push(ids) + (self._decoder.finish() if last else "")
        if self._state is _State.THINK:
            self.reasoning_tokens += len(ids)
        if not text:
            return
        if self._state in (_State.THINK, _State.TEXT):
            self._say(text)
        elif self._state is _State.NAME:
            self._name += text
        elif self._state is _State.KEY:
            self._key += text
        elif self._state is _State.VALUE:
            self._raw += text
            self._stream_value()
        elif text.strip():
            self._fault = "text between its arguments"

    def _say(self, text: str = "", last: bool = False) -> None:
        """Pass on thinking, or text but for blank text at its end, which may turn out to stand beside a call."""
        if self._state is _State.THINK:
            if text:
                self._events.append(Reasoning(text))
            if self._opened is not None:
                self._opened.append(text)
            return
        text = self._held + text
        kept = 0 if last else _blank_end(text)
        text, self._held = text[: len(text) - kept], text[len(text) - kept :]
        if text:
            self._events.append(Content(text))

    # ------------------------------------------------------------------------------------------ marks
    def _end_thinking(self) -> None:
        self._opened = None
        self._state = _State.TEXT

    def _think_again(self) -> None:
        self._say(last=True)
        self._state = _State.THINK

    def _begin_call(self) -> None:
        if self._state is _State.THINK:
            self._end_thinking()
        elif self._state is not _State.TEXT:  # the call before has no end
            if self._state is _State.NAME and not self._name.strip():
                self._not_a_call("")
            else:
                self._fault = "no </tool_call>"
                self._end_call()
                if self.done:
                    return
        self._held = ""
        self._state = _State.NAME
        self._name = self._key = self._raw = self._fault = ""
        self._has_key = self._any_argument = False

    def _not_a_call(self, tag: str) -> None:
        """A call without a name was none: its tags are text."""
        self._state = _State.TEXT
        self._say(f"<tool_call>{self._name}{tag}")

    def _start(self) -> None:
        """The name is complete."""
        self._name = self._name.strip()
        self._events.append(CallStart(self._calls, self._new_id(), self._name))
        self._calls += 1

    def _begin_key(self) -> None:
        if self._state is _State.NAME:
            if not self._name.strip():
                self._not_a_call("<arg_key>")
                return
            self._start()
        elif self._has_key:
            self._fault = "a key without a value"
        self._key, self._has_key = "", True
        self._state = _State.KEY

    def _end_key(self) -> None:
        self._state = _State.BETWEEN

    def _begin_value(self) -> None:
        if not self._has_key:
            self._fault = "a value without a key"
            return
        self._types = argument_types(self._tools.get(self._name), self._key)
        self._raw, self._streams = "", False
        self._state = _State.VALUE

    def _stream_value(self) -> None:
        """Pass on a string as it arrives: one that may also be null, once it cannot be that."""
        if not self._streams:
            if self._types - {"null"} != STRING or ("null" in self._types and "null".startswith(self._raw)):
                return
            self._streams = True
            self._argument('"')
        if self._raw:
            self._events.append(CallArguments(self._calls - 1, as_string(self._raw)[1:-1]))
            self._raw = ""

    def _end_value(self) -> None:
        if self._streams:
            self._events.append(CallArguments(self._calls - 1, '"'))
        else:
            self._argument(argument_json(self._raw, self._types))
        self._has_key = False
        self._state = _State.BETWEEN

    def _argument(self, value: str) -> None:
        opening = ", " if self._any_argument else "{"
        self._any_argument = True
        self._events.append(CallArguments(self._calls - 1, f"{opening}{as_string(self._key)}: {value}"))

    def _end_call(self) -> None:
        if self._state is _State.NAME:
            if not self._name.strip():
                self._not_a_call("</tool_call>")
                return
            self._start()
        if self._has_key:
            self._fault = "a key without a value"
        index = self._calls - 1
        self._events.append(CallArguments(index, "}" if self._any_argument else "{}"))
        self._events.append(CallEnd(index, True, self._fault))
        self._state = _State.TEXT
        self.done = not self._parallel

    def _end_turn(self, cut: bool = False) -> None:
        """A stop id came, or the answer was cut."""
        if self._state in (_State.NAME, _State.BETWEEN) and not cut:
            if self._state is _State.NAME and not self._name.strip():
                self._not_a_call("")
            else:
                self._fault = "no </tool_call>"
                self._end_call()
        if self._state is _State.TEXT:
            if not self._calls:
                self._say(last=True)
        elif self._state is _State.THINK:
            answer = "".join(self._opened or ())
            if answer.strip() and not cut:
                self._events.append(Content(answer, repeated=True))
                self.reasoning_tokens = 0
        elif self._state is not _State.NAME:  # a name may be cut: nothing of that call was passed on
            self._events.append(CallEnd(self._calls - 1, False, "the answer ended inside it"))
        self.done = True


def _blank_end(text: str) -> int:
    """How many characters of blank text to keep back from the end of a text."""
    tail = text[-LONGEST_BLANK:]
    return len(tail) - len(tail.rstrip())
