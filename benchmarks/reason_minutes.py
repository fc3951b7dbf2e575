"""Reasoning RL on four kinds of tasks at once, as far as it comes in a given time: `mini` on one GPU.

    python benchmarks/reason_minutes.py --out DIR [--seconds 1200] [--sft-steps 80] [--preset mini] [--device cuda]
                                        [--tasks TASK ...] [--seed 0] [--dtype bfloat16] ...

A TASK is a generator of reasoning-gym with its options, as `glm5 rl reason --prompts.tasks` takes it. A model that has
learned nothing is fine-tuned, briefly, on answers of two qualities, as in `reason_learning`: right ones, and careless
ones that do half of the work. Then it learns from reasoning-gym's verifiers on all kinds in equal parts, by the loop
behind `glm5 rl reason`, until the time is up; the rate falls to a tenth over --rl-steps. The trainer is in fp32 with
TF32 products, the engine in --dtype.

Nothing is kept but figures: what `glm5 sft` and `glm5 rl reason` write between and after the stages, some 20 GiB for
`mini`, would take the time. DIR/sft.jsonl and DIR/rl.jsonl have a line a step, written as they come, with the figures
of the commands' runs and `time/step`, `time/learn` (rows, gradients and update) and `seconds` since the beginning;
DIR/held-out.jsonl has the success of greedy answers to held-out tasks every --eval-every steps; DIR/result.json
what is in the table that is printed. DIR/tasks and DIR/tokenizer are made first, and taken where they are there.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any, TextIO

import torch

from glm5 import GLM5
from glm5.data.mixing import MixedLoader
from glm5.model.presets import preset
from glm5.posttrain.batched import digest
from glm5.posttrain.learner import LearnConfig
from glm5.posttrain.losses import glm5_reasoning
from glm5.posttrain.reason import Prompts, Reasoner, prepare_prompts, verifier_pool
from glm5.posttrain.rollouts import RolloutConfig, Rollouts
from glm5.posttrain.sft import SftConfig, conversations
from glm5.text import Tokenizer, load_tokenizer
from glm5.train.loop import Trainer
from glm5.train.schedule import LearningRate
from learning import training
from reason_learning import Seed

TASKS = (
    'spell_backward:{"min_word_len":3,"max_word_len":4}',
    'leg_counting:{"min_animals":1,"max_animals":1,"min_instances":1,"max_instances":15}',
    'letter_counting:{"min_words":2,"max_words":4}',
    'gcd:{"min_numbers":2,"max_numbers":2,"min_value":2,"max_value":40}',
)
SHOWN = (
    *("reward", "entropy", "train_rollout_logprob_abs_diff", "mismatch_k3", "is_masked_low", "is_masked_high"),
    *("frac_reward_zero_std", "completions/mean_length", "grad_norm"),
    *("time/step", "time/rollout", "time/verify", "time/weight_sync", "time/learn"),
)


class Minutes:
    """One run in its directory, by the clock of `began`."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.began = args, time.time()
        self.directory = Path(args.out)
        self.tasks = self.directory / "tasks"
        self.tasks.mkdir(parents=True, exist_ok=True)
        (self.directory / "rl").mkdir(exist_ok=True)
        self.held_out: list[dict[str, Any]] = []
        self.steps: list[dict[str, Any]] = []

    @property
    def seconds(self) -> float:
        return time.time() - self.began

    def say(self, text: str) -> None:
        print(f"{self.seconds:7.1f} s  {text}", flush=True)

    def write(self, file: TextIO, record: dict[str, Any]) -> None:
        file.write(json.dumps({**record, "seconds": self.seconds}) + "\n")
        file.flush()

    def prepared(self) -> tuple[Prompts, list[Path], Tokenizer]:
        """Tasks to learn from and to measure, conversations for fine-tuning, and a tokenizer made from these."""
        args, maker = self.args, Seed(self.args.seed, self.tasks, self.args)
        files = [self.tasks / f"{spec.partition(':')[0]}-talk.jsonl" for spec in args.first]
        if not all(file.exists() for file in files):
            maker.write_tasks()
            maker.answers()
        kept = self.directory / "tokenizer"
        if not kept.exists():
            Tokenizer.train([file.read_text() for file in files], args.vocab).save(kept)
        return prepare_prompts(maker.prompts(*args.first), args.seed), files, load_tokenizer(kept)

    def tuned(self, model: GLM5, files: list[Path], tokenizer: Tokenizer) -> GLM5:
        """After --sft-steps steps, in fp32."""
        args, scratch = self.args, self.directory / "sft"
        train = training(args, args.seed, batch=args.sft_rows)
        data = tuple(map(str, files))
        config = SftConfig(checkpoint="none", data=data, seq_len=args.seq_len, device=args.device, train=train)
        dataset = conversations(config, tokenizer, scratch, begun=False).dataset(args.seq_len, 1)
        self.say(f"{dataset.rows:,} rows of {dataset.seq_len} tokens")
        loader = MixedLoader(dataset, {source.path: source.ratio for source in config.sources}, args.seed)
        trainer = Trainer(train, model, loader, scratch)
        with open(self.directory / "sft.jsonl", "w") as file:
            while trainer.finished_steps < train.steps:
                record = {"step": trainer.finished_steps + 1, **trainer.step()}
                self.write(file, record)
                if trainer.finished_steps % 20 == 0:
                    self.say(f"fine-tuning, step {trainer.finished_steps}: loss {record['loss']:.3f}")
        return trainer.fp32_model()

    def learned(self, model: GLM5, prompts: Prompts, tokenizer: Tokenizer) -> None:
        """Until the time is up: no step is begun that would not fit, by the last one, with a measurement after it."""
        args = self.args
        config = RolloutConfig(
            prompts=args.groups,
            group=args.group,
            max_new_tokens=args.longest,
            thinking=False,
            rounds=args.rounds,
            running=args.running,
            dtype=args.dtype,
            memory_gib=args.memory_gib,
            verifiers=args.verifiers,
        )
        learn = LearnConfig(
            steps=args.rl_steps,
            lr=LearningRate(args.lr, args.lr / 10, warmup_steps=2),
            seed=args.seed,
            micro_batch=args.micro_batch,
            row_tokens=args.row_tokens,
        )
        with (
            verifier_pool(config, [*prompts.train, *prompts.held_out]) as pool,
            open(self.directory / "rl.jsonl", "w") as file,
            open(self.directory / "held-out.jsonl", "w") as held,
        ):
            rollouts = Rollouts(model, tokenizer, config, pool, seed=args.seed)
            longest = rollouts.refuse_long([*prompts.train, *prompts.held_out])
            self.say(f"verifiers and engine are there; prompts have up to {longest} tokens")
            learner = Reasoner(learn, model, glm5_reasoning(), rollouts, self.directory / "rl", digest(prompts.train))
            learner.order = prompts.order
            learner.resume()
            measuring = stepping = 0.0
            while True:
                began, done = self.seconds, learner.finished_steps
                if done % args.eval_every == 0 or args.seconds - began < measuring + stepping:
                    self.measured(done, rollouts.success(prompts.held_out), held)
                    measuring = self.seconds - began
                    began = self.seconds
                if args.seconds - began < measuring + stepping:
                    break
                record = learner.advance(lambda: False)
                assert record is not None
                stepping = self.seconds - began
                spent = sum(record[f"time/{name}"] for name in ("rollout", "verify", "weight_sync"))
                record = {"step": done + 1, **record, "time/step": self.seconds - began}
                record["time/learn"] = record["time/step"] - spent
                self.write(file, record)
                self.steps.append(record)
                if done % 5 == 0:
                    self.say(f"step {done + 1}: " + "  ".join(f"{n} {record[n]:.3g}" for n in SHOWN if n in record))

    def measured(self, step: int, found: dict[str, float], file: TextIO) -> None:
        self.held_out.append({"step": step, **found})
        self.write(file, self.held_out[-1])
        self.say(f"held out after step {step}: " + "  ".join(f"{name} {value:.3f}" for name, value in found.items()))

    def run(self) -> None:
        args = self.args
        prompts, files, tokenizer = self.prepared()
        self.say(f"{len(prompts.train):,} tasks to learn from, {len(prompts.held_out)} to measure")
        sizes = dict(hidden_size=args.hidden, num_hidden_layers=args.layers, n_routed_experts=args.experts)
        changes = {**{k: v for k, v in sizes.items() if v}, "max_position_embeddings": 512}
        shape = preset(args.preset, vocab_size=tokenizer.vocab_size, **changes)
        with torch.device(args.device):
            model = GLM5(shape, seed=args.seed)
        count = sum(p.numel() for p in model.parameters())
        self.say(f"{count:,} parameters")
        model = self.tuned(model, files, tokenizer)
        tuning_s = self.seconds
        try:
            self.learned(model, prompts, tokenizer)
        finally:
            rows = table(self.steps, self.held_out)
            print("\n".join(["", *rows]), flush=True)
            peak = torch.cuda.max_memory_allocated() / 2**30 if args.device.startswith("cuda") else None
            result = {
                "arguments": vars(args),
                "torch": torch.__version__,
                "parameters": count,
                "seconds": {"fine-tuned": tuning_s, "all": self.seconds},
                "peak_gib": peak,
                "held_out": self.held_out,
                "steps": [{k: v for k, v in r.items() if k in SHOWN or k.startswith("rewards/")} for r in self.steps],
            }
            (self.directory / "result.json").write_text(json.dumps(result, indent=1) + "\n")


def table(steps: list[dict[str, Any]], held_out: list[dict[str, Any]]) -> list[str]:
    """A line for each stretch between two measurements: the means of its steps, and the success at its end."""
    lines = []
    for before, now in zip([{"step": 0}, *held_out], held_out, strict=False):
        some = [r for r in steps if before["step"] < r["step"] <= now["step"]]
        means = {n: statistics.fmean(v) for n in SHOWN if (v := [r[n] for r in some if n in r])}
        success = "  ".join(f"{n} {v:.2f}" for n, v in now.items() if n != "step")
        figures = "  ".join(f"{n} {v:.3g}" for n, v in means.items())
        lines.append(f"after step {now['step']:>4}  {success}\n    {figures}" if some else f"before  {success}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", dest="first", nargs="+", default=list(TASKS))
    parser.add_argument("--preset", default="mini")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    for name, default in (
        ("seconds", 1200), ("seed", 0), ("count", 4000), ("held-out", 100), ("answers", 2), ("sft-steps", 80),
        ("sft-rows", 64), ("groups", 32), ("group", 16), ("rounds", 2), ("running", 256), ("longest", 12),
        ("vocab", 600), ("seq-len", 192), ("hidden", 0), ("layers", 0), ("experts", 0), ("eval-every", 10),
        ("micro-batch", 32), ("row-tokens", 512), ("verifiers", 8), ("rl-steps", 1000),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--sft-lr", type=float, default=2e-3)
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--careless", type=float, default=0.55)
    parser.add_argument("--memory-gib", type=float, default=4.0)
    parser.add_argument("--threads", type=int, default=4, help="of the processor")
    parser.add_argument("--out", required=True, help="figures, tasks and tokenizer lie here")
    args = parser.parse_args()
    args.second, args.first_line = [], False
    torch.set_num_threads(args.threads)
    torch.set_float32_matmul_precision("high")
    Minutes(args).run()


if __name__ == "__main__":
    main()
