"""OpenAI's responses: the official client, the order of its events, and conversations by id."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from fastapi.testclient import TestClient

from glm5.serve.http import responses
from glm5.serve.http.app import create_app
from glm5.serve.request import Constraint
from support.scripted import Scripted, chat_tokenizer
from support.serving import call, events, served

TOOL = {"type": "function", "name": "dim", "parameters": {"type": "object", "properties": {"lvl": {"type": "integer"}}}}
RAW = "let me see</think>the answer" + call("dim", lvl="3") + "<|observation|>"


def client_of(raw: str = RAW, **options: Any) -> tuple[TestClient, Scripted]:
    backend = Scripted(script=lambda request, index: raw, **options)
    return TestClient(create_app(backend)), backend


def prompt_of(backend: Scripted) -> str:
    return chat_tokenizer().decode(backend.seen[-1].input_ids)


@pytest.fixture(scope="module")
def official() -> Iterator[openai.OpenAI]:
    with served(Scripted(script=lambda request, index: RAW, sizes=(3, 1), cached=10)) as address:
        yield openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)


def test_official_client_whole(official: openai.OpenAI) -> None:
    told = official.responses.create(model="glm5-test", input="hi", tools=[TOOL])
    assert [item.type for item in told.output] == ["reasoning", "message", "function_call"]
    assert told.output[0].content[0].text == "let me see"
    assert told.output_text == "the answer"
    assert json.loads(told.output[2].arguments) == {"lvl": 3}
    assert told.status == "completed"
    assert told.usage.input_tokens_details.cached_tokens == 10
    assert told.usage.output_tokens_details.reasoning_tokens == len(chat_tokenizer().encode("let me see"))
    assert official.responses.retrieve(told.id).output_text == "the answer"
    official.responses.delete(told.id)
    with pytest.raises(openai.NotFoundError):
        official.responses.retrieve(told.id)


def test_official_client_streams_the_same(official: openai.OpenAI) -> None:
    with official.responses.stream(model="glm5-test", input="hi", tools=[TOOL]) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    assert final.output_text == "the answer"
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
    assert json.loads(final.output[2].arguments) == {"lvl": 3}


@pytest.mark.parametrize("sizes", [(1,), (2,), (1000,)])
def test_events_are_numbered_and_add_up(sizes: tuple[int, ...]) -> None:
    client, _ = client_of(sizes=sizes)
    text = client.post("/v1/responses", json={"input": "hi", "tools": [TOOL], "stream": True}).text
    told = events(text)
    assert [one["sequence_number"] for one in told] == list(range(len(told)))
    assert [line[7:] for line in text.split("\n") if line.startswith("event: ")] == [one["type"] for one in told]
    sums: dict[str, str] = {}
    for one in told:
        if one["type"].endswith(".delta"):
            sums[one["item_id"]] = sums.get(one["item_id"], "") + one["delta"]
        if one["type"] == "response.output_item.done":
            item = one["item"]
            whole = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
            assert sums[item["id"]] == whole
            assert item["status"] == "completed"
    items = [one["type"].split(".")[-1] for one in told if one["type"].startswith("response.output_item.")]
    assert items == ["added", "done"] * 3
    assert [item["type"] for item in told[-1]["response"]["output"]] == ["reasoning", "message", "function_call"]


def test_conversation_by_previous_id_and_by_items_is_one() -> None:
    client, backend = client_of()
    first = client.post("/v1/responses", json={"input": "hi", "tools": [TOOL]}).json()
    result = {"type": "function_call_output", "call_id": first["output"][2]["call_id"], "output": "12"}
    more = {"tools": [TOOL], "instructions": "Be brief."}
    client.post("/v1/responses", json={"previous_response_id": first["id"], "input": [result], **more})
    by_id = prompt_of(backend)
    items = [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}, *first["output"], result]
    client.post("/v1/responses", json={"input": items, "store": False, **more})
    assert prompt_of(backend) == by_id
    assert (
        "<|system|>Be brief.<|user|>hi<|assistant|><think>let me see</think>the answer" + call("dim", lvl="3") in by_id
    )
    assert "<tool_response>12</tool_response>" in by_id
    unkept = client.post("/v1/responses", json={"input": "hi", "store": False}).json()
    assert client.get(f"/v1/responses/{unkept['id']}").status_code == 404


@pytest.mark.parametrize(("name", "limit"), [("KEPT", 2), ("KEPT_BYTES", 4000)])
def test_only_the_last_are_kept(name: str, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(responses, name, limit)
    client, _ = client_of()
    ids = [client.post("/v1/responses", json={"input": "hi"}).json()["id"] for _ in range(8)]
    found = [client.get(f"/v1/responses/{id}").status_code for id in ids]
    assert found == sorted(found, reverse=True)  # 404 for the first ones
    assert 1 <= found.count(200) < 8
    assert client.delete(f"/v1/responses/{ids[-1]}").json()["deleted"] is True
    again = client.post("/v1/responses", json={"input": "hi"}).json()["id"]
    assert client.get(f"/v1/responses/{again}").status_code == 200


def test_what_is_no_unicode_comes_back_as_it_came() -> None:
    client, _ = client_of()
    body = b'{"input": "hi", "metadata": {"a": "\\ud800"}}'
    told = client.post("/v1/responses", content=body, headers={"Content-Type": "application/json"})
    assert told.json()["metadata"] == {"a": "\ud800"}


def test_answer_that_is_cut_is_incomplete() -> None:
    client, _ = client_of()
    told = client.post("/v1/responses", json={"input": "hi", "max_output_tokens": 3}).json()
    assert told["status"] == "incomplete"
    assert told["incomplete_details"] == {"reason": "max_output_tokens"}
    assert told["output"][-1]["status"] == "incomplete"
    text = client.post("/v1/responses", json={"input": "hi", "max_output_tokens": 3, "stream": True}).text
    assert events(text)[-1]["type"] == "response.incomplete"


def test_form_effort_and_choice_reach_the_engine() -> None:
    client, backend = client_of()
    form = {"type": "json_schema", "name": "x", "schema": {"type": "object"}, "strict": True}
    client.post("/v1/responses", json={"input": "hi", "text": {"format": form}, "reasoning": {"effort": "none"}})
    assert backend.seen[-1].params.constraint == Constraint("json_schema", '{"type": "object"}')
    assert prompt_of(backend).endswith("</think>")
    choice = {"type": "function", "name": "dim"}
    client.post("/v1/responses", json={"input": "hi", "tools": [TOOL], "tool_choice": choice})
    assert backend.seen[-1].params.constraint.max_calls == 1  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({}, 400),
        ({"input": []}, 400),
        ({"input": [{"type": "computer_call"}]}, 400),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, 400),
        ({"input": [{"role": "user", "content": 5}]}, 400),
        ({"input": [{"role": "owl", "content": "x"}]}, 400),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{"}]}, 400),
        ({"input": "x", "tools": [{"type": "web_search"}]}, 400),
        ({"input": "x", "background": True}, 400),
        ({"input": "x", "n": 2}, 400),
        ({"input": "x", "include": ["message.output_text.logprobs"]}, 400),
        ({"input": "x", "previous_response_id": "resp_0"}, 404),
        ({"input": "x", "model": "other"}, 404),
    ],
)
def test_wrong_requests(body: dict[str, Any], status: int) -> None:
    client, backend = client_of()
    answer = client.post("/v1/responses", json=body)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["message"]
    assert status == 404 or re.match(r"\w+", error["param"])[0] in ({"input"} | set(body))  # type: ignore[index]
    assert not backend.alive


CALL = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": [{"role": "user", "content": "x"}, CALL | {"arguments": "{"}]}, "input[1].arguments"),
        ({"input": [CALL, CALL | {"name": ""}]}, "input[1].name"),
        ({"instructions": "x", "input": [{"role": "user", "content": 5}]}, "input[0].content"),
        ({"instructions": "x", "input": [CALL, CALL, {"role": "robot", "content": "x"}]}, "input[2].role"),
        ({"input": [CALL, {"type": "function_call_output", "call_id": "1", "output": 5}]}, "input[1].output"),
        ({"input": [{"type": "function_call_output", "call_id": 1, "output": "x"}]}, "input[0].call_id"),
        ({"input": [CALL | {"call_id": 5}]}, "input[0].call_id"),
        ({"input": [{"type": "reasoning", "content": 5}]}, "input[0].content"),
        ({"input": "x", "tools": [{"type": "function", "name": " f"}]}, "tools[0].name"),
        ({"input": "x", "tools": [{"type": "function", "name": "f", "parameters": 3}]}, "tools[0].parameters"),
    ],
)
def test_a_fault_is_named_as_the_item_has_it(body: dict[str, Any], param: str) -> None:
    client, _ = client_of()
    answer = client.post("/v1/responses", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    kept = client.post("/v1/responses", json={"input": "x"}).json()["id"]  # whose items are none of the client's now
    answer = client.post("/v1/responses", json={**body, "previous_response_id": kept})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_failure_in_a_stream() -> None:
    client, backend = client_of(fail_with=RuntimeError("boom"))
    told = events(client.post("/v1/responses", json={"input": "hi", "stream": True}).text)
    assert told[-1]["type"] == "response.failed"
    assert told[-1]["response"]["error"]["code"] == "server_error"
    assert not backend.alive
