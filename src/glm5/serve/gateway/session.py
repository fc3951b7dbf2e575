"""A session of an agent: the tree of its turns, and the rule by which a request finds the turn that it goes on from.

The rule. What a client sends back is compared with what it was told, message by message from the first:

1. Messages that the agent wrote (system, user, tool) must be the same to the letter. The ids of calls do not count, and
   results of parallel calls may come in any order: they are put into the order of the calls.
2. An assistant's message is one that was told if its content is the same but for blanks around it, and its calls have
   the same names and the same values, however their JSON is spelled. Thinking may be left out; if it is there, it must
   be the same but for blanks around it. A call that was cut may be left out, or come back without arguments.
3. As far as that goes, the recorded ids are what the model is given: thinking that was left out, blanks and spelling
   are repaired by that. Only messages behind it are encoded, once, and their ids stay.
4. Anything else is an edit. The request then goes on from the last turn before the edit, as a branch, and the old one
   stays as it was; if there is none, it begins a trajectory of its own. No recorded id ever changes.
5. `clear_thinking: true`, if a client asks for it, rewrites history when a user's message comes after thinking: a new
   trajectory. Unless told, thinking stays.

Ids that come as ids (`/generate`) go on from the longest recorded turn that they begin with. Source: the report,
section 4.1. Read next: `app`, which has one of these for each session.
"""

from __future__ import annotations

import hashlib
import json
import time
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from glm5.serve.gateway.turn import Turn
from glm5.serve.http.answers import Answer
from glm5.serve.http.conversation import Conversation, Reply
from glm5.serve.request import Request
from glm5.text.chat import render
from glm5.text.events import Parsed
from glm5.text.messages import Message, Tool
from glm5.text.parser import Parser
from glm5.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Plan:
    """Where a request goes on.

    Args:
        parent: the turn whose ids it begins with; given: the ids after those.
        origin: start (the session's first), continued, branched (its parent went on before, or was asked again), edited
            (history has an assistant's turn that was never told), restarted (nothing of the history is known), cleared
            (its thinking is left out).
        note: for a reader: which message.
        key: of the conversation up to here; None for bare ids. tools, parallel: to read the answer with.
    """

    parent: Turn | None
    given: tuple[int, ...]
    origin: str
    note: str = ""
    key: bytes | None = None
    tools: tuple[Tool, ...] = ()
    parallel: bool = True

    def prompt(self) -> list[int]:
        """The whole prompt."""
        return [*(self.parent.ids() if self.parent is not None else ()), *self.given]


class Session:
    """See the module. `sampling` holds fields of `SamplingParams` that count here, whatever an agent asks for."""

    def __init__(self, id: str, tokenizer: Tokenizer, sampling: dict[str, Any] | None = None) -> None:
        self.id, self.sampling, self.started = id, sampling or {}, time.time()
        self.turns: list[Turn] = []
        self._begun = 0
        self._first: set[bytes] = set()  # conversations that a trajectory began with
        self._tokenizer = tokenizer
        self._told: dict[bytes, tuple[Turn, bytes]] = {}  # by conversation: the turn, and the key to go on with
        self._ends: dict[tuple[int, bytes], Turn] = {}  # by number of ids and their digest
        self._named: dict[str, Turn] = {}
        self._keys: dict[Turn, bytes | None] = {}

    # -------------------------------------------------------------------------------------------------- where it goes
    def plan(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        *,
        enable_thinking: bool = True,
        clear_thinking: bool = False,
        parallel: bool = True,
    ) -> Plan:
        """Where a conversation goes on. Nothing is changed by asking."""
        messages = in_order_of_calls(messages)
        key = _digest(b"", [tool.spec for tool in tools])
        known: dict[int, Turn] = {}  # by the place of its message
        for place, message in enumerate(messages):
            key = _digest(key, _canonical(message))
            if key in self._told:
                known[place], key = self._told[key]
        last = max(known, default=-1)
        parent = known.get(last)
        tail = messages[last + 1 :]
        edited = next((i for i in range(last + 1, len(messages)) if messages[i].role == "assistant"), None)
        plan = Plan(parent, (), "start", key=key, tools=tuple(tools), parallel=parallel)
        asks = any(message.role == "user" for message in tail)
        if parent is not None and clear_thinking and asks and any(_thought(turn) for turn in parent.path()):
            whole = [replace(m, ids=_as_sampled(known[i])) if i in known else m for i, m in enumerate(messages)]
            ids = self._render(whole, tools, enable_thinking, True)
            note = "thinking before the last user's message is left out"
            return replace(plan, parent=None, given=tuple(ids), origin="cleared", note=note)
        if parent is None:
            ids = self._render(messages, tools, enable_thinking, clear_thinking)
            if not self.turns:
                return replace(plan, given=tuple(ids))
            if key in self._first:
                return replace(plan, given=tuple(ids), origin="branched", note="the same was asked before")
            note = "no turn of this session stands in it" if edited is None else _edited(edited)
            return replace(plan, given=tuple(ids), origin="restarted", note=note)
        # The last id stands for all before it: it is what the next tag may repeat.
        end = (parent.drawn or parent.given)[-1]
        opening = Message("assistant", ids=(end,))
        ids = self._render([opening, *tail], (), enable_thinking, clear_thinking)
        given = tuple(ids[len(self._tokenizer.prefix_ids) + 2 :])
        if edited is not None:
            return replace(plan, given=given, origin="edited", note=_edited(edited))
        origin, note = self._origin(parent)
        return replace(plan, given=given, origin=origin, note=note)

    def plan_ids(self, ids: Sequence[int]) -> Plan:
        """Where bare ids go on."""
        found: Turn | None = None
        digest, at = hashlib.blake2b(digest_size=16), 0
        for length in sorted({length for length, _ in self._ends}):
            if length >= len(ids):  # at least one id is new
                break
            digest.update(array("i", ids[at:length]).tobytes())
            at = length
            found = self._ends.get((length, digest.digest()), found)
        if found is None:
            return Plan(None, tuple(ids), "restarted" if self.turns else "start")
        return Plan(found, tuple(ids[found.prompt_tokens + len(found.drawn) :]), *self._origin(found))

    def _origin(self, parent: Turn) -> tuple[str, str]:
        if any(turn.parent is parent and turn.failure is None for turn in self.turns):
            return "branched", f"turn {parent.number} went on before"
        return "continued", ""

    def _render(self, messages: Sequence[Message], tools: Sequence[Tool], thinks: bool, clears: bool) -> Sequence[int]:
        made = render(
            self._tokenizer,
            messages,
            tools,
            enable_thinking=thinks,
            clear_thinking=clears,
            add_generation_prompt=True,
        )
        return made.ids

    # -------------------------------------------------------------------------------------------------- its turns
    def repeated(self, name: str | None, digest: bytes, retried: bool) -> Turn | None:
        """The turn that a request asks for again, running or complete; one that failed is made anew.

        Args:
            name: of the request, if its client gave one. digest: of what it sent.
            retried: its client says that it sent this before.

        Raises:
            ValueError: the name was given to another request.
        """
        turn = self._named.get(name) if name is not None else None
        if turn is None and name is None and retried:
            turn = next((turn for turn in reversed(self.turns) if turn.digest == digest), None)
        if turn is None:
            return None
        if turn.digest != digest:
            raise ValueError(f"request {name!r} was another one before")
        return None if turn.failure is not None else turn

    def begin(self, plan: Plan, request: Request, *, name: str | None, digest: bytes, grace_s: float) -> Turn:
        """A turn that begins now."""
        reply = Reply(
            Conversation(request, plan.tools, plan.parallel),
            Answer(request, 0, self._tokenizer),
            Parser(self._tokenizer, plan.tools, prompt_ids=plan.given, parallel_tool_calls=plan.parallel),
        )
        turn = Turn(
            self._begun, plan.parent, plan.given, request, reply,
            origin=plan.origin, note=plan.note, name=name, digest=digest, grace_s=grace_s, ended=self._end,
        )  # fmt: skip
        self._begun += 1
        if plan.parent is None and plan.key is not None:
            self._first.add(plan.key)
        self.turns.append(turn)
        self._keys[turn] = plan.key
        if name is not None:
            self._named[name] = turn
        return turn

    def _end(self, turn: Turn) -> None:
        """Let later requests find a turn that is complete."""
        key = self._keys.pop(turn)
        if turn.failure is not None or turn.answer is None:
            return
        ids = turn.ids()
        self._ends[len(ids), hashlib.blake2b(array("i", ids).tobytes(), digest_size=16).digest()] = turn
        if key is None:
            return
        told = list(_as_told(turn.answer.parsed))
        onwards = _digest(key, told[0])
        for one in told:
            self._told[_digest(key, one)] = (turn, onwards)

    def withdraw(self, turn: Turn) -> None:
        """Forget a turn that was refused before it began, since its client asked for what cannot be."""
        self.turns.remove(turn)
        if turn.name is not None and self._named[turn.name] is turn:
            del self._named[turn.name]

    def cancel(self) -> None:
        """End what runs."""
        for turn in self.turns:
            turn.cancel()

    # -------------------------------------------------------------------------------------------------- told
    def export(self) -> dict[str, Any]:
        """The session as an object of JSON: every turn, and the trajectories, one for each complete turn that none
        goes on from. An id that was drawn is marked in the first trajectory that holds it, and is context elsewhere."""
        complete = [turn for turn in self.turns if turn.complete and turn.drawn]
        parents = {turn.parent for turn in complete}
        marked: set[Turn] = set()
        made = []
        for leaf in (turn for turn in complete if turn not in parents):
            made.append(_trajectory(leaf.path(), marked))
            marked.update(leaf.path())
        return {
            "id": self.id,
            "started": self.started,
            "turns": [turn.to_json() for turn in self.turns],
            "trajectories": made,
        }


def _trajectory(path: Sequence[Turn], marked: set[Turn]) -> dict[str, Any]:
    """One entry an id: the ids, which were drawn here, log-probabilities of the distribution that was drawn from,
    versions ("" where nothing was drawn), kept sets (None: all ids)."""
    ids: list[int] = []
    drawn: list[bool] = []
    logprobs: list[float] = []
    versions: list[str] = []
    kept: list[list[int] | None] = []
    for turn in path:
        answer, before = turn.answer, len(turn.given)
        assert answer is not None, "it is complete"
        ids += [*turn.given, *answer.ids]
        drawn += [False] * before + [turn not in marked] * answer.size
        logprobs += [0.0] * before + answer.logprobs
        versions += [""] * before + answer.versions
        kept += [*[None] * before, *answer.kept]
    return {
        "ids": ids,
        "drawn": drawn,
        "logprobs": logprobs,
        "versions": versions,
        "kept": kept if any(k is not None for k in kept) else None,
        "turns": [turn.number for turn in path],
    }


# ---------------------------------------------------------------------------------------------------- comparing
def in_order_of_calls(messages: Sequence[Message]) -> list[Message]:
    """The messages, with results that follow several calls in the order of these; others stay where they are."""
    out: list[Message] = []
    at = 0
    while at < len(messages):
        out.append(messages[at])
        places = {call.id: i for i, call in enumerate(messages[at].tool_calls)}
        at += 1
        run = []
        while places and at < len(messages) and messages[at].role == "tool":
            run.append(messages[at])
            at += 1
        if all(message.tool_call_id in places for message in run):
            run.sort(key=lambda message: places[message.tool_call_id])
        out += run
    return out


def _canonical(message: Message) -> list[Any]:
    """What of a message counts when two are compared."""
    if message.role != "assistant":
        return [message.role, message.content]
    return _assistant(message.content, message.reasoning, ((call.name, call.arguments) for call in message.tool_calls))


def _assistant(content: str, reasoning: str | None, calls: Iterator[tuple[str, Any]]) -> list[Any]:
    return ["assistant", content.strip(), (reasoning or "").strip(), [[name, dict(given)] for name, given in calls]]


def _as_told(parsed: Parsed) -> Iterator[list[Any]]:
    """The forms in which an answer may come back, its own first."""
    every = [(call.name, json.loads(call.arguments) if call.complete else {}) for call in parsed.calls]
    whole = [made for made, call in zip(every, parsed.calls, strict=True) if call.complete]
    for reasoning in (parsed.reasoning, ""):
        for calls in (whole, every):
            yield _assistant(parsed.content, reasoning, iter(calls))


def _thought(turn: Turn) -> bool:
    return turn.answer is not None and bool(turn.answer.parsed.reasoning.strip())


def _as_sampled(turn: Turn) -> tuple[int, ...]:
    """`Message.ids` of a turn."""
    return (turn.given[-1], *turn.drawn)


def _edited(place: int) -> str:
    return f"messages[{place}]: an assistant's turn that this session did not tell, or told otherwise"


def _digest(before: bytes, value: Any) -> bytes:
    data = json.dumps(value, sort_keys=True, ensure_ascii=True).encode()
    return hashlib.blake2b(before + data, digest_size=16).digest()
