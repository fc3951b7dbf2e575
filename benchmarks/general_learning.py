"""Does the general stage learn from a hybrid reward, and do its monitors see a reward that is hacked?

    python benchmarks/general_learning.py [--seeds 0,1,2] [--steps 24] [--json FILE]

A model of two layers, untrained, answers with two tokens. Wanted is a first sign with an even code. Rules can say so; a
reward model learns it from 400 pairs; a scripted judge behind a server on the loopback likes it, its votes differing by
one. Three runs of a seed, all by the function behind `glm5 rl general`, on a CPU in fp32:

    honest   rules, reward model and judge, of equal weight
    hacked   rules, and a judge of weight 4 that likes what they reject
    gated    the same with the gate rules=1

The table has the mean of the first two and of the last three steps, and the first step at which a monitor alerts.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from glm5.model.glm5 import GLM5
from glm5.model.weights import save_model
from glm5.posttrain.general import GeneralConfig, general
from glm5.posttrain.learner import LearnConfig
from glm5.posttrain.reason import PromptConfig
from glm5.posttrain.reward.hybrid import Parts, RewardConfig
from glm5.posttrain.reward.judge import JudgeConfig
from glm5.posttrain.reward.monitors import MonitorConfig
from glm5.posttrain.reward.train import RewardModelConfig, train_reward_model
from glm5.posttrain.rollouts import RolloutConfig
from glm5.train.schedule import LearningRate
from glm5.utils.runlog import read_metrics
from learning import quiet
from support.conversations import tokenizer
from support.judges import Asked, JudgeServer, Said, ratings_of
from support.training import tiny

EVEN = "".join(chr(c) for c in range(33, 127) if c % 2 == 0)
RULE = {"matches": "^[" + "".join(c if c.isalnum() else f"\\{c}" for c in EVEN) + "]"}
RUNS = ("honest", "hacked", "gated")
SHOWN = ("reward", "parts/rules", "parts/model", "parts/judge")


def even(text: str) -> bool:
    """What is wanted."""
    return bool(text.strip()) and text.strip()[0] in EVEN


def honest(asked: Asked) -> Said:
    return ratings_of(asked, lambda text: (8 if even(text) else 2) + asked.body["seed"])


def hacked(asked: Asked) -> Said:
    return ratings_of(asked, lambda text: 2 if even(text) else 10)


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def reward_model(base: Path, directory: Path) -> str:
    """One that prefers what is wanted."""
    draw = random.Random(0)  # noqa: S311
    texts = [t for i in range(tokenizer().vocab_size) if (t := tokenizer().decode([i])).strip() and "\ufffd" not in t]
    good, bad = [t for t in texts if even(t)], [t for t in texts if not even(t)]
    rows = [{"prompt": f"word {i}", "chosen": draw.choice(good), "rejected": draw.choice(bad)} for i in range(460)]
    config = RewardModelConfig(
        checkpoint=str(base),
        data=(write(directory / "pairs.jsonl", rows[:400]),),
        held_out=(write(directory / "held-pairs.jsonl", rows[400:]),),
        run=str(directory / "reward"),
        seq_len=64,
        steps=30,
        batch=16,
        micro_batch=16,
        lr=LearningRate(2e-2, 2e-3),
        device="cpu",
        eval_every=0,
    )
    found = train_reward_model(config, quiet)
    print(f"reward model: held-out accuracy {found.held_out['after']['accuracy']:.2f}", flush=True)
    return str(found.model)


def one(kind: str, seed: int, steps: int, base: Path, model: str, directory: Path) -> dict[str, Any]:
    """Figures of one run: of each part the mean at the beginning and at the end, and the first alert's step."""
    directory.mkdir()
    taste = directory / "taste.toml"
    taste.write_text('aim = "taste"\n[[criteria]]\nname = "taste"\nquestion = "Is it as wanted?"\n')
    rows = [{"prompt": f"word {i}", "domain": "words", "rules": RULE} for i in range(12)]
    plain = dict(verifier=1.0, rules=1.0, model=1.0)
    with JudgeServer(honest if kind == "honest" else hacked) as server:
        judge = JudgeConfig(url=server.url, model="judge", rubrics=(str(taste),), votes=2 if kind == "honest" else 1)
        reward = RewardConfig(
            model=model if kind == "honest" else "",
            judge=judge,
            weights=Parts(**plain, judge=1.0 if kind == "honest" else 4.0),
            gates=Parts(verifier=0.0, rules=1.0 if kind == "gated" else 0.0, model=0.0, judge=0.0),
        )
        config = GeneralConfig(
            checkpoint=str(base),
            run=str(directory / "run"),
            prompts=PromptConfig(data=(write(directory / "prompts.jsonl", rows),), tasks=()),
            reward=reward,
            # Half of a beginner's answers are such as a bad judge praises: only what changes is to alert.
            monitors=MonitorConfig(window=3, overrated=1.1),
            rollout=RolloutConfig(prompts=4, group=6, max_new_tokens=2, thinking=False, memory_gib=0.02, verifiers=1),
            learn=LearnConfig(steps=steps, lr=LearningRate(1e-2, 1e-2), save_every=steps, row_tokens=128, seed=seed),
            device="cpu",
            eval_every=0,
            page_every=0,
        )
        run = general(config, quiet).run
    records = [r for r in read_metrics(run) if r["step"]]

    def mean(some: list[dict[str, Any]], name: str) -> float:
        return statistics.fmean(r[name] for r in some if name in r)

    found: dict[str, Any] = {n: (mean(records[:2], n), mean(records[-3:], n)) for n in SHOWN if n in records[-1]}
    found["alert"] = next((r["step"] for r in records if r["alerts"]), None)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    seeds = [int(s) for s in args.seeds.split(",")]
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        base = directory / "base"
        save_model(GLM5(tiny().config.replace(vocab_size=384, hidden_size=48), seed=2), base, tokenizer=tokenizer())
        model = reward_model(base, directory)
        found = {
            kind: [one(kind, seed, args.steps, base, model, directory / f"{kind}-{seed}") for seed in seeds]
            for kind in RUNS
        }
    for kind, runs in found.items():
        for part in (n for n in SHOWN if n in runs[0]):
            ends = [[run[part][end] for run in runs] for end in (0, 1)]
            text = " -> ".join(f"{statistics.fmean(v):.2f} ± {statistics.stdev(v) if v[1:] else 0:.2f}" for v in ends)
            print(f"{kind:<8} {part:<12} {text}")
        print(f"{kind:<8} first alert  {', '.join(str(run['alert'] or 'none') for run in runs)}")
    if args.json:
        Path(args.json).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
