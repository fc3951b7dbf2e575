"""A training step of a slice of GLM-5 at true widths on one GPU, by stage, against the chip's limit.

    python benchmarks/train_slice.py [--tokens 4096,8192] [--rows 1] [--layers 2] [--experts 256]
                                     [--versions fast,torch] [--profile] [--json FILE]

The slice has the first layers of GLM-5, one dense and the others MoE, random bf16 weights and a vocabulary of 32,768;
some rows of so many tokens, forward and backward, no optimizer. Stages: `dense` pretraining; `warmup` of the indexers
(all else frozen, dense attention, the indexer's loss over whole intervals and no other); `sparse` adaptation
(top-2,048, the indexer's loss on the selection beside the tokens'). `torch` runs the specifications instead of the fast
operators. The floor is the larger of the counted bf16 operations over 790 TFLOP/s and of the weights' bytes (read twice
and their gradients written, or read once where frozen) over 4.3 TB/s, both measured on an H200. MFU counts model
operations alone (`glm5.ledger.step`: no scores made again), over 790 TFLOP/s.
"""

from __future__ import annotations

import argparse
import json
import os
import traceback
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

import torch

from glm5.kernels.cross_entropy import linear_cross_entropy
from glm5.ledger.step import step_flops
from glm5.model.config import ModelConfig
from glm5.model.glm5 import GLM5
from glm5.model.trace import Aux
from timing import event_us

BYTES_PER_S, FLOP_PER_S, GIB = 4.3e12, 790e12, 2**30
STAGES = ("dense", "warmup", "sparse")


def build(layers: int, experts: int) -> GLM5:
    config = ModelConfig(
        num_hidden_layers=layers,
        first_k_dense_replace=1,
        n_routed_experts=experts,
        num_nextn_predict_layers=0,
        vocab_size=32768,
        eos_token_id=(0,),
        pad_token_id=0,
    )
    with torch.device("meta"):
        model = GLM5(config, seed=None).to(torch.bfloat16)
    model = model.to_empty(device="cuda")
    model.init_weights(0)
    for buffer in model.buffers():
        buffer.zero_()
    return model


def operations(c: ModelConfig, tokens: int, stage: str) -> float:
    """Multiply-adds times two, forward and backward: products three times, attention by what its backward needs."""
    heads, latent = c.num_attention_heads, c.kv_lora_rank
    attention = (
        c.hidden_size * (c.q_lora_rank + c.latent_dim)
        + c.q_lora_rank * heads * c.qk_head_dim
        + latent * heads * (c.qk_nope_head_dim + c.v_head_dim)
        + heads * c.v_head_dim * c.hidden_size
    )
    index = c.q_lora_rank * c.index_n_heads * c.index_head_dim + c.hidden_size * (c.index_head_dim + c.index_n_heads)
    expert = 3 * c.hidden_size * c.moe_intermediate_size
    moe = expert * (c.num_experts_per_tok + c.n_shared_experts) + c.hidden_size * c.n_routed_experts
    moes = c.num_hidden_layers - 1
    weights = c.num_hidden_layers * attention + 3 * c.hidden_size * c.intermediate_size + moes * moe
    pairs = tokens * (tokens + 1) / 2
    index_pair = c.index_n_heads * c.index_head_dim
    if stage == "warmup":
        layer = 6.0 * tokens * index + 2.0 * pairs * (heads * (2 * c.qk_head_dim + c.v_head_dim) + 3 * index_pair)
        return 2.0 * tokens * weights + c.num_hidden_layers * layer
    total = 6.0 * tokens * (weights + c.hidden_size * c.vocab_size)
    if stage == "sparse":
        chosen = sum(min(t + 1, c.index_topk) for t in range(tokens))
        wide, value = c.latent_dim, latent
        pair = heads * (wide + value) + heads * (3 * wide + 2 * value)
        total += c.num_hidden_layers * (6.0 * tokens * index + 2.0 * chosen * (pair + heads * wide))
        total += c.num_hidden_layers * (2.0 * pairs * index_pair + 6.0 * chosen * index_pair)
    else:
        pair = heads * (c.qk_head_dim + c.v_head_dim) + heads * (3 * c.qk_head_dim + 2 * c.v_head_dim)
        total += c.num_hidden_layers * 2.0 * pairs * pair
    return total


def counted(c: ModelConfig, tokens: int, stage: str) -> float:
    """Model operations of one row, as training's metrics count them."""
    pairs = tokens * (tokens + 1) // 2
    selected = sum(min(t + 1, c.index_topk) for t in range(tokens))
    kind = "pretrain" if stage == "dense" else stage
    return step_flops(c, kind, tokens=tokens, pairs=pairs, selected=selected, mtp=0.0).total


def step(model: GLM5, ids: torch.Tensor, stage: str) -> Callable[[], None]:
    targets = ids.roll(-1, 1).flatten()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(stage != "warmup" or ".indexer." in name)

    def run() -> None:
        model.zero_grad(set_to_none=True)
        aux = Aux(indexer=stage != "dense")
        hidden = model.hidden(ids, sparse=stage == "sparse", aux=aux)
        if stage == "warmup":
            (aux.indexer_kl() / ids.numel()).backward()
            return
        loss = linear_cross_entropy(hidden.flatten(0, 1), model.lm_head.weight, targets).loss_sum
        ((loss + aux.indexer_kl()) / ids.numel()).backward()

    return run


def profile(call: Callable[[], None], rows: int = 14) -> None:
    """Where the device's time goes, by kernel."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        call()
        torch.cuda.synchronize()
    events = sorted(found.key_averages(), key=lambda e: -e.self_device_time_total)
    for e in events[:rows]:
        print(f"    {e.self_device_time_total / 1e3:8.2f} ms {e.count:5d} x {e.key[:90]}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="4096,8192")
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--stages", default=",".join(STAGES))
    parser.add_argument("--versions", default="fast,torch")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    print(torch.cuda.get_device_name(), "torch", torch.__version__, flush=True)
    model = build(arguments.layers, arguments.experts)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    rows = []
    for tokens in map(int, arguments.tokens.split(",")):
        ids = torch.randint(0, model.config.vocab_size, (arguments.rows, tokens), device="cuda")
        for stage in arguments.stages.split(","):
            passes = 1 if stage == "warmup" else 3
            work = arguments.rows * operations(model.config, tokens, stage)
            flop = arguments.rows * counted(model.config, tokens, stage)
            floor = 1e3 * max(work / FLOP_PER_S, passes * weights / BYTES_PER_S)
            for version in arguments.versions.split(","):
                os.environ["GLM5_KERNELS"] = "torch" if version == "torch" else ""
                torch.cuda.reset_peak_memory_stats()
                try:
                    call = step(model, ids, stage)
                    ms = event_us(call, 5 if version == "fast" else 2) / 1e3
                except Exception as problem:
                    traceback.print_exc()
                    print(f"{tokens} {stage} {version}: failed, {type(problem).__name__}", flush=True)
                    model.zero_grad(set_to_none=True)
                    torch.cuda.empty_cache()
                    continue
                peak = torch.cuda.max_memory_allocated() / GIB
                mfu = flop / (ms / 1e3) / FLOP_PER_S
                row = dict(tokens=tokens, stage=stage, version=version, ms=ms, floor_ms=floor, mfu=mfu, peak_gib=peak)
                rows.append(row)
                share = f"floor {floor:6.1f}  {floor / ms:4.0%}  MFU {mfu:5.1%}"
                print(f"{tokens:6d} {stage:7} {version:6} {ms:8.1f} ms  {share}  {peak:.1f} GiB", flush=True)
                if arguments.profile and version == "fast":
                    profile(call)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
