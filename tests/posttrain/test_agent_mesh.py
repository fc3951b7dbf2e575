"""The asynchronous learner over two processes: one process's ledger and updates, also when one of them dies."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import test_agent_run
import torch
from test_agent_learner import UPDATES, Drawers, Whole, filled, learner, ledger, policy, run

from glm5.parallel.mesh import World
from glm5.parallel.watch import watched
from glm5.posttrain.agent import LEDGER
from glm5.posttrain.agent_run import AgentConfig, Learned, agent
from glm5.posttrain.learner import LearnConfig
from glm5.posttrain.outcome import State
from glm5.posttrain.store import Store
from glm5.train.ranks import Ranks
from glm5.train.schedule import LearningRate
from glm5.utils.errors import ConfigError
from glm5.utils.runlog import read_metrics
from support.ranks import as_launched, exit_codes, run_ranks

STEPS = 2


def on_rank(world: World | None, directory: Path, dies: int = 0) -> Whole | None:
    """A run of which the main rank alone has ledger and drawers; the other one dies in its update number `dies`."""
    store, arrive = filled(directory / "t") if world is None or world.main else (None, lambda _: None)
    drawers = None if store is None else Drawers(arrive)
    of = learner(directory / "run", store, drawers, ranks=Ranks(world), steps=STEPS, save_every=1)
    if dies and not of.ranks.main:
        learn, calls = of.learn, iter(range(1, 100))

        def dying(batches: Any) -> Any:
            if next(calls) == dies:
                os.kill(os.getpid(), signal.SIGKILL)
            return learn(batches)

        of.learn = dying  # type: ignore[method-assign]
    run(of)
    if store is None or drawers is None:
        return None
    with store:
        return Whole(ledger(store), set(drawers.weights), drawers.weights[STEPS])


def told(world: World, directory: Path, dies: int) -> None:
    """The same, watched over as in the command; what a rank hears in the end is kept in a file."""
    try:
        with watched(world, directory / "ranks", 300):
            on_rank(world, directory, dies)
    except BaseException as error:
        (directory / f"rank-{world.rank}").write_text(f"{type(error).__name__}: {error}")
        raise


def test_two_ranks_make_one_processs_updates_also_when_one_dies(tmp_path: Path) -> None:
    for name in ("one", "two", "cut"):
        (tmp_path / name).mkdir()
    one = on_rank(None, tmp_path / "one")
    two, other = run_ranks(2, "dp=2", on_rank, tmp_path / "two", timeout=600)
    assert one is not None
    assert other is None
    assert two.ledger == one.ledger
    assert two.versions == one.versions == set(range(STEPS + 1))
    first = [next(r for r in read_metrics(tmp_path / n / "run") if r["step"] == 1) for n in ("one", "two")]
    for name in ("loss", "grad_norm", "entropy", "reward", "samples/trained", "is_masked_positive"):
        assert first[1][name] == pytest.approx(first[0][name], rel=1e-4, abs=1e-6), name

    before = policy().state_dict()
    for name, p in one.weights.items():
        moved = float((p - before[name]).abs().max())
        assert float((two.weights[name] - p).abs().max()) <= 0.1 * moved + 1e-6, name  # Muon amplifies rounding

    exit_codes(2, "dp=2", told, tmp_path / "cut", UPDATES + 2, timeout=600)
    heard = (tmp_path / "cut" / "rank-0").read_text()
    assert not (tmp_path / "cut" / "rank-1").exists(), "it was killed"
    assert "rank 1" in heard, heard
    again, _ = run_ranks(2, "dp=2", on_rank, tmp_path / "cut", timeout=600)
    assert again.ledger == two.ledger
    for name, p in two.weights.items():
        assert torch.equal(again.weights[name], p), name


def learned(world: World, config: AgentConfig) -> Learned:
    services = [test_agent_run.Even()]
    with as_launched(world):
        return agent(config, lambda _: None, services=services)


def test_a_run_on_two_processes(tmp_path: Path) -> None:
    base = test_agent_run.saved(tmp_path / "base")
    learn = LearnConfig(steps=1, lr=LearningRate(3e-3, 3e-3), row_tokens=128)
    config = test_agent_run.config(base, tmp_path / "run", mesh="dp=2", learn=learn, eval_rollouts=1)
    found, same = run_ranks(2, "dp=2", learned, config, timeout=600)
    assert found == same
    assert found.steps == 1
    assert found.held_out.keys() == {"before", "after"}
    assert (found.model / "model.safetensors").exists()
    with Store(tmp_path / "run" / LEDGER, read_only=True) as store:
        counts = store.counts()
        assert sum(counts.by_status.values()) == counts.started
        assert {s.step for s in store.samples(status=State.TRAINED)} == {1}
    first, last = read_metrics(tmp_path / "run")
    assert "held_out/even" in first
    assert last["staleness/max"] == 0
    assert last["train_rollout_logprob_abs_diff"] < 1e-3


def test_meshes_that_a_policy_cannot_use_are_refused() -> None:
    with pytest.raises(ConfigError, match="may have dp"):
        AgentConfig(mesh="dp=2,tp=2")
