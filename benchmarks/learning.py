"""What the benchmarks of learning share: the model that they begin with, where a seed lies, what seeds say together."""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from glm5.posttrain.sft import SftConfig, sft
from glm5.train.config import TrainConfig
from glm5.train.schedule import BatchWarmup, LearningRate


def quiet(_: str) -> None:
    """Say nothing: the table is what is wanted."""


def training(args: argparse.Namespace, seed: int, *, batch: int, mtp_depths: int = 0) -> TrainConfig:
    """`args.sft_steps` steps of `batch` rows at a rate up to `args.sft_lr`, nothing saved between."""
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


def tuned(
    base: Path,
    data: Sequence[str | Path],
    args: argparse.Namespace,
    seed: int,
    *,
    batch: int,
    seq_len: int,
    device: str = "cpu",
    mtp_depths: int = 0,
) -> Path:
    """A model fine-tuned on conversations, in `sft` beside the one that it was; see `training`."""
    config = SftConfig(
        checkpoint=str(base),
        data=tuple(map(str, data)),
        run=str(base.with_name("sft")),
        seq_len=seq_len,
        device=device,
        train=training(args, seed, batch=batch, mtp_depths=mtp_depths),
    )
    return sft(config, quiet).model


def seeds(args: argparse.Namespace) -> Iterator[tuple[int, Path]]:
    """Each seed of `args.seeds`, and its directory: below `args.out`, or else gone when the seed is done."""
    for seed in map(int, args.seeds.split(",")):
        with tempfile.TemporaryDirectory() as scratch:
            yield seed, Path(args.out or scratch) / f"seed-{seed}"


def spread(values: Sequence[float]) -> str:
    """Mean and sample deviation."""
    return f"{statistics.mean(values):.3f} ± {statistics.stdev(values) if len(values) > 1 else 0.0:.3f}"


def show(tables: Sequence[Mapping[str, Mapping[str, float]]]) -> None:
    """Success of each stage on each kind of tasks, over the tables of all seeds."""
    kinds = list(next(iter(tables[0].values())))
    print(f"\n{'after':<14}" + "".join(f"{kind[:20]:>22}" for kind in kinds))
    for stage in tables[0]:
        print(f"{stage:<14}" + "".join(f"{spread([t[stage][kind] for t in tables]):>22}" for kind in kinds))
