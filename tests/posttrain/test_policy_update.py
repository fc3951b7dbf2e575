"""Updates of a policy: nothing moves without a gradient, any cut gives the same weights, and rewards rise."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import pytest
import torch
from test_policy_rows import SEQ_LEN, fill, made

from glm5.model.glm5 import GLM5
from glm5.posttrain import losses
from glm5.posttrain.advantage import all_equal, group_advantages
from glm5.posttrain.losses import LossConfig
from glm5.posttrain.rows import Trajectory, pack
from glm5.posttrain.update import PolicyUpdate, freeze_indexers, score
from glm5.serve.config import EngineConfig
from glm5.serve.engine import Engine
from glm5.serve.request import Request, SamplingParams
from glm5.utils.errors import NumericalError
from support.engines import drained
from support.training import tiny


def adam(model: GLM5, lr: float = 1e-3) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr, weight_decay=0.1)


def weights(model: GLM5) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


CONFIGS = {
    "glm5_reasoning": losses.glm5_reasoning(),
    "glm5_agentic": losses.glm5_agentic(),
    "gspo": LossConfig(objective="sequence_clip", clip_low=0.3, clip_high=0.3),
    "geometric": LossConfig(
        correction="mask", correction_level="geometric", correction_low=0.9, correction_high=1.2, kl_weight=0.1
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_any_cut_gives_the_same_update(name: str) -> None:
    base = tiny().eval()
    trajectories = fill(base, made(), noise=0.1)
    other = copy.deepcopy(base)
    with torch.no_grad():
        for p in other.parameters():
            p.add_(0.01 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel()), dtype=p.dtype))
    found = []
    for size, packed in ((6, False), (1, False), (4, False), (2, True)):
        rows = pack(trajectories, SEQ_LEN, packed=packed)
        model = copy.deepcopy(other)
        old, reference = score(base, rows, micro_batch=size), score(other, rows, micro_batch=size)
        update = PolicyUpdate(model, torch.optim.SGD(model.parameters(), lr=1.0), CONFIGS[name], micro_batch=size)
        metrics = update(rows, 6, old_BT=old, reference_BT=reference)
        assert metrics["stepped"] == 1
        found.append((weights(model), metrics))
    start = weights(other)
    assert max(float((found[0][0][n] - w).abs().max()) for n, w in start.items()) > 1e-3
    for after, metrics in found[1:]:
        for n, w in found[0][0].items():
            torch.testing.assert_close(after[n], w, rtol=1e-4, atol=2e-6, msg=lambda m, n=n: f"{n}: {m}")
        assert metrics == pytest.approx(found[0][1], rel=1e-3, abs=1e-5)


def test_a_batch_with_nothing_to_learn_does_not_move_the_weights() -> None:
    """After an update Adam has momentum: one more step moves the weights even without gradients. It must not come."""
    model = tiny().eval()
    trajectories = fill(model, made())
    update = PolicyUpdate(model, adam(model), losses.glm5_reasoning(), micro_batch=4)
    assert update(pack(trajectories, SEQ_LEN), 6)["stepped"] == 1
    before = weights(model)
    nothing = [
        [replace(t, advantages=0.0) for t in trajectories],  # groups without differences
        [replace(t, drawn=[False] * len(t.ids)) for t in trajectories],  # all masked
        [replace(t, logprobs=[x + 5 for x in t.logprobs]) for t in trajectories],  # all outside IcePop's band
    ]
    for batch in nothing:
        metrics = update(pack(batch, SEQ_LEN), 6)
        assert metrics["stepped"] == 0
        assert all(math.isfinite(x) for x in metrics.values())
        assert all(torch.equal(before[n], w) for n, w in weights(model).items())
    assert update.skipped == 3
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    update.optimizer.step()  # what had been
    assert any(not torch.equal(before[n], w) for n, w in weights(model).items())


def test_a_loss_that_is_not_finite_leaves_the_weights() -> None:
    model = tiny().eval()
    rows = pack([replace(t, advantages=float("inf")) for t in fill(model, made())], SEQ_LEN)
    before = weights(model)
    update = PolicyUpdate(model, adam(model), LossConfig())
    with pytest.raises(NumericalError, match="the policy's loss is"):
        update(rows, 6)
    assert all(torch.equal(before[n], w) for n, w in weights(model).items())


def test_indexers_rest() -> None:
    model = tiny().eval()
    freeze_indexers(model)
    before = weights(model)
    PolicyUpdate(model, adam(model), LossConfig())(pack(fill(model, made()), SEQ_LEN), 6)
    moved = {n for n, w in weights(model).items() if not torch.equal(before[n], w)}
    assert moved
    assert not any(".indexer." in n for n in moved)


@pytest.mark.parametrize("loss", [losses.glm5_reasoning(), losses.glm5_agentic()], ids=["reasoning", "agentic"])
def test_rewards_rise(loss: LossConfig) -> None:
    """Rollouts by the engine, on-policy, groups of eight: the reward is the share of even ids in an answer of four."""
    model = tiny().eval()
    freeze_indexers(model)
    update = PolicyUpdate(model, adam(model, 5e-3), loss, micro_batch=8)
    params = SamplingParams(
        max_new_tokens=4, temperature=1.0, top_p=0.95, logprobs=0, kept_set=True, n=8, ignore_eos=True
    )
    prompts = [[5, 9, 11], [7, 8, 30]]
    rewards = []
    for step in range(40):
        engine = Engine(model, EngineConfig(pages=64))
        for i, prompt in enumerate(prompts):
            engine.add(Request(prompt, replace(params, seed=1000 * i + step), rid=str(i)))
        answers = drained(engine)
        groups = [[sum(i % 2 == 0 for i in answers[str(g), k].ids) / 4 for k in range(8)] for g in range(2)]
        rewards.append(sum(map(sum, groups)) / 16)
        batch = []
        for g in [g for g in range(2) if not all_equal(groups[g])]:
            for k, advantage in enumerate(group_advantages(groups[g])):
                drawn = answers[str(g), k]
                batch.append(Trajectory.sampled(prompts[g], drawn.ids, drawn.info, len(batch), advantages=advantage))
        if batch:
            metrics = update(pack(batch, 8, packed=False), len(batch))
            assert metrics["train_rollout_logprob_abs_diff_max"] < 1e-4  # the engine runs the weights that learn
            assert metrics["is_masked_low"] == metrics["is_masked_high"] == 0
    assert sum(rewards[:3]) / 3 < 0.7
    assert sum(rewards[-3:]) / 3 > 0.9
