"""Distillation by whole distributions: the divergence by its formula, its gradient against that of all draws."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_distill import config
from torch import Tensor

from glm5.model.weights import load_model
from glm5.posttrain.distill import DistillConfig, distill
from glm5.posttrain.divergence import reverse_kl
from glm5.posttrain.learner import LearnConfig
from glm5.posttrain.logprobs import Kept
from glm5.posttrain.losses import LossConfig
from glm5.train.schedule import LearningRate
from glm5.utils.errors import ConfigError
from glm5.utils.runlog import read_metrics

N, D, V = 7, 5, 23


def drawn(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    hidden, head = (torch.randn(n, D, generator=g, dtype=dtype, requires_grad=True) for n in (N, V))
    teacher, teacher_head = (torch.randn(n, D, generator=g, dtype=dtype) for n in (N, V))
    return hidden, head, teacher, teacher_head


@pytest.mark.parametrize("chunk", [None, 3])
def test_the_whole_divergence_is_torchs(chunk: int | None) -> None:
    hidden, head, teacher, teacher_head = drawn()
    heat = torch.linspace(0.5, 2, N, dtype=torch.float64)
    found = reverse_kl(hidden, head, teacher, teacher_head, temperature_N=heat, vocab_size=20, chunk=chunk)
    own = (hidden @ head[:20].T / heat[:, None]).log_softmax(-1)
    theirs = (teacher @ teacher_head[:20].T / heat[:, None]).log_softmax(-1)
    expected = torch.nn.functional.kl_div(theirs, own, log_target=True, reduction="none").sum(-1)
    torch.testing.assert_close(found, expected)
    weights = torch.randn(N, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    gradients = [torch.autograd.grad((weights * x).sum(), (hidden, head), retain_graph=True) for x in (found, expected)]
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b)
    assert not gradients[0][1][20:].any()


def test_ids_that_were_not_kept_have_no_part() -> None:
    hidden, head, teacher, teacher_head = drawn()
    sets = [None, (0, 3, 9), (5,), None, (1, 2), (4, 8, 15, 16), None]
    for top in (0, 4):
        found = reverse_kl(hidden, head, teacher, teacher_head, kept=Kept.of(sets), top=top, chunk=2)
        assert found[2].item() == pytest.approx(0, abs=1e-5)  # one id: there is nothing to differ in
        pairs = ((hidden.detach(), head.detach()), (teacher, teacher_head))
        own, theirs = ((a @ b.T)[1, [0, 3, 9]].log_softmax(-1) for a, b in pairs)
        assert found[1].item() == pytest.approx(float((own.exp() * (own - theirs)).sum()), abs=1e-5)
        assert all(g.isfinite().all() for g in torch.autograd.grad(found.sum(), (hidden, head)))


def test_the_likeliest_ids_say_no_more_than_all() -> None:
    hidden, head, teacher, teacher_head = drawn()
    of = {top: reverse_kl(hidden, head, teacher, teacher_head, top=top) for top in (0, 1, 4, 12, V - 1)}
    for fewer, more in ((1, 4), (4, 12), (12, 0)):
        assert bool((of[fewer] <= of[more] + 1e-9).all())
        assert bool((of[fewer] < of[more] - 1e-6).any())
    torch.testing.assert_close(of[V - 1], of[0], rtol=0, atol=1e-5)  # the rest is one id: nothing is lost
    # By hand for one id: it, and all others as one.
    own = (hidden @ head.T).softmax(-1)
    theirs = (teacher @ teacher_head.T).softmax(-1)
    p, at = own.max(-1)
    q = theirs.gather(-1, at[:, None])[:, 0]
    torch.testing.assert_close(of[1], p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log())
    assert bool(torch.autograd.gradcheck(lambda h: reverse_kl(h, head.detach(), teacher, teacher_head, top=4), hidden))


def test_its_gradient_is_the_mean_of_all_draws() -> None:
    """Σ_v π(v)·(-Â_v)·∇log π(v) with Â_v = sg[log π_teacher(v) - log π(v)], over every id that could be drawn."""
    hidden, head, teacher, teacher_head = drawn()
    (whole,) = torch.autograd.grad(reverse_kl(hidden, head, teacher, teacher_head).sum(), hidden)
    own = (hidden @ head.T).log_softmax(-1)
    advantage = ((teacher @ teacher_head.T).log_softmax(-1) - own).detach()
    (expected,) = torch.autograd.grad((own.detach().exp() * -advantage * own).sum(), hidden)
    torch.testing.assert_close(whole, expected)
    assert whole.abs().max() > 0.1


@pytest.mark.parametrize("top", [0, 8])
def test_the_divergence_falls(tmp_path: Path, top: int) -> None:
    learn = LearnConfig(steps=5, lr=LearningRate(5e-3, 5e-3), save_every=5, row_tokens=128, momentum=0.8)
    found = distill(config(tmp_path, divergence="full", top=top, learn=learn), lambda _: None)
    records = read_metrics(found.run)
    course = [r["loss"] for r in records]
    assert course[0] > 0.1
    assert sum(course[-2:]) < sum(course[:2]) * 0.8
    for r in records:
        assert r["stepped"] == 1
        assert r["train_rollout_logprob_abs_diff_max"] < 1e-4
        if top == 0:  # the mean over the vocabulary is what single draws scatter about
            assert r["reverse_kl"] == pytest.approx(r["loss"], abs=0.5)


def test_a_policy_that_is_its_own_teacher_stays(tmp_path: Path) -> None:
    given = config(tmp_path, divergence="full")
    own = tuple(f"{domain}={given.checkpoint}" for domain in "ab")
    found = distill(replace(given, teachers=own, learn=replace(given.learn, steps=1)), lambda _: None)
    assert [r["stepped"] for r in read_metrics(found.run)] == [0]
    before, after = load_model(given.checkpoint).state_dict(), load_model(found.model).state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_top_belongs_to_whole_distributions(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="belongs to divergence=full"):
        config(tmp_path, top=3)


def test_terms_that_whole_distributions_do_not_have_are_refused() -> None:
    for loss, name in ((LossConfig(kl_weight=0.1), "kl_weight"), (LossConfig(entropy_weight=0.1), "entropy_weight")):
        with pytest.raises(ConfigError, match=rf"loss\.{name}=0\.1: must be 0 with divergence=full"):
            DistillConfig(divergence="full", loss=loss)
        assert DistillConfig(loss=loss).loss == loss
