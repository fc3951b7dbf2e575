"""Updates of a policy on two processes: the same weights and figures as on one, whatever the batch leaves a rank."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_policy_rows import SEQ_LEN, fill, made
from test_policy_update import CONFIGS, weights

from glm5.model.glm5 import GLM5
from glm5.parallel.mesh import World
from glm5.posttrain.divergence import DivergenceUpdate
from glm5.posttrain.rows import PolicyRows, pack
from glm5.posttrain.update import PolicyUpdate, score
from glm5.train.ranks import Ranks
from glm5.utils.errors import NumericalError
from support.ranks import run_ranks
from support.training import tiny


def batches() -> tuple[GLM5, GLM5, dict[str, PolicyRows]]:
    """Two models some way apart, and rows of the first's answers: all of them, and one alone, which leaves the second
    rank nothing to read."""
    base = tiny().eval()
    other = copy.deepcopy(base)
    with torch.no_grad():
        for p in other.parameters():
            p.add_(0.01 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel()), dtype=p.dtype))
    trajectories = fill(base, made(), noise=0.1)
    rows = {
        "packed": pack(trajectories, SEQ_LEN),
        "lonely": pack(trajectories[1:2], SEQ_LEN),
    }
    return base, other, {n: replace(r, teacher_BT=torch.where(r.rollout_BT < 0, -1, 0)) for n, r in rows.items()}


def updated(ranks: Ranks) -> dict[str, tuple[dict[str, torch.Tensor], dict[str, float]]]:
    """Weights and figures after an update, of every loss and batch."""
    base, other, rows = batches()
    found = {}
    for name, config in CONFIGS.items():
        for which, batch in rows.items():
            model = copy.deepcopy(other)
            old, reference = score(base, batch, ranks=ranks), score(other, batch, micro_batch=4, ranks=ranks)
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            update = PolicyUpdate(model, optimizer, config, micro_batch=2, indexer_weight=0.1, ranks=ranks)
            metrics = update(batch, 6, old_BT=old, reference_BT=reference)
            found[f"{name} {which}"] = weights(model), metrics
    model = copy.deepcopy(other)
    plain = PolicyUpdate(model, torch.optim.SGD(model.parameters(), lr=1.0), CONFIGS["glm5_reasoning"], ranks=ranks)
    figures = DivergenceUpdate(plain, [base], 0)(rows["packed"], 6)
    found["divergence"] = weights(model), figures
    broken = replace(rows["packed"], advantages_BT=rows["packed"].advantages_BT.clone())
    broken.advantages_BT[0] = float("inf")  # a row of the first rank alone
    before = weights(model)
    with pytest.raises(NumericalError, match="the policy's loss is"):
        plain(broken, 6)
    assert all(torch.equal(before[n], w) for n, w in weights(model).items())
    return found


def on_rank(world: World, *_: Any) -> dict[str, tuple[dict[str, torch.Tensor], dict[str, float]]]:
    return updated(Ranks(world))


def test_two_ranks_make_the_same_update() -> None:
    expected = updated(Ranks())
    for found in run_ranks(2, "dp=2", on_rank, timeout=600):
        assert found.keys() == expected.keys()
        for name, (after, metrics) in found.items():
            alone, figures = expected[name]
            assert figures["stepped"] == 1
            assert metrics == pytest.approx(figures, rel=1e-3, abs=1e-5), name
            for n, w in alone.items():
                where = f"{name}, {n}"
                torch.testing.assert_close(after[n], w, rtol=1e-4, atol=2e-6, msg=lambda m, at=where: f"{at}: {m}")
