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

from glm5.parallel.compat import units
from glm5.parallel.mesh import Mesh, World
from glm5.train.config import TrainConfig
from glm5.train.estimate import estimate
from glm5.train.loop import Trainer
from glm5.train.meter import memory_of
from glm5.train.ranks import PipelineOptions, Ranks
from glm5.utils.errors import ConfigError, NumericalError
from support.parallel import apart, gradients, make
from support.ranks import run_ranks
from support.training import dataset, tiny

TOLERANCE = 3e-5
# What a step may be: stages, cuts, shares of MTP that don't divide over ranks, all tokens at one expert.
STEPS: dict[str, dict[str, Any]] = {
    "pretrain": dict(),
    "crowded": dict(crowd=50.0, micro_batch=1, recompute=("layer",)),
    "gathered": dict(gather_once=True, micro_batch=1),
    "warmup": dict(stage="warmup", mtp_depths=1),
    "sparse": dict(stage="sparse", mtp_share=0.25, micro_batch=1),
    "sparse-half": dict(stage="sparse", mtp_share=0.5, micro_batch=1, recompute=("attention",)),
}
# Figures of time, and those that are measured on rows of its own, of which each rank has others.
TIMED = ("tokens_per_second", "tflops_per_device", "memory_mib")
MEASURED = ("indexer_kl", "indexer_recall", "attention_logit_max")


def meshes(count: int, seed: int) -> list[str]:
    """Drawn without repeats from all meshes of 2 to 4 processes, again until every axis is among them."""
    found: list[Mesh] = []
    for dp, pp, cp, tp, ep, shard in itertools.product((1, 2, 4), (1, 2), (1, 2), (1, 2), (1, 2, 4), (0, 1, 2)):
        try:
            mesh = Mesh(dp=dp, pp=pp, cp=cp, tp=tp, ep=ep, shard=shard)
            mesh.check_model(tiny().config)
        except ConfigError:
            continue
        if 1 < mesh.size <= 4:
            found.append(mesh)
    rng = random.Random(seed)  # noqa: S311
    while True:
        drawn = rng.sample(found, count)
        if all(any(getattr(m, axis) > 1 for m in drawn) for axis in ("dp", "pp", "cp", "tp", "ep")):
            return [str(m) for m in drawn]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of tokens, and of what one process makes of each step."""
    directory = tmp_path_factory.mktemp("one")
    dataset(directory)
    for name, options in STEPS.items():
        of = make(None, directory, f"run-{name}", **options)
        found, metrics = gradients(of)
        torch.save((found, metrics, router_biases(of)), directory / f"{name}.pt")
    return directory


def router_biases(of: Trainer) -> dict[str, Tensor]:
    return {name: t.clone() for name, t in of.state.weights().items() if name.endswith("e_score_correction_bias")}


def _compare(world: World, directory: str) -> tuple[list[str], set[str]]:
    """What is wrong on this rank, in words; and of which parameters it has gradients, over all steps."""
    wrong, covered = [], set()
    for name, options in STEPS.items():
        if world.count("pp") > 1 and options.get("mtp_share") == 0.25 and world.count("dp") > 1:
            options = {**options, "mtp_share": 0.5}  # a pipeline deals MTP's rows evenly
            name = f"{name}-half"
        found, metrics, biases = torch.load(f"{directory}/{name}.pt")
        of = make(world, directory, f"{world.mesh}-{name}", **options)
        own, figures = gradients(of)
        covered |= {f"{name} {n}" for n in own}
        wrong += [f"{name}: gradient of {w}" for w in apart({n: found[n] for n in own}, own, TOLERANCE)]
        wrong += [f"{name}: no gradient of {n}" for n, p in of._trainable() if n not in own]
        for router, bias in router_biases(of).items():  # loads are counted over all ranks, in integers
            wrong += [] if torch.equal(bias, biases[router]) else [f"{name}: {router}"]
        apart_by_nature = TIMED if of.config.stage == "warmup" else TIMED + MEASURED
        if of.pipeline is not None and of.config.stage != "warmup":  # which has no forward pass to measure with
            metrics = {k: v for k, v in metrics.items() if k not in (*MEASURED, "attention_logit_max_by_layer")}
        for key, value in metrics.items():
            close = isinstance(value, float) and abs(figures[key] - value) <= 1e-4 * abs(value) + 1e-7
            if isinstance(value, float) and key not in apart_by_nature and not close:
                wrong.append(f"{name}: {key} is {figures[key]}, not {value}")
        wrong += [] if 0 < figures["exposed_communication"] < 1 else [f"{name}: waits {figures}"]
        if of.pipeline is not None:
            wrong += [] if 0 <= figures["bubble"] < 1 else [f"{name}: bubble {figures['bubble']}"]
            wrong += [] if ("bubble_played" in figures) == (of.config.stage != "warmup") else [f"{name}: bubble played"]
        else:
            said = estimate(of.model.config, of.config, 32, device="cpu", mesh=world.mesh)
            for kind, held in (
                ("parameters", said.weights),
                ("gradients", said.gradients),
                ("optimizer", said.optimizer),
            ):
                bytes_ = figures["memory"][kind] * 2**20
                wrong += [] if abs(bytes_ - held) <= 1 else [f"{name}: {kind} take {bytes_}, not {held}"]
        wrong += [f"{name}: metric {key} is missing" for key in metrics.keys() - figures.keys()]
    return wrong, covered


# Beside those drawn: experts over tensor-parallel ranks, and copies of a pipeline whose gradients are reduced late.
@pytest.mark.parametrize("mesh", ["dp=2,ep=2", *meshes(3, seed=5), "dp=2,tp=2,ep=2", "dp=2,pp=2,shard=1"])
def test_one_step_equals_one_process(mesh: str, expected: Path) -> None:
    covered: set[str] = set()
    for rank, (wrong, own) in enumerate(run_ranks(Mesh.parse(mesh).size, mesh, _compare, str(expected))):
        assert not wrong, f"rank {rank}: {wrong[:5]}"
        covered |= own
    names = torch.load(expected / "pretrain.pt")[0]
    assert {f"pretrain {n}" for n in names} <= covered  # stages hold them all between them


def _copied(world: World, directory: str) -> list[str]:
    """What is wrong where no parameter is gathered: every data rank holds a copy, FSDP none."""
    wrong = []
    for name in ("gathered", "crowded", "warmup", "sparse"):
        found, metrics, biases = torch.load(f"{directory}/{name}.pt")
        of = make(world, directory, f"{world.mesh}-copies-{name}", **{**STEPS[name], "gather_once": True})
        wrong += [] if of.ranks.copies and not list(units(of.model)) else [f"{name}: FSDP holds units"]
        own, figures = gradients(of)
        wrong += [f"{name}: gradient of {w}" for w in apart(found, own, TOLERANCE)]
        wrong += [f"{name}: {n}" for n, bias in router_biases(of).items() if not torch.equal(bias, biases[n])]
        for key in ("loss", "grad_norm"):
            if key in metrics and abs(figures[key] - metrics[key]) > 1e-4 * metrics[key]:
                wrong.append(f"{name}: {key} is {figures[key]}, not {metrics[key]}")
    return wrong


@pytest.mark.parametrize("mesh", ["dp=2,shard=1", "dp=4,shard=1,ep=2", "dp=2,tp=2,ep=2,shard=1"])
def test_copies_of_the_model_train_as_one(mesh: str, expected: Path) -> None:
    for rank, wrong in enumerate(run_ranks(Mesh.parse(mesh).size, mesh, _copied, str(expected))):
        assert not wrong, f"rank {rank}: {wrong[:5]}"


# As many experts a token as ranks that share them out, which then gather all tokens.
MANY: dict[str, Any] = dict(model_n_routed_experts=8, model_num_experts_per_tok=4)


def _gathered_experts(world: World, directory: str) -> list[str]:
    found, metrics, biases = torch.load(f"{directory}/many.pt")
    of = make(world, directory, "many-here", **MANY)
    own, figures = gradients(of)
    wrong = apart(found, own, TOLERANCE)
    wrong += [n for n, bias in router_biases(of).items() if not torch.equal(bias, biases[n])]
    return wrong + ([] if abs(figures["loss"] - metrics["loss"]) <= 1e-4 * metrics["loss"] else ["loss"])


def test_one_step_of_gathered_experts_equals_one_process(expected: Path) -> None:
    of = make(None, expected, "many", **MANY)
    torch.save((*gradients(of), router_biases(of)), expected / "many.pt")
    assert run_ranks(4, "dp=4,ep=4", _gathered_experts, str(expected)) == [[]] * 4


def _held(world: World, meshes: list[str]) -> list[str]:
    """Bytes of parameters on the rank that holds most, against the estimate, for every mesh."""
    wrong = []
    train = TrainConfig(precision="fp32")
    for text in meshes:
        model = tiny(index_n_heads=3, index_head_dim=10, hidden_size=30)  # matrices of 3 rows, of 30 and 10
        said = estimate(model.config, train, 32, device="cpu", mesh=Mesh.parse(text)).weights
        ranks = Ranks(World(Mesh.parse(text), world.device))
        ranks.place(model, PipelineOptions())
        held = memory_of(ranks, model.parameters(), [])["parameters"] * 2**20
        most = float(ranks.largest(torch.tensor(held, dtype=torch.float64)))
        wrong += [] if abs(most - said) <= 1 else [f"{text}: {most}, not {said}"]
    return wrong


def test_estimates_uneven_shards_exactly() -> None:
    chosen = ["dp=4", "dp=4,ep=4", "dp=4,shard=2,ep=2", "dp=2,tp=2", "dp=2,tp=2,ep=2", "cp=2,tp=2", "dp=4,shard=1"]
    for wrong in run_ranks(4, "dp=4", _held, chosen):
        assert wrong == []


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
