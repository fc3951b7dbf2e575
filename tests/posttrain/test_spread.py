"""Weights over a process group to engines in processes of their own, of which one dies and another begins."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest
import torch

from glm5.posttrain.engines import Engines
from glm5.posttrain.pushing import tensors_of
from glm5.posttrain.spread import Spread
from glm5.serve.weights import Joined, checksums_of
from support.scripted import chat_tokenizer
from support.tiny import tiny_model
from support.waiting import until

T = chat_tokenizer()
ENGINE = """
import socket, torch, uvicorn
from glm5.serve.config import EngineConfig
from glm5.serve.engine import Engine
from glm5.serve.http.app import create_app
from glm5.serve.runner import Runner
from support.scripted import chat_tokenizer
from support.tiny import tiny_model

torch.set_num_threads(1)
T = chat_tokenizer()
model = tiny_model(0, vocab_size=T.vocab_size, eos_token_id=T.stop_ids).eval()
runner = Runner(Engine(model, EngineConfig(pages=8, context=128), T), T, "policy")
app = create_app(runner, start=runner.start, stop=runner.stop)
listening = socket.create_server(("127.0.0.1", 0))
print(f"http://127.0.0.1:{listening.getsockname()[1]}", flush=True)
uvicorn.Server(uvicorn.Config(app, log_level="error", ws="none")).run([listening])
"""


@contextmanager
def engine() -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """One that runs: its address."""
    paths = [path for path in sys.path if path]
    command = [sys.executable, "-c", f"import sys; sys.path[:0] = {paths!r}\n{ENGINE}"]
    made = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert made.stdout is not None
        url = made.stdout.readline().strip()
        assert url.startswith("http"), made.communicate()[1][-2000:]
        yield url, made
    finally:
        made.kill()
        made.communicate()


def version(url: str) -> str:
    return str(httpx.get(f"{url}/get_weight_version", timeout=60).json()["weight_version"])


def checksums(url: str) -> dict[str, str]:
    found: dict[str, str] = httpx.post(f"{url}/weights_checker", json={"action": "checksum"}, timeout=60).json()[
        "checksums"
    ]
    return found


@pytest.mark.timeout(600)
def test_engines_receive_what_is_pushed_whoever_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    models = [tiny_model(seed, vocab_size=T.vocab_size, eos_token_id=T.stop_ids) for seed in range(4)]
    sums = [checksums_of(tensors_of(model).items()) for model in models]
    with engine() as (one, _), engine() as (other, dying), engine() as (third, _):
        spread = Spread("127.0.0.1", "gloo")
        about = {"spread": spread, "beat_s": 1.0, "patience_s": 300.0}
        with Engines.remote({"a": one, "b": other}, T, 128, None, **about) as engines:
            names = set()
            for number in (1, 2):
                engines.push(models[number], number)
                names.add(spread._name)
                for url in (one, other):
                    assert (version(url), checksums(url)) == (str(number), sums[number])
            assert len(names) == 1, "a group lasts as long as its engines do"
            sent, send = [], Joined.broadcast

            def last_words(self: Joined, tensor: torch.Tensor) -> None:
                sent.append(tensor)
                if len(sent) == 3:  # in the middle
                    dying.kill()
                    dying.wait()
                send(self, tensor)

            monkeypatch.setattr(Joined, "broadcast", last_words)
            engines.push(models[3], 3)
            assert spread._name not in names, "the group that broke was given up"
            assert (version(one), checksums(one)) == ("3", sums[3])
            assert engines.figures()["engine/routable"] == 1
            engines.call(engines.moved("b", third))
            until(lambda: engines.figures()["engine/routable"] >= 2, seconds=300)  # it is let in when it has them, too
            assert (version(third), checksums(third)) == ("3", sums[3])
