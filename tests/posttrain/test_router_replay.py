"""Router replay: the trainer takes the experts that the engine chose, and routers that disagree no longer matter."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from glm5.kernels.moe import route
from glm5.model.config import ModelConfig
from glm5.model.glm5 import GLM5
from glm5.model.trace import Trace
from glm5.posttrain.losses import glm5_reasoning, policy_loss
from glm5.posttrain.prompts import prompts_from_rows
from glm5.posttrain.rollouts import RolloutConfig, Rollouts
from glm5.posttrain.rows import PolicyRows, Trajectory, pack
from glm5.posttrain.update import score
from glm5.utils.errors import ConfigError, DataError
from support.conversations import tokenizer
from support.training import tiny


def policy(**changes: Any) -> GLM5:
    """Three layers, two of them with experts."""
    sizes = {**tiny(num_hidden_layers=3).config.to_dict(), "vocab_size": 384}
    return GLM5(ModelConfig.from_dict({**sizes, **changes}), seed=2)


def drawn(engine: GLM5, **changes: Any) -> PolicyRows:
    """Answers of an engine with these weights, packed, with advantages of both signs."""
    given: dict[str, Any] = dict(prompts=3, group=4, max_new_tokens=8, thinking=False, memory_gib=0.05)
    config = RolloutConfig(**{**given, "router_replay": True, **changes})
    made = prompts_from_rows(
        [{"prompt": f"word {i} {i}", "answer": "x", "verifier": "short", "domain": "a"} for i in range(3)]
    )
    batch: list[Trajectory] = []
    rollouts = Rollouts(engine, tokenizer(), config, None, seed=5)
    for group in rollouts.draw(list(enumerate(made))):
        group.advantages = {i: (-1.0) ** i for i in range(4)}
        group.copies = dict.fromkeys(range(4), 1)
        batch += group.trajectories(len(batch), config.temperature)
    return pack(batch, 64, vocab_size=rollouts.engine.vocab_size)


def gradients(model: GLM5, rows: PolicyRows) -> dict[str, Tensor]:
    model.zero_grad()
    policy_loss(glm5_reasoning(), rows.actions(rows.logprobs(model)), rows.counts(12)).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("settings", [{}, {"drafts": 2, "temperature": 1.3}], ids=["plain", "drafts"])
def test_experts_that_agree_change_no_gradient(settings: dict[str, Any]) -> None:
    model = policy()
    rows = drawn(model, **settings)
    assert rows.experts_BTXM is not None
    assert rows.experts_BTXM.shape[2:] == (2, 2)
    trace = Trace()
    model.hidden(rows.input_BT, documents=rows.first_BT, trace=trace)
    real_BT = rows.rollout_BT >= 0
    for layer, (_, _, own_NM) in enumerate(trace.router):  # what the engine told is what the trainer's routers say
        told_NM = rows.experts_BTXM[:, :, layer].flatten(0, 1).long()
        assert torch.equal(told_NM[real_BT.flatten()].sort(-1).values, own_NM[real_BT.flatten()].sort(-1).values)
    with_replay, without = gradients(model, rows), gradients(model, replace(rows, experts_BTXM=None))
    assert float(without["model.layers.1.mlp.gate.weight"].abs().max()) > 1e-4  # routers learn under replay, too
    for name, gradient in without.items():
        torch.testing.assert_close(with_replay[name], gradient, rtol=1e-4, atol=1e-7, msg=lambda m, n=name: f"{n}: {m}")


def test_routers_that_disagree_are_no_mismatch() -> None:
    """The engine's selection biases differ from the trainer's, which moves the choice of experts and nothing else."""
    model = policy()
    engine = copy.deepcopy(model)
    for name, bias in engine.named_buffers():
        if name.endswith("e_score_correction_bias"):
            bias += 0.2 * torch.randn(bias.shape, generator=torch.Generator().manual_seed(len(name)))
    rows = drawn(engine)
    told = rows.logprobs_BT[rows.mask_BT]
    apart = rows.logprobs(model).logprobs_N.detach() - told
    assert float(apart.abs().max()) < 1e-4
    plain = replace(rows, experts_BTXM=None).logprobs(model).logprobs_N.detach() - told
    assert float(plain.abs().max()) > 0.05
    # Scores made for the update are of the same experts, in any cut.
    for size in (1, 5):
        torch.testing.assert_close(score(model, rows, micro_batch=size)[rows.mask_BT], told, rtol=0, atol=1e-4)


def test_given_experts_weigh_by_this_calls_scores() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0], [3.0, 2.0, 1.0, 0.0]], requires_grad=True)
    given = torch.tensor([[0, 2], [-1, -1]])
    expert, weight, _ = route(logits, torch.zeros(4), 2, scaling=2.5, given_NM=given)
    assert expert.tolist() == [[0, 2], [0, 1]]  # the second token's are its own
    score_0, score_2 = torch.tensor([0.0, 2.0]).sigmoid().tolist()
    assert weight[0].tolist() == pytest.approx([2.5 * s / (score_0 + score_2) for s in (score_0, score_2)])
    weight[0, 0].backward()
    assert logits.grad is not None
    assert logits.grad[0, [0, 2]].abs().min() > 0
    assert logits.grad[0, [1, 3]].abs().max() == 0


def test_what_cannot_be_replayed_is_refused() -> None:
    with pytest.raises(ConfigError, match="does not tell the experts that router_replay needs"):
        RolloutConfig(router_replay=True, invariant="on")
    with pytest.raises(ConfigError, match="has no experts"):
        drawn(policy(first_k_dense_replace=3))
    with pytest.raises(DataError, match="experts has 3 entries for 3 ids"):
        Trajectory([1, 2, 3], [False, True, True], [0.0] * 3, 0, experts=torch.zeros(3, 2, 2, dtype=torch.int16))
