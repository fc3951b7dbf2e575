"""What `glm5 demo` found, as report.json, as a page with plots, and as the last lines on the terminal.

Read next: `demo`.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from glm5.utils.plots import Report
from glm5.utils.runlog import describe_environment, read_metrics

if TYPE_CHECKING:
    from glm5.model.glm5 import GLM5
    from glm5.train.evaluate import Drafting
    from glm5.train.sparsify import Sparsified


def summarise(
    model: GLM5,
    found: Sparsified,
    xz: float,
    drafts: Drafting,
    completions: dict[str, str],
    answers: dict[str, Any],
    times: dict[str, float],
    context: int,
) -> dict[str, Any]:
    """Every figure of the demo, as JSON values.

    Args:
        xz: bits per byte of `xz -9e`. answers: of `demo_answers`. context: tokens in a row.
    """
    from glm5.ledger.memory import cache_bytes
    from glm5.model.cache import Cache

    config = model.config
    held = Cache(config, capacity=1).nbytes(used=False)
    counted = cache_bytes(config, "fp32").total * config.num_cache_layers
    total = sum(times.values())
    lines = [
        "",
        f"bits per byte on held-out files   xz -9e {xz:.3f}   "
        + "   ".join(f"{name} {value:.3f}" for name, value in found.bits_per_byte.items()),
        "indexer recall of attention mass  "
        + "   ".join(f"{name} {value:.3f}" for name, value in found.recall.items()),
        f"drafting with {drafts.drafts} drafts           {drafts.accept_length:.2f} tokens a verification, "
        f"{'identical to plain decoding' if drafts.identical else 'NOT identical to plain decoding'}, "
        f"{drafts.plain_tokens_per_second:.0f} -> {drafts.drafted_tokens_per_second:.0f} tokens/s "
        f"({drafts.speedup:.2f}x)",
        f"held-out tasks solved             fine-tuned {answers['fine_tuned']:.0%}   after {answers['steps']} steps of "
        f"reinforcement learning {answers['learned']:.0%}",
        f"cache per token                   {held} bytes held, {counted} by the ledger",
        f"time                              {total:.0f} s: " + ", ".join(f"{k} {v:.0f}" for k, v in times.items()),
    ]
    return {
        "date": time.strftime("%Y-%m-%d"),
        "environment": describe_environment(),
        "model": {"parameters": sum(p.numel() for p in model.parameters()), **config.to_dict()},
        "corpus": found.result["corpus"],
        "bits_per_byte": {"xz -9e": xz, **found.bits_per_byte},
        "indexer_recall": found.result["recall_by_layer"],
        "drafting": {
            "drafts": drafts.drafts,
            "identical_to_plain": drafts.identical,
            "accept_length": drafts.accept_length,
            "acceptance_by_position": drafts.acceptance,
            "plain_tokens_per_second": drafts.plain_tokens_per_second,
            "drafted_tokens_per_second": drafts.drafted_tokens_per_second,
            "speedup": drafts.speedup,
        },
        "cache_bytes_per_token": {"held": held, "ledger": counted},
        "context": context,
        "index_topk": config.index_topk,
        "completions": completions,
        "answers": answers,
        "seconds": times,
        "lines": lines,
    }


def write_html(report: dict[str, Any], directory: Path) -> None:
    """report.html: one file, plots drawn from the stages' metrics."""
    bits, recall, drafts = report["bits_per_byte"], report["indexer_recall"], report["drafting"]
    metrics = {name: read_metrics(directory / name) for name in ("pretrain", "warmup", "adapt", "answers/rl")}

    def curve(stage: str, metric: str) -> list[tuple[float, float]]:
        return [(r["step"], r[metric]) for r in metrics[stage] if metric in r]

    page = Report("A small GLM-5, trained here")
    page.figures(
        {
            "bits per byte, sparse (held out)": round(bits["sparse, adapted"], 3),
            "bits per byte, dense": round(bits["dense"], 3),
            "bits per byte, xz -9e": round(bits["xz -9e"], 3),
            "tokens a verification": round(drafts["accept_length"], 2),
            "cache bytes a token": report["cache_bytes_per_token"]["held"],
        }
    )
    page.section(
        "What it cost to become sparse",
        f"Attention reads {report['index_topk']} of up to {report['context']} positions. Bits per byte on files that "
        "training never saw; lower is better.",
    )
    page.table(["model", "bits per byte"], [[name, round(value, 4)] for name, value in bits.items()])
    page.section("Pretraining", "Dense attention; the shared MTP block at each of its depths.")
    losses = {"next token": "loss", **{f"MTP depth {d}": f"mtp_loss_{d}" for d in (1, 2, 3)}}
    page.chart({name: curve("pretrain", key) for name, key in losses.items()}, y="nats per token")
    page.chart(
        {"largest attention logit": curve("pretrain", "attention_logit_max")},
        y="logit",
        caption="Largest attention logit: Muon Split is said to keep it bounded without clipping",
    )
    page.chart(
        {name: curve("pretrain", f"expert_load_{end}") for name, end in (("busiest", "max"), ("idlest", "min"))},
        y="load",
        caption="Load of the busiest and the idlest expert; 1 is balance",
    )
    page.section("The indexer", "Share of the dense attention's mass on the indexer's choice, by layer.")
    page.table(
        ["", *(f"layer {i}" for i in range(len(next(iter(recall.values())))))],
        [[name, *(round(x, 3) for x in layers)] for name, layers in recall.items()],
    )
    page.chart({"KL to the attention": curve("warmup", "indexer_kl")}, y="nats", log_y=True, caption="Warm-up")
    page.chart({"next token": curve("adapt", "loss")}, y="nats per token", caption="Adaptation")
    page.section("Drafting", "Greedy decoding with drafts from the MTP block, against decoding without.")
    page.table(
        ["figure", "value"],
        [[k.replace("_", " "), str(v) if isinstance(v, bool | list) else round(v, 3)] for k, v in drafts.items()],
    )
    page.section("Completions")
    for prompt, text in report["completions"].items():
        page.code(prompt + text)
    found = report["answers"]
    page.section(
        "Learning from verified answers",
        f"Tasks like max(3, 7, 5). Of {found['held_out']} held-out ones the fine-tuned model solves "
        f"{found['fine_tuned']:.0%}, and {found['learned']:.0%} after {found['steps']} steps of reinforcement learning "
        f"from {found['answers']:,} answers of its own. answers/rl/rollouts.html shows some, token by token.",
    )
    page.chart({"reward": curve("answers/rl", "reward")}, y="reward of the answers drawn")
    page.section("Corpus and time")
    page.table(
        ["corpus", ""], [[k, str(v) if isinstance(v, dict) else round(v, 2)] for k, v in report["corpus"].items()]
    )
    page.table(["stage", "seconds"], [[k, round(v, 1)] for k, v in report["seconds"].items()])
    page.save(directory / "report.html")
