"""What asynchrony pays: trained samples an hour, and who stands still, where rollouts have a long tail.

    python benchmarks/agent_asynchrony.py [--median 1.0] [--tail 10] [--update 1.5] [--steps 12] [--json FILE]

The orchestrator, the gateway, the store and the learner are the real ones; the engine is a stand-in that answers after
a time drawn from a log-normal distribution, by the sample's name, whose p99 is --tail times its median, and an update
of the policy takes --update seconds (of sleep; the model is tiny). Both loops have the same places for rollouts, the
same groups and the same updates. Synchronous is `intake.max_staleness=0`: a batch is started when the last one has been
learned from, and waits for its slowest rollout.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from glm5 import GLM5, save_model
from glm5.agents.service import Policy, Result, Rollout, TaskService, judged
from glm5.model.presets import nano
from glm5.posttrain.agent import AgentLearner, IntakeConfig
from glm5.posttrain.agent_run import AgentConfig, Field, resolve
from glm5.posttrain.engines import Engines
from glm5.posttrain.learner import Batch, LearnConfig
from glm5.posttrain.outcome import State
from glm5.posttrain.rollout.options import RolloutOptions
from glm5.posttrain.store import Store
from glm5.serve.client import WeightUpdate
from glm5.serve.request import Request
from glm5.train.schedule import LearningRate
from glm5.utils.runlog import read_metrics
from support.scripted import Scripted, chat_tokenizer

P99 = 2.3263  # of a standard normal distribution
LOOK_S = 0.02


class Slow(Scripted):
    """Answers after a time of its own."""

    median, tail = 1.0, 10.0

    async def generate(self, request: Request) -> Any:
        self.alive.add(request.rid)
        drawn = random.Random(request.route).gauss(0, 1)  # noqa: S311
        await asyncio.sleep(self.median * math.exp(drawn * math.log(self.tail) / P99))
        return await super().generate(request)


class Coins(TaskService):
    """One turn; half of the answers are right, by the sample's name."""

    name = "coins"
    timeout_s = 600.0
    concurrency = 10_000

    async def rollout(self, asked: Rollout, policy: Policy) -> Result:
        await policy.chat([{"role": "user", "content": "heads?"}], max_tokens=8)
        return judged(float(random.Random(asked.sample).random() < 0.5))  # noqa: S311


class Told(Engines):
    """Hears of a version; there are no weights."""

    def push(self, model: GLM5, version: int) -> None:
        self.call(self._push(WeightUpdate("tensor", weight_version=str(version)), version))


class Sleeper(AgentLearner):
    """Its updates take as long as it is told."""

    update_s = 1.0

    def learn(self, batches: list[Batch]) -> dict[str, float]:  # type: ignore[override]
        began = time.perf_counter()
        found = super().learn(batches)
        time.sleep(max(0.0, self.update_s - (time.perf_counter() - began)))
        return found


def measured(staleness: int, args: argparse.Namespace, directory: Path) -> dict[str, float]:
    tokenizer = chat_tokenizer()
    sizes = dict(hidden_size=32, num_hidden_layers=2, n_routed_experts=4, vocab_size=tokenizer.vocab_size)
    model = GLM5(nano(**sizes), seed=0)
    save_model(model, directory / "base", tokenizer=tokenizer)
    config, _ = resolve(
        AgentConfig(
            checkpoint=str(directory / "base"),
            run=str(directory / "run"),
            tasks=("coins",),
            rollout=RolloutOptions(group=args.group, concurrency=args.places, look_s=0.05),
            intake=IntakeConfig(args.groups, staleness),
            learn=LearnConfig(steps=args.steps, lr=LearningRate(1e-5, 1e-5), save_every=10_000),
            device="cpu",
        )
    )
    engine = Slow(weight_version="0", tokenizer=tokenizer)
    engine.median, engine.tail = args.median, args.tail
    busy: list[float] = []

    async def look() -> None:
        while True:
            busy.append(min(1.0, len(engine.alive) / args.places))
            await asyncio.sleep(LOOK_S)

    engines = Told({"scripted": engine})
    with (
        Store(directory / "run" / "t.sqlite") as store,
        Field(config, engines, store, [Coins()]) as field,
    ):
        begun = 0.0

        def step(of: AgentLearner) -> None:  # the first step fills the pipe, and does not count
            nonlocal begun
            if of.finished_steps == 1:
                begun = time.monotonic()
                busy.clear()

        learner = Sleeper(
            config.learn, config.intake, model, config.loss, directory / "run", "", tokenizer.vocab_size, store, field
        )
        learner.update_s = args.update
        looking = engines.spawn(look())
        learner.run(resolved=config, title="asynchronous" if staleness else "synchronous", on_step=step)
        seconds = time.monotonic() - begun
        looking.cancel()
        counts = store.counts().by_status
    records = [r for r in read_metrics(directory / "run") if r["step"] > 1]
    samples = sum(r["samples/trained"] for r in records)
    return {
        "trained an hour": 3600 * samples / seconds,
        "seconds a step": seconds / len(records),
        "trainer idle": statistics.fmean(r["idle/trainer"] for r in records),
        "engine places idle": 1 - statistics.fmean(busy),
        "staleness": statistics.fmean(r["staleness/mean"] for r in records),
        "stale": counts[State.STALE] / max(1, sum(counts[s] for s in State)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("steps", 12), ("places", 64), ("groups", 8), ("group", 8), ("staleness", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name, value in (("median", 1.0), ("tail", 10.0), ("update", 1.5)):
        parser.add_argument(f"--{name}", type=float, default=value)
    parser.add_argument("--json", help="write the figures here")
    args = parser.parse_args()
    torch.set_num_threads(1)
    table = {}
    for name, staleness in (("synchronous", 0), ("asynchronous", args.staleness)):
        with tempfile.TemporaryDirectory() as scratch:
            table[name] = measured(staleness, args, Path(scratch))
    print(f"\n{'':<20}" + "".join(f"{name:>16}" for name in table))
    for figure in table["synchronous"]:
        print(f"{figure:<20}" + "".join(f"{of[figure]:>16,.3f}" for of in table.values()))
    ratio = table["asynchronous"]["trained an hour"] / table["synchronous"]["trained an hour"]
    print(f"{ratio:.2f} times as many samples an hour")
    if args.json:
        Path(args.json).write_text(json.dumps({"arguments": vars(args), "table": table, "ratio": ratio}, indent=1))


if __name__ == "__main__":
    main()
