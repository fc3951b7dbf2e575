"""The gateway: exact ids from turn to turn, edits, branches, retries; the official clients, unmodified."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest
from fastapi.testclient import TestClient

from glm5.serve.client import Unavailable
from glm5.serve.gateway.app import GatewayOptions, create_gateway
from glm5.serve.request import Request
from glm5.text.chat import render
from glm5.text.messages import messages_from_openai, tools_from_openai
from support.scripted import Scripted, chat_tokenizer
from support.serving import HI, PING, call, events, served
from support.waiting import until

T = chat_tokenizer()
CHAT = "/sessions/s/v1/chat/completions"


def encode(text: str) -> list[int]:
    return T.encode(text, allow_special=True)


def spelled(text: str) -> list[int]:
    """The ids of a text as no tokenizer would give them: byte by byte."""
    return [id for character in text for id in T.encode(character)]


def saying(*answers: str | list[int]) -> Callable[[Request, int], Any]:
    """A script that gives one answer after another."""
    left = iter(answers)
    return lambda request, index: next(left)


def gateway(*answers: str | list[int], **changes: Any) -> tuple[TestClient, Scripted]:
    options = {name: changes.pop(name) for name in ("grace_s", "max_sessions") if name in changes}
    backend = Scripted(script=saying(*answers), sizes=(2, 1), **changes)
    return TestClient(create_gateway(backend, GatewayOptions(**options))), backend


def ask(client: TestClient, messages: list[dict[str, Any]], path: str = CHAT, **body: Any) -> dict[str, Any]:
    headers = body.pop("headers", {})
    answer = client.post(path, json={"messages": messages, **body}, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]


def session(client: TestClient, name: str = "s") -> dict[str, Any]:
    answer = client.get(f"/sessions/{name}")
    assert answer.status_code == 200, answer.text
    return answer.json()


def drawn(trajectory: dict[str, Any]) -> list[int]:
    return [id for id, mine in zip(trajectory["ids"], trajectory["drawn"], strict=True) if mine]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


# ------------------------------------------------------------------------------------------------- exact ids
def test_turns_go_on_from_the_ids_that_were_sampled() -> None:
    """An answer that no tokenizer would spell so stays as it was sampled."""
    odd = [*spelled("hm"), *encode("</think>"), *spelled("the answer"), *encode("<|user|>")]
    assert encode(T.decode(odd)) != odd
    client, backend = gateway(odd, "fine<|user|>")
    first = ask(client, HI)
    assert first["content"] == "the answer"
    assert first["reasoning_content"] == "hm"
    ask(client, [*HI, first, user("more")])
    one, two = (list(request.input_ids) for request in backend.seen)
    assert two == [*one, *odd, *T.encode("more"), T.assistant_id, T.think_id], "its own tag is not repeated"
    (trajectory,) = session(client)["trajectories"]
    assert trajectory["ids"] == [*two, *encode("fine<|user|>")]
    assert drawn(trajectory) == [*odd, *encode("fine<|user|>")]
    figures = zip(trajectory["ids"], trajectory["drawn"], trajectory["logprobs"], trajectory["versions"], strict=True)
    for id, mine, logprob, version in figures:
        assert (logprob, version) == ((-id / 1000, "1") if mine else (0.0, ""))
    assert [turn["origin"] for turn in session(client)["turns"]] == ["start", "continued"]


def test_the_first_prompt_and_every_given_span_are_what_a_whole_rendering_gives() -> None:
    """Two turns with tools, results in a row, thinking kept: outside of what was sampled, byte for byte."""
    tools = [PING]
    client, backend = gateway(
        f"a</think>{call('ping')}{call('ping')}<|observation|>",
        f"b</think>{call('ping')}<|observation|>",
        "done<|user|>",
    )
    history: list[dict[str, Any]] = [{"role": "system", "content": "be brief"}, *HI]
    for results in (2, 1, 0):
        told = ask(client, history, tools=tools)
        ids = [c["id"] for c in told.get("tool_calls", [])]
        assert len(ids) == results
        history = [*history, told, *({"role": "tool", "tool_call_id": id, "content": f"r{id[-3:]}"} for id in ids)]
    whole = render(
        T,
        messages_from_openai(history[:-1]),
        tools_from_openai(tools),
        clear_thinking=False,
        add_generation_prompt=True,
    ).ids
    assert list(backend.seen[-1].input_ids) == list(whole)


def test_results_of_parallel_calls_in_any_order() -> None:
    client, backend = gateway(f"</think>{call('ping')}{call('ping')}<|observation|>", "x<|user|>", "y<|user|>")
    told = ask(client, HI, tools=[PING])
    one, two = (c["id"] for c in told["tool_calls"])
    results = [{"role": "tool", "tool_call_id": i, "content": t} for i, t in ((two, "second"), (one, "first"))]
    ask(client, [*HI, told, *results], tools=[PING])
    ask(client, [*HI, told, *results[::-1]], tools=[PING])
    assert backend.seen[1].input_ids == backend.seen[2].input_ids
    assert "first" in T.decode(backend.seen[1].input_ids).split("second")[0]


def test_a_truncated_answer_goes_on() -> None:
    """No stop id was sampled: the next tag is given, and not learned."""
    client, backend = gateway("hm</think>the answer is ping<|user|>", "x<|user|>")
    told = ask(client, HI, max_tokens=5)
    ask(client, [*HI, told, user("go on")])
    first = list(backend.seen[0].input_ids)
    cut = encode("hm</think>the answer is ping")[:5]
    assert list(backend.seen[1].input_ids)[: len(first) + 6] == [*first, *cut, T.user_id]
    made = session(client)
    assert [turn["finish"] for turn in made["turns"]] == ["length", "stop"]
    assert made["trajectories"][0]["drawn"][len(first) + 5] is False


# ------------------------------------------------------------------------------------------------- what comes back
@pytest.mark.parametrize(
    ("change", "repaired"),
    [
        ({}, True),
        ({"reasoning_content": None}, True),
        ({"content": "  the answer\n"}, True),
        ({"tool_calls": [["ping", '{"n":3,"m":4}']]}, True),
        ({"tool_calls": [["ping", ' {"m" : 4, "n": 3} ']]}, True),
        ({"reasoning_content": "other"}, False),
        ({"content": "the Answer"}, False),
        ({"content": None}, False),
        ({"tool_calls": []}, False),
        ({"tool_calls": [["ping", '{"n":3}']]}, False),
        ({"tool_calls": [["pong", '{"n":3,"m":4}']]}, False),
    ],
)
def test_what_is_repaired_and_what_is_an_edit(change: dict[str, Any], repaired: bool) -> None:
    sampled = f"hm</think>the answer{call('ping', n='3', m='4')}<|observation|>"
    client, backend = gateway(sampled, "x<|user|>")
    told = ask(client, HI, tools=[PING])
    back = {**told, **change}
    if "tool_calls" in change:
        back["tool_calls"] = [
            {"id": f"c{i}", "type": "function", "function": {"name": name, "arguments": given}}
            for i, (name, given) in enumerate(change["tool_calls"])
        ]
    ask(client, [*HI, back, {"role": "tool", "tool_call_id": "c0", "content": "r"}], tools=[PING])
    first = [*backend.seen[0].input_ids, *encode(sampled)]
    begins = list(backend.seen[1].input_ids)[: len(first)] == first
    made = session(client)
    assert begins == repaired
    assert made["turns"][1]["origin"] == ("continued" if repaired else "restarted")
    assert len(made["trajectories"]) == (1 if repaired else 2)
    assert made["trajectories"][0]["ids"][: len(first)] == first, "what was recorded stays as it was"


def test_an_edit_far_back_branches_from_the_last_turn_that_is_the_same() -> None:
    client, backend = gateway("a</think>one<|user|>", "b</think>two<|user|>", "c</think>three<|user|>")
    one = ask(client, HI)
    two = ask(client, [*HI, one, user("q")])
    ask(client, [*HI, one, user("q"), {**two, "content": "TWO"}, user("r")])
    made = session(client)
    assert made["turns"][2]["origin"] == "edited"
    assert made["turns"][2]["parent"] == 0
    assert made["turns"][2]["note"].startswith("messages[3]")
    old, new = made["trajectories"]
    assert drawn(old) == [*encode("a</think>one<|user|>"), *encode("b</think>two<|user|>")]
    assert drawn(new) == encode("c</think>three<|user|>"), "a shared turn is learned once"
    shared = [*backend.seen[0].input_ids, *encode("a</think>one<|user|>")]
    assert new["ids"][: len(shared)] == shared
    assert new["versions"][len(shared) - 1] == "1", "and keeps its figures where it is context"


def test_branches_and_compaction() -> None:
    client, _ = gateway("</think>one<|user|>", "</think>two<|user|>", "</think>three<|user|>", "</think>four<|user|>")
    one = ask(client, HI)
    ask(client, [*HI, one, user("q")])
    ask(client, [*HI, one, user("other")])
    ask(client, [user("a summary of all that")])
    made = session(client)
    assert [turn["origin"] for turn in made["turns"]] == ["start", "continued", "branched", "restarted"]
    assert [turn["parent"] for turn in made["turns"]] == [None, 0, 0, None]
    assert [t["turns"] for t in made["trajectories"]] == [[0, 1], [0, 2], [3]]
    assert sum(sum(t["drawn"]) for t in made["trajectories"]) == sum(turn["drawn_tokens"] for turn in made["turns"])


def test_thinking_stays_unless_the_client_wants_it_cleared() -> None:
    for clear, origin in ((None, "continued"), (False, "continued"), (True, "cleared")):
        client, backend = gateway("hm</think>one<|user|>", "</think>two<|user|>")
        one = ask(client, HI)
        extra = {} if clear is None else {"chat_template_kwargs": {"clear_thinking": clear}}
        ask(client, [*HI, one, user("q")], **extra)
        assert session(client)["turns"][1]["origin"] == origin
        assert ("hm" in T.decode(backend.seen[1].input_ids)) == (origin == "continued")


def test_text_that_is_no_unicode_comes_back_as_it_was_sampled() -> None:
    broken = [*encode("</think>"), T.encode("ß")[0] if len(T.encode("ß")) > 1 else 200, *encode("<|user|>")]
    client, backend = gateway(broken, "x<|user|>")
    told = ask(client, HI)
    ask(client, [*HI, told, user("q")])
    n = len(backend.seen[0].input_ids)
    assert list(backend.seen[1].input_ids)[n : n + len(broken)] == broken


def test_ids_go_on_from_the_longest_turn() -> None:
    client, backend = gateway([60, 61], [62, 63], [64, 65], [66])
    path = "/sessions/s/generate"

    def give(ids: list[int]) -> None:
        answer = client.post(path, json={"input_ids": ids, "sampling_params": {"max_new_tokens": 2}})
        assert answer.status_code == 200, answer.text

    give([50, 51])
    give([50, 51, 60, 61, 70])
    give([50, 51, 60, 61, 71])
    give([50, 51, 60, 99])  # another id than was sampled
    made = session(client)
    assert [(t["origin"], t["parent"]) for t in made["turns"]] == [
        ("start", None), ("continued", 0), ("branched", 0), ("restarted", None),
    ]  # fmt: skip
    assert [drawn(t) for t in made["trajectories"]] == [[60, 61, 62, 63], [64, 65], [66]]
    assert all(request.params.logprobs == 0 for request in backend.seen)


# ------------------------------------------------------------------------------------------------- requests
def test_a_request_sent_again_is_generated_once() -> None:
    client, backend = gateway("a</think>one<|user|>", "b</think>two<|user|>", "c</think>three<|user|>")
    told = ask(client, HI, headers={"X-Request-ID": "r1"})
    assert ask(client, HI, headers={"X-Request-ID": "r1"}) == told
    assert ask(client, HI, headers={"x-stainless-retry-count": "1"}) == told
    assert ask(client, HI)["content"] == "two", "who asks twice without saying so wants two answers"
    answer = client.post(CHAT, json={"messages": [user("x")]}, headers={"X-Request-ID": "r1"})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "request_id_reused"
    assert len(backend.seen) == 2
    assert [t["origin"] for t in session(client)["turns"]] == ["start", "branched"]


def test_a_session_s_sampling_counts_whatever_the_agent_asks() -> None:
    client, backend = gateway("x<|user|>", "y<|user|>")
    begun = client.post("/sessions", json={"id": "s", "sampling": {"temperature": 0.7, "top_p": 0.9}})
    started = session(client)["started"]
    assert begun.json() == {"id": "s", "base_url": "/sessions/s/v1", "started": started}
    assert client.get("/sessions").json() == {"sessions": ["s"]}
    assert client.get("/health").json() == {"status": "ok", "sessions": 1, "weight_version": "1"}
    ask(client, HI, temperature=0)
    params = backend.seen[0].params
    assert (params.temperature, params.top_p, params.logprobs, params.kept_set) == (0.7, 0.9, 0, True)
    made = session(client)
    assert made["turns"][0]["temperature"] == 0.7
    kept = made["trajectories"][0]["kept"]
    assert [k for k, d in zip(kept, made["trajectories"][0]["drawn"], strict=True) if d] == [
        [id, 0] for id in encode("x<|user|>")
    ]
    ask(client, HI, path="/sessions/other/v1/chat/completions")
    assert backend.seen[1].params.kept_set is False


def test_sessions_by_header_and_what_is_refused() -> None:
    client, backend = gateway(*["x<|user|>"] * 5, max_sessions=2)
    body = {"messages": HI}
    for header in ("X-Session-ID", "X-SMG-Routing-Key"):
        assert client.post("/v1/chat/completions", json=body, headers={header: header}).status_code == 200
        assert len(session(client, header)["turns"]) == 1
    for path, sent, headers, status in (
        ("/v1/chat/completions", body, {}, 400),
        ("/v1/messages", {**body, "max_tokens": 5}, {}, 400),
        ("/sessions/third/v1/chat/completions", body, {}, 503),
        ("/sessions/a%20b/v1/chat/completions", body, {}, 400),
        ("/sessions/X-Session-ID/v1/chat/completions", {**body, "n": 2}, {}, 400),
        ("/sessions/X-Session-ID/v1/chat/completions", {"messages": [user("x" * 9000)]}, {}, 400),
        ("/sessions/X-Session-ID/generate", {"input_ids": [[5], [6]]}, {}, 400),
        ("/sessions", {"id": "X-Session-ID"}, {}, 400),
        ("/update_weights_from_disk", {"model_path": "x"}, {}, 404),
    ):
        answer = client.post(path, json=sent, headers=headers)
        assert answer.status_code == status, (path, answer.text)
    assert all(turn["status"] == "complete" for turn in session(client, "X-Session-ID")["turns"][:1])
    assert client.delete("/sessions/X-Session-ID").json()["trajectories"]
    assert client.get("/sessions/X-Session-ID").status_code == 404
    assert client.post("/v1/chat/completions", json=body, headers={"X-Session-ID": "X-Session-ID"}).status_code == 404
    assert not backend.alive


def test_an_engine_that_is_lost_is_told_apart_and_asked_again() -> None:
    client, backend = gateway("a</think>one<|user|>", "b</think>two<|user|>")
    backend.fail_with = Unavailable("the engine is gone")
    named = {"X-Request-ID": "r"}
    assert client.post(CHAT, json={"messages": HI}, headers=named).status_code == 503
    backend.fail_with = None
    assert ask(client, HI, headers=named)["content"] == "two"
    lost, made = session(client)["turns"]
    assert (lost["failure"], lost["status"], made["failure"], made["status"]) == (
        "engine_lost",
        "failed",
        None,
        "complete",
    )
    assert [t["turns"] for t in session(client)["trajectories"]] == [[1]]


# ------------------------------------------------------------------------------------------------- real clients
@pytest.fixture
def live() -> Iterator[tuple[str, Scripted]]:
    backend = Scripted(sizes=(2, 3))
    with served(create_gateway(backend, GatewayOptions(grace_s=3.0))) as address:
        yield address, backend


@pytest.mark.parametrize("stream", [False, True])
def test_openai_s_client(live: tuple[str, Scripted], stream: bool) -> None:
    address, backend = live
    answers = [f"hm</think>see{call('ping', n='3')}<|observation|>", "well</think>the answer<|user|>"]
    backend.script = saying(*answers)
    client = openai.OpenAI(base_url=f"{address}/sessions/oa/v1", api_key="none", max_retries=0)
    history: list[Any] = list(HI)
    for _ in answers:
        if stream:
            with client.chat.completions.stream(model="glm5-test", messages=history, tools=[PING]) as events_:
                message = events_.get_final_completion().choices[0].message
        else:
            message = (
                client.chat.completions.create(model="glm5-test", messages=history, tools=[PING]).choices[0].message
            )
        history.append(message.model_dump(exclude_none=True, include={"role", "content", "tool_calls"}))
        history += [{"role": "tool", "tool_call_id": c.id, "content": "ok"} for c in message.tool_calls or []]
    assert message.content == "the answer"
    made = httpx.get(f"{address}/sessions/oa").json()
    (trajectory,) = made["trajectories"]
    assert drawn(trajectory) == [*encode(answers[0]), *encode(answers[1])], "its thinking was left out, and repaired"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kept", [False, True])
def test_openai_s_client_of_responses(live: tuple[str, Scripted], kept: bool, stream: bool) -> None:
    """History as items that are sent back, or as the name of the response before."""
    address, backend = live
    answers = [f"hm</think>see{call('ping', n='3')}<|observation|>", "well</think>the answer<|user|>", "path<|user|>"]
    backend.script = saying(*answers)
    client = openai.OpenAI(base_url=f"{address}/sessions/re/v1", api_key="none", max_retries=0)
    schema = {"type": "object", "properties": {"n": {"type": "string"}}}
    tools: list[Any] = [{"type": "function", "name": "ping", "parameters": schema}]
    new: list[Any] = list(HI)
    history, before = new, None
    for _ in answers:
        asked: dict[str, Any] = {"model": "glm5-test", "tools": tools, "input": new if kept else history}
        if kept and before is not None:
            asked["previous_response_id"] = before
        if stream:
            with client.responses.stream(**asked) as events_:
                response = events_.get_final_response()
        else:
            response = client.responses.create(**asked)
        before = response.id
        calls = [item.call_id for item in response.output if item.type == "function_call"]
        new = [{"type": "function_call_output", "call_id": id, "output": "ok"} for id in calls] or [user("more")]
        # What an agent may leave out of what it sends back: its thinking, and fields that mean nothing to it.
        items = [item.model_dump(exclude_none=True) for item in response.output if item.type != "reasoning"]
        history = [*history, *items, *new]
    assert response.output_text == "path"
    made = httpx.get(f"{address}/sessions/re").json()
    (trajectory,) = made["trajectories"]
    assert [turn["origin"] for turn in made["turns"]] == ["start", "continued", "continued"]
    assert drawn(trajectory) == [id for answer in answers for id in encode(answer)]


@pytest.mark.parametrize("stream", [False, True])
def test_anthropic_s_client(live: tuple[str, Scripted], stream: bool) -> None:
    address, backend = live
    answers = [f"see{call('ping', n='3')}{call('ping', n='4')}<|observation|>", "the answer<|user|>"]
    backend.script = saying(*answers)
    client = anthropic.Anthropic(base_url=f"{address}/sessions/an", api_key="none", max_retries=0)
    tools: list[Any] = [{"name": "ping", "input_schema": {"type": "object", "properties": {"n": {"type": "string"}}}}]
    history: list[Any] = list(HI)
    for _ in answers:
        asked: dict[str, Any] = {"model": "glm5-test", "max_tokens": 200, "messages": history, "tools": tools}
        if stream:
            with client.messages.stream(**asked) as events_:
                message = events_.get_final_message()
        else:
            message = client.messages.create(**asked)
        history.append(
            {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in message.content]}
        )
        uses = [block.id for block in message.content if block.type == "tool_use"]
        if uses:
            results = [{"type": "tool_result", "tool_use_id": id, "content": "ok"} for id in reversed(uses)]
            history.append({"role": "user", "content": results})
    assert message.content[0].text == "the answer"
    made = httpx.get(f"{address}/sessions/an").json()
    assert [turn["origin"] for turn in made["turns"]] == ["start", "continued"]
    assert drawn(made["trajectories"][0]) == [*encode(answers[0]), *encode(answers[1])]


def test_a_client_that_breaks_off_and_asks_again_hears_the_same_turn(live: tuple[str, Scripted]) -> None:
    address, backend = live
    backend.delay_s = 0.02
    backend.script = saying("hm</think>" + "the answer is " * 8 + "<|user|>", "never<|user|>")
    url = f"{address}/sessions/re/v1/chat/completions"
    body, headers = {"messages": HI, "stream": True}, {"X-Request-ID": "one"}
    with httpx.stream("POST", url, json=body, headers=headers) as first:
        next(first.iter_lines())
    again = httpx.post(url, json=body, headers=headers, timeout=30)
    told = "".join(e["choices"][0]["delta"].get("content") or "" for e in events(again.text) if e["choices"])
    assert told.strip() == ("the answer is " * 8).strip()
    assert len(backend.seen) == 1


def test_the_official_client_s_own_retry_is_known(live: tuple[str, Scripted]) -> None:
    address, backend = live
    backend.script = saying("hm</think>" + "the answer is " * 4 + "<|user|>", "never<|user|>")
    backend.delay_s = 0.06
    client = openai.OpenAI(base_url=f"{address}/sessions/rt/v1", api_key="none", max_retries=5, timeout=0.4)
    told = client.chat.completions.create(model="glm5-test", messages=HI)
    assert (told.choices[0].message.content or "").strip() == ("the answer is " * 4).strip()
    assert len(backend.seen) == 1


def test_a_turn_that_nobody_wants_any_more_is_ended(live: tuple[str, Scripted]) -> None:
    address, backend = live
    backend.gate = asyncio.Event()  # no step is made
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{address}/sessions/ab/v1/chat/completions", json={"messages": HI}, timeout=0.3)
    until(lambda: not backend.alive)
    (turn,) = httpx.get(f"{address}/sessions/ab").json()["turns"]
    assert (turn["status"], turn["failure"]) == ("failed", "timeout")
    assert httpx.delete(f"{address}/sessions/ab").json()["trajectories"] == []


def test_an_answer_across_an_update_says_so_id_by_id(live: tuple[str, Scripted]) -> None:
    address, backend = live
    backend.delay_s = 0.05
    backend.script = saying("</think>" + "the answer is ping " * 4 + "<|user|>")

    def change() -> None:
        until(lambda: backend.steps >= 4)
        backend.weight_version = "2"

    thread = threading.Thread(target=change)
    thread.start()
    httpx.post(f"{address}/sessions/up/v1/chat/completions", json={"messages": HI}, timeout=30)
    thread.join()
    (trajectory,) = httpx.get(f"{address}/sessions/up").json()["trajectories"]
    found = [v for v, mine in zip(trajectory["versions"], trajectory["drawn"], strict=True) if mine]
    assert found == sorted(found)
    assert set(found) == {"1", "2"}


def test_many_sessions_at_once_keep_apart(live: tuple[str, Scripted]) -> None:
    """Forty agents of three turns each; each finds its own ids, and nothing is kept of them at the end."""
    address, backend = live
    backend.script = lambda request, index: f"</think>{len(request.input_ids)}<|user|>"
    wrong: list[str] = []

    def agent(name: str) -> None:
        with httpx.Client(base_url=f"{address}/sessions/{name}/v1", timeout=60) as client:
            history = [user(name)]
            for turn in range(3):
                told = client.post("/chat/completions", json={"messages": history}).json()["choices"][0]["message"]
                history += [told, user(f"{name} {turn}")]
        made = httpx.delete(f"{address}/sessions/{name}").json()
        text = T.decode(made["trajectories"][0]["ids"])
        if len(made["trajectories"]) != 1 or text.count(name) != 3 or "agent" in text.replace(name, ""):
            wrong.append(name)

    threads = [threading.Thread(target=agent, args=(f"agent{n:02}",)) for n in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []
    assert httpx.get(f"{address}/health").json()["sessions"] == 0
    assert not backend.alive
