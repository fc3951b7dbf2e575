"""Reinforcement learning as a command runs it: rewards rise, a killed run ends in the same bytes with the same ledger,
and what cannot be run is said at once."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from glm5.model.config import ModelConfig
from glm5.model.glm5 import GLM5
from glm5.model.weights import load_model, save_model
from glm5.posttrain.general import GeneralConfig
from glm5.posttrain.learner import LearnConfig
from glm5.posttrain.losses import glm5_reasoning
from glm5.posttrain.prompts import Difficulty
from glm5.posttrain.reason import PromptConfig, ReasonConfig, parse_ratios, prepare_prompts, reason, resolve
from glm5.posttrain.rollouts import RolloutConfig, Rollouts
from glm5.posttrain.samples import SampleLedger, read_samples
from glm5.train.schedule import LearningRate
from glm5.utils.errors import CheckpointError, ConfigError, DataError, UserError
from glm5.utils.runlog import read_metrics
from support.conversations import tokenizer
from support.training import tiny

SUPPORT = str(Path(__file__).parents[1] / "support")


@pytest.fixture(autouse=True)
def _verifiers_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", SUPPORT)


def checkpoint(directory: Path, seed: int = 2) -> str:
    sizes = {**tiny().config.to_dict(), "vocab_size": 384, "hidden_size": 48}
    save_model(GLM5(ModelConfig.from_dict(sizes), seed=seed), directory, tokenizer=tokenizer())
    return str(directory)


def write_prompts(path: Path, count: int = 12, verifier: str = "verifiers:even") -> str:
    rows = [
        {"id": f"{path.stem}-{i}", "prompt": f"word {i}", "answer": "x", "verifier": verifier, "domain": "ab"[i % 2]}
        for i in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def config(directory: Path, **changes: Any) -> ReasonConfig:
    learn: dict[str, Any] = dict(steps=4, lr=LearningRate(1e-2, 1e-2), save_every=2, row_tokens=128)
    rollout: dict[str, Any] = dict(prompts=4, group=6, max_new_tokens=2, thinking=False, memory_gib=0.02, verifiers=1)
    learn |= changes.pop("learn", {})
    rollout |= changes.pop("rollout", {})
    defaults: dict[str, Any] = dict(
        run=str(directory / "run"),
        learn=LearnConfig(**learn),
        rollout=RolloutConfig(**rollout),
        device="cpu",
        eval_every=0,
    )
    if "checkpoint" not in changes:
        defaults["checkpoint"] = checkpoint(directory / "base")
    if "prompts" not in changes:
        held = (write_prompts(directory / "held.jsonl"),)
        defaults["prompts"] = PromptConfig(data=(write_prompts(directory / "train.jsonl"),), held_out=held)
    return ReasonConfig(**{**defaults, **changes})


def test_rewards_rise_in_two_domains(tmp_path: Path) -> None:
    said: list[str] = []
    given = config(tmp_path, learn=dict(steps=24, save_every=24), page_every=8)
    found = reason(given, said.append)
    records = read_metrics(found.run)
    rewards = [r["reward"] for r in records if r["step"]]
    assert sum(rewards[:2]) / 2 < 0.75
    assert sum(rewards[-3:]) / 3 > 0.9
    assert min(found.held_out["after"].values()) > 0.9
    assert found.held_out["after"].keys() == {"a", "b"}
    assert any("a: 6, 50% of the mixture; 6 held out" in line for line in said)
    for r in records[1:]:
        if "train_rollout_logprob_abs_diff_max" in r:  # the engine runs the weights that learn, at every step
            assert r["train_rollout_logprob_abs_diff_max"] < 1e-4
            assert r["is_masked_low"] == r["is_masked_high"] == 0
    # Every prompt of the run is in the ledger once, and each answer came from the weights of its own step.
    samples = read_samples(found.run / "samples.jsonl")
    assert [s["number"] for s in samples] == list(range(found.prompts))
    assert dict(Counter(s["state"] for s in samples)) == found.states
    assert found.states["trained"] == sum(r.get("groups", 0) for r in records)
    assert all(s["versions"] == [str(s["step"] - 1)] for s in samples)
    page = (found.run / "rollouts.html").read_text()
    assert "ratio 1.0000" in page
    assert page.count("<h2>") > 1
    # What rests: indexers and the block that drafts.
    before, after = load_model(given.checkpoint), load_model(found.model)
    moved = {
        n
        for (n, p), (_, q) in zip(before.named_parameters(), after.named_parameters(), strict=True)
        if not torch.equal(p, q)
    }
    assert any("o_proj" in n for n in moved)
    assert not any(".indexer." in n or n.startswith("mtp") for n in moved)


def test_several_updates_from_one_batch(tmp_path: Path) -> None:
    found = reason(config(tmp_path, learn=dict(steps=3, updates=2)), lambda _: None)
    learned = [r for r in read_metrics(found.run) if "stepped" in r]
    assert any(r["stepped"] == 2 for r in learned)
    # The second update's old policy is not the one that learns: their distance is seen.
    assert any(r["ppo_kl"] > 1e-6 for r in learned)
    assert all(r["train_rollout_logprob_abs_diff_max"] < 1e-4 for r in learned)  # old against engine: equal weights


def test_a_policy_is_kept_near_the_model_it_began_with(tmp_path: Path) -> None:
    """The KL term's reference is that model: nothing is between the two at first, and less later than without."""
    apart, given = {}, config(tmp_path, learn=dict(steps=12), page_every=0)
    for weight in (1e-9, 10.0):
        loss = replace(glm5_reasoning(), kl_weight=weight)
        found = reason(replace(given, run=str(tmp_path / str(weight)), loss=loss), lambda _: None)
        apart[weight] = [r["kl_ref"] for r in read_metrics(found.run) if "kl_ref" in r]
        assert abs(apart[weight][0]) < 1e-6
    assert 0 < apart[10.0][-1] < apart[1e-9][-1] / 2, apart


def test_a_run_with_every_switch_turned(tmp_path: Path) -> None:
    """Replayed routing, indexers that learn, ties that fall at random: the loop as the defaults never run it."""
    switches = dict(router_replay=True, topk="racing", drafts=1, max_new_tokens=4)
    given = config(tmp_path, learn=dict(steps=3, indexer_weight=0.5), rollout=switches)
    found = reason(given, lambda _: None)
    learned = [r for r in read_metrics(found.run) if "stepped" in r]
    assert learned
    assert all(r["indexer_kl"] > 0 and r["spec_accept_length"] >= 1 for r in learned)
    before, after = load_model(given.checkpoint).state_dict(), load_model(found.model).state_dict()
    moved = {name for name, t in before.items() if not torch.equal(t, after[name])}
    assert any(".indexer." in name for name in moved)


# --------------------------------------------------------------------------------------------------- killed runs
class Killed(BaseException):
    """As a kill: nothing of the loop runs after it."""


def test_a_killed_run_has_the_same_ledger_and_ends_in_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the system's kill, which is `test_rl_kills`; and with a reference, which a resumed run needs, too."""
    loss = replace(glm5_reasoning(), kl_weight=0.05)
    whole = config(tmp_path, learn=dict(steps=6, save_every=2), eval_every=3, page_every=0, loss=loss)
    expected = reason(whole, lambda _: None)
    cut = replace(whole, run=str(tmp_path / "cut"))
    samples = tmp_path / "cut" / "samples.jsonl"

    # Before there is a checkpoint, when the step's prompts stand in the ledger already.
    push = Rollouts.push
    monkeypatch.setattr(Rollouts, "push", lambda *a: push(*a) if a[2] < 1 else (_ for _ in ()).throw(Killed()))
    with pytest.raises(Killed):
        reason(cut, lambda _: None)
    monkeypatch.undo()
    monkeypatch.setenv("PYTHONPATH", SUPPORT)
    assert {s["step"] for s in read_samples(samples)} == {1}

    # Between two checkpoints, in the middle of a step.
    collect = Rollouts.collect
    monkeypatch.setattr(
        Rollouts, "collect", lambda *a: collect(*a) if a[0].version != "3" else (_ for _ in ()).throw(Killed())
    )
    with pytest.raises(Killed):
        reason(cut, lambda _: None)
    monkeypatch.undo()
    monkeypatch.setenv("PYTHONPATH", SUPPORT)
    assert max(s["step"] for s in read_samples(samples)) == 3
    assert not (tmp_path / "cut" / "model").exists()

    found = reason(cut, lambda _: None)
    assert samples.read_bytes() == (expected.run / "samples.jsonl").read_bytes()
    assert (found.model / "model.safetensors").read_bytes() == (expected.model / "model.safetensors").read_bytes()
    assert found.held_out == expected.held_out
    assert found.states == expected.states
    timeless = [
        [{k: v for k, v in r.items() if "time" not in k} for r in read_metrics(f.run)] for f in (expected, found)
    ]
    assert timeless[0] == timeless[1]


def test_a_run_is_not_resumed_on_other_prompts_or_settings(tmp_path: Path) -> None:
    given = config(tmp_path, learn=dict(steps=2, save_every=1))
    reason(given, lambda _: None)
    with pytest.raises(ConfigError, match=r"rollout\.group"):
        reason(replace(given, rollout=replace(given.rollout, group=5)), lambda _: None)
    write_prompts(tmp_path / "train.jsonl", 14)
    with pytest.raises(DataError, match="not those that this run began with"):
        reason(given, lambda _: None)


def test_a_ledger_that_was_changed_is_refused(tmp_path: Path) -> None:
    ledger = SampleLedger(tmp_path)
    ledger.resume(0, 0)
    ledger.add(1, [{"number": 0, "state": "trained"}, {"number": 1, "state": "zero_variance"}])
    ledger.add(2, [{"number": 2, "state": "trained"}])
    with pytest.raises(ValueError, match="prompt 2 after 2"):
        ledger.add(3, [{"number": 2, "state": "trained"}])
    with ledger.path.open("ab") as f:
        f.write(b'{"step":3,"numb')  # torn by a kill
    again = SampleLedger(tmp_path)
    again.resume(1, 2)
    assert (again.next, dict(again.states)) == (2, {"trained": 1, "zero_variance": 1})
    assert [s["number"] for s in read_samples(again.path)] == [0, 1]
    with pytest.raises(DataError, match="does not hold prompts 0 to 2"):
        SampleLedger(tmp_path).resume(2, 3)


# --------------------------------------------------------------------------------------------------- prompts
def test_bad_rows_are_listed_by_their_lines_and_nothing_runs(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    write_prompts(path, 2)
    path.write_text(
        path.read_text() + '{"prompt": "x"}\n{"prompt": "y", "answer": 1, "verifier": "short", "domain": 3}\n'
    )
    with pytest.raises(DataError, match=r"2 of 4 rows cannot be used:\n  line 3: verifier.*\n  line 4: domain"):
        reason(config(tmp_path, prompts=PromptConfig(data=(str(path),))), lambda _: None)
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_verifiers_that_are_not_there_are_said_before_anything_is_drawn(tmp_path: Path) -> None:
    data = (write_prompts(tmp_path / "x.jsonl", verifier="verifiers:nothing"),)
    with pytest.raises(UserError, match="verifiers has no nothing"):
        reason(config(tmp_path, prompts=PromptConfig(data=data)), lambda _: None)


def test_ratios_and_difficulty_choose(tmp_path: Path) -> None:
    path = tmp_path / "rated.jsonl"
    rows = [
        {"id": str(i), "prompt": f"p{i}", "answer": 1, "verifier": "short", "domain": "ab"[i % 2]}
        | {"pass_rate": {"weak": i / 10, "strong": 1 - i / 20}}
        for i in range(10)
    ]
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    found = prepare_prompts(
        PromptConfig(
            data=(str(path),), ratios=("a=3", "b=1"), difficulty=Difficulty(weak_at_most=0.6, strong_at_least=0.8)
        ),
        seed=0,
    )
    assert [p.id for p in found.train] == ["0", "1", "2", "3", "4"]
    assert found.left_out == {"too easy": 3, "too hard": 2}
    assert Counter(p.domain for p in found.order.prompts(0, 40)) == {"a": 30, "b": 10}
    assert parse_ratios(()) is None
    with pytest.raises(ConfigError, match="DOMAIN=RATIO"):
        parse_ratios(("a",))


def test_tasks_are_made_on_the_spot_and_held_out_ones_are_others() -> None:
    spec = 'chain_sum:{"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}'
    found = prepare_prompts(PromptConfig(tasks=(spec,), count=60, held_out_count=20), seed=3)
    texts = {p.messages[0].content for p in found.train}
    assert len(found.held_out) == 20
    assert not texts & {p.messages[0].content for p in found.held_out}
    for bad in ('chain_sum:{"min_trms": 2}', "chain_sum:3", "nothing"):
        with pytest.raises(ConfigError):
            prepare_prompts(PromptConfig(tasks=(bad,), count=5, held_out_count=0), seed=0)


def test_what_cannot_be_run_is_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="must name the model's directory"):
        resolve(ReasonConfig())
    (tmp_path / "a-run").mkdir()
    checkpoint(tmp_path / "a-run" / "model")
    with pytest.raises(CheckpointError, match="is a run, not a model"):
        resolve(ReasonConfig(checkpoint=str(tmp_path / "a-run")))
    with pytest.raises(ConfigError, match="updates"):
        LearnConfig(updates=0)
    with pytest.raises(ConfigError, match=r"prompts\.tasks='gcf': reasoning-gym has no such generator"):
        prepare_prompts(PromptConfig(tasks=("gcf",)), 0)
    with pytest.raises(ConfigError, match=r"must name generators of reasoning-gym, or prompts\.data files"):
        prepare_prompts(PromptConfig(tasks=()), 0)
    data = (write_prompts(tmp_path / "x.jsonl", 2),)
    with pytest.raises(ConfigError, match=r"prompts\.ratios=.*must name the domains that there are: a, b"):
        prepare_prompts(PromptConfig(data=data, ratios=("a=1",)), 0)


@pytest.mark.parametrize(
    ("make", "changes", "match"),
    [
        *((RolloutConfig, {"top_p": value}, "top_p=.*0, 1") for value in (0.0, 1.5, math.nan)),
        (RolloutConfig, {"top_k": -1}, "top_k=-1: must be at least 0; 0 keeps all ids"),
        *((RolloutConfig, {"memory_gib": value}, "memory_gib=.*of GiB") for value in (0.0, math.nan, math.inf)),
        (RolloutConfig, {"verifier_timeout": 0.0}, "verifier_timeout=.*of seconds"),
        (RolloutConfig, {"verifiers": 0}, "verifiers=0: must be at least 1"),
        (RolloutConfig, {"drafts": -1}, r"drafts=-1: must lie in \[0, 63\], with running=64"),
        (RolloutConfig, {"drafts": 64, "running": 64}, r"drafts=64: must lie in \[0, 63\]"),
        *((LearnConfig, {"momentum": value}, r"momentum=.*\[0, 1\)") for value in (1.0, -0.5, math.nan)),
        (PromptConfig, {"count": 0}, "count=0: must be at least 1"),
        (PromptConfig, {"held_out_count": -1}, "held_out_count=-1"),
        (PromptConfig, {"ratios": ("a",)}, "ratios='a': must be DOMAIN=RATIO"),
        (PromptConfig, {"ratios": ("a=1", "a=2")}, "ratios='a=2': names its domain twice"),
        *(
            (kind, {"rollout": RolloutConfig(group=1)}, r"rollout\.group=1: must be at least 2")
            for kind in (ReasonConfig, GeneralConfig)
        ),
    ],
)
def test_values_that_no_run_can_use_are_refused(make: Any, changes: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        make(**changes)
