"""Sessions under agents that do anything to their history: what was recorded never changes, and counts once."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm5.serve.gateway.packed import Packed, PackedAnswer
from glm5.serve.gateway.session import Session, in_order_of_calls
from glm5.serve.gateway.turn import Turn
from glm5.serve.request import Delta, Finish, Request, SamplingParams, TokenInfo
from glm5.text.chat import render
from glm5.text.messages import Message, Tool, ToolCall
from support.scripted import Scripted, chat_tokenizer
from support.serving import PING, call

T = chat_tokenizer()
PING_TOOL = Tool("ping", PING["function"]["parameters"], PING)
PIECES = ["hm", "</think>", "the answer", " ", "\n", call("ping", n="3"), "<tool_call>ping<arg_key>n", "ß", "value"]
ENDS = ["<|user|>", "<|observation|>", "<|endoftext|>", ""]


async def ask(session: Session, backend: Scripted, messages: list[Message], clear: bool) -> Turn:
    plan = session.plan(messages, (PING_TOOL,), clear_thinking=clear)
    request = Request(plan.prompt(), SamplingParams(logprobs=0))
    turn = session.begin(plan, request, name=None, digest=b"", grace_s=60.0)
    turn.run(await backend.generate(request))
    while not turn.over:
        await asyncio.sleep(0)
    return turn


def answer_of(turn: Turn) -> PackedAnswer:
    assert turn.answer is not None, "it is over"
    return turn.answer


def edited(rng: random.Random, history: list[Message]) -> list[Message]:
    """The history as an agent may send it: as it is, trimmed, without thinking, cut, changed."""
    out = list(history)
    for i, message in enumerate(out):
        if message.role != "assistant":
            continue
        match rng.randrange(12):
            case 0:
                out[i] = replace(message, content=message.content + " x")
            case 1:
                out[i] = replace(message, tool_calls=())
            case 2:
                out[i] = replace(message, reasoning="other")
            case 3 | 4 | 5:
                out[i] = replace(message, reasoning=None)
            case 6:
                out[i] = replace(message, content=f" {message.content}\n")
    if rng.randrange(8) == 0:
        del out[: rng.randrange(len(out))]
        out = out or [Message("user", "a summary")]
    return out


@given(st.integers(0, 2**32))
@settings(max_examples=40, deadline=None)
def test_agents_that_do_anything(seed: int) -> None:
    rng = random.Random(seed)  # noqa: S311

    def script(request: Request, index: int) -> list[int]:
        text = "".join(rng.choices(PIECES, k=rng.randrange(1, 5)))
        spelled = T.encode(text, allow_special=True) if rng.random() < 0.6 else [
            id for c in text for id in T.encode(c)
        ]  # fmt: skip
        return [*spelled, *T.encode(rng.choice(ENDS), allow_special=True)]

    async def go() -> None:
        backend, session = Scripted(script=script, sizes=(1, 4)), Session("s", T)
        histories: list[list[Message]] = [[Message("user", "hi")]]
        recorded: dict[Turn, list[int]] = {}
        for _ in range(8):
            history = edited(rng, rng.choice(histories))
            turn = await ask(session, backend, history, clear=rng.random() < 0.2)
            assert turn.complete
            prompt = list(backend.seen[-1].input_ids)
            before = turn.parent.ids() if turn.parent is not None else []
            assert prompt == [*before, *turn.given]
            assert turn.ids() == [*prompt, *turn.drawn]
            assert len(turn.drawn) == len(answer_of(turn).logprobs) == len(answer_of(turn).versions)
            recorded[turn] = turn.ids()
            told = answer_of(turn).parsed.message()
            results = [Message("tool", f"r{i}") for i, _ in enumerate(told.tool_calls)]
            histories.append([*history, told, *(results or [Message("user", rng.choice(["more", "other"]))])])
        assert all(turn.ids() == ids for turn, ids in recorded.items()), "nothing that was recorded changes"
        made = session.export()
        marked = [id for t in made["trajectories"] for id, mine in zip(t["ids"], t["drawn"], strict=True) if mine]
        assert len(marked) == sum(len(turn.drawn) for turn in session.turns), "each drawn id counts once"
        for trajectory in made["trajectories"]:
            last = session.turns[trajectory["turns"][-1]]
            assert trajectory["ids"] == recorded[last]
            lengths = {len(trajectory[name]) for name in ("ids", "drawn", "logprobs", "versions")}
            assert len(lengths) == 1
            figures = zip(trajectory["ids"], trajectory["logprobs"], trajectory["versions"], strict=True)
            assert all(p == -id / 1000 for id, p, version in figures if version)

    asyncio.run(go())


@given(st.integers(0, 2**32))
@settings(max_examples=25, deadline=None)
def test_faithful_agents_have_one_trajectory(seed: int) -> None:
    """Whoever sends back what it was told, trimmed or without thinking, goes on from exact ids to the end."""
    rng = random.Random(seed)  # noqa: S311

    def script(request: Request, index: int) -> list[int]:
        thought, text = rng.choice(["hm", "so ", ""]), rng.choice(["the answer", " value \n", "naïve"])
        ids = [id for part in (thought, "</think>", text) for id in pieces(part)]
        called = rng.choice(["", call("ping", n="3"), "<tool_call>ping<arg_key>n"])
        return [*ids, *T.encode(called + rng.choice(ENDS), allow_special=True)]

    def pieces(text: str) -> list[int]:
        if text in T.special:
            return T.encode(text, allow_special=True)
        return [id for c in text for id in T.encode(c)]

    def sent_back(message: Message) -> Message:
        """One message in any of the forms that are no edits; another one each time."""
        if message.role != "assistant" or rng.random() < 0.5:
            return message
        return replace(message, reasoning=None, content=message.content.strip() + "\n")

    async def go() -> None:
        backend, session = Scripted(script=script), Session("s", T)
        history = [Message("system", "be brief"), Message("user", "hi")]
        exact = list(history)
        for number in range(6):
            turn = await ask(session, backend, [sent_back(message) for message in history], clear=False)
            assert turn.origin == ("start" if number == 0 else "continued")
            whole = render(T, exact, (PING_TOOL,), clear_thinking=False, add_generation_prompt=True).ids
            assert list(backend.seen[-1].input_ids) == list(whole), "as a whole rendering with the sampled ids has it"
            told: Any = answer_of(turn).parsed.message()
            history = [*history, told, Message("user", f"q{number}")]
            exact = [*exact, replace(told, ids=(turn.given[-1], *turn.drawn)), history[-1]]
        (trajectory,) = session.export()["trajectories"]
        assert trajectory["turns"] == list(range(6))

    asyncio.run(go())


def test_figures_that_are_packed_are_what_they_were() -> None:
    plain = [TokenInfo(-0.1 * i, kept_logprob=-0.01 * i) for i in range(5)]
    full = [TokenInfo(-1.5, ((3, -1.5), (4, -2.0)), (3, 4), -0.25), TokenInfo(-2.5)]
    for infos in ([], plain, full, [*plain, *full]):
        packed = Packed(infos)
        assert list(packed) == infos
        assert [packed[i] for i in range(len(infos))] == infos
        assert packed[1:4] == infos[1:4]
        assert packed[-1:] == infos[-1:]
    with pytest.raises(IndexError):
        Packed(full)[2]


def test_an_answer_is_heard_again_in_one_piece_a_version() -> None:
    ids = T.encode("hm</think>the answer<|user|>", allow_special=True)
    told = [
        Delta("r", 0, (id,), (TokenInfo(-id / 1000),), drafted=3, accepted=place % 2, version=str(min(place, 2) // 2))
        for place, id in enumerate(ids)
    ]
    told[-1] = replace(told[-1], finish=Finish("stop", ids[-1]))

    class Engine:
        left = iter(told)

        async def __anext__(self) -> Delta:
            for delta in self.left:
                return delta
            raise StopAsyncIteration

        async def aclose(self) -> None: ...

    async def go() -> None:
        session = Session("s", T)
        plan = session.plan([Message("user", "hi")])
        request = Request(plan.prompt(), SamplingParams(logprobs=0))
        turn = session.begin(plan, request, name=None, digest=b"", grace_s=60.0)
        early = turn.listen("early")
        turn.run(Engine())  # type: ignore[arg-type]
        heard = [delta async for delta in early]
        assert heard == [replace(delta, rid="early") for delta in told]
        again = [delta async for delta in turn.listen("late")]
        assert [(delta.ids, delta.version) for delta in again] == [(tuple(ids[:2]), "0"), (tuple(ids[2:]), "1")]
        assert [one for delta in again for one in delta.info] == [one for delta in told for one in delta.info]
        assert [delta.finish for delta in again] == [None, told[-1].finish]
        assert sum(delta.accepted for delta in again) == sum(delta.accepted for delta in told)
        (trajectory,) = session.export()["trajectories"]
        assert trajectory["versions"][-len(ids) :] == ["0"] * 2 + ["1"] * (len(ids) - 2)
        assert trajectory["logprobs"][-len(ids) :] == [-id / 1000 for id in ids]

    asyncio.run(go())


def test_results_without_ids_or_of_other_calls_stay_where_they_are() -> None:
    calls = Message("assistant", tool_calls=(ToolCall("a", {}, "1"), ToolCall("b", {}, "2")))
    two, one = Message("tool", "second", tool_call_id="2"), Message("tool", "first", tool_call_id="1")
    other = Message("tool", "x", tool_call_id="9")
    assert in_order_of_calls([calls, two, one]) == [calls, one, two]
    assert in_order_of_calls([calls, two]) == [calls, two]
    assert in_order_of_calls([calls, other, two, one]) == [calls, other, two, one]
    assert in_order_of_calls([two, calls, two, Message("user"), one]) == [two, calls, two, Message("user"), one]
