"""One attention layer of GLM-5 at true widths on one GPU, forward over a long prompt, by operator.

    python benchmarks/attention_block.py [--contexts 16384,131072] [--chunk 8192] [--versions fast,torch] [--json FILE]

From the layer's normed input to its output projection, random bf16 weights and inputs, top-2,048. A prompt is read
over pages in chunks, as the engine reads it. `torch` runs the specifications instead of the fast operators, on the last
chunk alone. The floor counts bf16 operations over 790 TFLOP/s, as `slice` does; what the last chunk's kernels took is
told by operator. The first chunk's first 2,048 tokens see everything, so that their outputs of both versions must
agree: the rest select, where a last bit of a score decides. Read next: `slice`, docs/kernels.md.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from glm5.kernels.basic import rotations
from glm5.model.config import ModelConfig
from glm5.model.mla import MLA
from glm5.model.paged import PagedBatch, PagedCache, Run
from slice import FLOP_PER_S, PAGE, by_kernel, parameters
from timing import event_us, relative

OPERATORS = {
    "sparse MLA": ("sparse_mla", "_attend"),
    "index scores": ("index_scores",),
    "top-k": ("stable_topk",),
    "products": ("nvjet", "gemm", "cutlass", "_by_head"),
}


def floor_ms(c: ModelConfig, tokens: int, before: int) -> float:
    """Of the operations of `tokens` after `before`."""
    index = (before + tokens / 2) * c.index_n_heads * c.index_head_dim
    picked = sum(min(before + t + 1, c.index_topk) for t in range(tokens)) / tokens
    attend = picked * c.num_attention_heads * (c.latent_dim + c.kv_lora_rank)
    return 2e3 * tokens * (parameters(c)["attention"] + index + attend) / FLOP_PER_S


def by_operator(call: Callable[[], object]) -> dict[str, float]:
    """Milliseconds on the device."""
    found = dict.fromkeys((*OPERATORS, "everything else"), 0.0)
    for row in by_kernel(call, top=1000):
        name = next((n for n, parts in OPERATORS.items() if any(p in row["kernel"] for p in parts)), "everything else")
        found[name] += row["us"] / 1e3
    return found


def read(layer: MLA, config: ModelConfig, context: int, chunk: int, versions: list[str]) -> list[dict[str, object]]:
    """A prompt of `context` tokens by each version, `fast` before `torch`."""
    cache = PagedCache(config, context // PAGE, size=PAGE, device="cuda", dtype=torch.bfloat16)
    table = torch.randperm(context // PAGE).tolist()
    x = torch.randn(1, context, config.hidden_size, device="cuda", dtype=torch.bfloat16)
    rope = rotations(torch.arange(context, device="cuda")[None], config.qk_rope_head_dim, config.rope_theta)

    def forward(start: int) -> Tensor:
        piece, batch = slice(start, start + chunk), PagedBatch(cache, [Run(table, start, chunk)])
        return layer(x[:, piece], rope[:, piece], batch.visible, cache=batch)

    starts, rows, seen = range(0, context, chunk), [], {}
    for version in versions:
        os.environ["GLM5_KERNELS"] = "torch" if version == "torch" else ""
        seen[version] = forward(0)[:, : config.index_topk]
        row: dict[str, object] = {"context": context, "chunk": chunk, "version": version}
        if version == "fast":
            torch.cuda.reset_peak_memory_stats()
            times = [event_us(lambda start=start: forward(start), 3) / 1e3 for start in starts]
            row |= {"ms": sum(times), "floor_ms": sum(floor_ms(config, chunk, start) for start in starts)}
            row |= {"last_ms": times[-1], "peak_gib": torch.cuda.max_memory_allocated() / 2**30}
            row["last_by_operator_ms"] = by_operator(lambda: forward(starts[-1]))
        else:
            row["last_ms"] = event_us(lambda: forward(starts[-1]), 1) / 1e3
            row["difference"] = relative(seen["fast"], seen[version]) if "fast" in seen else None
        row["last_floor_ms"] = floor_ms(config, chunk, starts[-1])
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", default="16384,131072")
    parser.add_argument("--chunk", type=int, default=8192)
    parser.add_argument("--versions", default="fast,torch")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    print(torch.cuda.get_device_name(), "torch", torch.__version__, flush=True)
    config = ModelConfig(num_hidden_layers=1, first_k_dense_replace=1, num_nextn_predict_layers=0)
    layer = MLA(config, 0).to("cuda", torch.bfloat16).eval()
    for weight in layer.parameters():
        weight.normal_(std=weight.shape[-1] ** -0.5) if weight.ndim > 1 else weight.fill_(1.0)
    rows = []
    for context in map(int, arguments.contexts.split(",")):
        rows += read(layer, config, context, arguments.chunk, arguments.versions.split(","))
        torch.cuda.empty_cache()
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    with torch.inference_mode():
        main()
