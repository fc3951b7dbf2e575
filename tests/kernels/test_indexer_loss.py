"""The indexer's loss against float64 over whole matrices: value, gradients, recall, padding."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from glm5.kernels import indexer_loss as module
from glm5.kernels import tiling
from glm5.kernels.indexer import index_select
from glm5.kernels.indexer_loss import indexer_loss
from glm5.kernels.visibility import Visibility
from support import naive

BATCH, HEADS, WIDTH, INDEX_HEADS, INDEX_WIDTH, SCALE, TOPK = 2, 4, 8, 3, 6, 0.4, 5


@dataclass
class Case:
    iq: Tensor
    iw: Tensor
    ik: Tensor
    q: Tensor
    k: Tensor
    visible: Visibility

    def run(self, selected: Tensor | None, topk: int = TOPK) -> module.IndexerLoss:
        return indexer_loss(self.iq, self.iw, self.ik, self.q, self.k, self.visible, selected, SCALE, topk)

    def select(self, topk: int = TOPK) -> Tensor:
        with torch.no_grad():
            return index_select(self.iq, self.iw, self.ik, self.visible, topk)


def case(name: str, seed: int = 0) -> Case:
    if name == "causal":
        visible = Visibility.causal(BATCH, 20)
    elif name == "documents":
        visible = Visibility.documents(torch.tensor([[0] * 6 + [6] * 14, [0] * 20]))
    else:  # padding on the right of row 1
        last = torch.arange(20).repeat(2, 1)
        last[1, 12:] = -1
        visible = Visibility(torch.zeros(2, 20, dtype=torch.int64), last, 20)
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).requires_grad_()

    index = draw(BATCH, 20, INDEX_HEADS, INDEX_WIDTH), draw(BATCH, 20, INDEX_HEADS), draw(BATCH, 20, INDEX_WIDTH)
    return Case(*index, draw(BATCH, 20, HEADS, WIDTH), draw(BATCH, 20, HEADS, WIDTH), visible)


def exact_kl(c: Case, mask: Tensor) -> Tensor:
    """Sum over queries of KL(head-summed attention || softmax of scores) over the mask, float64, differentiable."""
    summed = naive.attention_probs(c.q, c.k, mask, SCALE).detach().sum(1)
    alive = mask.any(-1)
    target = summed / summed.sum(-1, keepdim=True).clamp(min=1e-300)
    scores = naive.index_scores(c.iq, c.iw, c.ik).masked_fill(~mask, -torch.inf)
    scores = scores.masked_fill(~alive[..., None], 0.0)
    guess = scores.log_softmax(-1)
    terms = torch.where(mask & (target > 0), target * (target.clamp(min=1e-300).log() - guess), 0.0)
    return terms.sum()


@pytest.mark.parametrize("tile", [1, 2_000, 8 * 2**20])
@pytest.mark.parametrize("sparse", [False, True], ids=["interval", "selected set"])
@pytest.mark.parametrize("name", ["causal", "documents", "padded"])
def test_value_and_gradients(name: str, sparse: bool, tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiling, "TILE_ELEMENTS", tile)
    c = case(name)
    selected = c.select() if sparse else None
    mask = naive.interval_mask(c.visible, 20) if selected is None else naive.selection_mask(selected, 20)
    loss = c.run(selected)
    exact = exact_kl(c, mask)
    torch.testing.assert_close(loss.kl, exact.float(), rtol=1e-5, atol=1e-5)
    assert loss.queries.item() == c.visible.count_BT().gt(0).sum()
    ours = torch.autograd.grad(3 * loss.kl, (c.iq, c.iw, c.ik))  # an upstream gradient other than one
    right = torch.autograd.grad(3 * exact, (c.iq, c.iw, c.ik))
    for a, b in zip(ours, right, strict=True):
        assert a.abs().max() > 1e-2
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_the_main_attention_gets_no_gradient() -> None:
    c = case("causal")
    loss = c.run(None)
    assert torch.autograd.grad(loss.kl, (c.q, c.k), allow_unused=True) == (None, None)
    assert not loss.recall_sum.requires_grad
    assert not loss.logit_max_H.requires_grad
    assert not loss.queries.requires_grad


def test_a_perfect_indexer_has_no_loss_and_no_gradient() -> None:
    """One index head whose scores are the logs of the target, up to each row's constant."""
    visible = Visibility.causal(1, 8)
    target = torch.rand(8, 8, generator=torch.Generator().manual_seed(0)).tril() + 0.05
    scores = target.log() - target.log().min() + 0.1  # positive, for ReLU
    iq, ik = scores[None, :, None].clone().requires_grad_(), torch.eye(8)[None].clone().requires_grad_()
    iw = torch.ones(1, 8, 1, requires_grad=True)
    q, k = scores[None, :, None].clone(), torch.eye(8)[None, :, None].clone()
    loss = indexer_loss(iq, iw, ik, q, k, visible, None, 1.0, 3)
    assert abs(loss.kl.item()) < 1e-5
    for gradient in torch.autograd.grad(loss.kl, (iq, iw, ik)):
        assert gradient.abs().max() < 1e-5


@pytest.mark.parametrize("name", ["causal", "padded"])
def test_recall(name: str) -> None:
    """The head-averaged attention mass that falls on the indexer's top-k, summed over queries."""
    c = case(name)
    mask = naive.interval_mask(c.visible, 20)
    mass = naive.attention_probs(c.q, c.k, mask, SCALE).mean(1)
    loss = c.run(None)
    on_selected = (mass * naive.selection_mask(c.select(), 20)).sum()
    torch.testing.assert_close(loss.recall_sum, on_selected.float(), rtol=1e-5, atol=1e-5)
    assert loss.recall_sum < 0.95 * loss.queries  # something is missed here, so the number means something
    everything = c.run(None, topk=20)
    torch.testing.assert_close(everything.recall_sum, everything.queries)
    torch.testing.assert_close(c.run(c.select()).recall_sum, loss.queries)  # nothing outside the set is counted


def test_largest_logit_per_head() -> None:
    c = case("causal")
    with torch.no_grad():
        c.q[1, 7, 2] *= 50
    logits = torch.einsum("bthx,bshx->bhts", c.q, c.k) * SCALE
    logits = logits.masked_fill(~naive.interval_mask(c.visible, 20)[:, None], -torch.inf)
    torch.testing.assert_close(c.run(None).logit_max_H, logits.amax((0, 2, 3)), rtol=1e-5, atol=1e-5)


def test_without_gradients_the_value_is_the_same() -> None:
    c = case("causal")
    with torch.no_grad():
        silent = c.run(None)
    loud = c.run(None)
    assert torch.equal(silent.kl, loud.kl)
    assert not silent.kl.requires_grad


def test_bf16_gradients_keep_the_inputs_dtype() -> None:
    c = case("causal")
    low = Case(*(t.detach().bfloat16().requires_grad_() for t in (c.iq, c.iw, c.ik, c.q, c.k)), c.visible)
    loss = low.run(None)
    assert loss.kl.dtype == torch.float32
    exact = exact_kl(low, naive.interval_mask(low.visible, 20))
    assert loss.kl.item() == pytest.approx(exact.item(), rel=0.02)
    for ours, right in zip(
        torch.autograd.grad(loss.kl, (low.iq, low.iw, low.ik)),
        torch.autograd.grad(exact, (low.iq, low.iw, low.ik)),
        strict=True,
    ):
        assert ours.dtype == torch.bfloat16
        assert (ours - right).norm() < 0.02 * right.norm()
