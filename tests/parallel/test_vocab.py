"""The head and its loss with the vocabulary divided over ranks: one device's results, in chunks, and float64's."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from glm5.kernels.cross_entropy import linear_cross_entropy, linear_logprobs
from glm5.parallel import vocab
from glm5.parallel.shard import whole
from glm5.parallel.vocab import Vocabulary, divided_head, split_head
from glm5.train.losses import language_model_loss
from glm5.utils.errors import ConfigError, DataError
from support.ranks import run_ranks
from support.tiny import tiny_model

N, D, V = 23, 12, 50


def _case(dtype=torch.float32, scale=1.0):
    g = torch.Generator().manual_seed(2)
    hidden = (torch.randn(N, D, generator=g) * scale).to(dtype)
    weight = torch.randn(V, D, generator=g).to(dtype)
    targets = torch.randint(0, V, (N,), generator=g)
    weights = torch.randn(N, generator=g)
    weights[::4] = 0
    return hidden, weight, targets, weights


def _exact(hidden, weight, targets, weights):
    """Plain float64: loss, log-probabilities, entropy, and gradients."""
    h, w = (t.double().clone().requires_grad_() for t in (hidden, weight))
    logp = (h @ w.T).log_softmax(-1)
    own = logp.gather(1, targets[:, None])[:, 0]
    loss = -(own * weights.double()).sum()
    loss.backward()
    return loss.detach(), own.detach(), -(logp.exp() * logp).sum(-1).detach(), h.grad, w.grad


def _rows(world, cut):
    """First and past the last row of this rank."""
    if world.size == 2:
        edges = {"even": [0, 25, 50], "uneven": [0, 7, 50], "with an empty rank": [0, 50, 50]}
    else:
        edges = {"even": [0, 13, 26, 39, 50], "uneven": [0, 1, 30, 31, 50], "with an empty rank": [0, 20, 20, 44, 50]}
    return edges[cut][world.rank], edges[cut][world.rank + 1]


def _one_device(world):
    group = world.group("tp")
    vocab.CHUNK_ELEMENTS = {"cpu": 64, "cuda": 64}  # several chunks by default, too
    for cut in ("even", "uneven", "with an empty rank"):
        first, last = _rows(world, cut)
        vocabulary = Vocabulary(last - first, group)
        assert (vocabulary.first, vocabulary.size) == (first, V)
        for dtype, scale in ((torch.float32, 1.0), (torch.float32, 200.0), (torch.bfloat16, 1.0), (torch.float64, 1.0)):
            hidden, weight, targets, weights = _case(dtype, scale)
            loss, logp, entropy, dhidden, dweight = _exact(hidden, weight, targets, weights)
            for chunk in (None, 1, 7, 23, 100):
                h, w = hidden.clone().requires_grad_(), weight[first:last].clone().requires_grad_()
                out = vocabulary.cross_entropy(h, w, targets, weights, chunk=chunk, with_entropy=True)
                (2.0 * out.loss_sum).backward()
                accum = torch.promote_types(dtype, torch.float32)
                assert out.loss_sum.dtype == out.logprobs_N.dtype == out.entropy_N.dtype == accum
                tight = (
                    {"rtol": 2e-5, "atol": 2e-4 * scale} if dtype != torch.float64 else {"rtol": 1e-12, "atol": 1e-10}
                )
                torch.testing.assert_close(out.loss_sum.detach().double(), loss, **tight)
                torch.testing.assert_close(out.logprobs_N.double(), logp, **tight)
                torch.testing.assert_close(out.entropy_N.double(), entropy, **tight)
                loose = tight if dtype != torch.bfloat16 else {"rtol": 0.02, "atol": 0.02}
                assert h.grad.dtype == w.grad.dtype == dtype
                torch.testing.assert_close(h.grad.double(), 2 * dhidden, **loose)
                torch.testing.assert_close(w.grad.double(), 2 * dweight[first:last], **loose)
                # The same bits on every rank, for what is the same on every rank.
                for t in (out.loss_sum.detach(), out.logprobs_N, out.entropy_N, h.grad):
                    theirs = t.clone()
                    dist.broadcast(theirs, 0)
                    assert torch.equal(theirs, t)
    # Against the one-device operator, without gradients, and its argmax; ties go to the lowest id.
    hidden, weight, targets, weights = _case()
    hidden[0] = (3 * hidden[0]).round()
    weight[17] = weight[41] = 5 * hidden[0]  # integers: their logits are equal however they are added up
    first, last = _rows(world, "even")
    vocabulary = Vocabulary(last - first, group)
    own = vocabulary.logprobs(hidden, weight[first:last], targets, with_argmax=True, with_entropy=True, chunk=5)
    alone = linear_logprobs(hidden, weight, targets, with_argmax=True, with_entropy=True)
    assert torch.equal(own.argmax_N, alone.argmax_N)
    assert own.argmax_N[0] == 17
    torch.testing.assert_close(own.logprobs_N, alone.logprobs_N)
    torch.testing.assert_close(own.entropy_N, alone.entropy_N)
    with torch.no_grad():
        plain = vocabulary.cross_entropy(hidden, weight[first:last], targets)
    torch.testing.assert_close(plain.loss_sum, linear_cross_entropy(hidden, weight, targets).loss_sum)
    assert plain.entropy_N is None
    # A logit of minus infinity, and a rank on which all are.
    blocked = weight.clone()
    blocked[25:] = -torch.inf
    hidden = hidden.abs() + 0.1
    some = vocabulary.logprobs(hidden, blocked[first:last], targets % 25, with_entropy=True)
    ref = linear_logprobs(hidden, blocked, targets % 25, with_entropy=True)
    torch.testing.assert_close(some.logprobs_N, ref.logprobs_N)
    torch.testing.assert_close(some.entropy_N, ref.entropy_N)
    # Everyone refuses what cannot be right.
    with pytest.raises(DataError, match="target 50 lies outside the vocabulary of 50"):
        vocabulary.cross_entropy(hidden, weight[first:last], targets + (50 - targets.max()))
    for bad, match in (
        ((hidden, weight[first : last - 1], targets), "rows of the head"),
        ((hidden[:, :3], weight[first:last], targets), "need hidden"),
        ((hidden, weight[first:last], targets[1:]), "targets must be"),
        ((hidden, weight[first:last], targets, weights[1:]), "weights must be"),
    ):
        with pytest.raises(ValueError, match=match):
            vocabulary.cross_entropy(*bad)
    with pytest.raises(ValueError, match="chunk=0"):
        vocabulary.cross_entropy(hidden, weight[first:last], targets, chunk=0)


@pytest.mark.parametrize("ranks", [2, 4])
def test_loss_gradients_and_entropy_are_one_devices_in_any_chunks(ranks):
    run_ranks(ranks, f"tp={ranks}", _one_device)


def _main_and_mtp_heads(world):
    """The model's own head with two MTP depths: loss and gradients of one process; whole logits on demand."""
    g = torch.Generator().manual_seed(4)
    ids = torch.randint(0, 320, (2, 33), generator=g)
    targets = [(ids[:, d + 1 : d + 31], (torch.rand(2, 30, generator=g) > 0.2).float()) for d in range(3)]
    found = []
    for divided in (False, True):
        model = tiny_model()
        vocabulary = split_head(model, world) if divided else None
        trunk = model.hidden(ids[:, :30], sparse=True)
        hidden = [trunk, *model.mtp_hidden(trunk, ids, 2)]
        options = {} if vocabulary is None else {"cross_entropy": vocabulary.cross_entropy}
        head = model.lm_head.weight if vocabulary is None else divided_head(model.lm_head)[0]
        loss = language_model_loss(hidden, head, targets, mtp_weight=0.3, **options)
        loss.loss_sum.backward()
        grads = {n: whole(p.grad).clone() for n, p in model.named_parameters() if p.grad is not None}
        logits = model(ids, sparse=True).logits
        (logits * torch.arange(320)).sum().backward()
        again = model.model.norm.weight.grad.clone()
        found.append((loss, grads, logits.detach(), again))
        assert (divided_head(model.lm_head) is None) == (not divided)
        if divided:
            assert isinstance(model.lm_head.weight, DTensor)
            assert model.lm_head.weight.to_local().shape == (320 // world.size, 48)
            assert model.lm_head.weight.shape == (320, 48)
    (one, one_grads, one_logits, one_norm), (many, grads, logits, norm) = found
    torch.testing.assert_close(many.loss_sum, one.loss_sum)
    torch.testing.assert_close(many.ce_sums, one.ce_sums)
    assert grads.keys() == one_grads.keys()
    for name, want in one_grads.items():
        torch.testing.assert_close(grads[name], want, rtol=1e-4, atol=1e-4 * float(want.abs().max()), msg=name)
    torch.testing.assert_close(logits, one_logits)
    torch.testing.assert_close(norm, one_norm, rtol=1e-4, atol=1e-4 * float(one_norm.abs().max()))
    with pytest.raises(ConfigError, match="tie_word_embeddings"):
        split_head(tiny_model(tie_word_embeddings=True), world)
    with pytest.raises(ConfigError, match="must divide vocab_size=321"):
        split_head(tiny_model(vocab_size=321), world)


def test_main_and_mtp_heads_of_a_model():
    run_ranks(2, "tp=2", _main_and_mtp_heads)
