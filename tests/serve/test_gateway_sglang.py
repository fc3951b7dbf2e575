"""An engine that speaks SGLang's native interface and nothing else: it is asked with fields that SGLang has, of their
types, and what it cannot tell is not made up."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from glm5.serve.client import Unavailable, WeightGroup, WeightUpdate
from glm5.serve.gateway.app import create_gateway
from glm5.serve.gateway.pool import EnginePool
from glm5.serve.gateway.remote import HttpEngine
from glm5.serve.gateway.router import Router
from glm5.serve.request import Request, SamplingParams
from support.scripted import chat_tokenizer
from support.serving import HI, served

T = chat_tokenizer()
NUMBER = (int, float)
# Fields of its requests that may come, with their types. Of `sampling_params` an unknown one is an error there; of a
# request it is left out: `return_weight_versions` is ours, and an engine that does not know it tells one version.
SAMPLING: dict[str, Any] = {
    "max_new_tokens": (int, type(None)), "min_new_tokens": int, "temperature": NUMBER, "top_p": NUMBER, "top_k": int,
    "min_p": NUMBER, "frequency_penalty": NUMBER, "presence_penalty": NUMBER, "repetition_penalty": NUMBER,
    "sampling_seed": int, "stop": (str, list), "stop_token_ids": list, "ignore_eos": bool, "logit_bias": dict,
    "skip_special_tokens": bool, "no_stop_trim": bool, "regex": str, "ebnf": str, "json_schema": str,
    "custom_params": dict,
}  # fmt: skip
FIELDS: dict[str, dict[str, Any]] = {
    "/generate": {
        "rid": str, "input_ids": list, "sampling_params": dict, "return_logprob": bool, "top_logprobs_num": int,
        "priority": int, "stream": bool, "return_weight_versions": bool,
    },
    "/abort_request": {"rid": str, "abort_all": bool},
    "/pause_generation": {"mode": str},
    "/continue_generation": {},
    "/flush_cache": {},
    "/update_weights_from_disk": {"model_path": str, "flush_cache": bool, "weight_version": (str, type(None))},
    "/update_weights_from_distributed": {
        "names": list, "dtypes": list, "shapes": list, "group_name": str, "flush_cache": bool,
        "weight_version": (str, type(None)),
    },
    "/init_weights_update_group": {
        "master_address": str, "master_port": int, "rank_offset": int, "world_size": int, "group_name": str,
        "backend": str,
    },
    "/destroy_weights_update_group": {"group_name": str},
    "/weights_checker": {"action": str},
    "/release_memory_occupation": {"tags": list},
    "/resume_memory_occupation": {"tags": list},
}  # fmt: skip
IDS = T.encode("hm</think>the answer<|user|>", allow_special=True)


class SGLang:
    """The stand-in. `seen`: paths and bodies. `wrong`: what does not belong there."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, dict[str, Any]]] = []
        self.wrong: list[str] = []
        self.version = "7"

    def app(self) -> FastAPI:
        told = [Route(path, self.post, methods=["POST"]) for path in FIELDS]
        return FastAPI(
            routes=[
                *told,
                *(Route(path, self.get) for path in ("/health_generate", "/get_weight_version", "/server_info")),
            ]
        )

    def check(self, where: str, given: dict[str, Any], fields: dict[str, Any]) -> None:
        for name, value in given.items():
            if name not in fields:
                self.wrong.append(f"{where} has no {name}")
            elif not isinstance(value, fields[name]) or (isinstance(value, bool) and fields[name] is int):
                self.wrong.append(f"{where}: {name}={value!r}")

    async def get(self, request: HttpRequest) -> Response:
        if request.url.path == "/health_generate":
            return Response(status_code=200)  # no body
        return JSONResponse({"weight_version": self.version})

    async def post(self, request: HttpRequest) -> Response:
        path, body = request.url.path, await request.json()
        self.seen.append((path, body))
        self.check(path, body, FIELDS[path])
        if path != "/generate":
            self.version = body.get("weight_version") or self.version
            return JSONResponse({"success": True, "message": "", "num_paused_requests": 0, "checksums": {}})
        self.check("sampling_params", body["sampling_params"], SAMPLING)
        pairs = [[-id / 1000, id, None] for id in IDS]
        meta = {
            "id": body["rid"], "finish_reason": {"type": "stop", "matched": IDS[-1]}, "weight_version": self.version,
            "prompt_tokens": len(body["input_ids"]), "completion_tokens": len(IDS), "cached_tokens": 2,
            "e2e_latency": 0.1, "output_token_logprobs": pairs,
        }  # fmt: skip
        return JSONResponse({"text": "", "output_ids": IDS, "meta_info": meta})


@pytest.fixture
def live() -> Iterator[tuple[SGLang, HttpEngine]]:
    of = SGLang()
    with served(of.app()) as address:
        yield of, HttpEngine(address, T, "m", 4096)
    assert not of.wrong


def test_a_session(live: tuple[SGLang, HttpEngine]) -> None:
    of, engine = live
    pool = EnginePool({"a": engine}, Router("7"))
    with TestClient(create_gateway(pool, start=pool.start, stop=pool.stop)) as client:
        told: list[Any] = list(HI)
        for _ in range(2):
            body = {"messages": told, "seed": 5, "stop": ["x"], "frequency_penalty": 0.5, "max_tokens": 50, "min_p": 0}
            answer = client.post("/sessions/s/v1/chat/completions", json=body)
            assert answer.status_code == 200, answer.text
            told = [*told, answer.json()["choices"][0]["message"], *HI]
        (trajectory,) = client.get("/sessions/s").json()["trajectories"]
        cut = client.post("/sessions/c/v1/chat/completions", json={"messages": HI, "top_p": 0.9})
        client.portal.call(engine.stop)  # type: ignore[union-attr]
    first, second = (body for path, body in of.seen[:2])
    assert second["input_ids"][: len(first["input_ids"]) + len(IDS)] == [*first["input_ids"], *IDS]
    drawn = [i for i, mine in enumerate(trajectory["drawn"]) if mine]
    assert [trajectory["ids"][i] for i in drawn] == [*IDS, *IDS]
    assert [trajectory["logprobs"][i] for i in drawn] == [-id / 1000 for id in [*IDS, *IDS]]
    assert {trajectory["versions"][i] for i in drawn} == {"7"}
    assert cut.status_code == 503, "it does not tell what truncation kept: such draws cannot be learned from"


def test_what_it_is_asked(live: tuple[SGLang, HttpEngine]) -> None:
    of, engine = live
    params = [
        SamplingParams(logprobs=3, max_new_tokens=9, min_new_tokens=2, top_k=5, temperature=0.5),
        SamplingParams(logprobs=0, stop_token_ids=(7,), ignore_eos=True, logit_bias={5: 1.0}, repetition_penalty=1.1),
    ]

    async def go() -> None:
        for one in params:
            async for _ in await engine.generate(Request([5, 6], one)):
                pass
        with pytest.raises(Unavailable, match="truncation kept"):
            async for _ in await engine.generate(Request([5], SamplingParams(logprobs=0, top_p=0.5, kept_set=True))):
                pass
        assert await engine.probe(60)
        assert engine.weight_version == "7"
        await engine.update_weights(WeightUpdate("disk", path="/weights", weight_version="8"))
        assert engine.weight_version == "8"
        await engine.join_group(WeightGroup("127.0.0.1", 29500, 1, 2, "g", "gloo"))
        sent = WeightUpdate(
            "distributed", names=("a",), dtypes=("float32",), shapes=((2, 3),), group_name="g", weight_version="9"
        )
        await engine.update_weights(sent)
        await engine.leave_group("g")
        assert engine.weight_version == "9"
        for call in (engine.pause("retract"), engine.resume(), engine.flush(), engine.abort("r"), engine.abort(None)):
            await call
        await engine.release_memory(("weights",))
        await engine.resume_memory(("weights",))
        assert await engine.checksum() == {}
        await engine.stop()

    asyncio.run(go())
    asked = {path: body for path, body in of.seen if path != "/generate"}
    assert asked.keys() == FIELDS.keys() - {"/generate"}, "all that there is was asked"
    assert asked["/init_weights_update_group"]["rank_offset"] == 1
    assert asked["/update_weights_from_distributed"]["shapes"] == [[2, 3]]
