"""Prefill and decode on CPU, beside transformers in the same run: same weights, same threads, one process each.

    python benchmarks/inference.py [--threads 2] [--prefill 4096] [--context 2048] [--new-tokens 64] [--repeats 5]

Rounds alternate between the two, so that a busy machine slows both; the table gives medians and their ratio. Peak
memory is the growth of the process's peak resident set over what it held once the model was loaded.

The greedy tokens are compared as well. Where index scores tie exactly at the k-th place, transformers' top-k takes any
of them and ours the lowest positions; with random weights one such place turns the text. So transformers decodes once
more, untimed, with a stable sort in place of its top-k: then the tokens have to be ours.
Writes benchmarks/out/inference.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

OUT = Path(__file__).parent / "out"


def peak_kib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def stable_topk(scores: Any, k: int, dim: int = -1) -> Any:
    """As `Tensor.topk`; of equal scores the lower positions."""
    import torch

    values, indices = scores.sort(dim=dim, descending=True, stable=True)
    return torch.return_types.topk((values.narrow(dim, 0, k), indices.narrow(dim, 0, k)))


def worker(who: str, what: str, path: str, threads: int, length: int, new_tokens: int) -> dict[str, Any]:
    """One measurement in this process: seconds, and KiB of peak growth."""
    import torch

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    if who == "glm5":
        from glm5 import load_model

        model = load_model(path, dtype=torch.float32)

        def start(ids: Any) -> tuple[Any, Any]:
            cache = model.new_cache(1)
            return model(ids, cache=cache, logits_to_keep=1).logits, cache

        def step(ids: Any, cache: Any) -> Any:
            return model(ids, cache=cache).logits
    else:
        from transformers import DynamicCache, GlmMoeDsaForCausalLM
        from transformers.utils import logging

        logging.set_verbosity_error()
        if who == "transformers-stable":
            torch.Tensor.topk = stable_topk  # type: ignore[assignment]  # only the indexer calls it as a method
        reference = GlmMoeDsaForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

        def start(ids: Any) -> tuple[Any, Any]:
            cache = DynamicCache(config=reference.config)
            return reference(ids, cache=cache, use_cache=True, logits_to_keep=1).logits, cache

        def step(ids: Any, cache: Any) -> Any:
            return reference(ids, cache=cache, use_cache=True).logits

    ids = torch.randint(1, 2048, (1, length))
    with torch.inference_mode():
        start(ids[:, :64])
        before = peak_kib()
        begin = time.perf_counter()
        logits, cache = start(ids)
        prefill = time.perf_counter() - begin
        if what == "prefill":
            return {"seconds": prefill, "peak_kib": peak_kib() - before}
        token = logits[:, -1:].argmax(-1)
        produced = []
        for i in range(new_tokens + 4):
            if i == 4:  # the first steps warm up
                begin = time.perf_counter()
            token = step(token, cache)[:, -1:].argmax(-1)
            produced.append(int(token))
        return {"seconds": (time.perf_counter() - begin) / new_tokens, "tokens": produced}


def measure(who: str, what: str, path: str, a: argparse.Namespace) -> dict[str, Any]:
    length = a.prefill if what == "prefill" else a.context
    command = [sys.executable, __file__, "--worker", who, what, path, str(a.threads), str(length), str(a.new_tokens)]
    # As the command line does; for both, so that threads cost both the same on a shared machine.
    environment = {"GOMP_SPINCOUNT": "20000", **os.environ}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise SystemExit(f"{who} {what} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prefill", type=int, default=4096, help="tokens of the prefill")
    parser.add_argument("--context", type=int, default=2048, help="tokens in the cache when decoding begins")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--worker", nargs=6, help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.worker:
        who, what, path, *numbers = a.worker
        print(json.dumps(worker(who, what, path, *map(int, numbers))))
        return

    import torch
    import transformers

    from glm5 import GLM5, save_model
    from glm5.model.presets import nano

    with tempfile.TemporaryDirectory() as path:
        save_model(GLM5(nano(initializer_range=0.06), seed=1), path)
        runs: dict[tuple[str, str], list[dict[str, Any]]] = {}
        for what in ("prefill", "decode"):
            for _ in range(a.repeats):
                for who in ("glm5", "transformers"):
                    runs.setdefault((what, who), []).append(measure(who, what, path, a))
        stable = measure("transformers-stable", "decode", path, a)
    ours, theirs = (runs["decode", who][0]["tokens"] for who in ("glm5", "transformers"))
    same = {"as_it_is": ours == theirs, "with_a_stable_topk": ours == stable["tokens"]}
    seconds = {key: statistics.median(r["seconds"] for r in rows) for key, rows in runs.items()}
    memory = {who: max(r["peak_kib"] for r in runs["prefill", who]) for who in ("glm5", "transformers")}
    result = {
        "machine": f"{platform.machine()}, {a.threads} threads",
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "command": "python " + " ".join(["benchmarks/inference.py", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d"),
        "same_greedy_tokens": same,
        "rows": [
            {
                "what": f"prefill of {a.prefill} tokens, s",
                "glm5": seconds["prefill", "glm5"],
                "transformers": seconds["prefill", "transformers"],
                "ratio": seconds["prefill", "transformers"] / seconds["prefill", "glm5"],
            },
            {
                "what": "peak memory of that prefill, MiB",
                "glm5": memory["glm5"] / 1024,
                "transformers": memory["transformers"] / 1024,
                "ratio": memory["transformers"] / max(memory["glm5"], 1),
            },
            {
                "what": f"greedy decode at {a.context} tokens, tokens/s",
                "glm5": 1 / seconds["decode", "glm5"],
                "transformers": 1 / seconds["decode", "transformers"],
                "ratio": seconds["decode", "transformers"] / seconds["decode", "glm5"],
            },
        ],
        "runs": {f"{what}/{who}": rows for (what, who), rows in runs.items()},
    }
    print(f"{result['machine']}; torch {torch.__version__}, transformers {transformers.__version__}; nano, fp32")
    print(f"{'':44}{'glm5':>10}{'transformers':>14}{'ratio':>8}")
    for row in result["rows"]:
        print(f"{row['what']:44}{row['glm5']:>10.3f}{row['transformers']:>14.3f}{row['ratio']:>8.2f}")
    print(f"same greedy tokens: {same['as_it_is']}; with a stable top-k in transformers: {same['with_a_stable_topk']}")
    OUT.mkdir(exist_ok=True)
    (OUT / "inference.json").write_text(json.dumps(result, indent=1) + "\n")
    if not same["with_a_stable_topk"]:
        raise SystemExit("the tokens differ although both break ties alike")


if __name__ == "__main__":
    main()
