"""What the engine promises, on a GPU: at three layers of GLM-5's widths in bf16, with fewer experts."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch

from glm5.kernels import cuda
from glm5.model.config import ModelConfig
from glm5.model.glm5 import GLM5
from glm5.model.weights import disk_tensors
from glm5.serve import invariant
from glm5.serve.client import WeightUpdate
from glm5.serve.config import EngineConfig
from glm5.serve.engine import Engine
from glm5.serve.fold import Folded
from glm5.serve.request import Request, SamplingParams
from support.cluster import cluster, play
from support.scripted import chat_tokenizer

HOPPER, WHY = cuda.available()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason=WHY)]
VOCABULARY = 4096
ROOMY = EngineConfig(pages=2200, context=8192, max_running=64, max_batched_tokens=4096, chunk=2048)
GREEDY = SamplingParams(max_new_tokens=24, temperature=0.0, ignore_eos=True, logprobs=0)
Bits = list[tuple[list[int], list[float]]]


@pytest.fixture(scope="module")
def model() -> Iterator[GLM5]:
    """Its MTP block passes the embedding on, so that some drafts are right."""
    config = ModelConfig(
        num_hidden_layers=3,
        first_k_dense_replace=1,
        n_routed_experts=16,
        vocab_size=VOCABULARY,
        eos_token_id=(0,),
        pad_token_id=0,
    )
    with torch.no_grad():
        with torch.device("meta"):
            made = GLM5(config, seed=None).to(torch.bfloat16)
        made = made.to_empty(device="cuda").eval()
        made.init_weights(0)
        for buffer in made.buffers():
            buffer.zero_()
        width, mtp = config.hidden_size, made.mtp
        mtp.eh_proj.weight[:, :width] = torch.eye(width)
        mtp.eh_proj.weight[:, width:] *= 0.03
        for name, parameter in made.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight", "down_proj")):
                parameter.mul_(0.15)
            if name.endswith("mlp.gate.weight"):
                parameter.copy_(parameter.bfloat16())  # as a checkpoint holds it
        made.model.embed_tokens.weight.normal_(generator=torch.Generator("cuda").manual_seed(1))
    yield made
    torch.cuda.empty_cache()


def texts(*lengths: int, seed: int = 0, below: int = VOCABULARY) -> list[list[int]]:
    make = torch.Generator().manual_seed(seed)
    return [torch.randint(6, below, (n,), generator=make).tolist() for n in lengths]


def run(engine: Engine, prompts: list[list[int]], params: SamplingParams = GREEDY) -> Bits:
    """Ids and log-probabilities, in order."""
    requests = [Request(ids, params) for ids in prompts]
    folded = {request.rid: Folded() for request in requests}
    for request in requests:
        engine.add(request)
    while engine.has_work:
        for delta in engine.advance(lambda: None) if engine.overlap else engine.step():
            if delta.rid in folded:
                folded[delta.rid].add(delta)
    return [(one.ids, one.logprobs) for one in folded.values()]


PROMPTS = (1, 5, 63, 64, 65, 300, 2100, 3000)  # around pages, and around k
WAYS = {
    "plain": replace(ROOMY, cuda_graphs=False, overlap=False),
    "in chunks": replace(ROOMY, cuda_graphs=False, overlap=False, chunk=100),
    "recorded": replace(ROOMY, overlap=False),
    "recorded, drafts, overlap": replace(ROOMY, drafts=2),
}


@pytest.fixture(scope="module")
def alone(model: GLM5) -> Bits:
    config = replace(WAYS["plain"], invariant=True)
    return [run(Engine(model, config), [ids])[0] for ids in texts(*PROMPTS)]


@pytest.mark.parametrize("way", WAYS)
def test_no_bit_depends_on_what_runs_beside(way: str, model: GLM5, alone: Bits) -> None:
    """Among 56 strangers, and again from cached pages."""
    engine = Engine(model, replace(WAYS[way], invariant=True))
    for ids in texts(*range(10, 570, 10), seed=5):
        engine.add(Request(ids, replace(GREEDY, max_new_tokens=40)))
    for _ in range(2):
        assert run(engine, texts(*PROMPTS)) == alone
    assert (engine.executor.recorded_steps > 10) == WAYS[way].cuda_graphs
    engine.close()


def test_no_bit_is_lost_in_host_memory_or_by_preemption(model: GLM5, alone: Bits) -> None:
    """Pages for little more than the longest prompt: what the texts between pushed out comes back from the host. Then
    those that came first, who cross two pages' borders in the middle of decoding, take the pages of the last."""
    engine = Engine(model, replace(ROOMY, pages=64, host_pages=400, invariant=True, chunk=512))
    copy, restored = engine.cache.copy, [0]

    def count(kind: str, source: int, target: int) -> None:
        restored[0] += kind == "to_device"
        copy(kind, source, target)

    engine.cache.copy = count  # type: ignore[method-assign]
    for _ in range(2):
        assert [run(engine, [ids])[0] for ids in texts(*PROMPTS)] == alone
        run(engine, texts(700, 900, 1500, seed=9))
    assert restored[0] > 60
    for ids in texts(*[190] * 30, seed=7):
        engine.add(Request(ids, replace(GREEDY, max_new_tokens=100)))
    assert run(engine, texts(*PROMPTS)[:6]) == alone[:6]
    assert engine.scheduler.preemptions > 0
    engine.close()


def test_a_trainer_has_the_same_bits_and_the_ordinary_mode_has_not(model: GLM5, alone: Bits) -> None:
    prompts = texts(*PROMPTS)
    for ids, (said, logprobs) in list(zip(prompts, alone, strict=True))[4:7]:
        assert invariant.logprobs(model, [*ids, *said])[len(ids) - 1 :].tolist() == logprobs
    ordinary = WAYS["plain"]
    assert run(Engine(model, ordinary), prompts)[:4] != [run(Engine(model, ordinary), [ids])[0] for ids in prompts[:4]]


@pytest.mark.parametrize("params", [GREEDY, replace(GREEDY, temperature=0.8, top_p=0.9, seed=5)])
def test_drafts_change_no_bit(params: SamplingParams, model: GLM5) -> None:
    found, prompts = [], texts(*[20 + 41 * i for i in range(16)], seed=4)
    for drafts in (0, 3):
        engine = Engine(model, replace(ROOMY, invariant=True, drafts=drafts))
        found.append(run(engine, prompts, params))
        engine.close()
    assert engine.speculation.accept_length > 1.05
    assert engine.executor.drafter is not None
    assert all(kind is not None and kind.replayed > 10 for kind in engine.executor.drafter.recorded)
    assert found[0] == found[1]


@pytest.mark.parametrize("drafts", [0, 2])
def test_overlap_changes_no_bit(drafts: int, model: GLM5) -> None:
    found, prompts = [], texts(*[50 + 37 * i for i in range(24)], seed=3)
    for overlap in (False, True):
        engine = Engine(model, replace(ROOMY, drafts=drafts, overlap=overlap))
        found.append(run(engine, prompts))
        engine.close()
    assert found[0] == found[1]


def test_memory_is_released_and_taken_again(model: GLM5) -> None:
    engine, prompts = Engine(model, replace(ROOMY, invariant=True, drafts=1)), texts(200, 900, seed=6)
    before = run(engine, prompts)
    packed = safetensors.torch.save({name: t.cpu().contiguous() for name, t in disk_tensors(engine.model)})
    gc.collect()  # engines of other tests, whose parts point at each other
    used = torch.cuda.memory_reserved()
    engine.release_memory(("weights", "kv_cache", "cuda_graph"))
    assert torch.cuda.memory_reserved() < 0.2 * used
    engine.resume_memory(("weights",))
    engine.update_weights(WeightUpdate("tensor", tensors=(packed,), weight_version="1"))
    engine.resume_memory(("kv_cache", "cuda_graph"))
    assert run(engine, prompts) == before
    assert engine.executor.recorded_steps > 10
    engine.close()


def test_prefill_and_decode_apart_change_no_bit(model: GLM5, tmp_path: Path) -> None:
    prompts = texts(65, 130, 300, 1000, 2500, seed=8, below=320)  # of the tokenizer that those workers have
    config = replace(ROOMY, pages=400, invariant=True, drafts=1)
    engine = Engine(model, config, chat_tokenizer())
    expected, found = run(engine, prompts), []
    engine.close()

    async def test() -> None:
        async with cluster(model, tmp_path, config=config) as workers:
            answers = await workers.all([Request(ids, GREEDY) for ids in prompts])
            found.extend((one.ids, one.logprobs) for one in answers)
            await workers.until_clean()

    play(test)
    assert found == expected
