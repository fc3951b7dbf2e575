"""Reinforcement learning over several processes: a policy that lies over them has one process's gradients, and the
command makes what one process makes, killed or not."""

from __future__ import annotations

import copy
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import test_distill
import torch
from test_policy_ranks import batches
from test_policy_update import CONFIGS
from test_reason import SUPPORT, checkpoint, config

from glm5.model.glm5 import GLM5
from glm5.model.weights import load_model
from glm5.parallel.mesh import World
from glm5.posttrain.distill import distill
from glm5.posttrain.divergence import DivergenceUpdate
from glm5.posttrain.general import GeneralConfig, general
from glm5.posttrain.learner import LearnConfig
from glm5.posttrain.losses import glm5_reasoning
from glm5.posttrain.reason import PromptConfig, reason
from glm5.posttrain.rollouts import RolloutConfig
from glm5.posttrain.samples import read_samples
from glm5.posttrain.update import PolicyUpdate, freeze_indexers, score
from glm5.train.ranks import PipelineOptions, Ranks
from glm5.train.schedule import LearningRate
from glm5.utils.config_io import save
from glm5.utils.errors import ConfigError
from glm5.utils.runlog import read_metrics
from support.ranks import run_ranks

Gradients = dict[str, dict[str, torch.Tensor]]


class Seen(torch.optim.SGD):
    """An optimizer that keeps whole gradients and moves nothing."""

    def __init__(self, model: GLM5, ranks: Ranks) -> None:
        super().__init__(model.parameters(), lr=0.0)
        self.model, self.ranks = model, ranks
        self.gradients: dict[str, torch.Tensor] = {}

    def step(self, closure: Any = None) -> None:
        found = {n: p.grad for n, p in self.model.named_parameters() if p.grad is not None}
        self.gradients = {n: self.ranks.whole(g).clone() for n, g in found.items()}


def gradients(ranks: Ranks) -> Gradients:
    """Of each loss, cut into micro-batches of 1, 2 and 4 rows, and of a batch that leaves a rank nothing to read."""
    base, other, rows = batches()
    model = copy.deepcopy(other)
    freeze_indexers(model)
    ranks.place(model, PipelineOptions())
    holdings = ranks.holdings(list(model.parameters()))
    found: Gradients = {}
    seen = Seen(model, ranks)
    how: dict[str, Any] = dict(clip=0.0, ranks=ranks, holdings=holdings)
    for which, batch in rows.items():
        old = score(base, batch)
        for name in ("glm5_reasoning", "glm5_agentic", "gspo"):
            for micro in (1, 2, 4):
                figures = PolicyUpdate(model, seen, CONFIGS[name], micro_batch=micro, **how)(batch, 6, old_BT=old)
                found[f"{name} {which} {micro}"] = {**seen.gradients, "loss": torch.tensor(figures["loss"])}
        found[f"score {which}"] = {"logprobs": score(model, batch, micro_batch=2, ranks=ranks)}
    plain = PolicyUpdate(model, seen, CONFIGS["glm5_reasoning"], micro_batch=2, **how)
    DivergenceUpdate(plain, [base], 0)(rows["packed"], 6)
    found["divergence"] = seen.gradients
    return found


@cache
def alone() -> Gradients:
    return gradients(Ranks())


def on_rank(world: World) -> Gradients:
    return gradients(Ranks(world))


@pytest.mark.parametrize("mesh", ["dp=2", "dp=2,shard=1,ep=2"])
def test_a_policy_over_two_ranks_has_one_processs_gradients(mesh: str) -> None:
    expected = alone()
    assert any(float(g.abs().max()) > 1e-3 for g in expected["glm5_reasoning packed 1"].values())
    for found in run_ranks(2, mesh, on_rank, timeout=600):
        assert found.keys() == expected.keys()
        for name, whole in expected.items():
            cut = found[name]
            for n, g in whole.items():
                here = cut.get(n, torch.zeros_like(g))  # nobody's gradient is zero
                where = f"{name}, {n}"
                torch.testing.assert_close(here, g, rtol=1e-4, atol=2e-6, msg=lambda m, at=where: f"{at}: {m}")


def started(arguments: list[str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "glm5.cli.main", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    )


@pytest.mark.slow
def test_the_command_on_two_processes_makes_what_one_makes_also_when_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", SUPPORT, prepend=os.pathsep)
    loss = replace(glm5_reasoning(), kl_weight=0.01)  # its reference lies whole on each rank
    one = config(tmp_path, learn=dict(steps=3, save_every=1), page_every=1, run=str(tmp_path / "one"), loss=loss)
    alone = reason(one, lambda _: None)
    spread = tmp_path / "two"
    save(tmp_path / "two.json", replace(one, run=str(spread)))

    process = started(["rl", "reason", "--config", str(tmp_path / "two.json"), "--mesh", "dp=2"])
    try:
        deadline = time.monotonic() + 600
        while not list((spread / "checkpoints").glob("step-*")):
            assert process.poll() is None, process.communicate()[1]
            assert time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    shutil.copytree(spread, tmp_path / "moved")
    moved = reason(replace(one, run=str(tmp_path / "moved")), lambda _: None)  # what two began, one ends
    assert moved.steps == 3
    assert [s["number"] for s in read_samples(moved.run / "samples.jsonl")] == list(range(moved.prompts))
    process = started(["rl", "reason", "--config", str(tmp_path / "two.json"), "--mesh", "dp=2"])
    try:
        said, errors = process.communicate(timeout=600)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, errors
    assert said.count("learned   3 steps") == 1  # one process speaks
    assert (spread / "rollouts.html").read_text().count("ratio 1.0000") > 1

    # Draws are a function of weights, seed and number, so the first step's are the same; later ones follow rounding.
    ledgers = [read_samples(run / "samples.jsonl") for run in (alone.run, spread)]
    begins = [[s for s in ledger if s["step"] == 1] for ledger in ledgers]
    assert begins[0] == begins[1]
    assert [s["number"] for s in ledgers[1]] == list(range(len(ledgers[1])))
    first = [next(r for r in read_metrics(run) if r["step"] == 1) for run in (alone.run, spread)]
    for name in ("loss", "grad_norm", "entropy", "reward"):
        assert first[1][name] == pytest.approx(first[0][name], rel=1e-4, abs=1e-6), name
    learned = [r for r in read_metrics(spread) if "loss" in r]
    assert [r["step"] for r in learned] == [1, 2, 3]
    assert all(r["train_rollout_logprob_abs_diff_max"] < 1e-4 for r in learned)
    assert abs(learned[0]["kl_ref"]) < 1e-6 < learned[-1]["kl_ref"]
    if ledgers[0] == ledgers[1]:
        before, after, together = (load_model(p).state_dict() for p in (one.checkpoint, alone.model, spread / "model"))
        for name, start_ in before.items():
            moved = float((after[name] - start_).abs().max())
            assert float((together[name] - after[name]).abs().max()) <= 0.1 * moved + 1e-6, name
    result = json.loads((spread / "result.json").read_text())
    assert result["held_out"].keys() == alone.held_out.keys()


def test_meshes_that_rollouts_cannot_use_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="may have dp"):
        config(tmp_path, mesh="dp=2,tp=2")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["general", "distill"])
def test_the_other_loops_on_two_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Judges and served teachers: one step's figures are those of one process, and one rank asks the judges."""
    monkeypatch.setenv("PYTHONPATH", SUPPORT, prepend=os.pathsep)
    given: Any
    if kind == "general":
        base = checkpoint(tmp_path / "base")
        rows = [{"prompt": f"word {i}", "domain": "x", "rules": {"max_words": 1, "min_words": 1}} for i in range(8)]
        (tmp_path / "talks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        rollout = RolloutConfig(prompts=4, group=6, max_new_tokens=3, thinking=False, memory_gib=0.02, verifiers=1)
        prompts = PromptConfig(data=(str(tmp_path / "talks.jsonl"),), tasks=())
        learn = LearnConfig(steps=1, lr=LearningRate(1e-2, 1e-2), row_tokens=128)
        given = GeneralConfig(checkpoint=base, prompts=prompts, rollout=rollout, learn=learn, device="cpu")
        command, alone = ["rl", "general"], general
    else:
        distilling = test_distill.config(tmp_path)
        given = replace(
            distilling, teacher_engines=True, teacher_memory_gib=0.02, learn=replace(distilling.learn, steps=1)
        )
        command, alone = ["distill"], distill
    found = alone(replace(given, run=str(tmp_path / "one")), lambda _: None)
    save(tmp_path / "two.json", replace(given, run=str(tmp_path / "two")))
    process = started([*command, "--config", str(tmp_path / "two.json"), "--mesh", "dp=2"])
    try:
        _, errors = process.communicate(timeout=600)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, errors
    records = [read_metrics(run)[-1] for run in (found.run, tmp_path / "two")]
    more = ("reverse_kl", "reverse_kl/a") if kind == "distill" else ("reward",)
    for name in ("loss", "grad_norm", *more):
        assert records[1][name] == pytest.approx(records[0][name], rel=1e-3, abs=1e-5), name
    ledgers = [(run / "samples.jsonl").read_bytes() for run in (found.run, tmp_path / "two")]
    assert ledgers[0] == ledgers[1]
