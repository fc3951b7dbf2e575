"""Engines of an asynchronous run: agents talk while weights are pushed, and every token's version is the truth."""

from __future__ import annotations

import copy
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from glm5.model.glm5 import GLM5
from glm5.model.weights import assign_tensors, disk_tensors
from glm5.posttrain import engines as agent_engines
from glm5.posttrain.engines import Engines
from glm5.posttrain.record import Record, records_of_session
from glm5.posttrain.rows import pack
from glm5.serve.config import EngineConfig
from glm5.serve.engine import Engine
from glm5.serve.http.app import create_app
from glm5.serve.runner import Runner
from glm5.utils.errors import CheckpointError, UserError
from support.scripted import chat_tokenizer
from support.serving import served
from support.tiny import tiny_model

T = chat_tokenizer()
AGENTS, PUSHES = 3, 4
CONFIG = EngineConfig(pages=80, context=1024, drafts=2)


def policy(seed: int = 0) -> GLM5:
    # Neither positions nor experts are chosen: draws differ from run to run here, and a near tie may fall either way.
    shape = dict(index_topk=1024, first_k_dense_replace=3)
    return tiny_model(seed, vocab_size=T.vocab_size, eos_token_id=T.stop_ids, **shape)


def moved(model: GLM5, version: int) -> GLM5:
    """The model as an update of some size leaves it."""
    generator = torch.Generator().manual_seed(version)
    new = copy.deepcopy(model)
    with torch.no_grad():
        for p in new.parameters():
            p.add_(torch.randn(p.shape, generator=generator) * 0.1 * p.std())
    return new


def talk(url: str, name: str, enough: threading.Event, told: list[Any]) -> None:
    """An agent: turn after turn, until it is told to end; what its session kept."""
    with httpx.Client(timeout=120) as http:
        messages: list[dict[str, Any]] = [{"role": "user", "content": f"the answer {name}"}]
        base = f"{url}/sessions/{name}"
        while True:
            body = {"model": "policy", "messages": messages, "max_tokens": 60}
            answer = http.post(f"{base}/v1/chat/completions", json=body)
            if answer.status_code == 400 or enough.is_set():  # no room left, or the end
                break
            messages += [answer.json()["choices"][0]["message"], {"role": "user", "content": "value"}]
        told.append(http.delete(base).json())


def drawn_while_weights_change(engines: Engines, models: dict[int, GLM5]) -> list[Record]:
    enough, told = threading.Event(), []
    agents = [threading.Thread(target=talk, args=(engines.url, f"s{i}", enough, told)) for i in range(AGENTS)]
    for agent in agents:
        agent.start()
    for version in range(2, PUSHES + 2):
        while any(agent.is_alive() for agent in agents):
            engines.call(engines.pool.pause("keep"))  # so that what is under way stays so until the push goes on
            if any(asked(number, engines) for number in range(AGENTS)):
                break
            engines.call(engines.pool.resume())
            time.sleep(0.01)
        engines.push(models[version], version)
    enough.set()
    for agent in agents:
        agent.join(120)
    return [record for session in told for record in records_of_session(session)]


def asked(number: int, engines: Engines) -> bool:
    """Whether an answer of this agent is under way, and has begun."""
    session = httpx.get(f"{engines.url}/sessions/s{number}")
    if session.status_code != 200:
        return False
    turns = session.json()["turns"]
    return bool(turns) and turns[-1]["status"] == "running" and 0 < turns[-1]["drawn_tokens"] < 40


def apart(record: Record, models: dict[int, GLM5]) -> float:
    """The largest distance between the engine's log-probability of a token and that of the weights that drew it."""
    rows = pack([record.trajectory(0)], len(record.ids), vocab_size=T.vocab_size)
    version_A = torch.tensor([v for v, d in zip(record.versions, record.drawn, strict=True) if d])
    engine_A = rows.logprobs_BT[rows.mask_BT]
    worst = 0.0
    for version in version_A.unique().tolist():
        with torch.no_grad():
            own_A = rows.logprobs(models[version]).logprobs_N
        worst = max(worst, float((own_A - engine_A)[version_A == version].abs().max()))
    return worst


@pytest.mark.parametrize("in_flight", ["renew", "keep"])
def test_every_token_has_the_probability_that_its_version_gives_it(in_flight: Any) -> None:
    first = policy()
    models = {1: first, **{v: moved(first, v) for v in range(2, PUSHES + 2)}}
    with Engines.local(first, T, CONFIG, in_flight=in_flight) as engines:
        engines.push(models[1], 1)
        records = drawn_while_weights_change(engines, models)
        figures = engines.figures()
    assert figures["engine/routable"] == 1
    assert 0 <= figures["engine/idle"] <= 1
    assert figures["engine/spec_accept_length"] >= 1
    assert {v for r in records for v, d in zip(r.versions, r.drawn, strict=True) if d} <= set(models)
    across = [r for r in records if len({v for v, d in zip(r.versions, r.drawn, strict=True) if d}) > 1]
    assert across, "no session went on across a push"
    worst = max(apart(record, models) for record in records)
    if in_flight == "renew":
        assert worst < 1e-4
    else:  # entries of old weights under new ones: the version is then not the whole truth
        assert worst > 1e-3


def test_weights_that_did_not_arrive_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    first = policy()
    with Engines.local(first, T, CONFIG) as engines:
        assert httpx.get(f"{engines.url}/health").json()["status"] == "ok"
        monkeypatch.setattr("glm5.serve.weights.assign_tensors", lambda *_: None)
        with pytest.raises(CheckpointError, match="is not what was sent as version 1"):
            engines.push(moved(first, 1), 1)


def test_an_engine_in_bfloat16_has_the_weights_rounded_and_the_learner_keeps_its_own() -> None:
    first, new = policy(), moved(policy(), 1)
    kept = copy.deepcopy(new)
    with Engines.local(first, T, CONFIG, dtype=torch.bfloat16) as engines:
        assert engines._served is not None
        engines.push(new, 1)
        there = dict(disk_tensors(engines._served))
        assert engines.pool.weight_version == "1"
        enough, told = threading.Event(), []
        enough.set()
        talk(engines.url, "s0", enough, told)
    assert {t.dtype for name, t in there.items() if "e_score" not in name} == {torch.bfloat16}
    assert all(torch.equal(there[name], t.to(there[name].dtype)) for name, t in disk_tensors(kept))
    assert all(torch.equal(p, q) for p, q in zip(new.parameters(), kept.parameters(), strict=True))
    (record,) = records_of_session(told[0])
    assert 0 < apart(record, {1: new}) < 0.2


def test_a_wrong_weight_is_never_drawn_from(monkeypatch: pytest.MonkeyPatch) -> None:
    first, new = policy(), moved(policy(), 1)
    with Engines.local(first, T, CONFIG) as engines:
        engines.push(first, 1)

        def torn(model: GLM5, tensors: Any) -> None:
            assign_tensors(model, {name: t for name, t in tensors.items() if name != "lm_head.weight"})

        monkeypatch.setattr("glm5.serve.weights.assign_tensors", torn)
        with pytest.raises(CheckpointError, match=r"the engine's lm_head\.weight is not what was sent as version 2"):
            engines.push(new, 2)
        asked = {"model": "policy", "messages": [{"role": "user", "content": "x"}], "max_tokens": 4}
        refused = httpx.post(f"{engines.url}/sessions/s/v1/chat/completions", json=asked, timeout=120)
    assert refused.status_code == 503


def test_an_engine_that_has_ended_is_named_where_weights_are_pushed() -> None:
    first = policy()
    with Engines.local(first, T, CONFIG) as engines:
        runner = engines.pool.engines["local"]
        assert isinstance(runner, Runner)
        engines.check()
        engines.call(runner.stop())
        with pytest.raises(UserError, match="the engine has ended: "):
            engines.check()
        with pytest.raises(UserError, match="no engine confirmed weights 1: "):
            engines.push(first, 1)


def test_an_event_loop_that_stands_still_is_named_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(agent_engines, "STILL_S", 0.2)
    stand, stands = threading.Event(), threading.Event()

    def blocks() -> None:
        stands.set()
        stand.wait(120)

    with Engines.local(policy(), T, CONFIG) as engines:
        engines._loop.call_soon_threadsafe(blocks)
        assert stands.wait(60)
        until = time.monotonic() + 60
        while not caplog.records and time.monotonic() < until:
            engines.check()
            time.sleep(0.01)
        for _ in range(50):
            engines.check()
            time.sleep(0.01)
        stand.set()
    (told,) = (r.getMessage() for r in caplog.records if "nothing has gone on" in r.getMessage())
    assert "make it a plain `def`" in told


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_engines_behind_http_read_weights_from_disk(dtype: torch.dtype, tmp_path: Path) -> None:
    first = policy()
    runner = Runner(Engine(copy.deepcopy(first).eval().to(dtype), CONFIG, T), T, "policy")
    app = create_app(runner, start=runner.start, stop=runner.stop)
    with served(app) as url, Engines.remote([url], T, 1024, tmp_path / "pushed", dtype=dtype) as engines:
        for version in (1, 2):
            engines.push(moved(first, version), version)
            assert runner.weight_version == str(version)
        assert [p.name for p in (tmp_path / "pushed").iterdir()] == ["version-00000002"]
        enough, told = threading.Event(), []
        enough.set()
        talk(engines.url, "s0", enough, told)
        (record,) = records_of_session(told[0])
        assert apart(record, {2: moved(first, 2)}) < (1e-4 if dtype == torch.float32 else 0.2)


def test_weights_of_another_dtype_are_refused_with_the_way_out(tmp_path: Path) -> None:
    first = policy()
    runner = Runner(Engine(copy.deepcopy(first).eval().bfloat16(), CONFIG, T), T, "policy")
    app = create_app(runner, start=runner.start, stop=runner.stop)
    with (
        served(app) as url,
        Engines.remote([url], T, 1024, tmp_path / "pushed") as engines,
        pytest.raises(CheckpointError, match="--engine-dtype"),
    ):
        engines.push(first, 1)
