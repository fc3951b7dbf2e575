"""What the report's choices for reinforcement learning of a sparse model buy, each taken away, at a small size.

    python benchmarks/rl_ablations.py [--seeds 0,1,2] [--arms base,noisy,noisy-off,...] [--steps 40] --out DIR
                                      [--task big|sort] [--digits 3] [--json FILE]
    python benchmarks/rl_ablations.py --table FILE ...       # of what runs of several seeds or arms wrote by --json
    python benchmarks/rl_ablations.py --arms '' --out DIR    # fine-tune only; copies of DIR may then run arms beside
                                                             # each other, from the same weights

A model of `nano`'s parts (--hidden and so on set its size) that reads 6 positions by one index head, so that half of
index scores are ReLU's zeros and tie, is fine-tuned on "big 4 1 7" (the largest of the digits; --careless of the
answers say the first) or "sort 4 1 7" (the digits in order; the careless ones leave them as they stand) until it knows
the form, and then learns from verified answers by the function behind `glm5 rl reason`. Arms begin with the same
weights and draw from the same seed:

    base         the engine runs the trainer's weights; IcePop; stable top-k; frozen indexers
    base-off     the same without IcePop
    fp8          the engine's matrices are rounded to e4m3, a scale a row; IcePop
    fp8-off      the same without IcePop
    noisy        every weight of the engine's matrices is off by a normal relative error (--noise), anew in each step
    noisy-off    the same without IcePop
    noisy-replay as noisy, and the trainer takes the experts that the engine chose
    racing       ties of the top-k fall at random, in engine and trainer; IcePop
    racing-off   the same without IcePop
    trained      indexers learn on their KL meanwhile

Success is that of greedy answers to held-out tasks, by the stable engine with the trainer's own weights, whatever the
arm. Every seed draws weights, tasks and answers anew. The script goes on where it was stopped, run by run and within
each; DIR/results.json holds what is done. A verdict says "differs" where 0 lies outside the 95% interval (Student's t)
of the paired difference to its counterpart over the seeds, and else "within the noise".
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import learning
from glm5 import GLM5, load_model, save_model
from glm5.model.config import ModelConfig
from glm5.model.presets import nano
from glm5.posttrain import reason as reasoning
from glm5.posttrain.learner import LearnConfig
from glm5.posttrain.losses import LossConfig, glm5_reasoning
from glm5.posttrain.reason import PromptConfig, ReasonConfig, prepare_prompts, verifier_pool
from glm5.posttrain.rollouts import RolloutConfig, Rollouts
from glm5.text import Tokenizer, load_tokenizer
from glm5.train.schedule import LearningRate
from glm5.utils.runlog import read_metrics
from learning import quiet

HELD_OUT, TASKS = 200, 800
ARMS: dict[str, dict[str, Any]] = {
    "base": {},
    "base-off": {"icepop": False},
    "fp8": {"engine": "fp8"},
    "fp8-off": {"engine": "fp8", "icepop": False},
    "noisy": {"engine": "noisy"},
    "noisy-off": {"engine": "noisy", "icepop": False},
    "noisy-replay": {"engine": "noisy", "router_replay": True},
    "racing": {"topk": "racing"},
    "racing-off": {"topk": "racing", "icepop": False},
    "trained": {"indexer_weight": 1.0},
}
SOLVED: dict[str, Callable[[Sequence[str]], str]] = {"big": max, "sort": lambda digits: " ".join(sorted(digits))}
CARELESS: dict[str, Callable[[Sequence[str]], str]] = {"big": lambda digits: digits[0], "sort": " ".join}
# Each claim: an arm, and the one that it is held against.
PAIRS = (
    *(("noisy", "noisy-off"), ("fp8", "fp8-off"), ("base", "base-off"), ("base", "noisy"), ("base", "fp8")),
    *(("base", "racing"), ("racing", "racing-off"), ("base", "trained"), ("noisy-replay", "noisy")),
)
T95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)  # Student's, for 2 seeds, 3, ...
SHOWN = ("train_rollout_logprob_abs_diff", "is_masked_low", "is_masked_high", "mismatch_k3", "entropy", "indexer_kl")


def write_tasks(directory: Path, seed: int, args: argparse.Namespace) -> None:
    """Prompts to learn from and to measure, and conversations for fine-tuning, of which so many are careless."""
    rng = random.Random(seed)  # noqa: S311
    drawn = rng.sample(list(itertools.product("0123456789", repeat=args.digits)), HELD_OUT + TASKS)
    task = args.task
    rows = [
        {"prompt": f"{task} {' '.join(t)}", "answer": SOLVED[task](t), "verifier": "short", "domain": task}
        for t in drawn
    ]
    for part, some in (("held", rows[:HELD_OUT]), ("train", rows[HELD_OUT:])):
        (directory / f"{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
    talk = []
    for digits, row in zip(drawn[HELD_OUT:], rows[HELD_OUT:], strict=True):
        said = CARELESS[task](digits) if rng.random() < args.careless else row["answer"]
        talk.append({"messages": [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": said}]})
    (directory / "talk.jsonl").write_text("".join(json.dumps(row) + "\n" for row in talk))


def tuned(directory: Path, seed: int, args: argparse.Namespace) -> Path:
    """A model that knows the form: made once a seed."""
    if (directory / "sft" / "result.json").exists():
        return directory / "sft" / "model"
    write_tasks(directory, seed, args)
    talk = directory / "talk.jsonl"
    tokenizer = Tokenizer.train([talk.read_text()], 300)
    if not (directory / "start" / "config.json").exists():
        shape = nano(
            vocab_size=tokenizer.vocab_size,
            hidden_size=args.hidden,
            num_hidden_layers=args.layers,
            n_routed_experts=args.experts,
            index_topk=args.topk,
            index_n_heads=1,
        )
        sparse = ModelConfig.from_dict({**shape.to_dict(), "glm5_attention": "sparse"})
        save_model(GLM5(sparse, seed=seed), directory / "start", tokenizer=tokenizer)
    return learning.tuned(directory / "start", [talk], args, seed, batch=8, seq_len=64)


class Mismatched(Rollouts):
    """An engine whose weights are not quite those that it was sent."""

    kind, noise = "fp8", 0.0

    def push(self, model: GLM5, version: int) -> None:
        super().push(model, version)
        generator = torch.Generator().manual_seed(version)
        with torch.no_grad():
            for weight in self.engine.model.parameters():
                if weight.ndim < 2:
                    continue
                if self.kind == "fp8":
                    weight.copy_(as_fp8(weight))
                else:
                    weight.mul_(1 + self.noise * torch.randn(weight.shape, generator=generator))
        self.engine.model.forget_joined()


def as_fp8(weight: Tensor) -> Tensor:
    """Rounded to e4m3, with a scale for each row."""
    scale = weight.abs().amax(-1, keepdim=True).clamp(min=1e-12) / torch.finfo(torch.float8_e4m3fn).max
    return (weight / scale).to(torch.float8_e4m3fn).to(weight.dtype) * scale


@contextmanager
def engine(kind: str, noise: float) -> Iterator[None]:
    """`reason` makes its engine by the name `Rollouts`: here it finds the mismatched one."""
    if kind == "exact":
        yield
        return
    original, Mismatched.kind, Mismatched.noise = reasoning.Rollouts, kind, noise
    reasoning.Rollouts = Mismatched  # type: ignore[misc]
    try:
        yield
    finally:
        reasoning.Rollouts = original  # type: ignore[misc]


def longest(args: argparse.Namespace) -> int:
    """Tokens of the longest answer."""
    return 3 if args.task == "big" else 2 * args.digits + 2


def measured(model: Path, prompts: PromptConfig, seed: int, args: argparse.Namespace) -> float:
    """Success on the held-out tasks, by the stable engine."""
    held = prepare_prompts(prompts, seed).held_out
    config = RolloutConfig(max_new_tokens=longest(args), thinking=False, memory_gib=0.1)
    policy = load_model(model)
    with verifier_pool(config, held) as pool:
        return Rollouts(policy, load_tokenizer(model), config, pool, seed=seed).success(held)[args.task]


def one(seed: int, arm: str, directory: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Run an arm from the seed's fine-tuned model; its figures."""
    given = ARMS[arm]
    begin = tuned(directory, seed, args)
    prompts = PromptConfig(
        data=(str(directory / "train.jsonl"),), held_out=(str(directory / "held.jsonl"),), held_out_count=HELD_OUT
    )
    learn = LearnConfig(
        steps=args.steps,
        lr=LearningRate(args.lr, args.lr, warmup_steps=5),
        seed=seed,
        save_every=10,
        micro_batch=8,
        row_tokens=128,
        indexer_weight=given.get("indexer_weight", 0.0),
    )
    rollout = RolloutConfig(
        prompts=8,
        group=8,
        max_new_tokens=longest(args),
        thinking=False,
        rounds=2,
        memory_gib=0.1,
        topk=given.get("topk", "stable"),
        router_replay=given.get("router_replay", False),
    )
    loss = glm5_reasoning() if given.get("icepop", True) else LossConfig(clip_high=0.28)
    config = ReasonConfig(
        checkpoint=str(begin),
        run=str(directory / arm),
        prompts=PromptConfig(data=prompts.data),
        rollout=rollout,
        learn=learn,
        loss=loss,
        device="cpu",
        eval_every=0,
        page_every=0,
    )
    began = time.time()
    with engine(given.get("engine", "exact"), args.noise):
        found = reasoning.reason(config, quiet)
    records = [r for r in read_metrics(found.run) if r["step"]]
    late = [r["reward"] for r in records[-10:]]
    entropies = [r["entropy"] for r in records if "entropy" in r]  # a step that learned from nothing has none
    means = {
        name: statistics.mean(values)
        for name in SHOWN
        if (values := [r[name] for r in records if r.get(name) is not None])
    }
    return {
        "before": measured(begin, prompts, seed, args),
        "after": measured(found.model, prompts, seed, args),
        "last rewards": statistics.mean(late),
        **means,
        **({"entropy at the end": statistics.mean(entropies[-10:])} if entropies else {}),
        "seconds": time.time() - began,
    }


def verdict(a: list[float], b: list[float]) -> str:
    """Of the paired difference a - b."""
    apart = [x - y for x, y in zip(a, b, strict=True)]
    mean = statistics.mean(apart)
    if len(apart) < 2:
        return f"{mean:+.3f}, one seed: no verdict"
    half = T95[min(len(apart), len(T95) + 1) - 2] * statistics.stdev(apart) / math.sqrt(len(apart))
    return f"{mean:+.3f} ± {half:.3f} (95%): {'differs' if abs(mean) > half else 'within the noise'}"


def table(results: dict[str, dict[str, Any]], seeds: list[int], arms: list[str]) -> list[str]:
    """Means and sample deviations over the seeds, and what the pairs say."""

    def of(arm: str, name: str) -> list[float]:
        found = [results[f"{seed}/{arm}"].get(name) for seed in seeds if f"{seed}/{arm}" in results]
        return [value for value in found if value is not None]

    columns = ("before", "after", "last rewards", "entropy at the end", "train_rollout_logprob_abs_diff", "mismatch_k3")
    lines = ["| arm | " + " | ".join((*columns, "masked")) + " |", "|---|" + "---|" * (len(columns) + 1)]
    for arm in arms:
        cells = []
        for name in columns:
            values = of(arm, name)
            spread = f" ± {statistics.stdev(values):.2g}" if len(values) > 1 else ""
            cells.append(f"{statistics.mean(values):.3g}{spread}" if values else "")
        masked = [low + high for low, high in zip(of(arm, "is_masked_low"), of(arm, "is_masked_high"), strict=True)]
        lines.append(f"| {arm} | " + " | ".join([*cells, f"{statistics.mean(masked):.2%}" if masked else ""]) + " |")
    lines.append("")
    for a, b in PAIRS:
        both = [seed for seed in seeds if all(f"{seed}/{arm}" in results for arm in (a, b))]
        if both and {a, b} <= set(arms):
            for name in ("after", "last rewards"):
                one_a, one_b = ([float(results[f"{seed}/{arm}"][name]) for seed in both] for arm in (a, b))
                lines.append(f"{a} against {b}, {name}: {verdict(one_a, one_b)}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--sft-steps", type=int, default=40)
    parser.add_argument("--sft-lr", type=float, default=3e-3)
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--careless", type=float, default=0.0, help="share of answers to fine-tune on")
    parser.add_argument("--task", choices=tuple(SOLVED), default="big")
    parser.add_argument("--digits", type=int, default=3)
    parser.add_argument("--topk", type=int, default=6, help="positions that a query reads")
    parser.add_argument("--noise", type=float, default=0.3)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--experts", type=int, default=4)
    parser.add_argument("--out", help="the runs and results lie here")
    parser.add_argument("--table", nargs="+", metavar="FILE", help="only the table, of files that --json wrote")
    parser.add_argument("--json", help="write results and arguments here, too")
    args = parser.parse_args()
    if args.table:
        merged = {k: v for file in args.table for k, v in json.loads(Path(file).read_text())["results"].items()}
        kept_seeds = sorted({int(name.partition("/")[0]) for name in merged})
        print("\n".join(table(merged, kept_seeds, [arm for arm in ARMS if any(n.endswith(f"/{arm}") for n in merged)])))
        return
    if not args.out:
        parser.error("--out is missing")
    torch.set_num_threads(1)
    seeds, arms = [int(s) for s in args.seeds.split(",")], [arm for arm in args.arms.split(",") if arm]
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    kept = out / "results.json"
    results: dict[str, dict[str, Any]] = json.loads(kept.read_text()) if kept.exists() else {}
    for seed in seeds:
        directory = out / f"seed-{seed}"
        directory.mkdir(exist_ok=True)
        tuned(directory, seed, args)
        for arm in arms:
            name = f"{seed}/{arm}"
            if name not in results:
                results[name] = one(seed, arm, directory, args)
                kept.write_text(json.dumps(results, indent=1))
                print(name, {k: round(v, 4) for k, v in results[name].items()}, flush=True)
    print("\n".join(["", *table(results, seeds, arms)]))
    if args.json:
        document = {"arguments": vars(args), "torch": torch.__version__, "results": results}
        Path(args.json).write_text(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
