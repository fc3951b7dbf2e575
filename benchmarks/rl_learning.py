"""Does it learn? Fine-tuning, two stages of reinforcement learning, and distillation that brings back what was lost.

    python benchmarks/rl_learning.py [--seeds 0,1,2] [--sft-steps 25] [--rl-steps 50] [--distill-steps 40]
                                     [--out DIR] [--json FILE]

A model of `nano`'s parts (--hidden, --layers and --experts set its size) is fine-tuned, briefly, on two kinds of tasks,
"big 4 1 7" (the largest of three digits) and "small 4 1 7" (the smallest), so that it knows the form and solves some.
Stage 1 learns the first kind by `glm5 rl reason`, stage 2 goes on from there with the second alone, and `glm5 distill`
begins with stage 2's model and has stage 1's as the teacher of the first kind, its own of the second. Success is that
of greedy answers to held-out tasks, whose digits no stage has seen in this order. All runs are on a CPU in fp32, by the
functions behind the commands. The table has mean and spread (sample deviation) over the seeds, which draw everything:
weights, tasks and answers.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import time
from pathlib import Path
from typing import Any

import torch

from glm5 import GLM5, load_model, save_model
from glm5.model.presets import nano
from glm5.posttrain.distill import DistillConfig, distill
from glm5.posttrain.learner import LearnConfig
from glm5.posttrain.reason import PromptConfig, ReasonConfig, prepare_prompts, reason, verifier_pool
from glm5.posttrain.rollouts import RolloutConfig, Rollouts
from glm5.text import Tokenizer, load_tokenizer
from glm5.train.schedule import LearningRate
from learning import quiet, seeds, show, tuned

BIG, SMALL = "big", "small"
HELD_OUT = 100  # of the 1,000 triples of digits


def write_tasks(directory: Path, seed: int) -> None:
    """Prompts to learn from and to measure, a file of each kind, and conversations for fine-tuning."""
    triples = list(itertools.product("0123456789", repeat=3))
    random.Random(seed).shuffle(triples)  # noqa: S311
    talk = []
    for name, best in ((BIG, max), (SMALL, min)):
        rows = [
            {"prompt": f"{name} {' '.join(t)}", "answer": best(t), "verifier": "short", "domain": name} for t in triples
        ]
        for part, some in (("held", rows[:HELD_OUT]), ("train", rows[HELD_OUT:])):
            (directory / f"{name}-{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
        for row in rows[HELD_OUT:]:
            user, answer = {"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["answer"]}
            talk.append(json.dumps({"messages": [user, answer]}) + "\n")
    (directory / "talk.jsonl").write_text("".join(talk))


def one_seed(seed: int, directory: Path, args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Success by domain after each stage."""
    write_tasks(directory, seed)
    talk = directory / "talk.jsonl"
    tokenizer = Tokenizer.train([talk.read_text()], args.vocab)
    sizes = dict(hidden_size=args.hidden, num_hidden_layers=args.layers, n_routed_experts=args.experts)
    shape = nano(vocab_size=tokenizer.vocab_size, **sizes)
    save_model(GLM5(shape, seed=seed), directory / "base", tokenizer=tokenizer)
    begin = tuned(directory / "base", [talk], args, seed, batch=4, seq_len=128)

    def prompts(*names: str) -> PromptConfig:
        data, held = (tuple(str(directory / f"{n}-{part}.jsonl") for n in names) for part in ("train", "held"))
        return PromptConfig(data=data, held_out=held, held_out_count=HELD_OUT)

    def learn(steps: int) -> LearnConfig:
        rate = LearningRate(args.lr, args.lr, warmup_steps=5)
        return LearnConfig(steps=steps, lr=rate, seed=seed, save_every=10_000, micro_batch=4, row_tokens=256)

    def stage(begin: Path, name: str, *domains: str) -> Path:
        config = ReasonConfig(
            checkpoint=str(begin),
            run=str(directory / name),
            prompts=prompts(*domains),
            rollout=RolloutConfig(prompts=8, group=8, max_new_tokens=4, thinking=False, rounds=2, memory_gib=0.1),
            learn=learn(args.rl_steps),
            device="cpu",
            eval_every=0,
            page_every=0,
        )
        return reason(config, quiet).model

    def measured(model: Path, name: str) -> dict[str, float]:
        """Success on the held-out tasks of both."""
        held = prepare_prompts(prompts(BIG, SMALL), seed).held_out
        config = RolloutConfig(max_new_tokens=4, thinking=False, memory_gib=0.1)
        with verifier_pool(config, held) as pool:
            found = Rollouts(load_model(model), load_tokenizer(model), config, pool, seed=seed).success(held)
        print(f"seed {seed}  {name:<14} " + "  ".join(f"{d} {v:.3f}" for d, v in found.items()), flush=True)
        return found

    table = {"sft": measured(begin, "sft")}
    first = stage(begin, "stage1", BIG)
    table["rl on big"] = measured(first, "rl on big")
    second = stage(first, "stage2", SMALL)
    table["rl on small"] = measured(second, "rl on small")
    last = distill(
        DistillConfig(
            checkpoint=str(second),
            teachers=(f"{BIG}={first}", f"{SMALL}={second}"),
            run=str(directory / "distill"),
            prompts=prompts(BIG, SMALL),
            rollout=RolloutConfig(prompts=64, group=1, max_new_tokens=4, thinking=False, memory_gib=0.1),
            learn=learn(args.distill_steps),
            device="cpu",
            eval_every=0,
        ),
        quiet,
    ).model
    table["distilled"] = measured(last, "distilled")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--sft-steps", type=int, default=25)
    parser.add_argument("--sft-lr", type=float, default=3e-3)
    parser.add_argument("--rl-steps", type=int, default=50)
    parser.add_argument("--distill-steps", type=int, default=40)
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--vocab", type=int, default=320)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--experts", type=int, default=4)
    parser.add_argument("--out", help="keep the runs here")
    parser.add_argument("--json", help="write the figures here")
    args = parser.parse_args()
    torch.set_num_threads(1)
    began, found = time.time(), []
    for seed, directory in seeds(args):
        directory.mkdir(parents=True)
        found.append(one_seed(seed, directory, args))
    result: dict[str, Any] = {"arguments": vars(args), "seeds": found, "seconds": time.time() - began}
    show(found)
    print(f"{len(found)} seeds in {result['seconds']:.0f} s")
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
