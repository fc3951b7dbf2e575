"""How the benchmarks of agents configure a run."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Literal

from glm5.posttrain.agent import IntakeConfig
from glm5.posttrain.agent_run import AgentConfig
from glm5.posttrain.learner import LearnConfig
from glm5.posttrain.rollout.options import RolloutOptions
from glm5.serve.config import EngineConfig
from glm5.train.schedule import LearningRate


def asynchronous(
    model: Path,
    run: Path,
    args: argparse.Namespace,
    seed: int,
    engine: EngineConfig,
    *,
    micro_batch: int,
    save_every: int,
    device: str,
    engine_dtype: Literal["float32", "bfloat16"] = "float32",
) -> AgentConfig:
    """A run of agents as the options of the command line have it."""
    return AgentConfig(
        checkpoint=str(model),
        run=str(run),
        engine=engine,
        engine_dtype=engine_dtype,
        rollout=RolloutOptions(group=args.group, concurrency=args.concurrency, look_s=0.1),
        intake=IntakeConfig(groups=args.groups, max_staleness=args.staleness),
        learn=LearnConfig(
            steps=args.rl_steps,
            updates=args.updates,
            lr=LearningRate(args.lr, args.lr / 10, warmup_steps=2),
            row_tokens=1024,
            micro_batch=micro_batch,
            save_every=save_every,
            seed=seed,
        ),
        device=device,
        eval_every=args.eval_every,
        eval_rollouts=args.held_out,
    )
