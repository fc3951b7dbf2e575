"""What a token reads: the same positions in trainer and engine, unless ties are left to chance; and indexers that learn
where they are told to."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, Literal

import pytest
import torch
from test_policy_rows import SEQ_LEN, fill, made
from torch import Tensor

from glm5.kernels.topk import racing_topk, stable_topk
from glm5.model.config import ModelConfig
from glm5.model.glm5 import GLM5
from glm5.model.mla import MLA
from glm5.posttrain import losses
from glm5.posttrain.prompts import prompts_from_rows
from glm5.posttrain.rollouts import RolloutConfig, Rollouts
from glm5.posttrain.rows import Trajectory, pack
from glm5.posttrain.update import PolicyUpdate
from support.conversations import tokenizer
from support.training import tiny

# What each query read: (layer, the ids up to it) -> positions.
Read = dict[tuple[int, tuple[int, ...]], frozenset[int]]


def policy() -> GLM5:
    """Reads 8 positions of some 30, by one index head: half of its scores are ReLU's zeros, and tie."""
    sizes = {**tiny().config.to_dict(), "vocab_size": 384, "index_n_heads": 1, "glm5_attention": "sparse"}
    return GLM5(ModelConfig.from_dict(sizes), seed=2)


Seen = list[tuple[int, Tensor, Tensor, Tensor]]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """(layer, first, last, selected) of every selection that is made, over flat queries."""
    found: Seen = []
    select: Callable[..., Tensor | None] = MLA._select

    def selecting(self: MLA, index_q: Any, part: Any, trace: Any) -> Tensor | None:
        picked = select(self, index_q, part, trace)
        assert picked is not None
        visible = part.visible
        found.append((self.layer, visible.first_BT.flatten(), visible.last_BT.flatten(), picked.flatten(0, 1)))
        return picked

    monkeypatch.setattr(MLA, "_select", selecting)
    return found


def drain(seen: Seen, ids: Sequence[Sequence[int]]) -> Read:
    """What was recorded, of queries over these rows of ids, by the ids of their documents up to them; positions count
    from the document's beginning."""
    read: Read = {}
    for layer, first_N, last_N, selected_NK in seen:
        for n, (first, last) in enumerate(zip(first_N.tolist(), last_N.tolist(), strict=True)):
            row = ids[n // len(ids[0]) % len(ids)]
            if first <= last:
                picked = frozenset(p - first for p in selected_NK[n].tolist() if p >= 0)
                read[layer, tuple(row[first : last + 1])] = picked
    seen.clear()
    return read


def both(topk: Literal["stable", "racing"], seen: Seen) -> tuple[Read, Read, float]:
    """What the engine read while it answered, what the trainer reads in packed rows of the same, and how far their
    log-probabilities are apart."""
    model = policy()
    config = RolloutConfig(prompts=1, group=1, max_new_tokens=10, thinking=False, memory_gib=0.05, topk=topk)
    rollouts = Rollouts(model, tokenizer(), config, None, seed=5)
    text = "word and another word, and yet one more of them"
    rows = [{"prompt": f"{text} {i}", "answer": "x", "verifier": "short", "domain": "a"} for i in range(4)]
    engine: Read = {}
    batch: list[Trajectory] = []
    for numbered in enumerate(prompts_from_rows(rows)):
        (group,) = rollouts.draw([numbered])
        group.advantages, group.copies = {0: 1.0}, {0: 1}
        batch += group.trajectories(len(batch), config.temperature)
        engine |= drain(seen, [batch[-1].ids])
    if topk == "racing":
        model.race(0)
    packed = pack(batch, 2 * max(len(t.ids) for t in batch), vocab_size=rollouts.engine.vocab_size)
    assert len(packed) < len(batch)
    logprobs = packed.logprobs(model).logprobs_N.detach()
    trainer = drain(seen, packed.input_BT.tolist())
    return engine, trainer, float((logprobs - packed.logprobs_BT[packed.mask_BT]).abs().max())


def test_trainer_and_engine_read_the_same_positions(seen: Seen) -> None:
    engine, trainer, apart = both("stable", seen)
    shared = engine.keys() & trainer.keys()
    assert len(shared) > 150
    assert {layer for layer, _ in shared} == {0, 1}
    assert sum(len(ids) > 8 for _, ids in shared) > 100  # where there is a choice
    assert [key for key in shared if engine[key] != trainer[key]] == []
    assert apart < 1e-4


def test_a_racing_topk_reads_others_and_moves_the_log_probabilities(seen: Seen) -> None:
    engine, trainer, apart = both("racing", seen)
    shared = engine.keys() & trainer.keys()
    differing = [key for key in shared if engine[key] != trainer[key]]
    assert len(differing) > 0.1 * len(shared)
    assert all(len(engine[key]) == len(trainer[key]) for key in differing)
    assert apart > 1e-2


def test_a_race_is_for_ties_alone() -> None:
    scores = torch.tensor([[3.0, 0.0, 2.0, 0.0, 0.0, 1.0, 0.0, -torch.inf], [7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0, 0.0]])
    ties = torch.Generator().manual_seed(0)
    found = [racing_topk(scores, 5, ties).tolist() for _ in range(60)]
    assert stable_topk(scores, 5).tolist()[1] == [0, 1, 2, 3, 4]
    assert all(row[1] == [0, 1, 2, 3, 4] for row in found)
    pairs = {tuple(sorted(set(row[0]) - {0, 2, 5})) for row in found}
    assert pairs == {(a, b) for a in (1, 3, 4, 6) for b in (1, 3, 4, 6) if a < b}  # any two of the four that tie
    few = torch.tensor([[1.0, -torch.inf, 1.0, -torch.inf]])
    assert racing_topk(few, 3, ties).tolist() == [[0, 2, -1]]


# ------------------------------------------------------------------------------------------------ indexers that learn
def grown(model: GLM5, size: int, packed: bool, weight: float = 1.0) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Weights after an update of plain SGD with learning indexers."""
    rows = pack(fill(model, made()), SEQ_LEN, packed=packed)
    learner = copy.deepcopy(model)
    optimizer = torch.optim.SGD(learner.parameters(), lr=1.0)
    metrics = PolicyUpdate(learner, optimizer, losses.dapo(), micro_batch=size, clip=0, indexer_weight=weight)(rows, 6)
    return {name: p.detach() for name, p in learner.named_parameters()}, metrics


def test_indexers_learn_from_their_own_loss_alone() -> None:
    """With a weight they move by their KL, and the rest as without; any cut of the batch gives the same."""
    sizes = {**tiny().config.to_dict(), "index_topk": 4, "glm5_attention": "sparse"}
    model = GLM5(ModelConfig.from_dict(sizes), seed=2).eval()
    frozen, figures = grown(model, 6, False, weight=0.0)
    assert "indexer_kl" not in figures
    whole, figures = grown(model, 6, False)
    assert figures["indexer_kl"] > 0
    start = dict(model.named_parameters())
    for name, weight in whole.items():
        if ".indexer." in name:
            assert torch.equal(frozen[name], start[name])
            trunk = not name.startswith(f"model.layers.{model.config.num_hidden_layers}.")
            assert torch.equal(weight, start[name]) != trunk, name
        else:
            torch.testing.assert_close(weight, frozen[name], rtol=1e-5, atol=1e-7)
    for size, packed in ((1, False), (4, False), (2, True)):  # 4 of 6 rows: with empty ones, which count nothing
        cut, again = grown(model, size, packed)
        assert again["indexer_kl"] == pytest.approx(figures["indexer_kl"], rel=1e-4)
        for name, weight in whole.items():
            torch.testing.assert_close(cut[name], weight, rtol=1e-4, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}")
