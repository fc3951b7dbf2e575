"""From an agent that speaks text to the trainer: every id that was drawn has a ratio of 1 at the same weights.

The agent is OpenAI's client. The same conversation encoded anew from its text, as a switch, shows what that would do.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
import torch

from glm5.model.glm5 import GLM5
from glm5.posttrain.outcome import Outcome
from glm5.posttrain.record import records_of_session
from glm5.posttrain.rows import pack
from glm5.posttrain.store import Store
from glm5.serve.config import EngineConfig
from glm5.serve.engine import Engine
from glm5.serve.gateway.app import create_gateway
from glm5.serve.runner import Runner
from glm5.text.chat import render
from glm5.text.messages import messages_from_openai
from support.scripted import chat_tokenizer
from support.serving import served
from support.tiny import tiny_model

T = chat_tokenizer()
TURNS, TOKENS = 3, 24


@pytest.fixture(scope="module")
def model() -> GLM5:
    return tiny_model(0, vocab_size=T.vocab_size, eos_token_id=T.stop_ids)


@pytest.fixture(scope="module")
def address(model: GLM5) -> Iterator[str]:
    runner = Runner(Engine(model, EngineConfig(pages=60, context=1024, drafts=2), T), T, "tiny")
    with served(create_gateway(runner, start=runner.start, stop=runner.stop)) as url:
        yield url


@pytest.mark.parametrize("sampling", [{"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.8}])
def test_every_drawn_id_has_a_ratio_of_one(
    model: GLM5, address: str, sampling: dict[str, float], tmp_path: Any
) -> None:
    name = f"s{len(sampling)}"
    httpx.post(f"{address}/sessions", json={"id": name, "sampling": {**sampling, "seed": 5}})
    client = openai.OpenAI(base_url=f"{address}/sessions/{name}/v1", api_key="none", max_retries=0)
    history: list[Any] = [{"role": "user", "content": "the answer"}]
    for turn in range(TURNS):
        told = client.chat.completions.create(model="tiny", messages=history, max_tokens=TOKENS, temperature=0)
        history.append(told.choices[0].message.model_dump(include={"role", "content"}) | {"reasoning_content": ""})
        history.append({"role": "user", "content": f"value {turn}"})
    records = records_of_session(httpx.delete(f"{address}/sessions/{name}").json())
    with Store(tmp_path / "t.sqlite") as store:
        store.start("g", "t", ["s"])
        store.deliver("s", Outcome.OK, 1.0, records)
        (record,) = store.records("s")
    assert sum(record.drawn) > TURNS
    assert record.temperature == sampling["temperature"]
    assert (record.kept is not None) == ("top_p" in sampling)
    rows = pack([record.trajectory(0)], 512, vocab_size=T.vocab_size)
    ratio = (rows.logprobs(model).logprobs_N - rows.logprobs_BT[rows.mask_BT]).exp()
    assert len(ratio) == sum(record.drawn)
    torch.testing.assert_close(ratio, torch.ones_like(ratio), rtol=0, atol=1e-4)
    again = render(T, messages_from_openai(history[:-1]), clear_thinking=False).ids
    assert list(again) != list(record.ids)[: len(again)], "text does not give back the ids of an untrained model"
