"""An engine behind HTTP: what it says through the network is what it says in the process, field by field."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from glm5.serve.client import Unavailable, WeightUpdate
from glm5.serve.fold import Folded
from glm5.serve.gateway.app import GatewayOptions, create_gateway
from glm5.serve.gateway.pool import EnginePool
from glm5.serve.gateway.remote import HttpEngine, body_of, deltas_of
from glm5.serve.gateway.router import Router
from glm5.serve.request import Constraint, Request, SamplingParams
from glm5.utils.errors import UserError
from support.scripted import Scripted, chat_tokenizer
from support.serving import HI, served

T = chat_tokenizer()


@pytest.fixture(scope="module")
def live() -> Iterator[tuple[str, Scripted]]:
    backend = Scripted(script=lambda request, index: "hm</think>the answer is ping<|user|>", sizes=(2, 3), cached=1)
    with served(backend) as address:
        yield address, backend


def engine_at(address: str) -> HttpEngine:
    return HttpEngine(address, T, "glm5-test", 4096)


async def folded(backend: Any, request: Request) -> Folded:
    made = Folded()
    stream = await backend.generate(request)
    async for delta in stream:
        made.add(delta)
    await stream.aclose()
    return made


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(logprobs=0),
        SamplingParams(logprobs=2, top_p=0.9, kept_set=True, temperature=0.7, seed=3),
        SamplingParams(logprobs=0, max_new_tokens=3, min_new_tokens=1, frequency_penalty=0.5, top_k=5),
        SamplingParams(logprobs=0, stop=("answer",)),
        SamplingParams(logprobs=0, stop=("answer",), no_stop_trim=True),
        SamplingParams(stop_token_ids=(T.end_think_id,), ignore_eos=True, logit_bias={5: 1.0}, repetition_penalty=1.1),
    ],
)
def test_the_same_as_in_the_process(live: tuple[str, Scripted], params: SamplingParams) -> None:
    async def go() -> None:
        address, backend = live
        engine = engine_at(address)
        request = Request([5, 6, 7], params)
        there = await folded(engine, replace(request, rid="there"))
        asked = backend.seen[-1].params
        here = await folded(backend, request)
        for name in ("ids", "info", "finish", "trim", "prompt_tokens", "cached_tokens", "weight_version", "versions"):
            assert getattr(there, name) == getattr(here, name), name
        fields = {name: getattr(params, name) for name in SamplingParams.__dataclass_fields__}
        same = {**fields, "no_stop_trim": True, "top_k": params.top_k or -1}
        assert {name: getattr(asked, name) for name in fields} == same
        await engine.stop()

    asyncio.run(go())


def test_a_session_through_gateway_pool_and_network(live: tuple[str, Scripted]) -> None:
    address, _ = live
    pool = EnginePool({"a": engine_at(address), "b": engine_at("http://127.0.0.1:9")}, Router("1"), beat_s=5.0)
    with served(create_gateway(pool, GatewayOptions(), start=pool.start, stop=pool.stop)) as gateway:
        history: list[Any] = list(HI)
        for turn in range(2):
            answer = httpx.post(f"{gateway}/sessions/s/v1/chat/completions", json={"messages": history}, timeout=30)
            assert answer.status_code == 200, answer.text
            history += [answer.json()["choices"][0]["message"], {"role": "user", "content": str(turn)}]
        (trajectory,) = httpx.get(f"{gateway}/sessions/s").json()["trajectories"]
        assert sum(trajectory["drawn"]) == 2 * len(T.encode("hm</think>the answer is ping<|user|>", allow_special=True))
        assert {v for v, mine in zip(trajectory["versions"], trajectory["drawn"], strict=True) if mine} == {"1"}


def test_control_and_what_is_not_there(live: tuple[str, Scripted]) -> None:
    async def go() -> None:
        address, backend = live
        engine, dead = engine_at(address), engine_at("http://127.0.0.1:9")
        assert await engine.probe(5.0)
        assert engine.weight_version == "1"
        assert not await dead.probe(1.0)
        with pytest.raises(Unavailable):
            await folded(dead, Request([5]))
        await engine.update_weights(WeightUpdate("disk", path="x", weight_version="9"))
        assert (engine.weight_version, backend.weight_version) == ("9", "9")
        with pytest.raises(UserError, match="no checkpoint"):
            await engine.update_weights(WeightUpdate("disk", path="missing"))
        backend.weight_version = "1"
        await engine.pause("keep")
        assert engine.paused
        assert backend.pause_mode == "keep"
        await engine.resume()
        assert await engine.flush()
        assert "model.embed_tokens.weight" in await engine.checksum()
        for call in (engine.join_group, engine.update_weights):
            with pytest.raises(UserError):
                await call(WeightUpdate("tensor"))  # type: ignore[arg-type]
        with pytest.raises(UserError, match="refuses"):
            await folded(engine, Request([10**6]))
        await engine.stop()
        await dead.stop()

    asyncio.run(go())


@pytest.mark.parametrize("told", ['{"version": "1"}', "[]", "fine"])
def test_an_engine_that_does_not_tell_its_version_is_none(told: str) -> None:
    async def go() -> None:
        engine = engine_at("http://x")
        answers = httpx.MockTransport(lambda request: httpx.Response(200, text=told))
        engine._http = httpx.AsyncClient(transport=answers, base_url="http://x")
        assert not await engine.probe(5.0)
        with pytest.raises(Unavailable, match="does not tell the version"):
            await engine.update_weights(WeightUpdate("disk", path="x"))

    asyncio.run(go())


def test_versions_and_what_an_engine_must_tell() -> None:
    engine = HttpEngine("http://x", T, "m", 100)
    meta = {
        "output_token_logprobs": [[-1.0, 5, None], [-2.0, 6, None], [-3.0, 7, None]],
        "weight_version": "1", "weight_versions": ["1", "1", "2"], "finish_reason": {"type": "length", "length": 3},
    }  # fmt: skip
    request = Request([1], SamplingParams(logprobs=0))
    first, last = deltas_of(request, {"meta_info": meta}, engine)
    assert (first.ids, first.version, first.finish) == ((5, 6), "1", None)
    assert (last.ids, last.version, last.weight_version) == ((7,), "2", "1")
    assert last.finish is not None
    with pytest.raises(Unavailable, match="truncation kept"):
        deltas_of(Request([1], SamplingParams(logprobs=0, kept_set=True)), {"meta_info": meta}, engine)
    with pytest.raises(Unavailable, match="2 ids"):
        deltas_of(request, {"output_ids": [5, 6], "meta_info": {**meta, "output_token_logprobs": []}}, engine)
    pairs = meta["output_token_logprobs"]
    cut = {"top_p_token_ids": [5, 9, 6, 7], "top_p_token_offsets": [0, 2, 3, 4], "top_p_logprobs": [0.0] * 3}
    kept = Request([1], SamplingParams(logprobs=0, kept_set=True))
    told = [one.kept for delta in deltas_of(kept, {"meta_info": {**meta, **cut}}, engine) for one in delta.info]
    assert told == [(5, 9), (6,), (7,)]
    for asked, wrong, said in (
        (request, {"output_token_logprobs": [*pairs[:2], [-3.0, T.vocab_size, None]]}, "which is no id"),
        (request, {"output_token_logprobs": [[-1.0, -1, None], *pairs[1:]]}, "drew -1, which is no id"),
        (request, {"output_token_logprobs": [[None, 5, None], *pairs[1:]]}, "None is no log-probability"),
        (request, {"output_token_logprobs": [[math.nan, 5, None], *pairs[1:]]}, "nan is no log-probability"),
        (request, {"output_token_logprobs": [[-math.inf, 5, None], *pairs[1:]]}, "-inf is no log-probability"),
        (request, {"weight_versions": ["1", "2"]}, "2 versions of 3 ids"),
        (request, {"weight_versions": ["1", "1", "2", "2"]}, "4 versions of 3 ids"),
        (request, {"output_top_logprobs": [[], []]}, "2 lists of the likeliest ids of 3 ids"),
        (kept, {**cut, "top_p_token_offsets": [0, 2, 3], "top_p_logprobs": [0.0] * 2}, "2 sets of kept ids of 3 ids"),
        (kept, {**cut, "top_p_logprobs": [0.0] * 2}, "2 probabilities of 3 kept sets"),
        (kept, {**cut, "top_p_token_ids": [8, 9, 6, 7]}, "drew 5, which is not among"),
    ):
        with pytest.raises(Unavailable, match=said):
            deltas_of(asked, {"meta_info": {**meta, **wrong}}, engine)
    for params in (SamplingParams(n=2), SamplingParams(constraint=Constraint("tools", "[]"))):
        with pytest.raises(UserError):
            body_of(Request([1], params))
    assert (
        body_of(Request([1], SamplingParams(constraint=Constraint("regex", "a+"))))["sampling_params"]["regex"] == "a+"
    )
