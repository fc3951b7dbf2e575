"""How the benchmarks of reinforcement learning fine-tune the small models that they begin with."""

from __future__ import annotations

import argparse

from glm5.train.config import TrainConfig
from glm5.train.schedule import BatchWarmup, LearningRate


def tuning(args: argparse.Namespace, seed: int, *, batch: int, mtp_depths: int = 0) -> TrainConfig:
    """`args.sft_steps` steps at a rate up to `args.sft_lr`, of so many rows, nothing saved between."""
    return TrainConfig(
        steps=args.sft_steps,
        batch=BatchWarmup(batch, batch, 0),
        micro_batch=batch,
        lr=LearningRate(args.sft_lr, args.sft_lr / 10, warmup_steps=10),
        mtp_depths=mtp_depths,
        bias_rate=0.0,
        save_every=10_000,
        measure_every=10_000,
        seed=seed,
    )
