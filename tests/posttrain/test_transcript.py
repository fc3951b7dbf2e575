"""A trajectory read as messages, and rendered from them: the same ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from glm5.posttrain.record import Record
from glm5.posttrain.transcript import transcript
from glm5.text.chat import render
from glm5.text.messages import messages_from_openai, messages_to_openai
from support.conversations import PLAIN, conversations, function, tokenizer, tools

T = tokenizer()
PING = function("ping", n={"type": "integer"})
CALL = {"id": "", "type": "function", "function": {"name": "ping", "arguments": '{"n": 3}'}}
TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "weather?"},
    {"role": "assistant", "content": "look", "reasoning_content": "hm", "tool_calls": [CALL, CALL]},
    {"role": "tool", "content": "sun"},
    {"role": "tool", "content": ""},
    {"role": "assistant", "content": "true 数据"},
    {"role": "user", "content": ""},
    {"role": "assistant", "content": "", "reasoning_content": "null"},
]


def record_of(ids: Sequence[int], drawn: Sequence[bool] | None = None) -> Record:
    marks = list(drawn or [False] * len(ids))
    return Record(ids, marks, [-1.0 * d for d in marks], [1 if d else -1 for d in marks])


def plain(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in m.items() if k != "tool_call_id"} for m in messages]


def test_a_conversation_with_tools() -> None:
    offered = tools(PING)
    stop = T.encode("<|user|>", allow_special=True)
    ids = [*render(T, messages_from_openai(TALK), offered, clear_thinking=False).ids, *stop]
    made = transcript(record_of(ids), T)
    assert made.tools == offered
    told = messages_to_openai(made.messages)
    for message in told:
        for call in message.get("tool_calls", []):
            call["id"] = ""
    assert plain(told) == plain(messages_to_openai(messages_from_openai(TALK)))
    assert list(render(T, made.messages, made.tools, clear_thinking=False).ids) == ids


def test_a_tag_in_the_middle_of_an_answer_is_part_of_it() -> None:
    prompt = render(T, messages_from_openai(TALK[:2]), add_generation_prompt=True).ids
    answer = T.encode("hm</think>a<|system|>b<|user|>", allow_special=True)
    ids = [*prompt, *answer]
    made = transcript(record_of(ids, [False] * len(prompt) + [True] * len(answer)), T)
    assert [message.role for message in made.messages] == ["system", "user", "assistant"]
    assert list(render(T, made.messages, made.tools).ids) == ids


@settings(max_examples=60, deadline=None)
@given(conversations(PLAIN), st.booleans())
def test_rendered_again_it_has_the_same_ids(talk: list[dict[str, Any]], offers: bool) -> None:
    offered = tools(PING) if offers else ()
    last = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    ids = render(T, messages_from_openai([*talk, *last]), offered, clear_thinking=False).ids
    made = transcript(record_of(ids), T)
    assert render(T, made.messages, made.tools, clear_thinking=False).ids == ids
