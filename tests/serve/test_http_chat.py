"""Chat completions: the official client, every way in which an answer may be cut into pieces, and known faults."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from fastapi.testclient import TestClient
from hypothesis import given, settings
from hypothesis import strategies as st

from glm5.serve.http.app import create_app
from glm5.serve.request import Constraint
from support.scripted import Scripted, chat_tokenizer
from support.serving import HI, PING, call, events, served, tool

SPLITS = [(1,), (2,), (4,), (3, 1, 2), (100_000,)]


def client_of(script: Any = None, **options: Any) -> tuple[TestClient, Scripted]:
    if isinstance(script, str):
        text = script
        script = lambda request, index: text  # noqa: E731
    backend = Scripted(**({"script": script} if script else {}), **options)
    return TestClient(create_app(backend)), backend


def ask(client: TestClient, **body: Any) -> Any:
    answer = client.post("/v1/chat/completions", json={"messages": HI, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def streamed(client: TestClient, **body: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The choices that a stream adds up to, by index, and its last usage."""
    answer = client.post("/v1/chat/completions", json={"messages": HI, "stream": True, **body})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.text.endswith("data: [DONE]\n\n")
    found: dict[int, dict[str, Any]] = {}
    usage: dict[str, Any] = {}
    for chunk in events(answer.text):
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            one = found.setdefault(choice["index"], {"content": "", "reasoning": "", "calls": {}, "ids": [], "lp": []})
            assert "finish_reason" not in one, "nothing may follow a finish"
            delta = choice["delta"]
            one["content"] += delta.get("content") or ""
            one["reasoning"] += delta.get("reasoning_content") or ""
            for part in delta.get("tool_calls", []):
                if "id" in part:
                    assert part["index"] not in one["calls"], "the id comes once"
                    assert part["id"]
                    one["calls"][part["index"]] = {"id": part["id"], "name": part["function"]["name"], "arguments": ""}
                one["calls"][part["index"]]["arguments"] += part["function"]["arguments"]
            one["ids"] += choice.get("token_ids", [])
            one["lp"] += (choice["logprobs"] or {}).get("content", [])
            if choice["finish_reason"] is not None:
                one["finish_reason"] = choice["finish_reason"]
    return [found[i] for i in sorted(found)], usage


def whole(client: TestClient, **body: Any) -> dict[str, Any]:
    """The only choice of an answer, in the form that `streamed` has."""
    choice = ask(client, **body)["choices"][0]
    message = choice["message"]
    calls = {
        i: {"id": c["id"], "name": c["function"]["name"], "arguments": c["function"]["arguments"]}
        for i, c in enumerate(message.get("tool_calls", []))
    }
    return {
        "content": message["content"] or "",
        "reasoning": message["reasoning_content"] or "",
        "calls": calls,
        "finish_reason": choice["finish_reason"],
    }


def both(raw: str, tools: list[dict[str, Any]] | None = None, **body: Any) -> dict[str, Any]:
    """The answer that a raw text is, checked to be the same under every split, streamed or whole; ids are masked."""
    told = []
    client, backend = client_of(raw)
    for sizes in SPLITS:
        backend.sizes = sizes
        extra = {"tools": tools} if tools is not None else {}
        for one in (whole(client, **extra, **body), streamed(client, **extra, **body)[0][0]):
            ids = [found["id"] for found in one["calls"].values()]
            assert all(ids)
            assert len(set(ids)) == len(ids)
            told.append(
                (
                    one["content"],
                    one["reasoning"],
                    [(found["name"], found["arguments"]) for found in one["calls"].values()],
                    one["finish_reason"],
                )
            )
    assert all(other == told[0] for other in told)
    content, reasoning, calls, finish = told[0]
    return {"content": content, "reasoning": reasoning, "calls": calls, "finish_reason": finish}


def arguments(found: dict[str, Any]) -> list[Any]:
    return [json.loads(text) for _, text in found["calls"]]


# --------------------------------------------------------------------------------------------------- the client
@pytest.fixture(scope="module")
def official() -> Any:
    text = "let me see</think>the answer" + call("ping", n="3") + call("ping", n="4") + "<|observation|>"
    with served(Scripted(script=lambda request, index: text, sizes=(3, 2), cached=16)) as address:
        yield openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)


def test_official_client_whole(official: openai.OpenAI) -> None:
    assert [m.id for m in official.models.list()] == ["glm5-test"]
    assert official.models.retrieve("glm5-test").max_model_len == 4096
    told = official.chat.completions.create(model="glm5-test", messages=HI, tools=[tool("ping", n="integer")])
    message = told.choices[0].message
    assert message.content == "the answer"
    assert message.reasoning_content == "let me see"
    assert [(c.function.name, json.loads(c.function.arguments)) for c in message.tool_calls] == [
        ("ping", {"n": 3}),
        ("ping", {"n": 4}),
    ]
    assert told.choices[0].finish_reason == "tool_calls"
    assert told.usage.prompt_tokens_details.cached_tokens == 16
    ids = chat_tokenizer().encode("let me see")
    assert told.usage.completion_tokens_details.reasoning_tokens == len(ids)
    assert told.usage.total_tokens == told.usage.prompt_tokens + told.usage.completion_tokens


def test_official_client_streams(official: openai.OpenAI) -> None:
    with official.chat.completions.stream(
        model="glm5-test", messages=HI, tools=[tool("ping", n="integer")], stream_options={"include_usage": True}
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"content.delta", "tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= kinds
    assert final.choices[0].message.content == "the answer"
    assert [json.loads(c.function.arguments) for c in final.choices[0].message.tool_calls] == [{"n": 3}, {"n": 4}]
    assert final.usage.prompt_tokens_details.cached_tokens == 16


def test_official_client_sees_errors(official: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        official.chat.completions.create(model="gpt", messages=HI)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as wrong:
        official.chat.completions.create(model="glm5-test", messages=HI, temperature=-1)
    assert wrong.value.param == "temperature"
    endless = [{"role": "user", "content": "the answer " * 5000}]
    for asked in ({"messages": HI, "max_tokens": 5000}, {"messages": endless}):  # the answer has no room, or the prompt
        with pytest.raises(openai.BadRequestError) as long:
            official.chat.completions.create(model="glm5-test", **asked)
        assert long.value.code == "context_length_exceeded"


# ---------------------------------------------------------------------------------- known faults of other servers
def test_arguments_in_chunks_of_several_tokens() -> None:
    found = both("</think>" + call("dim", lvl="3") + "<|observation|>", [tool("dim", lvl="integer")])
    assert found["calls"][0][0] == "dim"
    assert arguments(found) == [{"lvl": 3}]
    assert found["finish_reason"] == "tool_calls"


def test_call_without_arguments() -> None:
    found = both("</think>" + call("ping") + "<|observation|>", [PING])
    assert found["calls"] == [("ping", "{}")]


@given(sizes=st.lists(st.integers(1, 7), min_size=1, max_size=6))
@settings(max_examples=25, deadline=None)
def test_argument_fragments_do_not_repeat(sizes: list[int]) -> None:
    raw = "</think>" + call("path", value="a/b/a/b.txt", dim="naïve 数据") + "<|observation|>"
    client, _ = client_of(raw, sizes=tuple(sizes))
    found, _ = streamed(client, tools=[tool("path", value="string", dim="string")])
    assert json.loads(found[0]["calls"][0]["arguments"]) == {"value": "a/b/a/b.txt", "dim": "naïve 数据"}


def test_arguments_arrive_before_the_call_closes() -> None:
    client, _ = client_of("</think>" + call("path", value="a/b " * 500), sizes=(1,))
    answer = client.post(
        "/v1/chat/completions", json={"messages": HI, "tools": [tool("path", value="string")], "stream": True}
    )
    with_arguments = [i for i, c in enumerate(events(answer.text)) if "tool_calls" in c["choices"][0]["delta"]]
    assert with_arguments[-1] - with_arguments[0] > 500


def test_object_as_last_argument() -> None:
    found = both("</think>" + call("path", value='{"a":1}') + "<|observation|>", [tool("path", value="object")])
    assert arguments(found) == [{"value": {"a": 1}}]


def test_unknown_name_leaves_its_siblings() -> None:
    raw = "</think>" + call("ping") + call("ghost") + call("ping") + "<|observation|>"
    assert both(raw, [PING])["calls"] == [("ping", "{}"), ("ghost", "{}"), ("ping", "{}")]


def test_parallel_calls_only_if_wanted() -> None:
    raw = "</think>" + call("ping") + call("ping") + "<|observation|>"
    assert len(both(raw, [PING])["calls"]) == 2
    one = both(raw, [PING], parallel_tool_calls=False)
    assert one["calls"] == [("ping", "{}")]
    assert one["finish_reason"] == "tool_calls"


def test_answer_that_made_its_only_call_says_no_more_beside_others() -> None:
    def script(request: Any, index: int) -> str:
        return "</think>" + "x" * 20 * index + call("ping") * 9 + "<|observation|>"

    client, _ = client_of(script)
    found, _ = streamed(client, n=2, tools=[PING], parallel_tool_calls=False)
    assert [list(one["calls"]) for one in found] == [[0], [0]]
    assert [one["finish_reason"] for one in found] == ["tool_calls", "tool_calls"]


def test_parallel_call_that_is_not_wanted_frees_the_request() -> None:
    raw = "</think>" + call("ping") + "x" * 1000
    client, backend = client_of(raw)
    whole(client, tools=[PING], parallel_tool_calls=False)
    assert not backend.alive
    assert backend.steps < 100


def test_same_raw_value_typed_by_each_tool() -> None:
    raw = "</think>" + call("A", v="7") + call("B", v="7") + "<|observation|>"
    assert arguments(both(raw, [tool("A", v="string"), tool("B", v="integer")])) == [{"v": "7"}, {"v": 7}]


def test_values_typed_by_schema() -> None:
    raw = "</think>" + call("f", n="5", b="true", l="[1]") + "<|observation|>"
    assert arguments(both(raw, [tool("f", n="integer", b="boolean", l="array")])) == [{"n": 5, "b": True, "l": [1]}]


@pytest.mark.parametrize("value", ['{"k":1}', "001", "null", '"quoted"'])
def test_string_that_looks_like_json_stays_text(value: str) -> None:
    assert arguments(both("</think>" + call("f", s=value) + "<|observation|>", [tool("f", s="string")])) == [
        {"s": value}
    ]


def test_call_inside_thinking_ends_it() -> None:
    found = both("hm" + call("ping") + "<|observation|>", [PING])
    assert found["reasoning"] == "hm"
    assert found["calls"] == [("ping", "{}")]


def test_without_tools_nothing_is_parsed() -> None:
    assert both("</think>a < b<|user|>")["content"] == "a < b"
    raw = "</think>" + call("ping") + "<|user|>"
    assert both(raw)["content"] == call("ping")
    assert both(raw, [PING], tool_choice="none")["content"] == call("ping")


def test_required_and_named_calls_become_a_grammar_of_the_native_form() -> None:
    tools = [PING, tool("dim", lvl="integer")]
    client, backend = client_of("</think>" + call("dim", lvl="1") + "<|observation|>")
    assert whole(client, tools=tools, tool_choice="required")["calls"][0]["name"] == "dim"
    asked = backend.seen[-1].params.constraint
    assert asked is not None
    assert (asked.kind, json.loads(asked.text), asked.after_thinking, asked.max_calls) == ("tools", tools, True, None)
    whole(client, tools=tools, tool_choice={"type": "function", "function": {"name": "dim"}})
    asked = backend.seen[-1].params.constraint
    assert asked is not None
    assert (asked.kind, json.loads(asked.text), asked.max_calls) == ("tools", tools[1:], 1)
    whole(client, tools=tools, tool_choice="required", parallel_tool_calls=False)
    assert backend.seen[-1].params.constraint.max_calls == 1  # type: ignore[union-attr]


def test_model_that_skips_thinking_answers_all_the_same() -> None:
    found = both("42<|user|>")
    assert found["content"] == "42"
    cut = both("42 and more of it", max_tokens=2)
    assert cut["content"] == ""
    assert cut["reasoning"]
    assert cut["finish_reason"] == "length"


def test_third_turn_after_a_tool_keeps_thinking_apart() -> None:
    history = [
        *HI,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "function": {"name": "ping", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "pong"},
    ]
    client, backend = client_of("x</think>y<|user|>")
    found = whole(client, messages=history, tools=[PING])
    assert (found["reasoning"], found["content"]) == ("x", "y")
    prompt = chat_tokenizer().decode(backend.seen[-1].input_ids)
    assert "None" not in prompt
    assert prompt.endswith("<|observation|><tool_response>pong</tool_response><|assistant|><think>")


def test_next_turn_begins_with_the_ids_of_this_one() -> None:
    """So all of it is found in the cache: the prompt, and what the model said to it, up to its stop."""
    tools = [tool("path", value="string", n="integer")]
    for raw in (
        "hm\nhm</think>" + call("path") + "<|observation|>",
        "hm</think>the answer" + call("path", value="a/b.txt", n="3") + call("path", value="") + "<|observation|>",
    ):
        client, backend = client_of(raw)
        message = ask(client, tools=tools)["choices"][0]["message"]
        results = [{"role": "tool", "tool_call_id": c["id"], "content": "12"} for c in message["tool_calls"]]
        ask(client, tools=tools, messages=[*HI, message, *results])
        first, second = (list(request.input_ids) for request in backend.seen)
        said = chat_tokenizer().encode(raw, allow_special=True)
        assert second[: len(first) + len(said)] == first + said


def test_arguments_in_history_are_a_string_or_an_object() -> None:
    client, backend = client_of()

    def with_arguments(given: Any) -> Any:
        made = {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": given}}]}
        return client.post("/v1/chat/completions", json={"messages": [*HI, made]})

    assert with_arguments('{"x":1}').status_code == 200
    assert with_arguments({"x": 1}).status_code == 200
    assert backend.seen[0].input_ids == backend.seen[1].input_ids
    refused = with_arguments('{"x":')
    assert refused.status_code == 400
    assert "messages[1].tool_calls[0].function.arguments" in refused.json()["error"]["message"]


def test_user_tag_ends_the_turn() -> None:
    found = both("</think>ok<|user|>more")
    assert (found["content"], found["finish_reason"]) == ("ok", "stop")


def test_no_hidden_limit_of_tokens() -> None:
    client, backend = client_of()
    whole(client)
    assert backend.seen[-1].params.max_new_tokens is None


def test_call_cut_by_the_limit() -> None:
    tools = [tool("path", value="string")]
    found = both("</think>" + call("path", value="a/b" * 50), tools, max_tokens=20)
    assert found["finish_reason"] == "length"
    assert found["calls"][0][0] == "path"
    with pytest.raises(json.JSONDecodeError):
        json.loads(found["calls"][0][1])


def test_thinking_within_a_budget() -> None:
    client, backend = client_of("x" * 100)
    found = whole(client, max_tokens=64, thinking={"type": "enabled", "budget_tokens": 16})
    assert (found["finish_reason"], found["content"]) == ("length", "")
    assert backend.seen[-1].params.thinking_budget == 16


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        ({"response_format": {"type": "json_object"}}, Constraint("json")),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}},
            Constraint("json_schema", '{"type": "object"}'),
        ),
        ({"regex": "[0-9]+"}, Constraint("regex", "[0-9]+")),
        ({"structured_outputs": {"choice": ["a.b", "c"]}}, Constraint("regex", "a\\.b|c")),
        ({"structured_outputs": {"json": {"type": "integer"}}}, Constraint("json_schema", '{"type": "integer"}')),
        ({"response_format": {"type": "text"}}, None),
    ],
)
def test_structure_reaches_the_engine(body: dict[str, Any], wanted: Constraint | None) -> None:
    client, backend = client_of()
    for enable in (True, False):
        ask(client, **body, chat_template_kwargs={"enable_thinking": enable})
        assert backend.seen[-1].params.constraint == wanted
        end = chat_tokenizer().think_id if enable else chat_tokenizer().end_think_id
        assert backend.seen[-1].input_ids[-1] == end


def test_speculation_across_the_end_of_thinking_doubles_nothing() -> None:
    assert both('hm</think>{"a": 1}<|user|>')["content"] == '{"a": 1}'


def test_each_of_n_has_its_own_parser() -> None:
    def script(request: Any, index: int) -> str:
        return f"t{index}</think>" + call("path", value=f"a/{index}") + "<|observation|>"

    for sizes in SPLITS:
        client, _ = client_of(script, sizes=sizes)
        found, usage = streamed(
            client, n=3, tools=[tool("path", value="string")], stream_options={"include_usage": True}
        )
        assert [json.loads(one["calls"][0]["arguments"]) for one in found] == [{"value": f"a/{i}"} for i in range(3)]
        assert [one["reasoning"] for one in found] == ["t0", "t1", "t2"]
        assert len({one["calls"][0]["id"] for one in found}) == 3
        assert usage["completion_tokens_details"]["reasoning_tokens"] == 6


def test_reasoning_tokens_are_counted_in_streams() -> None:
    thought = "let me see, the answer"
    client, _ = client_of(f"{thought}</think>12<|user|>", sizes=(4,))
    _, usage = streamed(client, stream_options={"include_usage": True})
    count = len(chat_tokenizer().encode(thought))
    assert usage["completion_tokens_details"]["reasoning_tokens"] == count
    assert usage == ask(client)["usage"]


# ------------------------------------------------------------------------------------------------------ details
def test_ids_and_logprobs_one_an_id() -> None:
    raw = "hm</think>the answer<|user|>"
    ids = chat_tokenizer().encode(raw, allow_special=True)
    for sizes in SPLITS:
        client, backend = client_of(raw, sizes=sizes)
        asked = {"return_token_ids": True, "logprobs": True, "top_logprobs": 2}
        told = ask(client, **asked)
        assert told["prompt_token_ids"] == list(backend.seen[-1].input_ids)
        assert told["choices"][0]["token_ids"] == ids
        content = told["choices"][0]["logprobs"]["content"]
        assert [entry["logprob"] for entry in content] == [-id / 1000 for id in ids]
        assert all(len(entry["top_logprobs"]) == 2 for entry in content)
        found, _ = streamed(client, **asked)
        assert found[0]["ids"] == ids
        assert found[0]["lp"] == content
    client, _ = client_of(raw)
    chunks = events(
        client.post("/v1/chat/completions", json={"messages": HI, "stream": True, "return_token_ids": True}).text
    )
    assert "prompt_token_ids" in chunks[0]
    assert not any("prompt_token_ids" in chunk for chunk in chunks[1:])


@pytest.mark.parametrize("stop", ["answer", "ans", "r", "swe", "answer is", "e a", "wer"])
def test_stop_strings_never_show(stop: str) -> None:
    text = "the answer is ping"
    found = both(f"</think>{text}<|user|>", stop=[stop, "zzz"])
    assert found["content"] == text[: text.index(stop)].rstrip() or found["content"] == text[: text.index(stop)]
    assert found["finish_reason"] == "stop"
    kept = both(f"</think>{text}<|user|>", stop=stop, include_stop_str_in_output=True)
    assert kept["content"].rstrip() == text[: text.index(stop) + len(stop)].rstrip()


def test_stop_string_in_thinking_does_not_make_an_answer_of_it() -> None:
    found = both("let me see the answer", stop="see")
    assert (found["reasoning"], found["content"], found["finish_reason"]) == ("let me ", "", "stop")


def test_what_begins_like_a_stop_string_and_is_none_is_shown() -> None:
    assert both("</think>the answer is pin<|user|>", stop="ping!")["content"] == "the answer is pin"
    assert both("</think>数据 naïv", stop="naïve")["content"] == "数据 naïv"


def test_all_names_of_thinking_agree_or_are_refused() -> None:
    client, backend = client_of()
    off = chat_tokenizer().end_think_id
    for body in (
        {"thinking": {"type": "disabled"}},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"reasoning_effort": "none"},
    ):
        ask(client, **body)
        assert backend.seen[-1].input_ids[-1] == off
    body = {"thinking": {"type": "disabled"}, "chat_template_kwargs": {"enable_thinking": True}}
    refused = client.post("/v1/chat/completions", json={"messages": HI, **body})
    assert refused.status_code == 400
    assert "differ" in refused.json()["error"]["message"]


def test_cleared_and_preserved_thinking() -> None:
    history = [*HI, {"role": "assistant", "content": "12", "reasoning_content": "old thought"}, *HI]
    client, backend = client_of()
    ask(client, messages=history)
    ask(client, messages=history, thinking={"type": "enabled", "clear_thinking": False})
    cleared, kept = (chat_tokenizer().decode(request.input_ids) for request in backend.seen)
    assert "old thought" not in cleared
    assert "<think>old thought</think>" in kept


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "bird", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        ({"temperature": "1"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"n": 0}, "n"),
        ({"top_p": 0}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a"] * 65}, "stop"),
        ({"stop": "a\ufffd"}, "stop"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"999999": 1}}, "logit_bias"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [PING], "tool_choice": {"type": "function", "function": {"name": "pong"}}}, "tool_choice"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_object"}, "regex": "a"}, "forms"),
        ({"response_format": {"type": "json_object"}, "tools": [PING], "tool_choice": "required"}, "forms"),
        ({"regex": "("}, "regex"),
        ({"functions": []}, "functions"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"stop_token_ids": [9999]}, "stop_token_ids"),
        ({"messages": [{"role": "user", "content": "x" * 9000}]}, "context"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_wrong_requests_are_400_and_say_where(body: dict[str, Any], word: str, stream: bool) -> None:
    client, backend = client_of()
    answer = client.post("/v1/chat/completions", json={"messages": HI, "stream": stream, **body})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert word in error["message"]
    assert error["type"] == "invalid_request_error"
    assert not backend.alive


def test_answer_goes_on_behind_its_end_if_ends_are_ignored() -> None:
    client, _ = client_of("</think>the<|user|>answer is<|user|>ping")
    told = ask(client, ignore_eos=True, max_tokens=12)
    assert told["usage"]["completion_tokens"] == 12
    assert told["choices"][0]["message"]["content"] == "the"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": HI}),
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/messages", {"messages": HI, "max_tokens": 5}),
        ("/v1/messages/count_tokens", {"messages": HI}),
    ],
)
def test_unknown_fields_are_refused_where_the_interface_does_so(path: str, body: dict[str, Any]) -> None:
    client, backend = client_of()
    for name in ("max_token", "odd name", "tools2"):
        answer = client.post(path, json={**body, name: 5})
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["message"].startswith(f"{name}: this interface has no such field")
        if not path.startswith("/v1/messages"):
            assert (error["param"], error["code"]) == (name, "unknown_field")
    assert not backend.seen
    assert client.post(path, json={**body, "metadata": {"a": "1"}, "service_tier": "auto"}).status_code == 200


def test_sampling_params_of_sglang_are_strict_and_its_body_is_not() -> None:
    client, _ = client_of()
    body = {"input_ids": [5], "sampling_params": {"max_new_tokens": 2, "spaces_between_special_tokens": False}}
    assert client.post("/generate", json={**body, "bootstrap_room": 7}).status_code == 200
    answer = client.post("/generate", json={"input_ids": [5], "sampling_params": {"max_tokens": 2}})
    assert answer.status_code == 400
    assert "max_tokens" in answer.json()["error"]["message"]


def test_fields_without_effect_and_nulls_are_ignored() -> None:
    client, _ = client_of()
    nulls = dict.fromkeys(
        ["temperature", "top_p", "tools", "tool_choice", "stop", "n", "seed", "response_format", "stream"]
    )
    ask(client, **nulls, user="u", store=True, metadata={"a": 1}, service_tier="auto")


def test_abort_finishes_the_answer() -> None:
    client, backend = client_of("</think>the answer")
    backend.aborted.add("all")

    def script(request: Any, index: int) -> str:
        backend.aborted.add(request.rid)
        return "never"

    backend.script = script
    assert whole(client)["finish_reason"] == "abort"


def test_engine_failure_is_told_in_both_ways() -> None:
    client, backend = client_of(fail_with=RuntimeError("boom"))
    safe = TestClient(client.app, raise_server_exceptions=False)
    answer = safe.post("/v1/chat/completions", json={"messages": HI})
    assert answer.status_code == 500
    assert answer.json()["error"]["type"] == "server_error"
    told = safe.post("/v1/chat/completions", json={"messages": HI, "stream": True}).text
    assert events(told)[-1]["error"]["type"] == "server_error"
    assert told.endswith("data: [DONE]\n\n")
    assert not backend.alive


@pytest.mark.parametrize(
    ("raw", "tools", "answered"),
    [
        ("</think>the answer<|assistant|>", None, {}),  # no stop id of this model, but the end of a turn
        ("</think>" + call("ping"), [PING], {"parallel_tool_calls": False}),
    ],
)
def test_what_a_block_of_drafts_has_beyond_the_turn_is_not_counted(
    raw: str, tools: list[dict[str, Any]] | None, answered: dict[str, Any]
) -> None:
    client, backend = client_of(raw + "path value")
    count = len(backend.tokenizer.encode(raw, allow_special=True))
    body: dict[str, Any] = {"return_token_ids": True, "logprobs": True, **answered}
    if tools is not None:
        body["tools"] = tools
    for sizes in SPLITS:
        backend.sizes = sizes
        told = ask(client, **body)
        choice = told["choices"][0]
        assert told["usage"]["completion_tokens"] == count
        assert len(choice["token_ids"]) == len(choice["logprobs"]["content"]) == count
        assert choice["finish_reason"] == ("tool_calls" if tools else "stop")
        choices, usage = streamed(client, **body, stream_options={"include_usage": True})
        assert usage["completion_tokens"] == len(choices[0]["ids"]) == len(choices[0]["lp"]) == count
        assert not backend.alive
