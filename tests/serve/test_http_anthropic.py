"""Anthropic's messages: the official client, its stream, and the turns that coding agents send."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from fastapi.testclient import TestClient

from glm5.serve.http.app import create_app
from support.scripted import Scripted, chat_tokenizer
from support.serving import HI, call, events, served

TOOL = {
    "name": "dim",
    "description": "d",
    "input_schema": {"type": "object", "properties": {"lvl": {"type": "integer"}, "path": {"type": "string"}}},
}
RAW = "let me see</think>the answer" + call("dim", lvl="3", path="a/b") + "<|observation|>"
THINK = {"type": "enabled", "budget_tokens": 2048}


def client_of(raw: str = RAW, **options: Any) -> tuple[TestClient, Scripted]:
    backend = Scripted(script=lambda request, index: raw, **options)
    return TestClient(create_app(backend)), backend


def prompt_of(backend: Scripted) -> str:
    return chat_tokenizer().decode(backend.seen[-1].input_ids)


@pytest.fixture(scope="module")
def official() -> Iterator[anthropic.Anthropic]:
    with served(Scripted(script=lambda request, index: RAW, sizes=(3, 1), cached=10)) as address:
        yield anthropic.Anthropic(base_url=address, api_key="none", max_retries=0)


def ask(**more: Any) -> dict[str, Any]:
    return {"model": "glm5-test", "max_tokens": 1000, "messages": HI, **more}


def test_official_client_whole(official: anthropic.Anthropic) -> None:
    told = official.messages.create(**ask(tools=[TOOL], thinking=THINK))
    assert [block.type for block in told.content] == ["thinking", "text", "tool_use"]
    assert told.content[0].thinking == "let me see"
    assert told.content[1].text == "the answer"
    assert (told.content[2].name, told.content[2].input) == ("dim", {"lvl": 3, "path": "a/b"})
    assert told.content[2].id.startswith("toolu_")
    assert told.stop_reason == "tool_use"
    assert told.usage.cache_read_input_tokens == 10
    count = official.messages.count_tokens(model="glm5-test", messages=HI, tools=[TOOL], thinking=THINK)
    assert told.usage.input_tokens + 10 == count.input_tokens


def test_official_client_streams_the_same(official: anthropic.Anthropic) -> None:
    whole = official.messages.create(**ask(tools=[TOOL], thinking=THINK))
    with official.messages.stream(**ask(tools=[TOOL], thinking=THINK)) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    assert [block.type for block in final.content] == ["thinking", "text", "tool_use"]
    for one, other in zip(final.content, whole.content, strict=True):
        left, right = one.to_dict(), other.to_dict()
        for ignored in ("id", "parsed_output"):
            left.pop(ignored, None)
            right.pop(ignored, None)
        assert left == right
    assert final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens


def test_official_client_sees_errors(official: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        official.messages.create(**ask(model="claude"))
    assert missing.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
    with pytest.raises(anthropic.BadRequestError) as wrong:
        official.messages.create(**ask(max_tokens=0))
    assert wrong.value.body["type"] == "error"  # type: ignore[index]
    assert "max_tokens" in wrong.value.body["error"]["message"]  # type: ignore[index]


@pytest.mark.parametrize("sizes", [(1,), (2,), (7,), (1000,)])
def test_stream_opens_one_block_at_a_time(sizes: tuple[int, ...]) -> None:
    raw = "hm</think>ok" + call("dim", lvl="1") + call("dim", lvl="2") + "<|observation|>"
    client, _ = client_of(raw, sizes=sizes)
    told = events(client.post("/v1/messages", json=ask(tools=[TOOL], thinking=THINK, stream=True)).text)
    open_: int | None = None
    blocks: list[tuple[str, str]] = []
    for one in told:
        if one["type"] == "content_block_start":
            assert open_ is None
            open_ = one["index"]
            assert open_ == len(blocks)
            blocks.append((one["content_block"]["type"], ""))
        elif one["type"] == "content_block_delta":
            assert one["index"] == open_
            kind, text = blocks[-1]
            delta = one["delta"]
            blocks[-1] = kind, text + str(delta.get("thinking") or delta.get("text") or delta.get("partial_json") or "")
        elif one["type"] == "content_block_stop":
            assert one["index"] == open_
            open_ = None
    assert open_ is None
    assert [kind for kind, _ in blocks] == ["thinking", "text", "tool_use", "tool_use"]
    assert [text for _, text in blocks[:2]] == ["hm", "ok"]
    assert [json.loads(text) for _, text in blocks[2:]] == [{"lvl": 1}, {"lvl": 2}]
    assert told[-2]["delta"]["stop_reason"] == "tool_use"


def test_thinking_only_if_asked() -> None:
    client, backend = client_of("the answer<|user|>")
    for thinking, open_ in ((None, False), ({"type": "disabled"}, False), ({"type": "adaptive"}, True), (THINK, True)):
        client.post("/v1/messages", json=ask(**({"thinking": thinking} if thinking else {})))
        assert prompt_of(backend).endswith("<think>") == open_
    assert backend.seen[-1].params.thinking_budget == 2048


def test_history_of_an_agent() -> None:
    client, backend = client_of("done<|user|>")
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "fix it", "cache_control": {"type": "ephemeral"}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "look first", "signature": ""},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "t1", "name": "dim", "input": {"path": "a"}},
                {"type": "tool_use", "id": "t2", "name": "dim", "input": {"lvl": 2}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "one"}]},
                {"type": "tool_result", "tool_use_id": "t2", "content": "two", "is_error": True},
            ],
        },
    ]
    system = [{"type": "text", "text": "Be brief."}, {"type": "text", "text": "Be kind."}]
    answer = client.post("/v1/messages", json=ask(messages=messages, system=system, tools=[TOOL], thinking=THINK))
    assert answer.status_code == 200, answer.text
    prompt = prompt_of(backend)
    assert "<|system|>Be brief.\nBe kind.<|user|>fix it<|assistant|><think>look first</think>I look." in prompt
    assert call("dim", path="a") + call("dim", lvl="2") in prompt
    assert prompt.endswith(
        "<|observation|><tool_response>one</tool_response><tool_response>two</tool_response><|assistant|><think>"
    )


def test_stop_sequences_limits_and_context() -> None:
    client, backend = client_of("the answer is ping<|user|>")
    told = client.post("/v1/messages", json=ask(stop_sequences=["is"])).json()
    assert (told["stop_reason"], told["stop_sequence"]) == ("stop_sequence", "is")
    assert told["content"] == [{"type": "text", "text": "the answer "}]
    told = client.post("/v1/messages", json=ask(max_tokens=2)).json()
    assert told["stop_reason"] == "max_tokens"
    backend.script = lambda request, index: "x" * 5000
    told = client.post("/v1/messages", json=ask(max_tokens=64000)).json()
    assert told["stop_reason"] == "model_context_window_exceeded"


@pytest.mark.parametrize(
    ("choice", "kind", "calls"),
    [
        ({"type": "any"}, "tools", None),
        ({"type": "any", "disable_parallel_tool_use": True}, "tools", 1),
        ({"type": "tool", "name": "dim"}, "tools", 1),
        ({"type": "auto"}, None, None),
    ],
)
def test_tool_choice(choice: dict[str, Any], kind: str | None, calls: int | None) -> None:
    client, backend = client_of()
    client.post("/v1/messages", json=ask(tools=[TOOL], tool_choice=choice))
    constraint = backend.seen[-1].params.constraint
    assert (constraint and constraint.kind) == kind
    assert (constraint and constraint.max_calls) == calls


def test_a_form_is_asked_for() -> None:
    client, backend = client_of("</think>{}<|user|>")
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    config = {"effort": "low", "format": {"type": "json_schema", "schema": schema}}
    told = client.post("/v1/messages", json=ask(output_config=config)).json()
    assert told["content"] == [{"type": "text", "text": "{}"}]
    constraint = backend.seen[-1].params.constraint
    assert constraint is not None
    assert (constraint.kind, json.loads(constraint.text), constraint.where) == (
        "json_schema",
        schema,
        "output_config.format.schema",
    )
    client.post("/v1/messages", json=ask(output_config={"effort": "high"}))
    assert backend.seen[-1].params.constraint is None


USE = {"type": "tool_use", "id": "1", "name": "f", "input": {}}


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}]}, "messages[0].content[0].name"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": 1}]}]}, "tool_use_id"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"name": ""}]}, "tools[0].name: "),
        ({"tools": [{"name": "f", "input_schema": 3}]}, "tools[0].input_schema: 3"),
        (
            {"messages": [{"role": "assistant", "content": [USE | {"name": " f"}]}, *HI]},
            "messages[0].content[0].name: ",
        ),
        ({"tool_choice": {"type": "tool"}, "tools": [TOOL]}, "tool_choice"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"system": [{"type": "text"}]}, "system[0].text"),
        ({"stop_sequences": [""]}, "stop"),
        ({"messages": [*HI, {"role": "assistant", "content": "It is ("}]}, "End with a user's message"),
        ({"output_config": {"format": {"type": "json_object"}}}, "output_config.format.type"),
        (
            {
                "output_config": {"format": {"type": "json_schema", "schema": {}}},
                "tools": [TOOL],
                "tool_choice": {"type": "any"},
            },
            "(output_config.format.schema, tool_choice)",
        ),
    ],
)
def test_wrong_requests_are_400_in_their_shape(body: dict[str, Any], word: str) -> None:
    client, backend = client_of()
    answer = client.post("/v1/messages", json=ask(**body))
    assert answer.status_code == 400, answer.text
    told = answer.json()
    assert (told["type"], told["error"]["type"]) == ("error", "invalid_request_error")
    assert word in told["error"]["message"]
    assert not backend.alive


def test_cut_call_is_not_taken_for_a_whole_one() -> None:
    client, _ = client_of("</think>" + call("dim", path="a/b" * 30))
    told = client.post("/v1/messages", json=ask(tools=[TOOL], thinking=THINK, max_tokens=20)).json()
    assert told["stop_reason"] == "max_tokens"
    assert told["content"][-1]["input"] == {}


def test_failure_in_a_stream_is_an_error_event() -> None:
    client, backend = client_of(fail_with=RuntimeError("boom"))
    text = client.post("/v1/messages", json=ask(stream=True)).text
    assert "event: error\n" in text
    assert events(text)[-1]["error"]["type"] == "api_error"
    assert not backend.alive
