"""The whole way: a client, the server, the engine's thread, a small model; and nothing is lost or left over."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from fastapi import FastAPI
from safetensors.torch import save

from glm5.model.generate import generate
from glm5.model.glm5 import GLM5
from glm5.model.weights import disk_tensors, save_model
from glm5.serve.config import EngineConfig
from glm5.serve.engine import Engine
from glm5.serve.http.app import create_app
from glm5.serve.runner import Runner
from support.scripted import chat_tokenizer
from support.serving import HI, events, served, tool
from support.tiny import tiny_model

SIZES: dict[str, Any] = {"vocab_size": chat_tokenizer().vocab_size, "eos_token_id": chat_tokenizer().stop_ids}
GREEDY = {"temperature": 0, "ignore_eos": True}


def app_of(engine: Engine) -> FastAPI:
    runner = Runner(engine, chat_tokenizer(), "tiny")
    return create_app(runner, start=runner.start, stop=runner.stop)


@pytest.fixture(scope="module")
def model() -> GLM5:
    return tiny_model(0, **SIZES)


@pytest.fixture(scope="module")
def running(model: GLM5) -> Iterator[tuple[str, Engine]]:
    engine = Engine(model, EngineConfig(pages=60, context=1024, drafts=2), chat_tokenizer())
    with served(app_of(engine)) as address:
        yield address, engine


def test_ids_are_those_of_the_model_alone_and_beside_others(model: GLM5, running: tuple[str, Engine]) -> None:
    prompts = [[50 + i, *range(60, 60 + 7 * i)] for i in range(6)]

    async def ask() -> list[Any]:
        async with httpx.AsyncClient(base_url=running[0], timeout=60) as client:
            sampling: dict[str, Any] = {**GREEDY, "max_new_tokens": 10}
            bodies = [{"input_ids": ids, "sampling_params": sampling, "return_logprob": True} for ids in prompts]
            answers = await asyncio.gather(*(client.post("/generate", json=body) for body in bodies))
            return [answer.json() for answer in answers]

    for ids, told in zip(prompts, asyncio.run(ask()), strict=True):
        assert told["output_ids"] == list(generate(model, ids, max_new_tokens=10, stop_ids=()))
        assert [entry[1] for entry in told["meta_info"]["output_token_logprobs"]] == told["output_ids"]
        assert told["meta_info"]["spec_verify_ct"] > 0


def test_routed_experts_come_as_slime_reads_them(model: GLM5, running: tuple[str, Engine]) -> None:
    body = {"input_ids": list(range(250, 320)), "sampling_params": {**GREEDY, "max_new_tokens": 5}}
    with httpx.Client(base_url=running[0], timeout=60) as client:
        told = client.post("/generate", json={**body, "return_routed_experts": True}).json()
        streamed = events(client.post("/generate", json={**body, "return_routed_experts": True, "stream": True}).text)
    packed = told["meta_info"]["routed_experts"]
    config = model.config
    shape = (70 + 5 - 1, config.num_hidden_layers, config.num_experts_per_tok)
    experts = np.frombuffer(base64.b64decode(packed), dtype=np.int32).reshape(shape)
    assert 0 <= experts.min() < experts.max() < config.n_routed_experts
    assert len(set(experts[5, -1].tolist())) == config.num_experts_per_tok
    assert streamed[-1]["meta_info"]["routed_experts"] == packed


def test_a_scored_prompt_has_the_figures_that_an_answer_had(running: tuple[str, Engine]) -> None:
    ids, scored = list(range(250, 320)), {"return_logprob": True, "return_routed_experts": True}
    with httpx.Client(base_url=running[0], timeout=60) as client:
        body = {"input_ids": ids, "sampling_params": {**GREEDY, "max_new_tokens": 5}, **scored}
        given = client.post("/generate", json=body).json()
        text, said = [*ids, *given["output_ids"]], given["meta_info"]["output_token_logprobs"]
        body |= {"input_ids": text, "sampling_params": {**GREEDY, "max_new_tokens": 0}, "logprob_start_len": len(ids)}
        meta = client.post("/generate", json=body).json()["meta_info"]
        echo = {"prompt": text, "max_tokens": 0, "echo": True, "logprobs": 1}
        choice = client.post("/v1/completions", json=echo).json()["choices"][0]
    assert [entry[0] for entry in meta["input_token_logprobs"]] == pytest.approx([entry[0] for entry in said], abs=2e-5)
    assert choice["logprobs"]["token_logprobs"][len(ids) :] == pytest.approx([entry[0] for entry in said], abs=2e-5)
    likeliest = [*choice["logprobs"]["top_logprobs"][-1].values()]
    assert likeliest == pytest.approx(
        choice["logprobs"]["token_logprobs"][-1:], abs=2e-5
    )  # since it was drawn greedily
    assert len(meta["routed_experts"]) == len(given["meta_info"]["routed_experts"])


def test_chat_streams_what_it_answers(running: tuple[str, Engine]) -> None:
    client = openai.OpenAI(base_url=f"{running[0]}/v1", api_key="none", max_retries=0)
    asked: dict[str, Any] = {"model": "tiny", "messages": HI, "max_tokens": 40, "temperature": 0}
    whole = client.chat.completions.create(**asked)
    assert whole.usage.completion_tokens > 0
    text, thought = "", ""
    for chunk in client.chat.completions.create(**asked, stream=True):
        text += chunk.choices[0].delta.content or ""
        thought += getattr(chunk.choices[0].delta, "reasoning_content", None) or ""
    assert (text, thought) == (whole.choices[0].message.content, whole.choices[0].message.reasoning_content or "")


def test_earlier_prompts_are_read_from_the_cache(running: tuple[str, Engine]) -> None:
    with httpx.Client(base_url=running[0], timeout=60) as client:
        body = {"input_ids": list(range(60, 260)), "sampling_params": {**GREEDY, "max_new_tokens": 2}}
        first, second = (client.post("/generate", json=body).json()["meta_info"] for _ in range(2))
        assert first["cached_tokens"] == 0
        assert second["cached_tokens"] == 192
        assert client.post("/flush_cache").status_code == 200
        assert client.post("/generate", json=body).json()["meta_info"]["cached_tokens"] == 0
        assert 'glm5:prefix_cache_hits_total{model_name="tiny"}' in client.get("/metrics").text


def test_the_turn_after_a_call_reads_the_turn_before_from_the_cache(running: tuple[str, Engine]) -> None:
    """But for the last page, which is not whole."""
    with httpx.Client(base_url=running[0], timeout=60) as client:
        assert client.post("/flush_cache").status_code == 200
        tools = [tool("dim", lvl={"type": "integer", "minimum": 0, "maximum": 9})]
        asked = {"tools": tools, "chat_template_kwargs": {"enable_thinking": False}, "max_tokens": 60, "seed": 1}
        named = {"type": "function", "function": {"name": "dim"}}
        first = client.post("/v1/chat/completions", json={"messages": HI, "tool_choice": named, **asked}).json()
        message = first["choices"][0]["message"]
        results = [{"role": "tool", "tool_call_id": c["id"], "content": "done"} for c in message["tool_calls"]]
        second = client.post("/v1/chat/completions", json={"messages": [*HI, message, *results], **asked}).json()
        before, cached = first["usage"]["prompt_tokens"], second["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert before > 256
        assert cached >= before // 64 * 64


def test_forms_are_kept(running: tuple[str, Engine]) -> None:
    """A random model can only say what the grammar lets it, so this holds the whole way from the field to the mask."""
    with httpx.Client(base_url=running[0], timeout=60) as client:
        asked = {"messages": HI, "chat_template_kwargs": {"enable_thinking": False}, "max_tokens": 60, "seed": 1}
        told = client.post("/v1/chat/completions", json={**asked, "regex": "[0-9]{3}"}).json()
        assert told["choices"][0]["message"]["content"].isdecimal()
        tools = [tool("dim", lvl={"type": "integer", "minimum": 0, "maximum": 9})]
        named = {"type": "function", "function": {"name": "dim"}}
        told = client.post("/v1/chat/completions", json={**asked, "tools": tools, "tool_choice": named}).json()
        made = told["choices"][0]["message"]["tool_calls"]
        assert [one["function"]["name"] for one in made] == ["dim"]
        assert set(json.loads(made[0]["function"]["arguments"])) <= {"lvl"}
        assert told["choices"][0]["finish_reason"] == "tool_calls"
        refused = client.post("/v1/chat/completions", json={**asked, "regex": "("})
        assert refused.status_code == 400
        assert "regex" in refused.json()["error"]["message"]


def test_a_form_that_cannot_be_had_is_the_clients_fault(running: tuple[str, Engine]) -> None:
    seven = chat_tokenizer().encode("7")
    with httpx.Client(base_url=running[0], timeout=60) as client:
        body = {"prompt": "a", "regex": "7", "stop_token_ids": seven}  # what the form needs ends the answer
        told = client.post("/v1/completions", json=body)
        assert told.status_code == 400
        assert "no id may follow" in told.json()["error"]["message"]


CHAT, RESPONSES, COMPLETIONS = "/v1/chat/completions", "/v1/responses", "/v1/completions"
NO_SCHEMA = {"type": "strin"}


def _format(**given: Any) -> dict[str, Any]:
    return {"type": "json_schema", **given}


def _sampled(*each: dict[str, Any]) -> dict[str, Any]:
    """SGLang's body: of one prompt, or of several with parameters of their own."""
    if len(each) == 1:
        return {"input_ids": [50], "sampling_params": each[0]}
    return {"input_ids": [[50]] * len(each), "sampling_params": list(each)}


@pytest.mark.parametrize(
    ("path", "asked", "field"),
    [
        *((path, {"regex": "("}, "regex") for path in (CHAT, COMPLETIONS, RESPONSES)),
        (CHAT, {"ebnf": "("}, "ebnf"),
        (CHAT, {"json_schema": NO_SCHEMA}, "json_schema"),
        (CHAT, {"json_schema": "{"}, "json_schema"),
        (CHAT, {"structured_outputs": {"json": NO_SCHEMA}}, "structured_outputs.json"),
        (COMPLETIONS, {"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
        (CHAT, {"structured_outputs": {"grammar": "("}}, "structured_outputs.grammar"),
        (CHAT, {"structured_outputs": {"choice": ["a" * 500_001]}}, "structured_outputs.choice"),
        (CHAT, {"response_format": _format(json_schema={"schema": NO_SCHEMA})}, "response_format.json_schema.schema"),
        (COMPLETIONS, {"response_format": _format(json_schema={})}, "response_format.json_schema.schema"),
        (RESPONSES, {"text": {"format": _format(name="x", schema=NO_SCHEMA)}}, "text.format.schema"),
        (RESPONSES, {"text": {"format": _format(name="x")}}, "text.format.schema"),
        ("/generate", _sampled({"regex": "("}), "sampling_params.regex"),
        ("/generate", _sampled({}, {"json_schema": "["}), "sampling_params[1].json_schema"),
        (CHAT, {"tools": [tool("f", x={"type": "string", "maxLength": "5"})], "tool_choice": "required"}, "tools"),
        (RESPONSES, {"regex": "a", "text": {"format": {"type": "json_object"}}}, "regex"),
    ],
)
def test_a_faulty_form_is_named_as_the_client_wrote_it(
    path: str, asked: dict[str, Any], field: str, running: tuple[str, Engine]
) -> None:
    said = {CHAT: {"messages": HI}, RESPONSES: {"input": "hi"}, COMPLETIONS: {"prompt": "a"}}.get(path, {})
    with httpx.Client(base_url=running[0], timeout=60) as client:
        answer = client.post(path, json={**said, **asked})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert field in error["message"]
    assert error["param"] in (field, field.removesuffix(".json_schema.schema").removesuffix(".schema"))
    if len(asked) == 2 and "regex" in asked:
        assert "(regex, text.format)" in error["message"]


def test_stop_string_never_shows(running: tuple[str, Engine]) -> None:
    with httpx.Client(base_url=running[0], timeout=60) as client:
        body = {"prompt": "the answer", "max_tokens": 60, "skip_special_tokens": False, "seed": 1, "ignore_eos": True}
        text = client.post("/v1/completions", json=body).json()["choices"][0]["text"]
        stop = next(text[i : i + 3] for i in range(10, len(text)) if text[i : i + 3].isascii())
        told = client.post("/v1/completions", json={**body, "stop": stop}).json()["choices"][0]
        assert told["text"] == text[: text.index(stop)]
        assert (told["finish_reason"], told["stop_reason"]) == ("stop", stop)
        streamed = events(client.post("/v1/completions", json={**body, "stop": stop, "stream": True}).text)
        assert "".join(chunk["choices"][0]["text"] for chunk in streamed) == told["text"]


def test_going_away_and_abort_give_the_pages_back(running: tuple[str, Engine]) -> None:
    address, engine = running
    with httpx.Client(base_url=address, timeout=60) as client:
        client.post("/flush_cache")
        body = {"input_ids": [50, 51], "sampling_params": {**GREEDY, "max_new_tokens": 500}, "stream": True}
        with client.stream("POST", "/generate", json=body) as answer:
            next(answer.iter_lines())
        for _ in range(500):
            if client.get("/v1/loads").json()["loads"][0]["num_total_reqs"] == 0:
                break
        assert client.post("/flush_cache").status_code == 200
        assert engine.pool.device.free + engine.pool.device.idle == engine.pool.device.count


def test_weights_change_between_steps(model: GLM5, tmp_path: Any) -> None:
    other = tiny_model(1, **SIZES)
    save_model(other, tmp_path)
    engine = Engine(tiny_model(0, **SIZES), EngineConfig(pages=20, context=256), chat_tokenizer())
    body = {"input_ids": [50, 51, 52], "sampling_params": {**GREEDY, "max_new_tokens": 6}}
    with served(app_of(engine)) as address, httpx.Client(base_url=address, timeout=60) as client:
        assert client.get("/health_generate").status_code == 200
        before = client.post("/generate", json=body).json()
        assert client.post("/pause_generation", json={"mode": "retract"}).status_code == 200
        assert client.get("/health_generate").status_code == 200
        sent = {"model_path": str(tmp_path), "weight_version": "2"}
        assert client.post("/update_weights_from_disk", json=sent).json()["success"] is True
        assert client.post("/continue_generation", json={}).status_code == 200
        after = client.post("/generate", json=body).json()
        sums = client.post("/weights_checker", json={"action": "checksum"}).json()["checksums"]
        assert client.post("/update_weights_from_disk", json={"model_path": "/nothing"}).status_code == 400
        assert client.get("/get_weight_version").json() == {"weight_version": "2"}
    assert before["output_ids"] == list(generate(model, [50, 51, 52], max_new_tokens=6, stop_ids=()))
    assert after["output_ids"] == list(generate(other, [50, 51, 52], max_new_tokens=6, stop_ids=()))
    assert (before["meta_info"]["weight_version"], after["meta_info"]["weight_version"]) == ("0", "2")
    mtp = f"model.layers.{other.config.num_hidden_layers}."
    assert any(name.startswith(mtp) for name in sums)


def test_memory_is_released_for_a_trainer_and_weights_are_pushed(model: GLM5) -> None:
    """The order of a trainer that shares the device: pause, release, resume weights, push them, resume the rest."""
    engine = Engine(tiny_model(0, **SIZES), EngineConfig(pages=20, context=256, drafts=1), chat_tokenizer())
    body = {"input_ids": [50, 51, 52], "sampling_params": {**GREEDY, "max_new_tokens": 6}}
    weights = save({name: tensor.contiguous() for name, tensor in disk_tensors(model)})
    sent = {"serialized_named_tensors": [base64.b64encode(weights).decode()], "weight_version": "2"}
    with served(app_of(engine)) as address, httpx.Client(base_url=address, timeout=60) as client:
        before = client.post("/generate", json=body).json()
        for path in ("/pause_generation", "/flush_cache", "/release_memory_occupation"):
            assert client.post(path, json={} if "flush" not in path else None).status_code == 200
        refused = client.post("/generate", json=body)
        assert refused.status_code == 503
        assert "resume_memory_occupation" in refused.json()["error"]["message"]
        assert client.get("/health_generate").status_code == 200
        assert client.post("/update_weights_from_tensor", json=sent).status_code == 400
        assert client.post("/resume_memory_occupation", json={"tags": ["weights"]}).status_code == 200
        assert client.post("/update_weights_from_tensor", json=sent).json()["success"] is True
        assert client.post("/resume_memory_occupation", json={"tags": ["kv_cache", "cuda_graph"]}).status_code == 200
        assert client.post("/continue_generation", json={}).status_code == 200
        after = client.post("/generate", json=body).json()
    assert after["output_ids"] == before["output_ids"]
    assert after["meta_info"]["weight_version"] == "2"
