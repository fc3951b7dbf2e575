"""Reasoning RL on reasoning-gym: fine-tuning, two stages of learning, and distillation that brings back what was lost.

    python benchmarks/reason_learning.py [--seeds 0,1,2] [--first TASK ...] [--second TASK ...] [--careless SHARE]
                                         [--sft-steps N] [--rl-steps N] [--distill-steps N] [--last STAGE]
                                         [--preset nano|mini] [--device cpu|cuda] [--out DIR] [--json FILE] ...

A TASK is a generator of reasoning-gym with its options, as `glm5 rl reason --prompts.tasks` takes it; with NAME@VALUE
only those of its tasks whose metadata has this value, as number_sorting@ascending. A model of the
preset's parts (--hidden, --layers and --experts change its size) is fine-tuned, briefly, on answers of two qualities:
right ones, and careless ones (--careless is their share) that do half of the work: the word as it stands for the word
spelled backward, the number of animals for that of their legs. So it can do the tasks, and often does not. Stage 1
learns the first kinds by `glm5 rl reason`, stage 2 goes on from there with the second ones alone, and `glm5 distill`
begins with stage 2's model and has stage 1's as the teacher of the first kinds, its own of the second. Success is that
of greedy answers to held-out tasks, by reasoning-gym's own verifiers; no stage has seen these tasks. All runs are made
by the functions behind the commands, in fp32. The table has mean and spread (sample deviation) over the seeds, which
draw everything: weights, tasks and answers. The JSON file has each stage's curves as well, and is written after each
stage.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from glm5 import GLM5, load_model, save_model
from glm5.model.presets import preset
from glm5.posttrain.distill import DistillConfig, distill
from glm5.posttrain.learner import LearnConfig
from glm5.posttrain.reason import PromptConfig, ReasonConfig, prepare_prompts, reason, verifier_pool
from glm5.posttrain.rollouts import RolloutConfig, Rollouts
from glm5.posttrain.verify import gym
from glm5.text import Tokenizer, load_tokenizer
from glm5.train.schedule import LearningRate
from glm5.utils.runlog import read_metrics
from learning import quiet, seeds, show, tuned

FIRST = ('spell_backward:{"min_word_len":3,"max_word_len":4}',)
SECOND = ('leg_counting:{"min_animals":1,"max_animals":1,"min_instances":1,"max_instances":5}',)


def turned(words: Sequence[str]) -> str:
    """A list of words as it stands; of a single one, its letters turned round."""
    return words[0][::-1] if len(words) == 1 else ", ".join(words)


# What somebody answers who does half of the work, by generator.
CARELESS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "spell_backward": lambda metadata: metadata["word"],
    "leg_counting": lambda metadata: str(sum(metadata["animals"].values())),
    "word_sequence_reversal": lambda metadata: turned(metadata["words"]),
    "chain_sum": lambda metadata: metadata["expression"].split()[0],
    "letter_counting": lambda metadata: str(metadata["span"][0].lower().count(metadata["target_letter"])),
    "gcd": lambda metadata: str(min(metadata["numbers"])),
    "lcm": lambda metadata: str(max(metadata["numbers"])),
    "number_sorting": lambda metadata: str(metadata["original_numbers"]),
    "letter_jumble": lambda metadata: " ".join(metadata["scrambled_words"]),
}
STAGES = ("sft", "first", "second", "distill")
CURVES = (
    *("step", "reward", "entropy", "train_rollout_logprob_abs_diff", "mismatch_k3", "is_masked_low", "is_masked_high"),
    *("frac_reward_zero_std", "completions/mean_length", "grad_norm", "reverse_kl", "time/rollout", "time/weight_sync"),
)


class Seed:
    """The stages of one seed, in its directory."""

    def __init__(self, seed: int, directory: Path, args: argparse.Namespace) -> None:
        self.seed, self.directory, self.args = seed, directory, args
        self.began = time.time()
        self.success: dict[str, dict[str, float]] = {}
        self.curves: dict[str, list[dict[str, Any]]] = {}
        self.seconds: dict[str, float] = {}

    def write_tasks(self) -> None:
        """A file of tasks to learn from and one to measure, of each kind; none is there twice."""
        for spec in (*self.args.first, *self.args.second):
            name, _, options = spec.partition(":")
            generator, _, value = name.partition("@")
            rows = gym.rows(generator, self.args.count, self.seed, **json.loads(options or "{}"))
            of_value = [row for row in rows if not value or value in row["info"]["metadata"].values()]
            rows = [{**row, "domain": name, "prompt": self.asked(row["prompt"])} for row in of_value]
            rows = list({row["prompt"]: row for row in rows}.values())
            for part, some in (("held", rows[: self.args.held_out]), ("train", rows[self.args.held_out :])):
                (self.directory / f"{name}-{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))

    def asked(self, question: str) -> str:
        return question.partition("\n")[0] if self.args.first_line else question

    def prompts(self, *specs: str) -> PromptConfig:
        names = [spec.partition(":")[0] for spec in specs]
        data, held = (tuple(str(self.directory / f"{n}-{part}.jsonl") for n in names) for part in ("train", "held"))
        return PromptConfig(data=data, held_out=held, held_out_count=self.args.held_out)

    def answers(self) -> list[Path]:
        """Conversations to fine-tune on, a file of each kind: several answers to each task, right or careless."""
        draw, files = random.Random(self.seed), []  # noqa: S311
        for spec in (*self.args.first, *self.args.second):
            name, rows = spec.partition(":")[0], []
            for prompt in prepare_prompts(self.prompts(spec), self.seed).train:
                for _ in range(self.args.answers):
                    answer = str(prompt.answer)
                    careless = CARELESS.get(name.partition("@")[0])
                    if careless is not None and draw.random() < self.args.careless:
                        answer = careless(prompt.info["metadata"])
                    user = {"role": "user", "content": prompt.messages[-1].content}
                    said = {"role": "assistant", "content": answer, "thinking": False}
                    rows.append(json.dumps({"messages": [user, said]}) + "\n")
            files.append(self.directory / f"{name}-talk.jsonl")
            files[-1].write_text("".join(rows))
        return files

    def base(self, files: Sequence[Path]) -> Path:
        """A model that has learned nothing, and its tokenizer, made from what is learned first."""
        args = self.args
        tokenizer = Tokenizer.train([file.read_text() for file in files], args.vocab)
        sizes = dict(hidden_size=args.hidden, num_hidden_layers=args.layers, n_routed_experts=args.experts)
        shape = preset(args.preset, vocab_size=tokenizer.vocab_size, **{k: v for k, v in sizes.items() if v})
        model = GLM5(shape, seed=self.seed)
        print(f"seed {self.seed}  {sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
        save_model(model, self.directory / "base", tokenizer=tokenizer)
        return self.directory / "base"

    def tuned(self) -> Path:
        args = self.args
        self.write_tasks()
        files = self.answers()
        ratios = args.ratios or [1.0] * len(files)
        data = [f"{file}={ratio:g}" for file, ratio in zip(files, ratios, strict=True)]
        of = dict(batch=args.sft_rows, seq_len=args.seq_len, device=args.device)
        return tuned(self.base(files), data, args, self.seed, **of)

    def learn(self, steps: int) -> LearnConfig:
        args = self.args
        rate = LearningRate(args.lr, args.lr / 10, warmup_steps=5)
        return LearnConfig(
            steps=steps, lr=rate, seed=self.seed, save_every=10_000, micro_batch=args.micro_batch, row_tokens=512
        )

    def rollout(self, prompts: int, group: int) -> RolloutConfig:
        args = self.args
        return RolloutConfig(
            prompts=prompts,
            group=group,
            max_new_tokens=args.longest,
            thinking=False,
            rounds=2,
            memory_gib=args.memory_gib,
            verifiers=args.verifiers,
        )

    def reasoned(self, begin: Path, name: str, *specs: str) -> Path:
        args = self.args
        config = ReasonConfig(
            checkpoint=str(begin),
            run=str(self.directory / name),
            prompts=self.prompts(*specs),
            rollout=self.rollout(args.groups, args.group),
            learn=self.learn(args.rl_steps),
            device=args.device,
            eval_every=args.eval_every,
            page_every=0,
        )
        return reason(config, quiet).model

    def distilled(self, first: Path, second: Path) -> Path:
        args = self.args
        kinds = [(first, args.first), (second, args.second)]
        config = DistillConfig(
            checkpoint=str(second),
            teachers=tuple(f"{spec.partition(':')[0]}={model}" for model, specs in kinds for spec in specs),
            run=str(self.directory / "distill"),
            prompts=self.prompts(*args.first, *args.second),
            rollout=self.rollout(args.groups * args.group, 1),
            learn=self.learn(args.distill_steps),
            device=args.device,
            eval_every=args.eval_every,
        )
        return distill(config, quiet).model

    def measured(self, model: Path, stage: str) -> None:
        """Success on the held-out tasks of all kinds, and the stage's curves."""
        args = self.args
        held = prepare_prompts(self.prompts(*args.first, *args.second), self.seed).held_out
        config = self.rollout(1, 1)
        with verifier_pool(config, held) as pool:
            policy = load_model(model, device=args.device, dtype="float32")
            found = Rollouts(policy, load_tokenizer(model), config, pool, seed=self.seed).success(held)
        self.success[stage] = found
        if stage != "sft":
            records = read_metrics(model.parent)
            self.curves[stage] = [
                {k: v for k, v in r.items() if k in CURVES or k.startswith(("held_out/", "rewards/", "reverse_kl/"))}
                for r in records
            ]
        self.seconds[stage] = time.time() - self.began
        text = "  ".join(f"{d} {v:.3f}" for d, v in found.items())
        print(f"seed {self.seed}  {stage:<8} {text}  ({self.seconds[stage]:.0f} s)", flush=True)

    def run(self) -> None:
        """All stages up to the last one wanted."""
        args, models = self.args, dict[str, Path]()
        for stage in STAGES[: STAGES.index(args.last) + 1]:
            if stage == "sft":
                models[stage] = self.tuned()
            elif stage == "first":
                models[stage] = self.reasoned(models["sft"], "first", *args.first)
            elif stage == "second":
                models[stage] = self.reasoned(models["first"], "second", *args.second)
            else:
                models[stage] = self.distilled(models["first"], models["second"])
            self.measured(models[stage], stage)
            args.found[str(self.seed)] = {
                "success": self.success,
                "curves": self.curves,
                "seconds": self.seconds,
            }
            if args.json:
                arguments = {k: v for k, v in vars(args).items() if k != "found"}
                Path(args.json).write_text(json.dumps({"arguments": arguments, "seeds": args.found}, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--first", nargs="+", default=list(FIRST))
    parser.add_argument("--second", nargs="+", default=list(SECOND))
    parser.add_argument("--last", choices=STAGES, default=STAGES[-1])
    parser.add_argument("--preset", default="nano")
    parser.add_argument("--device", default="cpu")
    for name, default in (
        ("count", 3000), ("held-out", 100), ("answers", 2), ("sft-steps", 100), ("sft-rows", 4), ("rl-steps", 50),
        ("distill-steps", 40), ("groups", 8), ("group", 8), ("longest", 16), ("vocab", 400), ("seq-len", 256),
        ("hidden", 128), ("layers", 2), ("experts", 4), ("eval-every", 10), ("micro-batch", 4), ("verifiers", 1),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--sft-lr", type=float, default=3e-3)
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--ratios", nargs="+", type=float, help="of rows of each kind to fine-tune on")
    parser.add_argument("--first-line", action="store_true", help="ask a question's first line only")
    parser.add_argument("--careless", type=float, default=0.55)
    parser.add_argument("--memory-gib", type=float, default=0.1)
    parser.add_argument("--out", help="keep the runs here")
    parser.add_argument("--json", help="write the figures here")
    args = parser.parse_args()
    args.found = {}
    torch.set_num_threads(1)
    for seed, directory in seeds(args):
        directory.mkdir(parents=True)
        Seed(seed, directory, args).run()
    show([found["success"] for found in args.found.values()])


if __name__ == "__main__":
    main()
