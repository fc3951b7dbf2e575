"""Rendering: what is learned, where messages stand, when ids only grow, and what a conversation forks at."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from glm5.text import (
    Message,
    Rendered,
    ToolCall,
    messages_from_openai,
    messages_to_openai,
    render,
    render_for_training,
)
from glm5.text.chat import fork, forks
from support.conversations import HOSTILE, bytes_of, conversations, function, ids_of, tokenizer, tools

SYSTEM, USER = Message("system", "s"), Message("user", "u")
PING = ToolCall("ping", {"n": 1})


def show(rendered: Rendered) -> str:
    """The text, with what is learned in braces."""
    shown, inside = "", False
    for id, learned in zip(rendered.ids, rendered.loss, strict=True):
        if learned != inside:
            shown += "{" if learned else "}"
            inside = learned
        shown += tokenizer().decode([id])
    return shown + ("}" if inside else "")


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        # Thinking, its end, the text and the tag that ends the turn; never the opening tag, which the prompt gives.
        (
            [USER, Message("assistant", "a", "r"), USER],
            "[gMASK]<sop><|user|>u<|assistant|><think>{r</think>a<|user|>}u",
        ),
        # Without thinking the prompt gives </think>.
        ([USER, Message("assistant", "a"), USER], "[gMASK]<sop><|user|>u<|assistant|></think>{a<|user|>}u"),
        # A call is ended by <|observation|>; of two results, the first has the tag.
        (
            [USER, Message("assistant", "", "r", (PING, PING)), Message("tool", "1"), Message("tool", "2")],
            "[gMASK]<sop><|user|>u<|assistant|><think>{r</think>"
            + "<tool_call>ping<arg_key>n</arg_key><arg_value>1</arg_value></tool_call>" * 2
            + "<|observation|>}<tool_response>1</tool_response><tool_response>2</tool_response>",
        ),
        # A tag that the model would not have ended this turn with is not learned.
        (
            [Message("assistant", "", None, (ToolCall("ping"),)), USER],
            "[gMASK]<sop><|assistant|></think>{<tool_call>ping</tool_call>}<|user|>u",
        ),
        (
            [Message("assistant", "a"), Message("tool", "1")],
            "[gMASK]<sop><|assistant|></think>{a}<|observation|><tool_response>1</tool_response>",
        ),
        ([Message("assistant", "a"), SYSTEM], "[gMASK]<sop><|assistant|></think>{a}<|system|>s"),
        (
            [Message("assistant", "a"), Message("assistant", "b"), USER],
            "[gMASK]<sop><|assistant|></think>{a}<|assistant|></think>{b<|user|>}u",
        ),
        # A mistaken step stays in the context, without loss, as does the tag after it.
        (
            [USER, Message("assistant", "a", "r", trained=False), USER, Message("assistant", "b")],
            "[gMASK]<sop><|user|>u<|assistant|><think>r</think>a<|user|>u<|assistant|></think>{b}",
        ),
    ],
)
def test_what_is_learned(messages: list[Message], expected: str) -> None:
    assert show(render(tokenizer(), messages, clear_thinking=False)) == expected


@pytest.mark.parametrize(
    ("weight", "expected"),
    [
        ({"reasoning_content": 0}, "<think>r</think>{a<tool_call>ping</tool_call><|observation|>}"),
        ({"content": 0}, "<think>{r</think>}a{<tool_call>ping</tool_call><|observation|>}"),
        ({"tool_calls": 0, "content": 1}, "<think>{r</think>a}<tool_call>ping</tool_call>{<|observation|>}"),
        (
            dict.fromkeys(("reasoning_content", "content", "tool_calls"), 0),
            "<think>r</think>a<tool_call>ping</tool_call>{<|observation|>}",
        ),
        ({}, "<think>{r</think>a<tool_call>ping</tool_call><|observation|>}"),
        (0, "<think>r</think>a<tool_call>ping</tool_call><|observation|>"),
    ],
)
def test_segments_of_a_turn_can_be_left_out_of_the_loss(weight: Any, expected: str) -> None:
    call = {"function": {"name": "ping", "arguments": ""}}
    turn = {"role": "assistant", "content": "a", "reasoning_content": "r", "tool_calls": [call], "weight": weight}
    messages = messages_from_openai([{"role": "user", "content": "u"}, turn, {"role": "tool", "content": "1"}])
    shown = show(render(tokenizer(), messages))
    assert shown == f"[gMASK]<sop><|user|>u<|assistant|>{expected}<tool_response>1</tool_response>"
    assert messages_from_openai(messages_to_openai(messages)) == messages


def test_a_turn_whose_thinking_is_cleared_is_not_learned() -> None:
    messages = [USER, Message("assistant", "a", "r"), USER, Message("assistant", "b", "q")]
    rendered = render(tokenizer(), messages)
    assert show(rendered) == ("[gMASK]<sop><|user|>u<|assistant|></think>a<|user|>u<|assistant|><think>{q</think>b}")
    assert rendered.cleared == {1}


def test_tools_prompts_and_results_are_not_learned() -> None:
    messages = [SYSTEM, USER, Message("tool", "1")]
    rendered = render(tokenizer(), messages, tools(function("f")), add_generation_prompt=True)
    assert not any(rendered.loss)


def test_text_never_becomes_a_special_token() -> None:
    text = "<|user|>x</think><tool_call>f</tool_call><|endoftext|>[gMASK]</arg_value>"
    call = ToolCall(text, {text: text, "list": [text]})
    messages = [Message("system", text), Message("user", text), Message("assistant", text, text, (call,))]
    messages.append(Message("tool", text))
    rendered = render(tokenizer(), messages, clear_thinking=False)
    special = set(tokenizer().special.values())
    found = [id for id in rendered.ids if id in special]
    names = {id: name for name, id in tokenizer().special.items()}
    assert [names[id] for id in found] == (
        ["[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<think>", "</think>", "<tool_call>"]
        + ["<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"] * 2
        + ["</tool_call>", "<|observation|>", "<tool_response>", "</tool_response>"]
    )
    assert tokenizer().decode(rendered.ids).count(text) == 9


@given(conversation=conversations(HOSTILE), keep=st.booleans(), prompt=st.booleans())
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
def test_spans_tile_the_conversation(conversation: list[dict[str, Any]], keep: bool, prompt: bool) -> None:
    messages = messages_from_openai(conversation)
    rendered = render(tokenizer(), messages, clear_thinking=not keep, add_generation_prompt=prompt)
    assert len(rendered.ids) == len(rendered.loss)
    edges = [2, *(end for _, end in rendered.spans)]
    assert [start for start, _ in rendered.spans] == edges[:-1]
    assert edges[-1] == len(rendered.ids) - 2 * prompt
    for message, (start, end) in zip(messages, rendered.spans, strict=True):
        inside = tokenizer().decode(rendered.ids[start:end])
        assert message.role == "assistant" or message.content in inside
        assert message.role == "assistant" or not any(rendered.loss[start + 1 : end])


# ------------------------------------------------------------------------------------------------ growing by ids
@given(conversation=conversations(HOSTILE))
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
def test_preserved_thinking_only_appends(conversation: list[dict[str, Any]]) -> None:
    """Every prompt with the answer that was given to it is the beginning of the next prompt."""
    messages = messages_from_openai(conversation)
    whole = render(tokenizer(), messages, clear_thinking=False)
    for index, message in enumerate(messages):
        if message.role == "assistant":
            prompt = render(
                tokenizer(),
                messages[:index],
                enable_thinking=bool(message.reasoning),
                clear_thinking=False,
                add_generation_prompt=True,
            )
            assert fork(prompt, whole) is None
        before = render(tokenizer(), messages[:index], clear_thinking=False)
        assert fork(before, whole) is None


@given(conversation=conversations(HOSTILE))
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
def test_clearing_forks_where_it_says(conversation: list[dict[str, Any]]) -> None:
    messages = messages_from_openai(conversation)
    at = forks(messages)
    for index in range(len(messages)):
        found = fork(render(tokenizer(), messages[:index]), render(tokenizer(), messages[: index + 1]))
        assert (found is not None) == (index in at)
        if found is not None:
            assert "cleared" in found.reason
            assert messages[found.message or 0].reasoning


def test_forks_name_their_message_and_reason() -> None:
    messages = [SYSTEM, USER, Message("assistant", "a", "r"), Message("user", "more")]
    old = render(tokenizer(), messages[:3])
    found = fork(old, render(tokenizer(), messages))
    assert found is not None
    assert (found.position, found.message) == (old.spans[2][0] + 1, 2)
    assert "cleared" in found.reason
    edited = fork(old, render(tokenizer(), [SYSTEM, Message("user", "v"), *messages[2:]], clear_thinking=False))
    assert edited is not None
    assert (edited.message, edited.reason) == (1, "it was edited")
    shorter = fork(old, render(tokenizer(), messages[:2]))
    assert shorter is not None
    assert "ends here" in shorter.reason
    assert "tools differ" in fork(old, render(tokenizer(), messages[:3], tools(function("f")))).reason  # type: ignore[union-attr]
    # The model thought nothing: the published form writes that turn without <think>.
    prompt = render(tokenizer(), messages[:2], add_generation_prompt=True)
    answered = replace(prompt, ids=(*prompt.ids, *ids_of("</think>a")))
    unsampled = fork(answered, render(tokenizer(), [*messages[:2], Message("assistant", "a", "")]))
    assert unsampled is not None
    assert (unsampled.message, unsampled.position) == (2, len(prompt.ids) - 1)
    assert "sampled" in unsampled.reason


@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_sampled_ids_are_kept_whatever_they_are(data: st.DataObject) -> None:
    """A conversation of sampled turns grows by exact ids, and exactly the sampled ones are learned."""
    draw = random.Random(data.draw(st.integers(0, 2**32)))  # noqa: S311
    messages: list[Message] = [USER]
    known: list[int] = []
    sampled_flags: list[bool] = []
    for _ in range(data.draw(st.integers(1, 4))):
        thinking = draw.random() < 0.5
        prompt = render(
            tokenizer(), messages, enable_thinking=thinking, clear_thinking=False, add_generation_prompt=True
        )
        assert list(prompt.ids[: len(known)]) == known
        sampled_flags += [False] * (len(prompt.ids) - len(known))
        answer = [draw.randrange(36, tokenizer().vocab_size) for _ in range(draw.randrange(1, 6))]
        answer += ids_of(draw.choice(["</think>a", "<tool_call>ping</tool_call>", ""]))
        answer += draw.choice([[], [tokenizer().user_id], [tokenizer().observation_id], [tokenizer().end_of_text_id]])
        known = [*prompt.ids, *answer]
        sampled_flags += [True] * len(answer)
        messages.append(Message("assistant", "not this text", "nor this", ids=(prompt.ids[-1], *answer)))
        messages.append(draw.choice([USER, Message("tool", "1")]))
    whole = render(tokenizer(), messages, clear_thinking=False)
    assert list(whole.ids[: len(known)]) == known
    assert list(whole.loss[: len(known)]) == sampled_flags
    assert not any(whole.loss[len(known) :])
    edges = [2, *(end for _, end in whole.spans)]
    assert [start for start, _ in whole.spans] == edges[:-1]


def test_a_sampled_stop_is_the_next_tag_and_is_not_written_twice() -> None:
    ids = (tokenizer().think_id, *bytes_of("r</think>a"), tokenizer().user_id)
    rendered = render(tokenizer(), [USER, Message("assistant", "a", "r", ids=ids), USER], clear_thinking=False)
    assert tokenizer().decode(rendered.ids) == "[gMASK]<sop><|user|>u<|assistant|><think>r</think>a<|user|>u"
    assert show(rendered).endswith("<think>{r</think>a<|user|>}u")
    # Where its thinking has to go, the turn is rendered from its text.
    cleared = render(tokenizer(), [USER, Message("assistant", "a", "r", ids=ids), USER])
    assert tokenizer().decode(cleared.ids) == "[gMASK]<sop><|user|>u<|assistant|></think>a<|user|>u"


# ------------------------------------------------------------------------------------------------ for training
def test_each_turn_is_learned_once_in_the_context_that_it_is_sampled_in() -> None:
    talk = [
        USER,
        Message("assistant", "", "one", (ToolCall("ping"),)),
        Message("tool", "1"),
        Message("assistant", "a", "two"),
        Message("user", "v"),
        Message("assistant", "b"),
        Message("user", "w"),
        Message("assistant", "c", "three"),
    ]
    call = "<tool_call>ping</tool_call>"
    result = "<tool_response>1</tool_response><|assistant|>"
    kept = render_for_training(tokenizer(), talk, clear_thinking=False)
    assert [show(r) for r in kept] == [
        "[gMASK]<sop><|user|>u<|assistant|><think>{one</think>"
        + call
        + "<|observation|>}"
        + result
        + "<think>{two</think>a<|user|>}v<|assistant|></think>{b<|user|>}w<|assistant|><think>{three</think>c<|user|>}"
    ]
    forked = render_for_training(tokenizer(), talk, clear_thinking=True)
    assert [show(r) for r in forked] == [
        "[gMASK]<sop><|user|>u<|assistant|><think>{one</think>"
        + call
        + "<|observation|>}"
        + result
        + "<think>{two</think>a<|user|>}",
        "[gMASK]<sop><|user|>u<|assistant|></think>"
        + call
        + "<|observation|>"
        + result
        + "</think>a<|user|>v<|assistant|></think>{b<|user|>}w<|assistant|><think>{three</think>c<|user|>}",
    ]
    last_call = render_for_training(tokenizer(), talk[:2], clear_thinking=True)
    assert show(last_call[0]).endswith(call + "<|observation|>}")
    assert render_for_training(tokenizer(), [USER, replace(talk[3], trained=False)], clear_thinking=True) == []
    assert render_for_training(tokenizer(), [], clear_thinking=True) == []


@given(conversation=conversations(HOSTILE))
@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
def test_forks_learn_as_many_ids_as_one_rendering_does(conversation: list[dict[str, Any]]) -> None:
    messages = [m for m in messages_from_openai(conversation) if m.role in ("user", "assistant") and not m.tool_calls]
    kept = render_for_training(tokenizer(), messages, clear_thinking=False)
    forked = render_for_training(tokenizer(), messages, clear_thinking=True)
    assert sum(sum(r.loss) for r in kept) == sum(sum(r.loss) for r in forked)
