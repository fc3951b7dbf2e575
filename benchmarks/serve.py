"""The engine on a CPU beside transformers, in one run: the same weights, prompts and threads, a process for each.

    python benchmarks/serve.py [--requests 64] [--min-prompt 64] [--max-prompt 2048] [--new-tokens 128] [--threads 2]
                               [--drafts 3] [--checkpoint DIR] [--peers one-by-one batched]

Every request is there at the beginning; greedy; no end of text before `--new-tokens`. For the engine also the time to
the first token and between tokens. Prompts are random ids, or, with a checkpoint that has a tokenizer, pieces of this
Python's standard library, so that drafts mean something. Writes benchmarks/out/serve.json.

    python benchmarks/serve.py --soak MINUTES      sustained load on a real server: see soak.py
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

OUT = Path(__file__).parent / "out"
BATCHES = (8, 16)  # of the peer, whose prefill takes memory like batch times length squared; the better one counts


def prompts(a: argparse.Namespace) -> list[list[int]]:
    """Lengths spread evenly over the range, in random order."""
    rng = random.Random(0)  # noqa: S311
    spread = (a.max_prompt - a.min_prompt) / max(a.requests - 1, 1)
    lengths = [round(a.min_prompt + i * spread) for i in range(a.requests)]
    rng.shuffle(lengths)
    if not a.checkpoint:
        return [[rng.randrange(16, 2048) for _ in range(n)] for n in lengths]
    from glm5 import load_tokenizer

    tokenizer = load_tokenizer(a.checkpoint)
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    out = []
    for n in lengths:
        ids: list[int] = [*tokenizer.prefix_ids]
        while len(ids) < n:
            ids += tokenizer.encode(rng.choice(files).read_text(errors="replace"))
        out.append(ids[:n])
    return out


def engine(path: str, ids: list[list[int]], a: argparse.Namespace, drafts: int) -> dict[str, Any]:
    import torch

    from glm5 import load_model
    from glm5.serve.config import EngineConfig
    from glm5.serve.engine import Engine
    from glm5.serve.request import Request, SamplingParams

    model = load_model(path, dtype=torch.float32)
    pages = sum((len(p) + a.new_tokens + drafts) // 64 + 1 for p in ids)
    config = EngineConfig(
        pages=pages,
        drafts=drafts,
        max_running=a.requests,
        chunk=a.chunk,
        overlap=not a.no_overlap,
        invariant=a.invariant,
    )
    server = Engine(model, config)
    params = SamplingParams(temperature=0.0, max_new_tokens=a.new_tokens, ignore_eos=True)
    warm = Request(ids[0][:64], SamplingParams(temperature=0.0, max_new_tokens=4, ignore_eos=True))
    server.add(warm)
    while server.has_work:
        server.step()
    server.flush_cache()
    begin = time.perf_counter()
    first: dict[str, float] = {}
    last: dict[str, float] = {}
    gaps: list[float] = []
    tokens = steps = 0
    for prompt in ids:
        server.add(Request(prompt, params))
    while server.has_work:
        deltas = server.step() if a.no_overlap else server.advance(lambda: None)
        now, steps = time.perf_counter(), steps + 1
        for delta in deltas:
            tokens += len(delta.ids)
            if delta.rid in last:
                gaps.append((now - last[delta.rid]) / len(delta.ids))
            first.setdefault(delta.rid, now - begin)
            last[delta.rid] = now
    seconds = time.perf_counter() - begin

    def quantiles(values: list[float]) -> dict[str, float]:
        cut = statistics.quantiles(values, n=100)
        return {"p50": statistics.median(values), "p99": cut[98]}

    return {
        "seconds": seconds,
        "tokens": tokens,
        "steps": steps,
        "ttft_s": quantiles(list(first.values())),
        "between_tokens_s": quantiles(gaps),
        "accept_length": server.speculation.accept_length,
    }


def transformers(path: str, ids: list[list[int]], a: argparse.Namespace, batch: int) -> dict[str, Any]:
    import torch
    from transformers import GlmMoeDsaForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    model = GlmMoeDsaForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    options: dict[str, Any] = dict(do_sample=False, max_new_tokens=a.new_tokens, min_new_tokens=a.new_tokens)
    options["pad_token_id"] = 0
    ordered = sorted(ids, key=len)  # so that batches pad little
    model.generate(torch.tensor([ids[0][:64]]), do_sample=False, max_new_tokens=4, pad_token_id=0)
    begin, tokens = time.perf_counter(), 0
    for at in range(0, len(ordered), batch):
        part = ordered[at : at + batch]
        longest = max(map(len, part))
        padded = torch.tensor([[0] * (longest - len(p)) + p for p in part])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in part])
        out = model.generate(padded, attention_mask=mask, **options)
        tokens += (out.shape[1] - longest) * len(part)
    return {"seconds": time.perf_counter() - begin, "tokens": tokens}


def measure(who: str, path: str, a: argparse.Namespace) -> dict[str, Any]:
    """One measurement in a process of its own."""
    command = [sys.executable, __file__, *sys.argv[1:], "--worker", who, path]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={"GOMP_SPINCOUNT": "20000", **os.environ}
    )
    if done.returncode:
        raise SystemExit(f"{who} failed:\n{done.stderr[-3000:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    found["tokens_per_second"] = found["tokens"] / found["seconds"]
    print(f"{who:28}{found['tokens_per_second']:>10.1f} tokens/s{found['seconds']:>10.1f} s", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--min-prompt", type=int, default=64)
    parser.add_argument("--max-prompt", type=int, default=2048)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--drafts", type=int, default=3)
    parser.add_argument("--chunk", type=int, default=2048)
    parser.add_argument("--checkpoint", default="")
    parser.add_argument("--peers", nargs="*", default=["one-by-one", "batched"], choices=["one-by-one", "batched"])
    parser.add_argument("--soak", type=float, default=0.0, metavar="MINUTES")
    parser.add_argument("--workers", type=int, nargs=2, metavar=("PREFILL", "DECODE"), help="with --soak")
    parser.add_argument("--no-overlap", action="store_true", help="plan and tell only between steps")
    parser.add_argument("--invariant", action="store_true", help="the engine's batch-invariant mode")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.soak:
        from soak import soak

        soak(a)
        return
    import torch

    torch.set_num_threads(a.threads)
    if a.worker:
        who, path = a.worker
        kind, number = who.split(":")
        work = engine if kind == "engine" else transformers
        print(json.dumps(work(path, prompts(a), a, int(number))))
        return

    from glm5 import GLM5, save_model
    from glm5.model.presets import nano

    with tempfile.TemporaryDirectory() as made:
        path = a.checkpoint or made
        if not a.checkpoint:
            save_model(GLM5(nano(initializer_range=0.06), seed=1), made)
        whos = ["engine:0", *([f"engine:{a.drafts}"] if a.drafts else [])]
        whos += [f"transformers:{n}" for n in BATCHES] if "batched" in a.peers else []
        whos += ["transformers:1"] if "one-by-one" in a.peers else []
        print(
            f"{platform.machine()}, {a.threads} threads, torch {torch.__version__}; nano, fp32; {a.requests} requests"
        )
        runs = {who: measure(who, path, a) for who in whos}
    plain = runs["engine:0"]
    rates = {who: found["tokens_per_second"] for who, found in runs.items()}
    ratios = {who: rates["engine:0"] / rate for who, rate in rates.items() if who.startswith("transformers")}
    for who, ratio in ratios.items():
        print(f"engine over {who}: {ratio:.2f}")
    for name in ("ttft_s", "between_tokens_s"):
        print(f"{name}: p50 {plain[name]['p50']:.3f}, p99 {plain[name]['p99']:.3f}")
    if a.drafts:
        drafted = runs[f"engine:{a.drafts}"]
        gain = drafted["tokens_per_second"] / plain["tokens_per_second"]
        print(f"with {a.drafts} drafts: {gain:.2f} times as fast, accept length {drafted['accept_length']:.2f}")
    OUT.mkdir(exist_ok=True)
    result = {
        "machine": f"{platform.machine()}, {a.threads} threads",
        "torch": torch.__version__,
        "command": "python " + " ".join(["benchmarks/serve.py", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d"),
        "ratios": ratios,
        "runs": runs,
    }
    (OUT / "serve.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
