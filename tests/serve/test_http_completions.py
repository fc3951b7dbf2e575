"""Completions, tokens and models: the official client, log-probabilities, and batches of prompts."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from fastapi.testclient import TestClient

from glm5.serve.http.app import create_app
from glm5.serve.request import Request
from support.scripted import Scripted, chat_tokenizer
from support.serving import HI, PING, events, served

RAW = "the answer is 数据<|endoftext|>"


def client_of(**options: Any) -> tuple[TestClient, Scripted]:
    backend = Scripted(**{"script": lambda request, index: RAW, **options})
    return TestClient(create_app(backend)), backend


def streamed(client: TestClient, **body: Any) -> tuple[dict[int, dict[str, Any]], dict[str, Any]]:
    told = client.post("/v1/completions", json={"stream": True, **body})
    assert told.status_code == 200, told.text
    choices: dict[int, dict[str, Any]] = {}
    usage: dict[str, Any] = {}
    for chunk in events(told.text):
        usage = chunk.get("usage") or usage
        for one in chunk["choices"]:
            sum_ = choices.setdefault(one["index"], {"text": "", "ids": [], "lp": [], "offsets": [], "finish": None})
            sum_["text"] += one["text"]
            sum_["ids"] += one.get("token_ids", [])
            sum_["lp"] += (one["logprobs"] or {}).get("token_logprobs", [])
            sum_["offsets"] += (one["logprobs"] or {}).get("text_offset", [])
            sum_["finish"] = one["finish_reason"]
    return choices, usage


def test_official_client() -> None:
    with served(Scripted(script=lambda request, index: RAW, sizes=(2,), cached=2)) as address:
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
        told = client.completions.create(model="glm5-test", prompt="the", logprobs=1, max_tokens=50)
        assert told.choices[0].text == "the answer is 数据"
        assert told.choices[0].finish_reason == "stop"
        assert len(told.choices[0].logprobs.token_logprobs) == told.usage.completion_tokens
        assert told.usage.prompt_tokens_details.cached_tokens == 2
        parts = client.completions.create(
            model="glm5-test", prompt="the", stream=True, stream_options={"include_usage": True}
        )
        found = list(parts)
        assert "".join(c.choices[0].text for c in found if c.choices) == "the answer is 数据"
        assert found[-1].usage.completion_tokens == told.usage.completion_tokens


def test_without_a_limit_the_default_is_openais() -> None:
    client, backend = client_of()
    client.post("/v1/completions", json={"prompt": "the"})
    client.post("/v1/completions", json={"prompt": "the", "max_tokens": None})
    assert [request.params.max_new_tokens for request in backend.seen] == [16, None]


def test_prompt_as_text_opens_as_documents_do_and_as_ids_is_untouched() -> None:
    client, backend = client_of()
    tokenizer = chat_tokenizer()
    client.post("/v1/completions", json={"prompt": "the"})
    client.post("/v1/completions", json={"prompt": [7, 8]})
    client.post("/v1/completions", json={"prompt": "<|user|>"})
    text, ids, special = (list(request.input_ids) for request in backend.seen)
    assert text == [*tokenizer.prefix_ids, *tokenizer.encode("the")]
    assert ids == [7, 8]
    assert tokenizer.user_id not in special


@pytest.mark.parametrize("prompt", [["a", "b"], [[50, 51], [52]]])
def test_batches_number_their_choices(prompt: list[Any]) -> None:
    client, _ = client_of(
        script=lambda request, index: chat_tokenizer().decode(request.input_ids, skip_control=True) + str(index)
    )
    told = client.post("/v1/completions", json={"prompt": prompt, "n": 2}).json()
    assert [choice["index"] for choice in told["choices"]] == [0, 1, 2, 3]
    texts = [choice["text"] for choice in told["choices"]]
    assert [text[-1] for text in texts] == ["0", "1", "0", "1"]
    assert texts[0][:-1] != texts[2][:-1]
    choices, _ = streamed(client, prompt=prompt, n=2)
    assert [choices[i]["text"] for i in range(4)] == texts


@pytest.mark.parametrize("sizes", [(1,), (3,), (1000,)])
def test_stream_adds_up_to_the_whole(sizes: tuple[int, ...]) -> None:
    client, backend = client_of(sizes=sizes)
    asked = {"prompt": "a", "logprobs": 2, "return_token_ids": True, "echo": False}
    whole = client.post("/v1/completions", json=asked).json()
    choices, usage = streamed(client, **asked, stream_options={"include_usage": True})
    choice = whole["choices"][0]
    assert choices[0]["text"] == choice["text"] == "the answer is 数据"
    assert choices[0]["ids"] == choice["token_ids"] == chat_tokenizer().encode(RAW, allow_special=True)
    assert choices[0]["lp"] == choice["logprobs"]["token_logprobs"] == [-id / 1000 for id in choice["token_ids"]]
    assert len(choice["logprobs"]["top_logprobs"]) == len(choice["token_ids"])
    assert usage == whole["usage"]
    assert choice["prompt_token_ids"] == list(backend.seen[0].input_ids)


def test_offsets_point_into_the_text() -> None:
    client, _ = client_of(script=lambda request, index: "the answer", sizes=(2,))
    choice = client.post("/v1/completions", json={"prompt": "a", "logprobs": 0}).json()["choices"][0]
    logprobs = choice["logprobs"]
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert choice["text"][offset : offset + len(token)] == token
    assert streamed(client, prompt="a", logprobs=0)[0][0]["offsets"] == logprobs["text_offset"]


def test_prompt_logprobs_and_names_by_id() -> None:
    client, _ = client_of()
    body = {
        "prompt": [50, 51],
        "prompt_logprobs": 0,
        "logprobs": 1,
        "return_tokens_as_token_ids": True,
        "max_tokens": 1,
    }
    choice = client.post("/v1/completions", json=body).json()["choices"][0]
    assert choice["prompt_logprobs"][0] is None
    assert choice["prompt_logprobs"][1]["51"]["logprob"] == -0.051
    assert choice["logprobs"]["tokens"][0].startswith("token_id:")


def test_echo_comes_once() -> None:
    client, _ = client_of(sizes=(1,))
    body = {"prompt": "path ", "echo": True}
    assert client.post("/v1/completions", json=body).json()["choices"][0]["text"] == "path the answer is 数据"
    assert streamed(client, **body)[0][0]["text"] == "path the answer is 数据"


def test_echo_with_logprobs_scores_the_prompt_too() -> None:
    """As programs that evaluate models ask: the prompt's entries come before the answer's, in a stream once."""
    client, _ = client_of(script=lambda request, index: "the answer", sizes=(2,))
    asked = {"prompt": "path ", "echo": True, "logprobs": 1, "return_token_ids": True}
    choice = client.post("/v1/completions", json=asked).json()["choices"][0]
    ids = [*choice["prompt_token_ids"], *choice["token_ids"]]
    assert choice["text"] == "path the answer"
    assert choice["logprobs"]["token_logprobs"] == [None, *(-id / 1000 for id in ids[1:])]
    assert [top is None for top in choice["logprobs"]["top_logprobs"]] == [True] + [False] * (len(ids) - 1)
    told = zip(choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"], strict=True)
    shown = [*told][2:]  # behind the prefix
    assert all(choice["text"][offset : offset + len(token)] == token for token, offset in shown)
    stream = streamed(client, **asked)[0][0]
    assert (stream["text"], stream["lp"]) == (choice["text"], choice["logprobs"]["token_logprobs"])
    assert stream["offsets"] == choice["logprobs"]["text_offset"]


def test_echo_alone_answers_nothing() -> None:
    client, backend = client_of(cached=2)
    asked = {"prompt": [50, 51], "echo": True, "logprobs": 1, "max_tokens": 0}
    told = client.post("/v1/completions", json=asked).json()
    choice = told["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (chat_tokenizer().decode([50, 51]), "length")
    assert choice["logprobs"]["token_logprobs"] == [None, -0.051]
    assert (told["usage"]["completion_tokens"], backend.seen[0].params.max_new_tokens) == (0, 1)
    assert streamed(client, **asked)[0][0]["lp"] == [None, -0.051]


def test_special_tokens_show_if_wanted() -> None:
    client, _ = client_of()
    body = {"prompt": "a", "skip_special_tokens": False, "stop_token_ids": [300], "ignore_eos": True}
    assert client.post("/v1/completions", json=body).json()["choices"][0]["text"].endswith("<|endoftext|>")


def test_no_half_characters_in_a_stream() -> None:
    client, _ = client_of(script=lambda request, index: "数据" * 20, sizes=(1,))
    assert "\ufffd" not in streamed(client, prompt="a")[0][0]["text"]
    cut, _ = client_of(script=lambda request, index: chat_tokenizer().encode("数".encode()[:2]))
    assert cut.post("/v1/completions", json={"prompt": "a"}).json()["choices"][0]["text"] == "\ufffd"


def test_infinite_logprobs_are_numbers() -> None:
    class Zero(Scripted):
        def _infos(self, request: Request, ids: Any) -> Any:
            return tuple(type(info)(-float("inf")) for info in super()._infos(request, ids))

    client = TestClient(create_app(Zero(script=lambda request, index: "the")))
    told = client.post("/v1/completions", json={"prompt": "a", "logprobs": 0}).json()
    assert set(told["choices"][0]["logprobs"]["token_logprobs"]) == {-9999.0}


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"prompt": []},
        {"prompt": [[]]},
        {"prompt": [1, "a"]},
        {"prompt": [-1]},
        {"prompt": [100_000]},
        {"prompt": "\ud800"},
        {"prompt": "a", "suffix": "b"},
        {"prompt": "a", "best_of": 3},
        {"prompt": "a", "echo": True, "logprobs": 1, "prompt_logprobs": 2},
        {"prompt": "a", "max_tokens": 0},
        {"prompt": ["a"] * 2000},
    ],
)
def test_wrong_prompts_are_400(body: dict[str, Any]) -> None:
    client, backend = client_of()
    answer = client.post("/v1/completions", content=json.dumps(body), headers={"Content-Type": "application/json"})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"]
    assert not backend.alive


def test_one_bad_prompt_of_a_batch_refuses_all() -> None:
    client, backend = client_of(gate=None)
    assert client.post("/v1/completions", json={"prompt": [[50], [100_000]]}).status_code == 400
    assert not backend.alive


# ------------------------------------------------------------------------------------------------ tokens and models
def test_tokenize_and_back() -> None:
    client, _ = client_of()
    tokenizer = chat_tokenizer()
    told = client.post("/tokenize", json={"prompt": "the 数据", "return_token_strs": True}).json()
    assert told["tokens"] == [*tokenizer.prefix_ids, *tokenizer.encode("the 数据")]
    assert told["count"] == len(told["tokens"]) == len(told["token_strs"])
    assert told["max_model_len"] == 4096
    plain = client.post("/v1/tokenize", json={"prompt": "the 数据", "add_special_tokens": False}).json()["tokens"]
    back = client.post("/detokenize", json={"tokens": plain}).json()
    assert back["prompt"] == back["text"] == "the 数据"
    whole = client.post("/detokenize", json={"tokens": told["tokens"]}).json()["text"]
    assert whole == "[gMASK]<sop>the 数据"


def test_tokenize_renders_as_chat_does() -> None:
    client, backend = client_of()
    asked = {"messages": HI, "tools": [PING]}
    client.post("/v1/chat/completions", json=asked)
    assert client.post("/tokenize", json=asked).json()["tokens"] == list(backend.seen[0].input_ids)
    open_ = client.post("/tokenize", json={"messages": HI, "add_generation_prompt": False}).json()["tokens"]
    assert open_[-1] != chat_tokenizer().think_id
    assert client.post("/tokenize", json={}).status_code == 400
    assert client.post("/detokenize", json={"tokens": [9999]}).status_code == 400


def test_models() -> None:
    client, _ = client_of()
    card = client.get("/v1/models").json()["data"][0]
    assert (card["id"], card["max_model_len"]) == ("glm5-test", 4096)
    assert client.get("/v1/models/glm5-test").json() == card
    missing = client.get("/v1/models/other/name")
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "model_not_found"
