"""Does an agent learn? Fine-tuning on scripted trajectories, then asynchronous reinforcement learning with a tool.

    python benchmarks/agent_learning.py [--seeds 0,1,2] [--sft-steps N] [--rl-steps N] [--out DIR] [--json FILE]
                                        [--variant whole|retokenised|no-mask|no-bound|no-reset|synchronous ...]
    python benchmarks/agent_learning.py --table FILE ...          # one table of what several runs wrote with --json

The task is `examples/services/cards.py`: look at hidden cards, one a turn, and name the highest. A model of `nano`'s
parts (--hidden, --layers and --experts set its size) is fine-tuned on scripts of agents, of which --hasty is the share
of those that name a card before they have seen all; then `glm5 rl agent` as a function learns from its own rollouts:
engine, gateway, orchestrator and learner in this process, on a CPU in fp32. Success is that of greedy answers to deals
that were held out: neither scripts nor rollouts have them. With --out the runs stay, and the same command goes on where
it was killed; several commands may share it, each with variants of its own, once the models are fine-tuned (no
--variant at all). The table has mean and spread (sample deviation) over the seeds, which draw everything.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import itertools
import json
import math
import random
import statistics
import time
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from agent_config import asynchronous
from glm5 import GLM5, save_model
from glm5.agents.service import Policy, Result, Rollout, TaskService
from glm5.model.presets import nano
from glm5.posttrain.agent_run import AgentConfig, agent
from glm5.serve.config import EngineConfig
from glm5.text import Tokenizer, render
from glm5.text.messages import messages_from_openai
from glm5.utils.runlog import read_metrics
from learning import quiet, seeds, spread, tuned

P99 = 2.3263  # of a standard normal distribution
PHASES = "wait", "update", "weight_sync"  # of a step
SERVICE = Path(__file__).parents[1] / "examples" / "services" / "cards.py"


def cards(names: str, highest: int) -> Any:
    """The example's module, dealing cards of these names below `highest`."""
    spec = importlib.util.spec_from_file_location("cards", SERVICE)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)

    def deal(seed: int) -> dict[str, int]:
        """Cards by name, no two alike."""
        return dict(zip(names, random.Random(seed).sample(range(highest), len(names)), strict=True))  # noqa: S311

    made.NAMES, made.deal = names, deal
    return made


def held_out(deal: dict[str, int]) -> bool:
    """Whether a deal is one of the quarter that is only measured: scripts and what is learned from have the others."""
    return zlib.crc32(repr(sorted(deal.items())).encode()) % 4 == 0


def seed_of(task: Any, seed: int, *, held: bool) -> int:
    """The first seed from this one on whose deal is of the right part."""
    return next(s for s in itertools.count(seed) if held_out(task.deal(s)) == held)


def service(task: Any, delay_s: float) -> TaskService:
    """The example's service, on deals of the right part: sessions of held-out figures have names of their own. A
    rollout that is learned from takes `delay_s` longer in the median, and ten times that at the 99th percentile."""

    class Cards(task.Cards):  # type: ignore[name-defined, misc]
        async def rollout(self, asked: Rollout, policy: Policy) -> Result:
            held = asked.sample.startswith("held-")
            if delay_s and not held:
                drawn = random.Random(asked.sample).gauss(0, 1)  # noqa: S311
                await asyncio.sleep(delay_s * math.exp(drawn * math.log(10) / P99))
            seed = seed_of(task, asked.seed, held=held)
            return await super().rollout(replace(asked, seed=seed), policy)

    return Cards()


def script(task: Any, seed: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """A conversation to fine-tune on, of a perfect agent or a hasty one, who names a card before all are seen."""
    whole, deal, draw = task.script(seed), task.deal(seed), random.Random(seed)  # noqa: S311
    if draw.random() >= args.hasty:
        return whole
    looks = draw.randrange(len(deal))
    seen, unseen = args.cards[:looks], args.cards[looks:]
    best = max(seen, key=deal.__getitem__, default="")
    guess = best if best and deal[best] >= args.highest / 2 else draw.choice(unseen)
    return [*whole[: 1 + 2 * looks], {"role": "assistant", "content": guess, "thinking": False}]


def base(directory: Path, args: argparse.Namespace, seed: int) -> Path:
    """The fine-tuned model that learning begins with; one that is there is taken as it is."""
    if (directory / "sft" / "result.json").exists():
        return directory / "sft" / "model"
    task = cards(args.cards, args.highest)
    talk, rows = directory / "talk.jsonl", []
    for number in range(args.scripts):
        rows.append({"messages": script(task, seed_of(task, (seed * 1_000 + number) * 1_000, held=False), args)})
    talk.write_text("".join(json.dumps(row) + "\n" for row in rows))
    plain = Tokenizer.train([talk.read_text()], 292)  # whatever it is, its text is what the tokenizer must know
    texts = []
    for row in rows[:20]:
        rendered = render(plain, messages_from_openai(row["messages"]))
        texts.append(plain.decode(list(rendered.ids)))
    tokenizer = Tokenizer.train(texts, args.vocab)
    sizes = dict(hidden_size=args.hidden, num_hidden_layers=args.layers, n_routed_experts=args.experts)
    shape = nano(vocab_size=tokenizer.vocab_size, max_position_embeddings=1024, **sizes)
    if not (directory / "base").exists():
        save_model(GLM5(shape, seed=seed), directory / "base", tokenizer=tokenizer)
    return tuned(directory / "base", [talk], args, seed, batch=4, seq_len=args.seq_len, mtp_depths=1)


def config(model: Path, run: Path, args: argparse.Namespace, seed: int) -> AgentConfig:
    engine = EngineConfig(memory_gib=0.2, context=1024, drafts=args.drafts, overlap=False)
    return asynchronous(model, run, args, seed, engine, micro_batch=2, save_every=10, device="cpu")


def varied(given: AgentConfig, variant: str) -> AgentConfig:
    """The configuration without one of the mechanisms."""
    if variant == "no-bound":
        return replace(given, intake=replace(given.intake, max_staleness=1_000))
    if variant == "no-reset":
        return replace(given, intake=replace(given.intake, reset_optimizer=False))
    if variant == "no-mask":
        return replace(given, loss=replace(given.loss, clip_low=1.0, clip_high=1e9))
    if variant == "synchronous":
        return replace(given, intake=replace(given.intake, max_staleness=0))
    if variant == "retokenised":
        return replace(given, intake=replace(given.intake, retokenise=True))
    return given


def one_seed(seed: int, directory: Path, args: argparse.Namespace, table: dict[str, Any]) -> Iterator[None]:
    """Fill the seed's table, by variant; gives way after each."""
    directory.mkdir(parents=True, exist_ok=True)
    model = base(directory, args, seed)
    for variant in args.variant:
        began = time.time()
        given = varied(config(model, directory / variant, args, seed), variant)
        found = agent(given, quiet, services=[service(cards(args.cards, args.highest), args.delay)])
        records = read_metrics(found.run)
        table[variant] = {
            "before": found.held_out["before"]["cards"],
            "after": found.held_out["after"]["cards"],
            "curve": {r["step"]: r["held_out/cards"] for r in records if "held_out/cards" in r},
            "rewards": [r["rewards/cards"] for r in records if "rewards/cards" in r],
            "states": found.states,
            "seconds": time.time() - began,
            "step_s": statistics.median([sum(r[f"time/{of}"] for of in PHASES) for r in records if "loss" in r]),
            **{name: statistics.fmean([r[name] for r in records if name in r])
               for name in ("staleness/mean", "staleness/max", "idle/trainer", "engine/idle", "is_masked_low",
                            "is_masked_high", "train_rollout_logprob_abs_diff")},
        }  # fmt: skip
        print(f"seed {seed}  {variant:<12} {json.dumps(table[variant])}", flush=True)
        yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--variant", nargs="*", default=["whole"])
    parser.add_argument("--table", nargs="+", help="show what these files hold, and run nothing")
    for name, default in (
        ("sft-steps", 250), ("rl-steps", 8), ("scripts", 1000), ("vocab", 300), ("hidden", 128), ("layers", 2),
        ("experts", 4), ("seq-len", 128), ("group", 8), ("groups", 4), ("updates", 4), ("staleness", 2),
        ("concurrency", 64), ("drafts", 0), ("held-out", 44), ("eval-every", 2), ("highest", 10),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--cards", default="ab", help="a letter each")
    parser.add_argument("--hasty", type=float, default=0.8)
    parser.add_argument("--delay", type=float, default=0.0, help="seconds that rollouts take longer, in the median")
    parser.add_argument("--sft-lr", type=float, default=3e-3)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--out", help="keep the runs here, and go on from what is there")
    parser.add_argument("--json", help="write the figures here")
    args = parser.parse_args()
    if args.table:
        show([table for file in args.table for table in json.loads(Path(file).read_text())["seeds"]])
        return
    torch.set_num_threads(1)
    found: list[dict[str, Any]] = []
    for seed, directory in seeds(args):
        found.append({})
        for _ in one_seed(seed, directory, args, found[-1]):
            if args.json:
                Path(args.json).write_text(json.dumps({"arguments": vars(args), "seeds": found}, indent=1))
    show(found)


def show(found: list[dict[str, Any]]) -> None:
    """Mean and sample deviation over the seeds, by variant."""
    columns = {
        "before": lambda t: t["before"],
        "after": lambda t: t["after"],
        "drawn, last two": lambda t: statistics.fmean(t["rewards"][-2:]),
        "s a step": lambda t: t["step_s"],
        "staleness": lambda t: t["staleness/mean"],
        "masked, %": lambda t: 100 * (t["is_masked_low"] + t["is_masked_high"]),
        "off a token": lambda t: t["train_rollout_logprob_abs_diff"],
    }
    print(f"\n{'variant':<13}{'seeds':>6}" + "".join(f"{name:>17}" for name in columns))
    for variant in dict.fromkeys(variant for table in found for variant in table):
        tables = [table[variant] for table in found if variant in table]
        line = f"{variant:<13}{len(tables):>6}"
        for of in columns.values():
            line += f"{spread([of(table) for table in tables]):>17}"
        print(line)


if __name__ == "__main__":
    main()
