"""A slice of GLM-5 at true widths on one GPU: decode and prefill against the chip's limit, and beside transformers.

    python benchmarks/slice.py [--parts check,decode,engine,invariant,prefill,chunks,profile,peer]
        [--batches 1,16,64,128] [--contexts 8192,32768] [--layers 3] [--experts 256] [--json FILE]

The slice has the first layers of GLM-5, one dense and the others MoE, with random bf16 weights that are made on the
device; no checkpoint is read. Decode runs over pages whose contents are random too, so that no time goes into filling
them. The floor of a step counts the bytes that it has to read (weights of the experts that a random router touches,
latents of the selected positions, index keys of all) over the copy bandwidth of an H200, 4.3 TB/s; of a prefill the
bf16 operations over 790 TFLOP/s. transformers runs on the same tensors, eagerly, with its fastest settings.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # large prefills leave little unused

import torch
from torch import Tensor

from glm5.model.config import ModelConfig
from glm5.model.glm5 import GLM5
from glm5.model.paged import PagedBatch, PagedCache, Run
from glm5.serve.config import EngineConfig
from glm5.serve.engine import Engine
from glm5.serve.graphs import Graphs, recorder_for
from glm5.serve.request import Request, SamplingParams

BYTES_PER_S, FLOP_PER_S = 4.3e12, 790e12
PAGE = 64
GIB = 2**30


def shape(layers: int, experts: int) -> ModelConfig:
    return ModelConfig(
        num_hidden_layers=layers, first_k_dense_replace=1, n_routed_experts=experts, num_nextn_predict_layers=0
    )


def build(config: ModelConfig) -> GLM5:
    """The slice on the GPU, bf16 but for the router, random weights."""
    with torch.inference_mode(False), torch.no_grad():
        with torch.device("meta"):
            model = GLM5(config, seed=None).to(torch.bfloat16)
        model = model.to_empty(device="cuda").eval()
        model.init_weights(0)
        for buffer in model.buffers():
            buffer.zero_()
        model.lay_out()
    return model


# ---- floors -------------------------------------------------------------------------------------------------------


def parameters(c: ModelConfig) -> dict[str, int]:
    """Elements of a layer's parts."""
    down = c.q_lora_rank + c.latent_dim + c.index_head_dim + c.index_n_heads
    up = c.q_lora_rank * (c.num_attention_heads * c.qk_head_dim + c.index_n_heads * c.index_head_dim)
    values = c.num_attention_heads * c.v_head_dim
    absorbed = c.kv_lora_rank * c.num_attention_heads * (c.qk_nope_head_dim + c.v_head_dim)
    return {
        "attention": c.hidden_size * down + up + absorbed + values * c.hidden_size,
        "dense": 3 * c.hidden_size * c.intermediate_size,
        "expert": 3 * c.hidden_size * c.moe_intermediate_size,
        "router": c.hidden_size * c.n_routed_experts,
        "head": c.hidden_size * c.vocab_size,
    }


def decode_floor(c: ModelConfig, batch: int, context: int) -> float:
    """Seconds that the bytes of one step take."""
    size, moe = parameters(c), c.num_hidden_layers - 1
    touched = c.n_routed_experts * (1 - (1 - c.num_experts_per_tok / c.n_routed_experts) ** batch)
    weights = c.num_hidden_layers * size["attention"] + size["dense"] + size["head"]
    weights += moe * size["expert"] * (touched + c.n_shared_experts)
    keys = context * c.index_head_dim + min(context, c.index_topk) * c.latent_dim
    total = 2 * weights + 4 * moe * size["router"] + 2 * batch * c.num_hidden_layers * keys
    return total / BYTES_PER_S


def prefill_floor(c: ModelConfig, tokens: int, before: int = 0) -> float:
    """Seconds that the operations of `tokens` after `before` take; the head reads one row."""
    size, moe = parameters(c), c.num_hidden_layers - 1
    each = c.num_hidden_layers * size["attention"] + size["dense"]
    each += moe * size["expert"] * (c.num_experts_per_tok + c.n_shared_experts)
    seen = before + tokens / 2
    index = seen * c.index_n_heads * c.index_head_dim
    full = max(0, min(tokens, c.index_topk - before))  # queries that see fewer than k positions
    picked = (tokens - full) * c.index_topk + full * (before + full / 2)
    attend = picked / tokens * c.num_attention_heads * (c.latent_dim + c.kv_lora_rank)
    return 2 * tokens * (each + c.num_hidden_layers * (index + attend)) / FLOP_PER_S


# ---- measuring ----------------------------------------------------------------------------------------------------


def median_ms(call: Callable[[], Any], repeats: int = 10, warm: int = 3) -> float:
    """Wall time with the device idle before and after, as a caller sees it."""
    for _ in range(warm):
        call()
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(times)


@contextmanager
def peak_gib(into: dict[str, Any]) -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    yield
    torch.cuda.synchronize()
    into["peak_gib"] = torch.cuda.max_memory_allocated() / GIB


def by_kernel(call: Callable[[], Any], top: int = 45) -> list[dict[str, Any]]:
    """Time on the device by kernel name, of one call."""
    call()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    rows = [
        {"kernel": e.key[:110], "calls": e.count, "us": e.self_device_time_total}
        for e in profile.key_averages()
        if e.self_device_time_total > 0
    ]
    return sorted(rows, key=lambda row: -row["us"])[:top]


def profile(model: GLM5, name: str, make: Callable[[GLM5], Callable[[], Any]]) -> list[dict[str, Any]]:
    kernels = by_kernel(make(model))
    print(f"\n{name}, by kernel: {sum(k['us'] for k in kernels):.0f} us")
    for k in kernels:
        print(f"{k['us']:>10.1f} us {k['calls']:>5} x  {k['kernel']}")
    return [{"part": f"profile of {name}", "batch": 0, "context": 0, "kernels": kernels}]


def random_pages(model: GLM5, batch: int, context: int) -> tuple[PagedCache, list[Run]]:
    """A cache whose pages hold random numbers and one more that is nobody's, and the last slot of each sequence."""
    each = context // PAGE
    cache = PagedCache(model.config, batch * each + 1, size=PAGE, device="cuda", dtype=torch.bfloat16)
    for layer in cache.layers:
        for pool in layer:
            pool.normal_()
    order = torch.randperm(batch * each).view(batch, each).tolist()
    return cache, [Run(table, context - 1, 1) for table in order]


def random_ids(model: GLM5, *size: int) -> Tensor:
    return torch.randint(model.config.vocab_size, size, device="cuda")


# ---- parts --------------------------------------------------------------------------------------------------------


Outputs = tuple[Tensor, Tensor]  # hidden states, logits


def decode_calls(model: GLM5, batch: int, context: int) -> tuple[Callable[[], Outputs], Callable[[], Outputs]]:
    """One step of `batch` sequences, each of which sees `context` tokens: recorded, and plain."""
    cache, runs = random_pages(model, batch, context)
    ids = random_ids(model, batch, 1).tolist()
    record = recorder_for(model.device)
    assert record is not None
    recorded = Graphs(model, cache, spare=batch * (context // PAGE), most=batch, context=context, record=record)

    def replay() -> Outputs:
        outputs = recorded(runs, ids)
        assert outputs is not None, "recording failed"
        return outputs

    def plain() -> Outputs:
        paged = PagedBatch(cache, runs)
        hidden = model.hidden(paged.flat(ids), cache=paged)[0]
        return hidden, model.lm_head(hidden)

    return replay, plain


def decode(model: GLM5, batch: int, context: int, with_plain: bool) -> list[dict[str, Any]]:
    replay, plain = decode_calls(model, batch, context)
    row: dict[str, Any] = {"part": "decode", "batch": batch, "context": context}
    expected = plain()[1].float()
    row["error"] = float((replay()[1].float() - expected).norm() / expected.norm())
    row["ms"] = median_ms(lambda: replay()[1].argmax(-1))
    row["floor_ms"] = decode_floor(model.config, batch, context) * 1e3
    if not with_plain:
        return [row]
    return [row, {**row, "part": "decode, not recorded", "ms": median_ms(lambda: plain()[1].argmax(-1)), "error": 0.0}]


def prefill_call(model: GLM5, tokens: int) -> Callable[[], Tensor]:
    ids = random_ids(model, 1, tokens)

    def call() -> Tensor:
        cache = model.new_cache(1, capacity=tokens)
        return model(ids, cache=cache, logits_to_keep=1).logits[0, -1].argmax()

    return call


def prefill(model: GLM5, tokens: int) -> dict[str, Any]:
    row: dict[str, Any] = {"part": "prefill", "batch": 1, "context": tokens}
    call = prefill_call(model, tokens)
    call()
    with peak_gib(row):
        row["ms"] = median_ms(call, repeats=3, warm=0)
    row["floor_ms"] = prefill_floor(model.config, tokens) * 1e3
    return row


def chunks(model: GLM5, tokens: int, chunk: int) -> dict[str, Any]:
    """A long prompt in chunks, as the engine reads it."""
    row: dict[str, Any] = {"part": f"prefill in chunks of {chunk}", "batch": 1, "context": tokens}
    cache = PagedCache(model.config, tokens // PAGE, size=PAGE, device="cuda", dtype=torch.bfloat16)
    table = torch.randperm(tokens // PAGE).tolist()
    ids = random_ids(model, 1, tokens)
    times = []

    def once() -> None:
        times.clear()
        for start in range(0, tokens, chunk):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            batch = PagedBatch(cache, [Run(table, start, chunk)])
            model.hidden(ids[:, start : start + chunk], cache=batch)
            torch.cuda.synchronize()
            times.append((time.perf_counter() - begin) * 1e3)

    once()
    with peak_gib(row):
        once()
    row["ms"] = sum(times)
    row["floor_ms"] = sum(prefill_floor(model.config, chunk, start) for start in range(0, tokens, chunk)) * 1e3
    row["chunks_ms"] = times
    return row


def check(model: GLM5, tokens: int) -> list[dict[str, Any]]:
    """Logits of all positions by the fast operators, whole and over pages in pieces, against plain PyTorch.

    With random weights a last bit decides which experts a token gets and which positions it sees, and the logits of two
    correct runs in bf16 differ by a tenth. So every token gets all of 8 experts here, and `tokens` should not pass k.
    """
    sure = build(shape(model.config.num_hidden_layers, model.config.num_experts_per_tok))
    ids = random_ids(sure, 1, tokens)
    os.environ["GLM5_KERNELS"] = "torch"
    oracle = sure(ids, cache=sure.new_cache(1)).logits.float()
    del os.environ["GLM5_KERNELS"]
    whole = sure(ids, cache=sure.new_cache(1)).logits
    pages = 4096 // PAGE
    cache = PagedCache(sure.config, pages + 1, size=PAGE, device="cuda", dtype=torch.bfloat16)
    for layer in cache.layers:
        for pool in layer:
            pool.fill_(torch.nan)
    table, cuts = torch.randperm(pages).tolist(), [0, tokens // 2, tokens - 3, tokens - 1, tokens]
    pieces = [
        sure.hidden(ids[:, start:end], cache=PagedBatch(cache, [Run(table, start, end - start)]))
        for start, end in itertools.pairwise(cuts)
    ]
    record = recorder_for(sure.device)
    assert record is not None
    graphs = Graphs(sure, cache, spare=pages, most=1, context=4096, record=record)
    step = graphs([Run(table, tokens - 1, 1)], ids[:, -1:].tolist())
    assert step is not None, "recording failed"
    rows = []
    pairs = (
        ("whole", whole),
        ("over pages, in pieces", sure.lm_head(torch.cat(pieces, 1))),
        ("a recorded step", step[1]),
    )
    for name, logits in pairs:
        error = float((logits.float() - oracle[0, -logits.shape[-2] :]).norm() / oracle[0, -logits.shape[-2] :].norm())
        rows.append({"part": f"logits, {name}", "batch": 1, "context": tokens, "error": error})
    return rows


def engine(model: GLM5, batch: int, context: int, invariant: bool = False) -> list[dict[str, Any]]:
    """Steps of the whole engine while all its sequences decode: scheduling, drawing and Python included."""
    new = max(48, 2 * batch)  # so that the first still decodes when the last has been read
    rows, said = [], []
    limits = dict(max_running=batch, max_batched_tokens=8192, chunk=8192, context=context + 2 * PAGE)
    params = SamplingParams(temperature=0.0, max_new_tokens=new, ignore_eos=True)
    prompts = random_ids(model, batch, context - new).tolist()
    for graphs in (True, False) if batch == 1 and not invariant else (True,):
        pages = batch * (context // PAGE + 2)
        server = Engine(model, EngineConfig(pages=pages, cuda_graphs=graphs, invariant=invariant, **limits))
        for prompt in prompts:
            server.add(Request(prompt, params))
        begin, times, ids = time.perf_counter(), [], []
        while server.has_work:
            deltas = server.step()
            now = time.perf_counter()
            ids += [id for d in deltas for id in d.ids]
            if len(deltas) == batch and not any(d.finish for d in deltas):
                times.append((now - begin) * 1e3)
            begin = now
        name = "engine's step" + ("" if graphs else ", not recorded") + (", invariant" if invariant else "")
        row: dict[str, Any] = {"part": name, "batch": batch, "context": context, "ms": statistics.median(times[4:])}
        row["floor_ms"] = decode_floor(model.config, batch, context) * 1e3
        row["recorded_steps"] = server.info()["recorded_steps"]
        rows.append(row)
        said.append(ids)
        del server
    if len(said) == 2:
        rows[0]["same_ids"] = rows[1]["same_ids"] = next(
            (i for i, (a, b) in enumerate(zip(*said, strict=True)) if a != b), new
        )
    return rows


def peer(model: GLM5) -> Any:
    """transformers' model over the same tensors."""
    from transformers import AutoConfig, GlmMoeDsaForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    public = AutoConfig.for_model(**model.config.to_dict())
    with torch.device("meta"):
        made = GlmMoeDsaForCausalLM(public).to(torch.bfloat16)
    missing, unexpected = made.load_state_dict(model.state_dict(), assign=True, strict=False)
    if missing or unexpected:
        print(f"peer: missing {missing}, unexpected {unexpected}", file=sys.stderr)
    made.model.rotary_emb = type(made.model.rotary_emb)(public).to("cuda")
    return made.eval()


def peer_rows(model: GLM5, context: int, tokens: int) -> list[dict[str, Any]]:
    """Decode of batch 1 and prefill by transformers, in the settings that its configuration offers."""
    from transformers import DynamicCache

    reference, rows = peer(model), []
    for attention, experts in (("sdpa", "grouped_mm"), ("eager", "batched_mm"), ("sdpa", "batched_mm")):
        reference.set_attn_implementation(attention)
        reference.set_experts_implementation("grouped_mm")  # for the prompt: the other would copy experts per token
        row: dict[str, Any] = {"part": f"transformers decode, {attention} + {experts}", "batch": 1, "context": context}
        try:
            cache = DynamicCache(config=reference.config)
            for _ in range(0, context, 2048):
                reference(random_ids(model, 1, 2048), past_key_values=cache, use_cache=True, logits_to_keep=1)
            token = random_ids(model, 1, 1)
            reference.set_experts_implementation(experts)

            def step(token: Tensor = token, cache: Any = cache) -> Tensor:
                return reference(token, past_key_values=cache, use_cache=True).logits[0, -1].argmax()

            row["ms"] = median_ms(step)
        except Exception as problem:
            row["failed"] = f"{type(problem).__name__}: {str(problem)[:120]}"
        rows.append(row)
        cache = step = None  # type: ignore[assignment]
        torch.cuda.empty_cache()
    reference.set_experts_implementation("grouped_mm")
    for attention, length in (("eager", tokens // 2), ("sdpa", tokens // 2), ("sdpa", tokens)):
        reference.set_attn_implementation(attention)
        row = {"part": f"transformers prefill, {attention} + grouped_mm", "batch": 1, "context": length}
        ids = random_ids(model, 1, length)

        def run(ids: Tensor = ids) -> Tensor:
            return reference(ids, use_cache=True, logits_to_keep=1).logits[0, -1].argmax()

        try:
            run()
            with peak_gib(row):
                row["ms"] = median_ms(run, repeats=2, warm=0)
        except Exception as problem:
            row["failed"] = f"{type(problem).__name__}: {str(problem)[:120]}"
            print("".join(traceback.format_exception(problem)[-3:]), file=sys.stderr)
        rows.append(row)
        torch.cuda.empty_cache()
    return rows


# ---- command ------------------------------------------------------------------------------------------------------


def show(row: dict[str, Any]) -> None:
    text = f"{row['part']:44}{row['batch']:>6}{row['context']:>9}"
    if "failed" in row:
        print(f"{text}  failed: {row['failed']}", flush=True)
        return
    if "ms" not in row:
        print(f"{text}  error {row['error']:.1e}" if "error" in row else "", flush=True)
        return
    text += f"{row['ms']:>11.3f}"
    text += f"{row['floor_ms']:>11.3f}{row['floor_ms'] / row['ms']:>8.0%}" if "floor_ms" in row else " " * 19
    text += f"{row['peak_gib']:>9.1f}" if "peak_gib" in row else " " * 9
    text += f"  error {row['error']:.1e}" if row.get("error") else ""
    text += f"  {row['same_ids']} ids alike" if "same_ids" in row else ""
    print(text, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="check,decode,engine,prefill,chunks,profile,peer")
    parser.add_argument("--batches", default="1,16,64,128")
    parser.add_argument("--contexts", default="8192,32768")
    parser.add_argument("--prefill", type=int, default=16384)
    parser.add_argument("--long", type=int, default=131072)
    parser.add_argument("--chunk", type=int, default=8192)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--json", type=Path)
    a = parser.parse_args()
    parts = a.parts.split(",")
    batches, contexts = ([int(n) for n in text.split(",")] for text in (a.batches, a.contexts))
    begin = time.perf_counter()
    model = build(shape(a.layers, a.experts))
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated() / GIB
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; {a.layers} layers, {held:.1f} GiB of weights")
    print(f"built in {time.perf_counter() - begin:.1f} s")
    print(f"{'':44}{'batch':>6}{'context':>9}{'ms':>11}{'floor':>11}{'share':>8}{'GiB':>9}")
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "command": "python benchmarks/slice.py " + " ".join(sys.argv[1:]),
        "date": time.strftime("%Y-%m-%d"),
        "weights_gib": held,
        "rows": [],
    }

    def add(make: Callable[..., dict[str, Any] | list[dict[str, Any]]], *args: Any) -> None:
        """A part that fails loses its own rows only."""
        try:
            made = make(model, *args)
        except Exception as problem:
            traceback.print_exc()
            what = f"{make.__name__}{args}"
            made = {"part": what, "batch": 0, "context": 0, "failed": f"{type(problem).__name__}: {problem}"[:300]}
        for row in made if isinstance(made, list) else [made]:
            show(row)
            result["rows"].append(row)
        torch.cuda.empty_cache()
        if a.json:  # now and then again, so that a run that is cut short leaves what it has
            a.json.write_text(json.dumps(result, indent=1) + "\n")

    with torch.inference_mode():
        if "check" in parts:
            add(check, model.config.index_topk)
        if "decode" in parts:
            for batch in batches:
                for context in contexts:
                    add(decode, batch, context, (batch, context) == (batches[0], contexts[0]))
        if "engine" in parts:
            for batch in sorted({batches[0], 64}):
                add(engine, batch, contexts[0])
        if "invariant" in parts:
            for batch in sorted({batches[0], 64}):
                add(engine, batch, contexts[0], True)
        if "prefill" in parts:
            add(prefill, a.prefill // 2)
            add(prefill, a.prefill)
        if "chunks" in parts:
            add(chunks, a.long, a.chunk)
        if "peer" in parts:
            add(peer_rows, 8192, a.prefill)
        if "profile" in parts:
            for name, call in (
                ("decode 1 x 8192", lambda m: decode_calls(m, 1, 8192)[0]),
                ("decode 64 x 8192", lambda m: decode_calls(m, 64, 8192)[0]),
                (f"prefill {a.prefill}", lambda m: prefill_call(m, a.prefill)),
            ):
                add(profile, name, call)


if __name__ == "__main__":
    main()
