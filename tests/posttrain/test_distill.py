"""Distillation from earlier stages: each token's advantage is its own teacher's, the divergence falls in every domain,
and teachers that cannot teach are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_reason import checkpoint, write_prompts

from glm5.model.weights import load_model, save_model
from glm5.posttrain.distill import DistillConfig, Distiller, distill, load_teachers, resolve
from glm5.posttrain.learner import LearnConfig
from glm5.posttrain.losses import glm5_reasoning
from glm5.posttrain.reason import PromptConfig, prepare_prompts
from glm5.posttrain.rollouts import RolloutConfig, Rollouts
from glm5.posttrain.samples import read_samples
from glm5.text import load_tokenizer, messages_from_openai, render
from glm5.train.schedule import LearningRate
from glm5.utils.errors import ConfigError
from glm5.utils.runlog import read_metrics
from support.conversations import tokenizer


def teacher(directory: Path, base: str, strength: float) -> str:
    """The base, but what it says first is one of every other id, by so many nats: the state behind each prompt is
    nearly the same, and those ids' rows of the head are moved towards it."""
    model, t = load_model(base), tokenizer()
    ids = render(
        t,
        messages_from_openai([{"role": "user", "content": "word 1"}]),
        enable_thinking=False,
        add_generation_prompt=True,
    ).ids
    with torch.no_grad():
        state_D = model.hidden(torch.tensor([list(ids)]))[0, -1]
        model.lm_head.weight[::2] += strength * state_D / state_D.square().sum()
    save_model(model, directory, tokenizer=tokenizer())
    return str(directory)


def config(directory: Path, **changes: Any) -> DistillConfig:
    base = checkpoint(directory / "base")
    a, b = (teacher(directory / f"teacher-{n}", base, n) for n in (4, 5))
    defaults: dict[str, Any] = dict(
        checkpoint=base,
        teachers=(f"a={a}", f"b={b}"),
        run=str(directory / "run"),
        prompts=PromptConfig(data=(write_prompts(directory / "train.jsonl", verifier="short"),)),
        rollout=RolloutConfig(prompts=48, group=1, max_new_tokens=1, thinking=False, memory_gib=0.02, invariant="off"),
        learn=LearnConfig(steps=20, lr=LearningRate(5e-3, 5e-3), save_every=5, row_tokens=128, momentum=0.8),
        device="cpu",
        eval_every=0,
    )
    return DistillConfig(**{**defaults, **changes})


def test_the_divergence_from_every_teacher_falls(tmp_path: Path) -> None:
    found = distill(config(tmp_path), lambda _: None)
    records = read_metrics(found.run)
    assert len(records) == 20
    for domain in "ab":
        course = [r[f"reverse_kl/{domain}"] for r in records]
        assert sum(course[:4]) / 4 > 0.6
        assert sum(course[-4:]) / 4 < 0.6 * sum(course[:4]) / 4
    assert all(r["train_rollout_logprob_abs_diff_max"] < 1e-4 for r in records)
    samples = read_samples(found.run / "samples.jsonl")
    assert [s["number"] for s in samples] == list(range(20 * 48))
    assert {s["state"] for s in samples} == {"trained"}


def test_a_tokens_advantage_is_its_own_teachers(tmp_path: Path) -> None:
    """Against the models asked one rollout at a time: log π_teacher - log π_θ of the tokens drawn."""
    given = config(tmp_path)
    model, t = load_model(given.checkpoint), load_tokenizer(given.checkpoint)
    longer = replace(given.rollout, max_new_tokens=6)
    rollouts = Rollouts(model, t, longer, None, seed=0)
    learner = Distiller(given.learn, model, glm5_reasoning(), rollouts, tmp_path, "")
    learner.teachers, learner.divergence = load_teachers(given, ["a", "b"], "cpu"), {}
    groups = rollouts.draw(list(enumerate(prepare_prompts(given.prompts, 0).train[:4])))
    batch = []
    for group in groups:
        group.advantages, group.copies = {0: 0.0}, {0: 1}
        batch += group.trajectories(len(batch), 1.0)
    rows = learner.taught(learner.rows(batch), groups)
    for number, group in enumerate(groups):
        ids = torch.tensor([[*group.prompt_ids, *group.samples[0].ids]])
        start = len(group.prompt_ids)

        def own(which: Any, ids: torch.Tensor = ids, start: int = start) -> torch.Tensor:
            logits = which(ids[:, :-1]).logits[0, start - 1 :, : t.vocab_size]
            return logits.log_softmax(-1).gather(-1, ids[0, start:, None])[:, 0]

        with torch.no_grad():
            expected = own(learner.teachers[group.prompt.domain]) - own(model)
        here = (rows.rollout_BT == number) & rows.mask_BT
        torch.testing.assert_close(rows.advantages_BT[here], expected, rtol=0, atol=1e-4)
        assert expected.abs().max() > 0.05
    assert not rows.advantages_BT[~rows.mask_BT].any()


def test_a_policy_that_is_its_own_teacher_does_not_move(tmp_path: Path) -> None:
    given = config(tmp_path)
    own = tuple(f"{domain}={given.checkpoint}" for domain in "ab")
    found = distill(replace(given, teachers=own, learn=replace(given.learn, steps=2)), lambda _: None)
    assert [r["stepped"] for r in read_metrics(found.run)] == [0, 0]
    before, after = load_model(given.checkpoint).state_dict(), load_model(found.model).state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_teachers_that_cannot_teach_are_refused(tmp_path: Path) -> None:
    given = config(tmp_path)
    with pytest.raises(ConfigError, match="must name a teacher for every domain"):
        resolve(replace(given, teachers=()))
    for teacher in ("a", "a=", "a=ftp://x", "a=http://"):
        with pytest.raises(ConfigError, match=f"teachers='{teacher}': must be"):
            replace(given, teachers=(teacher,))
    with pytest.raises(ConfigError, match="teachers='a': has two teachers"):
        replace(given, teachers=("a=x", "a=y"))
    with pytest.raises(ConfigError, match="must name the domains that there are: a, b"):
        distill(replace(given, teachers=given.teachers[:1]), lambda _: None)
    other = Path(given.paths["b"]) / "tokenizer.json"
    other.write_text(other.read_text() + "\n")
    with pytest.raises(ConfigError, match=r"b=.*its tokenizer\.json is not the policy's"):
        resolve(given)
