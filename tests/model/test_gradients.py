"""Who learns from what, through the whole model: the indexer from its KL alone, everything else from the LM loss.

And packed documents, in training form, give what separate rows give: values and gradients.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from glm5.model.glm5 import GLM5
from glm5.model.trace import Aux, Trace
from support import naive
from support.checks import form
from support.tiny import tiny_model

TOKENS = 60


def ids(rows: int = 2, tokens: int = TOKENS, seed: int = 0) -> Tensor:
    return torch.randint(6, 320, (rows, tokens), generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def model() -> GLM5:
    return tiny_model(3)


def lm_loss(model: GLM5, x: Tensor, sparse: bool, aux: Aux | None = None) -> Tensor:
    """Cross-entropy of the trunk and of three MTP depths."""
    out = model(x, sparse=sparse, aux=aux)
    loss = F.cross_entropy(out.logits[:, :-1].flatten(0, 1), x[:, 1:].flatten())
    for depth, hidden in enumerate(model.mtp_hidden(out.hidden, x, 3, sparse=sparse, aux=aux), 1):
        loss = loss + F.cross_entropy(model.lm_head(hidden[:, :-1]).flatten(0, 1), x[:, depth + 1 :].flatten())
    return loss


def is_indexer(name: str) -> bool:
    return ".indexer." in name


@pytest.mark.parametrize("sparse", [False, True])
def test_the_lm_loss_leaves_the_indexer_alone(model: GLM5, sparse: bool) -> None:
    lm_loss(model, ids(), sparse).backward()
    touched = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.any()}
    assert not any(is_indexer(name) for name in touched)
    assert touched == {name for name, _ in model.named_parameters() if not is_indexer(name)}  # the rest: all of it


@pytest.mark.parametrize("sparse", [False, True])
def test_the_kl_reaches_the_indexer_alone(model: GLM5, sparse: bool) -> None:
    aux = Aux(indexer=True)
    lm_loss(model, ids(), sparse, aux)
    assert len(aux.indexer_losses) == 3 + 3  # the trunk's layers and the MTP block's depths
    aux.indexer_kl().backward()
    touched = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.any()}
    assert touched == {name for name, _ in model.named_parameters() if is_indexer(name)}


@pytest.mark.parametrize("sparse", [False, True])
def test_measuring_changes_nothing_else(model: GLM5, sparse: bool) -> None:
    """With the KL in the sum, the LM loss and its gradients are bit for bit what they are without."""
    plain = lm_loss(model, ids(), sparse)
    plain.backward()
    before = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    aux = Aux(indexer=True, balance=True)
    joint = lm_loss(model, ids(), sparse, aux)
    assert torch.equal(joint, plain)
    (joint + aux.indexer_kl()).backward()
    for name, gradient in before.items():
        if not is_indexer(name):
            assert torch.equal(model.get_parameter(name).grad, gradient), name


@torch.no_grad()
@pytest.mark.parametrize("sparse", [False, True])
def test_kl_and_recall_are_measured_without_gradients_too(model: GLM5, sparse: bool) -> None:
    """Also where the model would prefer the absorbed form, which has no expanded keys to measure with."""
    x = ids(1, 100)
    with torch.enable_grad():
        trained = Aux(indexer=True)
        model(x, sparse=sparse, aux=trained)
    for name in ("chosen", "absorbed"):
        measured = Aux(indexer=True)
        with form(name):
            model(x, sparse=sparse, aux=measured)
        assert len(measured.indexer_losses) == 3
        torch.testing.assert_close(measured.indexer_kl(), trained.indexer_kl().detach(), rtol=1e-5, atol=1e-3)


@torch.no_grad()
def test_the_kl_is_that_of_the_models_own_attention(model: GLM5) -> None:
    """The first layer's loss, from its projections by hand: head-summed attention against softmax of the scores."""
    x = ids(1)
    trace, aux = Trace(scores=True), Aux(indexer=True)
    model(x, sparse=False, aux=aux, trace=trace)
    block = model.blocks[0]
    attn, y = block.self_attn, block.input_layernorm(trace.hidden[0])
    visible = naive.Visibility.causal(1, TOKENS)
    rotation = model._rope(visible.last_BT).unsqueeze(-2)
    cos, sin = rotation.real, rotation.imag
    q = attn.q_b_proj(attn.q_a_layernorm(attn.q_a_proj(y))).unflatten(-1, (4, 32))
    rows = attn.kv_a_proj_with_mqa(y)
    k = attn.kv_b_proj(attn.kv_a_layernorm(rows[..., :28])).unflatten(-1, (4, 38))[..., :20]

    def turn(pairs: Tensor) -> Tensor:
        even, odd = pairs[..., 0::2], pairs[..., 1::2]
        return torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)

    q = torch.cat((q[..., :20], turn(q[..., 20:])), dim=-1)
    k = torch.cat((k, turn(rows[..., None, 28:]).expand(-1, -1, 4, -1)), dim=-1)
    mask = naive.interval_mask(visible, TOKENS)
    target = naive.attention_probs(q, k, mask, 32**-0.5).mean(1)
    own = attn.indexer
    scores = naive.index_scores(
        *own.queries(y, attn.q_a_layernorm(attn.q_a_proj(y)), model._rope(visible.last_BT)),
        own.keys(y, model._rope(visible.last_BT)),
    )
    guess = scores.masked_fill(~mask, -torch.inf).log_softmax(-1).masked_fill(~mask, 0.0)
    exact = (torch.xlogy(target, target) - target * guess).sum()
    torch.testing.assert_close(aux.indexer_losses[0].kl, exact.float(), rtol=1e-4, atol=1e-4)


# --------------------------------------------------------------------------- packed documents
LENGTHS = (34, 1, 25)  # one longer than k = 24


def begins() -> Tensor:
    starts = [0, *torch.tensor(LENGTHS).cumsum(0)[:-1].tolist()]
    return torch.tensor([[start for start, n in zip(starts, LENGTHS, strict=True) for _ in range(n)]])


def probe(shape: torch.Size, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("sparse", [False, True])
def test_packed_documents_equal_separate_rows(model: GLM5, sparse: bool) -> None:
    """Hidden states, MTP where its tokens lie in the document, KL, loads, and the gradients of all parameters."""
    x, documents = ids(1, sum(LENGTHS)), begins()

    def run(row: Tensor, boundaries: Tensor | None, weight: Tensor) -> tuple[list[Tensor], Tensor, Aux]:
        aux = Aux(indexer=True)
        hidden = model.hidden(row, documents=boundaries, sparse=sparse, aux=aux)
        states = [hidden, *model.mtp_hidden(hidden, row, 2, documents=boundaries, sparse=sparse)]
        score = (hidden * weight).sum() + aux.indexer_kl()
        return states, score, aux

    weight = probe(torch.Size((1, sum(LENGTHS), 48)), 1)
    packed, score, packed_aux = run(x, documents, weight)
    score.backward()
    together = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)

    kl, loads, at = torch.zeros(()), 0, 0
    for length in LENGTHS:
        part = slice(at, at + length)
        states, score, aux = run(x[:, part], None, weight[:, part])
        score.backward()
        kl, loads = kl + aux.indexer_kl().detach(), loads + torch.stack(aux.loads)
        for depth, alone in enumerate(states):
            inside = packed[depth][:, at : at + length - depth]
            torch.testing.assert_close(inside, alone, rtol=1e-5, atol=2e-5)
        at += length
    torch.testing.assert_close(packed_aux.indexer_kl(), kl, rtol=1e-5, atol=1e-4)
    assert torch.equal(torch.stack(packed_aux.loads), loads)
    for name, gradient in together.items():
        alone = model.get_parameter(name).grad
        scale = gradient.abs().max().item()
        torch.testing.assert_close(gradient, alone, rtol=1e-4, atol=1e-5 * max(scale, 1e-3), msg=name)


@torch.no_grad()
def test_documents_differ_from_one_long_row(model: GLM5) -> None:
    """So that the test above can fail."""
    x = ids(1, sum(LENGTHS))
    packed, long = model.hidden(x, documents=begins()), model.hidden(x)
    torch.testing.assert_close(packed[:, : LENGTHS[0]], long[:, : LENGTHS[0]], rtol=1e-5, atol=2e-5)
    assert (packed - long)[:, LENGTHS[0] :].abs().amax(-1).min() > 1e-3


@torch.no_grad()
def test_padding_among_documents_is_finite_and_counts_nowhere(model: GLM5) -> None:
    """A document that begins past its own slot is padding: it sees nothing and nobody sees it."""
    x = ids(1, 40)
    documents = torch.zeros(1, 40, dtype=torch.int64)
    documents[0, 30:] = 40
    aux = Aux(indexer=True)
    hidden = model.hidden(x, documents=documents, aux=aux)
    assert bool(hidden.isfinite().all())
    alone_aux = Aux(indexer=True)
    alone = model.hidden(x[:, :30], aux=alone_aux)
    torch.testing.assert_close(hidden[:, :30], alone, rtol=1e-5, atol=2e-5)
    for ours, theirs in zip(aux.indexer_losses, alone_aux.indexer_losses, strict=True):
        assert ours.queries == theirs.queries == 30
        torch.testing.assert_close(ours.kl, theirs.kl, rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(ours.recall_sum, theirs.recall_sum, rtol=1e-5, atol=1e-4)
    for state in model.mtp_hidden(hidden, x, 2, documents=documents):
        assert bool(state.isfinite().all())
