"""The mode in which log-probabilities are the same to the last bit, whatever runs beside a request."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from glm5.kernels.cpu.build import available
from glm5.model.glm5 import GLM5
from glm5.model.presets import nano
from glm5.serve import invariant
from glm5.serve.config import EngineConfig
from glm5.serve.engine import Engine
from glm5.serve.llm import Answer
from glm5.serve.request import Request, SamplingParams
from glm5.utils.errors import ConfigError
from support.drafting import agreeable
from support.engines import answered
from support.tiny import tiny_model

pytestmark = pytest.mark.skipif(not available()[0], reason="needs a C++ compiler")
CONFIG = EngineConfig(pages=60, context=400, invariant=True)
SAMPLED = SamplingParams(max_new_tokens=9, temperature=0.7, seed=11, ignore_eos=True, logprobs=2)


@pytest.fixture(scope="module", params=["sparse", "dense", "wide"])
def model(request: pytest.FixtureRequest) -> GLM5:
    if request.param == "wide":  # the shapes that the benchmark serves
        return GLM5(nano(initializer_range=0.06, num_hidden_layers=3), seed=1).eval()
    return agreeable(0, **({"extra": {"glm5_attention": "dense"}} if request.param == "dense" else {})).eval()


def answers(engine: Engine, requests: list[Request], rng: random.Random) -> dict[str, Answer]:
    """Requests arrive at random moments; every answer has its log-probabilities."""
    out = {request.rid: Answer() for request in requests}
    todo = list(requests)
    while todo or engine.has_work:
        while todo and (rng.random() < 0.5 or not engine.has_work):
            engine.add(todo.pop())
        for delta in engine.step():
            out[delta.rid].add(delta)
    return out


def bits(answer: Answer) -> list[Any]:
    return [answer.ids, answer.logprobs, [info.top for info in answer.info], answer.prompt_info]


def test_no_bit_depends_on_the_batch(model: GLM5) -> None:
    """Alone, and in random crowds with random chunks, drafts, cached prefixes, preemption and host memory."""
    rng = random.Random(0)  # noqa: S311
    vocabulary = min(model.config.vocab_size, 320)
    texts = [[rng.randrange(6, vocabulary) for _ in range(n)] for n in (1, 5, 16, 17, 40, 64, 65, 100, 130, 200)]
    texts += [[*texts[-1][:140], *texts[3]]]  # begins as another
    params = [replace(SAMPLED, prompt_logprobs=1 if i % 3 == 0 else None) for i in range(len(texts))]
    expected = []
    for ids, p in zip(texts, params, strict=True):
        alone = Engine(model, CONFIG)
        request = Request(ids, p)
        expected.append(bits(answers(alone, [request], rng)[request.rid]))
    for _ in range(3):
        config = replace(
            CONFIG,
            pages=rng.choice([16, 60]),
            host_pages=rng.choice([0, 8]),
            drafts=rng.choice([0, 3]),
            chunk=rng.choice([5, 23, 64, 2048]),
            max_batched_tokens=rng.choice([64, 300]),
            max_running=rng.choice([4, 16]),
        )
        engine = Engine(model, config)
        order = [rng.randrange(len(texts)) for _ in range(12)]
        crowd = [Request(texts[i], params[i], priority=rng.choice([0, 0, 1])) for i in order]
        found = answers(engine, crowd, rng)
        for i, request in zip(order, crowd, strict=True):
            assert bits(found[request.rid]) == expected[i], (config, len(texts[i]))


def test_a_trainer_gets_the_same_bits(model: GLM5) -> None:
    rng = random.Random(1)  # noqa: S311
    for length in (3, 70, 150):
        request = Request([rng.randrange(6, 320) for _ in range(length)], SAMPLED)
        answer = answers(Engine(model, replace(CONFIG, chunk=50, drafts=2)), [request], rng)[request.rid]
        whole = [*request.input_ids, *answer.ids]
        recomputed = invariant.logprobs(model, whole, temperature=0.7)
        assert recomputed[length - 1 :].tolist() == answer.logprobs
        with torch.no_grad():
            plain = (model(torch.tensor([whole])).logits[0, :-1] / 0.7).log_softmax(-1)
        rows = plain.gather(-1, torch.tensor(whole[1:])[:, None])[:, 0]
        torch.testing.assert_close(recomputed, rows, rtol=0, atol=3e-5)


def test_the_ordinary_mode_does_depend_on_the_batch() -> None:
    """Else the tests above would prove nothing."""
    model = GLM5(nano(initializer_range=0.06, num_hidden_layers=3), seed=1).eval()
    rng = random.Random(0)  # noqa: S311
    texts = [[rng.randrange(6, 320) for _ in range(n)] for n in (5, 40, 100, 130)]
    ordinary = replace(CONFIG, invariant=False)
    alone = []
    for ids in texts:
        request = Request(ids, SAMPLED)
        alone.append(answers(Engine(model, ordinary), [request], rng)[request.rid].logprobs)
    together = answered(Engine(model, replace(ordinary, chunk=23)), [Request(ids, SAMPLED) for ids in texts])
    assert [answer.logprobs for answer in together] != alone


def test_linear_maps_have_one_shape_inside() -> None:
    seen: list[int] = []

    class Spy(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.nn.functional.linear:
                seen.append(len(args[0]))
            return func(*args, **(kwargs or {}))

    weight, bias = torch.randn(5, 8), torch.randn(5)
    x = torch.randn(2, 21, 8)
    with Spy(), invariant.operators(tiny_model()):
        y = torch.nn.functional.linear(x, weight, bias)
    assert seen == [16, 16, 16]
    torch.testing.assert_close(y, torch.nn.functional.linear(x, weight, bias))


@pytest.mark.parametrize(("what", "said"), [("bf16", "float32"), ("bias", "without biases"), ("torch", "GLM5_KERNELS")])
def test_what_cannot_be_promised_is_refused(what: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = agreeable(0, attention_bias=what == "bias").eval()
    if what == "bf16":
        model = model.to(torch.bfloat16)
    if what == "torch":
        monkeypatch.setenv("GLM5_KERNELS", "torch")
    with pytest.raises(ConfigError, match=said):
        Engine(model, CONFIG)
