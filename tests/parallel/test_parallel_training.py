"""Training on meshes against training in one process: loss, every gradient, counters and norm, in every stage.

Meshes are drawn with a fixed seed from all that have at most 4 processes. Tolerances: one fp32 step is compared, since
Muon's orthogonalisation magnifies the last digits of weak directions from the second one on; its own update is equal
bit for bit where gradients are (`test_muon`).
"""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from glm5.parallel.mesh import Mesh, World
from glm5.utils.errors import ConfigError, NumericalError
from support.parallel import apart, gradients, make
from support.ranks import run_ranks
from support.training import dataset

TOLERANCE = 3e-5
# What a step may be: stages, cuts, shares of MTP that don't divide over ranks, all tokens at one expert.
STEPS: dict[str, dict[str, Any]] = {
    "pretrain": dict(),
    "crowded": dict(crowd=50.0, micro_batch=1),
    "warmup": dict(stage="warmup", mtp_depths=1),
    "sparse": dict(stage="sparse", mtp_share=0.25, micro_batch=1),
}
# Figures of time, and those that are measured on rows of its own, of which each rank has others.
TIMED, MEASURED = ("tokens_per_second", "memory_mib"), ("indexer_kl", "indexer_recall", "attention_logit_max")


def meshes(count: int, seed: int = 0) -> list[str]:
    """Drawn without repeats: some of two processes, more of four."""
    found = []
    for dp, tp, ep, shard in itertools.product((1, 2, 4), (1, 2), (1, 2, 4), (0, 1, 2)):
        try:
            mesh = Mesh(dp=dp, tp=tp, ep=ep, shard=shard)
        except ConfigError:
            continue
        if 1 < mesh.size <= 4:
            found.append(str(mesh))
    return random.Random(seed).sample(found, count)  # noqa: S311


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of tokens, and of what one process makes of each step."""
    torch.set_num_threads(1)
    directory = tmp_path_factory.mktemp("one")
    dataset(directory)
    for name, options in STEPS.items():
        of = make(None, directory, f"run-{name}", **options)
        found, metrics = gradients(of)
        torch.save((found, metrics, router_biases(of)), directory / f"{name}.pt")
    return directory


def router_biases(of: Any) -> list[Tensor]:
    return [r.e_score_correction_bias.clone() for r in of.routers]


def _compare(world: World, directory: str) -> list[str]:
    """What is wrong on this rank, in words."""
    wrong = []
    for name, options in STEPS.items():
        found, metrics, biases = torch.load(f"{directory}/{name}.pt")
        of = make(world, directory, f"{world.mesh}-{name}", **options)
        own, figures = gradients(of)
        wrong += [f"{name}: gradient of {w}" for w in apart(found, own, TOLERANCE)]
        wrong += [f"{name}: no gradient of {n}" for n, p in of._trainable() if n not in own]
        if not all(map(torch.equal, biases, router_biases(of))):  # loads are counted over all ranks, in integers
            wrong.append(f"{name}: router biases")
        apart_by_nature = TIMED if of.config.stage == "warmup" else TIMED + MEASURED
        for key, value in metrics.items():
            close = isinstance(value, float) and abs(figures[key] - value) <= 1e-4 * abs(value) + 1e-7
            if isinstance(value, float) and key not in apart_by_nature and not close:
                wrong.append(f"{name}: {key} is {figures[key]}, not {value}")
        wrong += [f"{name}: metric {key} is missing" for key in metrics.keys() - figures.keys()]
    return wrong


@pytest.mark.parametrize("mesh", meshes(5))
def test_one_step_equals_one_process(mesh: str, expected: Path) -> None:
    for rank, wrong in enumerate(run_ranks(Mesh.parse(mesh).size, mesh, _compare, str(expected))):
        assert not wrong, f"rank {rank}: {wrong[:5]}"


def test_refuses_batches_that_cannot_be_dealt(expected: Path) -> None:
    def said(**changes: Any) -> str:
        try:
            run_ranks(2, "dp=2", _make, str(expected), changes)
        except AssertionError as e:
            return str(e)
        return ""

    assert "batch.initial=3: must be a multiple of dp=2" in said(rows=3)


def _make(world: World, directory: str, changes: dict[str, Any]) -> None:
    make(world, directory, "refused", **changes)


def _poisoned(world: World, directory: str) -> str:
    """A NaN in one rank's expert: an error on every rank that says whose, and the state kept."""
    of = make(world, directory, "poisoned")
    with torch.no_grad():
        if world.rank == 1:
            of.ranks.local(of.model.model.layers[1].mlp.experts.down_proj).fill_(float("nan"))
    try:
        of.run()
    except NumericalError as e:
        return str(e)
    return "nothing"


def test_a_nan_on_one_rank_stops_all_and_is_named(expected: Path) -> None:
    said = run_ranks(2, "dp=2,ep=2", _poisoned, str(expected))
    for text in said:
        assert "rank 1: " in text
        assert "parameter model.layers.1.mlp.experts.down_proj" in text
        assert "The state is kept in" in text
