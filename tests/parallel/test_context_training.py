"""Training with rows shared among ranks: every stage's step is one process's, evaluation too."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from glm5.parallel.context import ContextRows, context_ways
from glm5.parallel.exchange import Hierarchy
from glm5.parallel.mesh import Mesh, World
from glm5.train.config import TrainConfig
from glm5.train.evaluate import held_out
from glm5.utils.errors import ConfigError
from support.parallel import apart, gradients, make, unlike
from support.ranks import run_ranks
from support.training import dataset

TOLERANCE = 3e-5
STEPS: dict[str, dict[str, Any]] = {
    "pretrain": dict(),
    "heads": dict(model_num_attention_heads=4, model_num_key_value_heads=4),
    "positions": dict(by_heads=False),
    "warmup": dict(stage="warmup", mtp_depths=1),
    "sparse": dict(stage="sparse", mtp_share=0.25, micro_batch=1),
}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of tokens, and of what one process makes of each step."""
    directory = tmp_path_factory.mktemp("one")
    dataset(directory)
    for name, options in STEPS.items():
        of = make(None, directory, f"run-{name}", **options)
        found, metrics = gradients(of)
        biases = [r.e_score_correction_bias.clone() for r in of.routers]
        measured = held_out(make(None, directory, "held").model, of.loader.dataset, sparse=name != "warmup")
        torch.save((found, metrics, biases, vars(measured)), directory / f"{name}.pt")
    return directory


def _compare(world: World, directory: str) -> list[str]:
    """What is wrong on this rank, in words."""
    wrong, divided, attend = [], [], ContextRows.attend

    def attended(self: ContextRows, *args: Any) -> torch.Tensor:
        divided.append(args)
        return attend(self, *args)

    ContextRows.attend = attended  # type: ignore[method-assign]
    os.environ["LOCAL_WORLD_SIZE"] = "2"  # as if two hosts held four ranks
    hosts = context_ways(world)
    if isinstance(hosts, Hierarchy) != (world.mesh.cp > 2):
        wrong.append(f"{hosts} between cp={world.mesh.cp} ranks")
    # Two heads divide between two ranks, four also between more; then "pretrain" goes by positions as it is.
    known = "heads" if world.mesh.cp * world.mesh.tp == 2 else "positions"
    for name, options in STEPS.items():
        if name == known:
            continue
        *expected, measured = torch.load(f"{directory}/{name}.pt")
        of = make(world, directory, f"{world.mesh}-{name}", **options)
        divided.clear()
        own, figures = gradients(of)
        local = of.model.config.num_attention_heads // world.count("tp")
        if bool(divided) != (
            options.get("by_heads", name != "sparse" and name != "warmup") and local % world.mesh.cp == 0
        ):
            wrong.append(f"{name}: {len(divided)} calls divided by heads")
        wrong += [f"{name}: {w}" for w in unlike(of, own, figures, tuple(expected), TOLERANCE)]
        fresh = make(world, directory, f"{world.mesh}-held")
        again = vars(held_out(fresh.model, of.loader.dataset, sparse=name != "warmup", ranks=fresh.ranks))
        for key, value in measured.items():
            if abs(again[key] - value) > 1e-5 * abs(value):
                wrong.append(f"{name}: held-out {key} is {again[key]}, not {value}")
    return wrong


@pytest.mark.parametrize("mesh", ["dp=2,cp=2", "cp=2,tp=2", "cp=4,ep=2"])
def test_one_step_equals_one_process(mesh: str, expected: Path) -> None:
    for rank, wrong in enumerate(run_ranks(Mesh.parse(mesh).size, mesh, _compare, str(expected))):
        assert not wrong, f"rank {rank}: {wrong[:8]}"


def _by_work(world: World, directory: str) -> tuple[list[str], list[float]]:
    """What is wrong with a step whose rows are dealt by work, and the work of this rank's micro-batches."""
    found, *_ = torch.load(f"{directory}/pretrain.pt")
    of = make(world, directory, f"{world.mesh}-by-work", by_work=True, micro_batch=1)
    own, _ = gradients(of)
    of.samples = 0
    rows = of._rows(0, 4)
    seen = [float((torch.arange(r.seq_len) - r.first_BS[:, : r.seq_len] + 1).clamp(min=0).sum()) for r in rows]
    return apart(found, own, TOLERANCE), seen


def test_rows_dealt_by_work_give_the_same_gradient(expected: Path) -> None:
    (wrong, one), (also_wrong, other) = run_ranks(2, "dp=2", _by_work, str(expected))
    assert not wrong + also_wrong
    rows = sorted(one + other, reverse=True)
    assert len(set(rows)) > 1
    # Like with like: each micro-batch has the next two of all rows by work.
    assert [sorted(pair, reverse=True) for pair in zip(one, other, strict=True)] == [rows[:2], rows[2:]]


def test_dealing_by_work_needs_mtp_on_every_row() -> None:
    with pytest.raises(ConfigError, match="by_work=True: needs mtp_share=1"):
        TrainConfig(by_work=True, mtp_share=0.5)
    TrainConfig(by_work=True, mtp_share=0.5, mtp_depths=0)
