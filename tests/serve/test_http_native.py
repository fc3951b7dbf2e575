"""SGLang's `/generate` and control plane, called field for field as slime's rollouts call them."""

from __future__ import annotations

import asyncio
import base64
from itertools import pairwise
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient

from glm5.serve.client import WeightGroup, WeightUpdate
from glm5.serve.http.app import create_app
from glm5.serve.http.metrics import Pace
from support.scripted import Scripted, chat_tokenizer
from support.serving import HI, events

# As slime sends it, nulls and fields of other engines included.
SAMPLING = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "max_new_tokens": 16,
    "stop": None,
    "stop_token_ids": None,
    "skip_special_tokens": False,
    "no_stop_trim": True,
    "spaces_between_special_tokens": False,
    "sampling_seed": 3,
}
RAW = "hm</think>the answer<|user|>"
IDS = chat_tokenizer().encode(RAW, allow_special=True)


def client_of(**options: Any) -> tuple[TestClient, Scripted]:
    backend = Scripted(**{"script": lambda request, index: RAW, "sizes": (2, 1), **options})
    return TestClient(create_app(backend)), backend


def generate(client: TestClient, **body: Any) -> Any:
    answer = client.post("/generate", json={"input_ids": [50, 51], "sampling_params": SAMPLING, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


# ------------------------------------------------------------------------------------------------------ generate
def test_as_a_rollout_reads_it() -> None:
    client, backend = client_of(cached=1)
    told = generate(client, return_logprob=True)
    meta = told["meta_info"]
    assert [entry[1] for entry in meta["output_token_logprobs"]] == IDS
    assert [entry[0] for entry in meta["output_token_logprobs"]] == [-id / 1000 for id in IDS]
    assert all(len(entry) == 3 and entry[2] is None for entry in meta["output_token_logprobs"])
    assert told["text"] == RAW
    assert told["output_ids"] == IDS
    assert meta["finish_reason"] == {"type": "stop", "matched": chat_tokenizer().user_id}
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (2, len(IDS), 1)
    assert meta["weight_version"] == "1"
    assert meta["spec_verify_ct"] > 0
    assert meta["spec_accept_token_num"] <= meta["spec_draft_token_num"]
    params = backend.seen[0].params
    assert (params.seed, params.top_k, params.no_stop_trim, params.max_new_tokens) == (3, -1, True, 16)


@pytest.mark.parametrize("sizes", [(1,), (4,), (5, 1)])
def test_one_logprob_an_id_under_speculation(sizes: tuple[int, ...]) -> None:
    client, _ = client_of(script=lambda request, index: list(range(60, 90)), sizes=sizes)
    meta = generate(client, return_logprob=True, top_logprobs_num=2)["meta_info"]
    assert [entry[1] for entry in meta["output_token_logprobs"]] == list(range(60, 76))
    assert [len(entry) for entry in meta["output_top_logprobs"]] == [2] * 16
    assert meta["finish_reason"] == {"type": "length", "length": 16}


def test_stop_ids_are_among_the_ids_and_only_shown_if_wanted() -> None:
    client, _ = client_of(script=lambda request, index: list(range(60, 90)))
    sampling = {"stop_token_ids": [63]}
    told = generate(client, sampling_params=sampling)
    assert told["output_ids"] == [60, 61, 62, 63]
    assert told["text"] == chat_tokenizer().decode([60, 61, 62])
    assert told["meta_info"]["finish_reason"] == {"type": "stop", "matched": 63}
    told = generate(client, sampling_params={**sampling, "no_stop_trim": True})
    assert told["text"] == chat_tokenizer().decode([60, 61, 62, 63])


def test_answer_that_ends_inside_a_character() -> None:
    client, _ = client_of(script=lambda request, index: chat_tokenizer().encode("a数".encode()[:3]))
    assert generate(client)["text"] == "a\ufffd"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input_ids": [5], "sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
        ({"input_ids": [5], "sampling_params": {"max_token": 1}}, "sampling_params.max_token"),
        ({"input_ids": [5, "6"]}, "input_ids.1"),
        ({"text": 5}, "text"),
    ],
)
def test_a_fault_is_named_as_the_client_wrote_it(body: dict[str, Any], param: str) -> None:
    """And not by the classes that say which forms a field may have."""
    answer = client_of()[0].post("/generate", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("script", [[60, 61], [chat_tokenizer().user_id]])  # goes on, or would end there
def test_scoring_a_prompt_answers_nothing(script: list[int]) -> None:
    """As distillation on a student's own answers asks a teacher."""
    client, backend = client_of(script=lambda request, index: script)
    asked = {"return_logprob": True, "logprob_start_len": 0, "sampling_params": {"max_new_tokens": 0, "temperature": 0}}
    told = generate(client, **asked)
    meta = told["meta_info"]
    assert (told["text"], told["output_ids"], meta["output_token_logprobs"]) == ("", [], [])
    assert [entry[:2] for entry in meta["input_token_logprobs"]] == [[None, 50], [-0.051, 51]]
    assert (meta["completion_tokens"], meta["finish_reason"]) == (0, {"type": "length", "length": 0})
    assert backend.seen[0].params.max_new_tokens == 1


def test_kept_sets_as_ragged_lists() -> None:
    client, _ = client_of()
    sampling = {**SAMPLING, "top_p": 0.9, "custom_params": {"return_top_p_token_ids": True}}
    meta = generate(client, sampling_params=sampling, return_logprob=True)["meta_info"]
    assert meta["top_p_token_ids"] == [i for id in IDS for i in (id, 0)]
    assert meta["top_p_token_offsets"] == list(range(0, 2 * len(IDS) + 1, 2))


def test_prompt_logprobs_from_a_position() -> None:
    client, _ = client_of()
    meta = generate(client, input_ids=[50, 51, 52], return_logprob=True, logprob_start_len=1)["meta_info"]
    assert meta["input_token_logprobs"] == [[-0.051, 51, None], [-0.052, 52, None]]
    meta = generate(client, return_logprob=True, logprob_start_len=0, return_text_in_logprobs=True)["meta_info"]
    assert meta["input_token_logprobs"][0][0] is None
    assert meta["output_token_logprobs"][0][2] == chat_tokenizer().decode(IDS[:1])


def test_stream_is_cumulative() -> None:
    client, _ = client_of()
    answer = client.post(
        "/generate", json={"input_ids": [50], "sampling_params": SAMPLING, "stream": True, "return_logprob": True}
    )
    told = events(answer.text)
    assert answer.text.endswith("data: [DONE]\n\n")
    for before, after in pairwise(told):
        assert after["text"].startswith(before["text"])
        assert (
            after["meta_info"]["output_token_logprobs"][: len(before["output_ids"])]
            == (before["meta_info"]["output_token_logprobs"])
        )
        assert before["meta_info"]["finish_reason"] is None
    assert told[-1]["output_ids"] == IDS
    assert told[-1]["meta_info"]["finish_reason"]["type"] == "stop"


def test_batches_and_several_answers() -> None:
    client, backend = client_of(script=lambda request, index: [request.input_ids[0] + 1, 60 + index])
    told = generate(client, input_ids=[[50], [52]], rid="r")
    assert [one["output_ids"] for one in told] == [[51, 60], [53, 60]]
    assert [one["meta_info"]["id"] for one in told] == ["r_0", "r_1"]
    told = generate(client, sampling_params={**SAMPLING, "n": 2})
    assert [one["output_ids"] for one in told] == [[51, 60], [51, 61]]
    told = generate(client, input_ids=[[50], [52]], sampling_params=[{"n": 2}, {"max_new_tokens": 1}])
    assert [one["output_ids"] for one in told] == [[51, 60], [51, 61], [53]]
    text = client.post(
        "/generate",
        json={"input_ids": [[50], [52]], "sampling_params": [{"n": 2}, {"max_new_tokens": 1}], "stream": True},
    ).text
    last = {one["index"]: one["output_ids"] for one in events(text)}
    assert last == {0: [51, 60], 1: [51, 61], 2: [53]}
    single = client.post("/generate", json={"text": ["a"], "rid": ["x"]}).json()
    assert single[0]["meta_info"]["id"] == "x"
    assert not backend.alive


@pytest.mark.parametrize(
    "body",
    [
        {"input_ids": [50], "text": "a"},
        {"input_ids": None},
        {"input_ids": []},
        {"input_ids": [[]]},
        {"input_ids": [[50], 51]},
        {"input_ids": [True]},
        {"input_ids": [1.5]},
        {"input_ids": [50], "sampling_params": {"max_new_tokens": -1}},
        {"input_ids": [50], "sampling_params": {"max_new_tokens": 5000}},
        {"input_ids": [50], "sampling_params": {"seed": 1, "sampling_seed": 2}},
        {"input_ids": [50], "sampling_params": [{}, {}]},
        {"input_ids": [50], "return_hidden_states": True},
        {"input_ids": [50], "image_data": ["x"]},
        {"input_ids": [[50], [51]], "rid": ["a"]},
        {"input_ids": [[50], [51]], "rid": ["a", "a"]},
        {"input_ids": [50], "top_logprobs_num": 1000},
        {"input_ids": [50], "sampling_params": {"regex": "a", "ebnf": "b"}},
    ],
)
def test_wrong_requests_are_400(body: dict[str, Any]) -> None:
    client, backend = client_of()
    answer = client.post("/generate", json=body)
    assert answer.status_code == 400, answer.text
    assert not backend.alive


# --------------------------------------------------------------------------------------------------------- control
def test_weights_from_disk_tensor_and_group() -> None:
    client, backend = client_of()
    assert client.get("/get_weight_version").json() == {"weight_version": "1"}
    told = client.post("/update_weights_from_disk", json={"model_path": "checkpoint", "weight_version": "2"}).json()
    assert told["success"] is True
    assert backend.calls[-1] == WeightUpdate("disk", path="checkpoint", weight_version="2")
    assert client.get("/get_weight_version").json() == {"weight_version": "2"}
    data = b"safetensors"
    body = {
        "serialized_named_tensors": [base64.b64encode(data).decode()],
        "load_format": None,
        "flush_cache": False,
        "weight_version": "3",
    }
    assert client.post("/update_weights_from_tensor", json=body).json()["success"] is True
    assert backend.calls[-1] == WeightUpdate("tensor", tensors=(data,), flush_cache=False, weight_version="3")
    group: dict[str, Any] = {"master_address": "127.0.0.1", "master_port": 29500, "rank_offset": 1, "world_size": 2}
    assert client.post("/init_weights_update_group", json={**group, "group_name": "g", "backend": "gloo"}).json()[
        "success"
    ]
    assert backend.calls[-1] == WeightGroup("127.0.0.1", 29500, 1, 2, "g", "gloo")
    for rank in (0, 2):  # the sender's, and one that the group does not have
        assert client.post("/init_weights_update_group", json={**group, "rank_offset": rank}).status_code == 400
    body = {
        "names": ["model.norm.weight", "model.layers.78.eh_proj.weight"],
        "dtypes": ["bfloat16", "bfloat16"],
        "shapes": [[8], [8, 16]],
        "group_name": "g",
        "flush_cache": True,
    }
    assert client.post("/update_weights_from_distributed", json=body).json()["success"] is True
    assert backend.calls[-1].names == tuple(body["names"])
    assert backend.calls[-1].shapes == ((8,), (8, 16))
    assert client.post("/destroy_weights_update_group", json={"group_name": "g"}).json()["success"] is True
    sums = client.post("/weights_checker", json={"action": "checksum"}).json()
    assert "model.layers.78.eh_proj.weight" in sums["checksums"]
    assert sums["weight_version"] == "3"


def test_update_that_fails_says_so_and_keeps_the_version() -> None:
    client, _ = client_of()
    answer = client.post("/update_weights_from_disk", json={"model_path": "missing", "weight_version": "9"})
    assert answer.status_code == 400
    assert answer.json()["success"] is False
    assert "missing is no checkpoint" in answer.json()["message"]
    assert client.get("/get_weight_version").json() == {"weight_version": "1"}
    assert client.post("/update_weights_from_tensor", json={"serialized_named_tensors": ["*"]}).status_code == 400
    body = {"names": ["a"], "dtypes": [], "shapes": [[1]]}
    assert client.post("/update_weights_from_distributed", json=body).status_code == 400


def test_update_can_end_all_requests_first() -> None:
    client, backend = client_of()
    client.post("/update_weights_from_disk", json={"model_path": "c", "abort_all_requests": True})
    assert backend.calls[0] == ("abort", None)


def test_answers_carry_the_version_that_made_them() -> None:
    client, _ = client_of()
    assert generate(client)["meta_info"]["weight_version"] == "1"
    client.post("/update_weights_from_disk", json={"model_path": "c", "weight_version": "step-2"})
    assert generate(client)["meta_info"]["weight_version"] == "step-2"


@pytest.mark.parametrize(
    ("path", "body", "mode"),
    [
        ("/pause_generation", {}, "abort"),
        ("/pause_generation", {"mode": "in_place"}, "keep"),
        ("/pause_generation", {"mode": "retract"}, "retract"),
        ("/pause", None, "abort"),
        ("/pause?mode=keep", None, "keep"),
        ("/pause?mode=wait", None, "wait"),
        ("/pause", {"mode": "keep"}, "keep"),
    ],
)
def test_pause_and_go_on(path: str, body: Any, mode: str) -> None:
    client, backend = client_of()
    assert client.post(path, json=body).status_code == 200
    assert backend.pause_mode == mode
    assert client.get("/is_paused").json() == {"is_paused": True}
    assert client.post("/continue_generation", json={}).status_code == 200
    assert not backend.paused
    assert client.post("/pause_generation", json={"mode": "sideways"}).status_code == 400


def test_memory_tags() -> None:
    client, backend = client_of()
    assert client.post("/release_memory_occupation", json={}).status_code == 200
    assert backend.calls[-1] == ("release", ("weights", "kv_cache", "cuda_graph"))
    client.post("/resume_memory_occupation", json={"tags": ["weights"]})
    assert backend.calls[-1] == ("resume", ("weights",))
    client.post("/resume_memory_occupation", json={"tags": None})
    assert backend.calls[-1] == ("resume", ("weights", "kv_cache", "cuda_graph"))
    assert client.post("/release_memory_occupation", json={"tags": ["disk"]}).status_code == 400


def test_health_says_whether_a_step_ran() -> None:
    gate = asyncio.Event()
    client, backend = client_of(gate=gate)
    assert client.get("/health").status_code == 200
    assert client.get("/health_generate").status_code == 503
    gate.set()
    assert client.get("/health_generate").status_code == 200
    backend.failure = "the engine failed: RuntimeError: boom"
    for path in ("/health", "/health_generate", "/ping"):
        answer = client.get(path)
        assert answer.status_code == 503
        assert "boom" in answer.json()["error"]["message"]
    assert client.post("/generate", json={"input_ids": [50]}).status_code == 503


def test_flush_is_refused_while_requests_run() -> None:
    client, backend = client_of()
    assert client.get("/flush_cache").status_code == 200
    assert client.post("/flush_cache", json={}).status_code == 200
    backend.alive.add("x")
    assert client.get("/flush_cache").status_code == 400


def test_what_the_server_says_of_itself() -> None:
    client, backend = client_of()
    for path in ("/server_info", "/get_server_info"):
        told = client.get(path).json()
        assert (told["context_length"], told["weight_version"], told["page_size"]) == (4096, "1", 64)
        assert (told["status"], told["tp_size"], told["disaggregation_mode"]) == ("ready", 1, "null")
        state = told["internal_states"][0]
        assert (state["num_total_reqs"], state["last_gen_throughput"]) == (0, 0)
    assert client.get("/get_model_info").json()["is_generation"] is True
    backend.alive.add("x")
    load = client.get("/v1/loads?include=core,disagg,queues").json()["loads"][0]
    assert load["num_total_reqs"] == load["num_running_reqs"] == 1


def test_settings_have_their_names_in_sglang_too() -> None:
    one = {"chunk": 256, "max_running": 8, "pages": 10, "drafts": 3, "overlap": False, "accept_length": 2.5, "tp": 2}
    backend = Scripted()
    backend.info = lambda: _now(one)  # type: ignore[method-assign]
    told = TestClient(create_app(backend)).get("/server_info").json()
    assert {**told, **one} == told
    expected = {
        "chunked_prefill_size": 256,
        "max_running_requests": 8,
        "max_total_num_tokens": 640,
        "max_req_input_len": 4095,
        "speculative_num_steps": 3,
        "speculative_num_draft_tokens": 4,
        "disable_overlap_schedule": True,
        "tp_size": 2,
        "dp_size": 1,
    }
    assert {name: told[name] for name in expected} == expected
    state = told["internal_states"][0]
    assert (state["avg_spec_accept_length"], state["effective_max_running_requests_per_dp"]) == (2.5, 8)
    backend.info = lambda: _now({"prefill": [{**one, "name": "p"}], "decode": [{**one, "name": "d"}]})  # type: ignore[method-assign]
    told = TestClient(create_app(backend)).get("/server_info").json()
    assert [(w["name"], w["disaggregation_mode"]) for w in told["prefill"] + told["decode"]] == [
        ("p", "prefill"),
        ("d", "decode"),
    ]
    assert (told["name"], told["chunked_prefill_size"]) == ("d", 256)
    assert told["internal_states"][0]["avg_spec_accept_length"] == 2.5


async def _now(value: Any) -> Any:
    return value


def test_the_pace_is_of_the_last_second_of_work() -> None:
    pace = Pace()
    for at in (0.0, 0.5, 1.0):
        pace.take(10, at)
    assert pace.tokens_per_second == 20
    pace.take(10, 60.0)  # idle time does not count
    assert pace.tokens_per_second == 20
    for at in (60.25, 60.5, 60.75, 61.0):
        pace.take(1, at)
    assert pace.tokens_per_second == 4


async def abort_by_name() -> None:
    gate = asyncio.Event()
    backend = Scripted(script=lambda request, index: RAW, gate=gate)
    transport = httpx.ASGITransport(create_app(backend))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:

        async def ask(**body: Any) -> Any:
            return (await client.post("/generate", json=body)).json()

        async def started(count: int) -> None:
            while len(backend.alive) < count:
                await asyncio.sleep(0.005)

        one = asyncio.create_task(ask(input_ids=[50], rid="one"))
        two = asyncio.create_task(ask(input_ids=[[50], [51]], rid="two"))
        await started(3)
        taken = await client.post("/generate", json={"input_ids": [50], "rid": "one"})
        assert taken.status_code == 400
        assert (await client.post("/abort_request", json={"rid": "nobody"})).status_code == 200
        await client.post("/abort_request", json={"rid": "two"})
        assert [part["meta_info"]["finish_reason"]["type"] for part in await two] == ["abort", "abort"]
        assert not one.done()
        three = asyncio.create_task(client.post("/v1/chat/completions", json={"messages": HI}))
        await started(2)
        await client.post("/abort_request", json={"abort_all": True})
        assert (await one)["meta_info"]["finish_reason"]["type"] == "abort"
        assert (await three).json()["choices"][0]["finish_reason"] == "abort"
        assert (await client.post("/abort_request", json={})).status_code == 400
    assert not backend.alive


def test_abort_by_name_of_a_batch_and_all() -> None:
    asyncio.run(abort_by_name())
