"""One update of the loop: independent of how a step is cut, each stage moving exactly what it should."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from glm5.model.glm5 import GLM5
from glm5.train.loop import Rows, Trainer
from glm5.train.totals import Counts, Totals
from support.training import dataset, trainer


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def gradients(of: Trainer, monkeypatch: pytest.MonkeyPatch) -> dict[str, Tensor]:
    """The gradients of the next step, after clipping, caught before the update."""
    found: dict[str, Tensor] = {}

    def catch(**_: Any) -> None:
        found.update({n: p.grad.clone() for n, p in of.model.named_parameters() if p.grad is not None})

    monkeypatch.setattr(of.optimizer, "step", catch)
    of.step()
    return found


def close(a: dict[str, Tensor], b: dict[str, Tensor], tolerance: float = 3e-6) -> None:
    """Equal to fp32 rounding: by tensor, the largest difference against the largest entry."""
    assert a.keys() == b.keys()
    assert len(a) > 5
    for name in a:
        scale = a[name].abs().max()
        assert scale > 0, f"{name} has no gradient"
        assert (a[name] - b[name]).abs().max() <= tolerance * max(1e-3, float(scale)), name


# --------------------------------------------------------------------------- cutting a step
@pytest.mark.parametrize("stage", ["pretrain", "warmup", "sparse"])
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_gradients_do_not_depend_on_micro_batches(
    stage: Any, share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = dataset(tmp_path)
    found = []
    for micro_batch in (4, 2, 1, 3):
        of = trainer(
            tmp_path, data, stage=stage, micro_batch=micro_batch, mtp_share=share, balance_weight=0.3, clip=1e9
        )
        found.append(gradients(of, monkeypatch))
    for other in found[1:]:
        close(found[0], other)


def test_every_loss_term_reaches_the_gradients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the test before compares does hold all terms: switching one off changes the gradients."""
    data = dataset(tmp_path)
    options = dict(stage="sparse", balance_weight=0.3, clip=1e9)
    whole = gradients(trainer(tmp_path, data, **options), monkeypatch)
    router = "model.layers.1.mlp.gate.weight"
    head, indexer, mtp = "lm_head.weight", "model.layers.1.self_attn.indexer.wk.weight", "model.layers.2.eh_proj.weight"
    for name, changes in (
        (router, dict(balance_weight=0.0)),
        (indexer, dict(indexer_weight=0.5)),
        (mtp, dict(mtp_weight=0.1)),
        (head, dict(mtp_depths=2)),
    ):
        other = gradients(trainer(tmp_path, data, **{**options, **changes}), monkeypatch)
        assert (whole[name] - other[name]).abs().max() > 1e-4 * whole[name].abs().max(), name


def test_the_loss_is_its_formula(tmp_path: Path) -> None:
    """Counts of one, plain PyTorch: mean CE of the main head + lambda times the depths' mean + balance + KL."""
    data = dataset(tmp_path)
    of = trainer(tmp_path, data, stage="sparse", balance_weight=0.2, mtp_weight=0.6, mtp_depths=2)
    batch = of.loader.batch(0, 4)
    rows = Rows.of(batch, torch.device("cpu"))
    counts = Counts(rows=1, mtp_rows=1, tokens=1, queries=1)
    totals = Totals(len(of.routers), 2)
    loss = of._losses(rows, 0, counts, totals)

    from glm5.model.trace import Aux

    aux = Aux(indexer=True, balance=True, valid=rows.valid_BT)
    trunk = of.model.hidden(rows.input_BT, documents=rows.documents_BT, sparse=True, aux=aux)
    kept = rows.head(1)
    aux.valid = kept.valid_BT
    depths = of.model.mtp_hidden(trunk[:1], kept.ids_BS, 2, documents=kept.documents_BT, sparse=True, aux=aux)

    def ce(hidden: Tensor, depth: int, n: int) -> Tensor:
        target, weight = (torch.from_numpy(x)[:n] for x in batch.targets(depth + 1))
        t = hidden.shape[1]
        logp = of.model.lm_head(hidden).log_softmax(-1).gather(-1, target[:, :t, None])[..., 0]
        return -(logp * weight[:, :t]).sum()

    expected = ce(trunk, 0, 4) + 0.6 / 2 * sum(ce(h, d, 1) for d, h in enumerate(depths, 1))
    kl = [x.kl for x in aux.indexer_losses]
    expected = expected + kl[0] + kl[1] + (kl[2] + kl[3]) / 2
    balance = aux.balance_losses
    expected = expected + 0.2 * (balance[0] + (balance[1] + balance[2]) / 2)
    torch.testing.assert_close(loss, expected)


def test_mtp_trains_on_its_share_of_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = dataset(tmp_path)
    seen: list[int] = []
    hidden = GLM5.mtp_hidden

    def count(self: GLM5, hidden_BTD: Tensor, *args: Any, **options: Any) -> Any:
        seen.append(len(hidden_BTD))
        return hidden(self, hidden_BTD, *args, **options)

    monkeypatch.setattr(GLM5, "mtp_hidden", count)
    for share, micro_batch, expected in (
        (1.0, 4, [4]),
        (0.5, 4, [2]),
        (0.5, 1, [1, 1]),
        (0.75, 2, [2, 1]),
        (0.01, 4, [1]),
    ):
        seen.clear()
        trainer(tmp_path, data, mtp_share=share, micro_batch=micro_batch).step()
        assert seen == expected, (share, micro_batch)
