"""The joint loss against plain cross-entropy, balance and bias by hand, and split invariance."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F

from glm5.kernels.balance import sequence_balance_loss
from glm5.model.glm5 import GLM5
from glm5.model.presets import nano
from glm5.model.trace import Aux, Trace
from glm5.train.losses import language_model_loss, router_bias_update

TINY = dict(hidden_size=32, vocab_size=64, num_hidden_layers=2, intermediate_size=48, moe_intermediate_size=16)


def _generator(seed=0):
    return torch.Generator().manual_seed(seed)


# --------------------------------------------------------------------------- the joint loss
def _joint_inputs(batch=3, slots=9, width=6, vocab=20):
    g = _generator()
    head = torch.randn(vocab, width, generator=g, dtype=torch.float64)
    hidden = [torch.randn(batch, slots - d, width, generator=g, dtype=torch.float64) for d in range(4)]
    ids = torch.randint(0, vocab, (batch, slots), generator=g)
    documents = torch.tensor([[0] * 9, [0] * 4 + [4] * 5, [0] * 2 + [2] * 6 + [8]])
    mask = torch.randint(0, 2, (batch, slots), generator=g).double()
    return hidden, head, ids, documents, mask


def _targets(hidden, ids, documents, mask):
    """Of each depth, the token depth + 1 ahead and its weight in the mask: 0 past the row or in another document."""
    found = []
    for depth, h in enumerate(hidden):
        target, weight = torch.zeros(h.shape[:2], dtype=torch.int64), torch.zeros(h.shape[:2])
        for b, t in itertools.product(*map(range, h.shape[:2])):
            s = t + depth + 1
            if s < ids.shape[1] and documents[b, s] == documents[b, t]:
                target[b, t], weight[b, t] = ids[b, s], mask[b, s]
        found.append((target, weight))
    return found


def _plain_loss(hidden, head, targets, mtp_weight):
    """The formula with loops over positions."""
    sums = []
    for h, (target, weight) in zip(hidden, targets, strict=True):
        total = head.new_zeros(())
        for b, t in itertools.product(*map(range, h.shape[:2])):
            total = total + weight[b, t] * F.cross_entropy(head @ h[b, t], target[b, t])
        sums.append(total)
    return sums, sums[0] + mtp_weight / (len(hidden) - 1) * sum(sums[1:])


def test_joint_loss_and_gradients_equal_the_formula():
    hidden, head, ids, documents, mask = _joint_inputs()
    leaves = [*hidden, head]
    for leaf in leaves:
        leaf.requires_grad_()
    targets = _targets(hidden, ids, documents, mask)
    sums, expected = _plain_loss(hidden, head, targets, 0.3)
    expected_grads = torch.autograd.grad(expected, leaves)
    out = language_model_loss(hidden, head, targets, mtp_weight=0.3, chunk=5)
    grads = torch.autograd.grad(out.loss_sum, leaves)
    torch.testing.assert_close(out.loss_sum, expected)
    torch.testing.assert_close(out.ce_sums, torch.stack(sums).detach())
    for got, want in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(got, want)
    assert not out.ce_sums.requires_grad


def test_token_counts_are_the_weights_of_each_depth():
    hidden, head, ids, documents, _ = _joint_inputs()
    out = language_model_loss(hidden, head, _targets(hidden, ids, documents, torch.ones(ids.shape)), mtp_weight=0.3)
    # Runs of n tokens in one document give n - 1 - depth targets: lengths 9; 4, 5; 2, 6, 1.
    assert out.tokens.tolist() == [8 + 3 + 4 + 1 + 5, 7 + 2 + 3 + 4, 6 + 1 + 2 + 3, 5 + 1 + 2]


def test_without_mtp_it_is_the_main_loss():
    hidden, head, ids, *_ = _joint_inputs()
    ones = torch.ones(ids.shape)
    out = language_model_loss(hidden[:1], head, _targets(hidden[:1], ids, torch.zeros_like(ids), ones))
    expected = F.cross_entropy((hidden[0][:, :-1] @ head.T).flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")
    torch.testing.assert_close(out.loss_sum, expected)


def _gradients(model, micro_batches, tokens, sequences):
    """Gradients of one step, accumulated over `micro_batches`, and the total loss."""
    model.zero_grad()
    total = 0.0
    for ids in micro_batches:
        aux = Aux(balance=True)
        trunk = model.hidden(ids, sparse=False, aux=aux)
        hidden = [trunk, *model.mtp_hidden(trunk, ids, 3, sparse=False, aux=aux)]
        targets = _targets(hidden, ids, torch.zeros_like(ids), torch.ones(ids.shape))
        lm = language_model_loss(hidden, model.lm_head.weight, targets, mtp_weight=0.3)
        balance = torch.stack(aux.balance_losses).sum()
        loss = lm.loss_sum / tokens + 1e-2 * balance / sequences
        loss.backward()
        total += loss.item()
    return total, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def test_gradient_of_the_whole_model_does_not_depend_on_accumulation():
    config = nano(**TINY)
    model = GLM5(config).double()
    ids = torch.randint(0, 64, (4, 24), generator=_generator(3))
    whole_loss, whole = _gradients(model, [ids], tokens=4 * 23, sequences=4)
    for split in ([1, 1, 1, 1], [3, 1], [2, 2]):
        loss, grads = _gradients(model, ids.split(split), tokens=4 * 23, sequences=4)
        assert loss == pytest.approx(whole_loss, rel=1e-6)
        assert grads.keys() == whole.keys()
        for name, want in whole.items():
            # The router works in fp32 whatever the model's dtype.
            torch.testing.assert_close(grads[name], want, rtol=1e-4, atol=1e-7, msg=lambda m, n=name: f"{n}: {m}")


# --------------------------------------------------------------------------- balance
def test_balance_loss_by_hand():
    # Two tokens, three experts, one chosen each: experts 0 and 1.
    scores = torch.tensor([[[0.6, 0.3, 0.1], [0.2, 0.2, 0.4]]])
    experts = torch.tensor([[[0], [1]]])
    # f = 3/2 * (1, 1, 0); P = mean of (.6, .3, .1) and (.25, .25, .5) = (.425, .275, .3).
    assert sequence_balance_loss(scores, experts).item() == pytest.approx(1.5 * (0.425 + 0.275))


def test_perfect_balance_gives_one_and_collapse_gives_more():
    scores = torch.full((2, 8, 4), 0.5)
    even = (torch.arange(16).view(8, 2) % 4).expand(2, 8, 2)
    assert sequence_balance_loss(scores, even).item() == pytest.approx(2.0)
    collapsed_scores = torch.tensor([0.9, 0.9, 0.1, 0.1]).expand(2, 8, 4)
    collapsed = torch.tensor([0, 1]).expand(2, 8, 2)
    assert sequence_balance_loss(collapsed_scores, collapsed).item() == pytest.approx(2 * 2 * 0.9)


def test_balance_loss_ignores_padding_and_adds_up_over_sequences():
    g = _generator()
    scores = torch.rand(3, 10, 8, generator=g)
    experts = torch.rand(3, 10, 8, generator=g).topk(2, -1).indices
    valid = torch.arange(10)[None] < torch.tensor([[10], [6], [0]])
    whole = sequence_balance_loss(scores, experts, valid)
    parts = [sequence_balance_loss(scores[:1], experts[:1]), sequence_balance_loss(scores[1:2, :6], experts[1:2, :6])]
    torch.testing.assert_close(whole, sum(parts))


def test_balance_of_the_sequences_of_a_row_is_that_of_rows():
    g = _generator()
    scores = torch.rand(2, 12, 8, generator=g)
    experts = torch.rand(2, 12, 8, generator=g).topk(2, -1).indices
    number = torch.tensor([[0] * 5 + [1] * 4 + [0] * 3, [2] * 12])
    valid = torch.tensor([[True] * 9 + [False] * 3, [True] * 10 + [False] * 2])
    rows = [(0, slice(0, 5)), (0, slice(5, 9)), (1, slice(0, 10))]
    found, wanted = scores.clone().requires_grad_(), scores.clone().requires_grad_()
    whole = sequence_balance_loss(found, experts, valid, sequences=(number, 4))  # one of them elsewhere
    parts = sum(sequence_balance_loss(wanted[b, s][None], experts[b, s][None]) for b, s in rows)
    torch.testing.assert_close(whole, parts)
    whole.backward()
    parts.backward()
    torch.testing.assert_close(found.grad, wanted.grad)


def test_balance_gradient_pushes_scores_of_busy_experts_down():
    scores = torch.full((1, 4, 3), 0.5, requires_grad=True)
    experts = torch.zeros(1, 4, 1, dtype=torch.int64)
    sequence_balance_loss(scores, experts).backward()
    assert (scores.grad[..., 0] > 0).all()
    assert (scores.grad[..., 1:] < 0).all()


def test_the_models_balance_loss_is_this_one():
    model = GLM5(nano(**TINY))
    ids = torch.randint(0, 64, (3, 12), generator=_generator(1))
    trace, aux = Trace(), Aux(balance=True)
    model.hidden(ids, sparse=False, trace=trace, aux=aux)
    (logits, _, experts), (balance,) = trace.router[0], aux.balance_losses
    scores = logits.sigmoid().view(3, 12, -1)
    torch.testing.assert_close(balance, sequence_balance_loss(scores, experts.view(3, 12, -1)))
    assert aux.loads[0].tolist() == torch.bincount(experts.flatten(), minlength=16).tolist()


# --------------------------------------------------------------------------- router bias
def test_bias_moves_by_the_rate_towards_balance():
    bias = torch.tensor([0.5, -0.5, 0.0])
    new = router_bias_update(bias, torch.tensor([1, 9, 5]), 0.001)
    torch.testing.assert_close(new, torch.tensor([0.501, -0.501, 0.0]), rtol=0, atol=1e-8)
    assert bias.tolist() == [0.5, -0.5, 0.0]
    assert torch.equal(router_bias_update(bias, torch.tensor([1, 9, 5]), 0.0), bias)


def test_sign_is_exact_where_bf16_counts_would_flip_it():
    # 64 shards count 40,840 and 40,960 tokens: in bf16 both sums are the same number.
    shards = torch.tensor([[40_840, 40_960]]).repeat(64, 1)
    assert len(set(shards.bfloat16().sum(0).tolist())) == 1
    new = router_bias_update(torch.zeros(2), shards.sum(0), 0.001)
    torch.testing.assert_close(new, torch.tensor([0.001, -0.001]))


def test_sign_is_exact_where_fp32_means_would_not_see_one_token():
    counts = torch.tensor([2**30, 2**30 + 1, 2**30, 2**30])
    assert router_bias_update(torch.zeros(4), counts, 1.0).tolist() == [1.0, -1.0, 1.0, 1.0]


def test_bias_keeps_small_steps_at_its_usual_size():
    bias = torch.full((2,), 7.0)
    for _ in range(100):
        bias = router_bias_update(bias, torch.tensor([0, 2]), 0.001)
    torch.testing.assert_close(bias, torch.tensor([7.1, 6.9]), rtol=0, atol=1e-4)


def test_rounded_state_is_refused():
    with pytest.raises(TypeError, match="bfloat16"):
        router_bias_update(torch.zeros(2, dtype=torch.bfloat16), torch.tensor([1, 2]), 0.1)
    with pytest.raises(TypeError, match=r"float32 and torch\.float32"):
        router_bias_update(torch.zeros(2), torch.tensor([1.0, 2.0]), 0.1)


def test_bias_updates_balance_a_skewed_router():
    g = _generator(5)
    skew = torch.linspace(0, 0.2, 8)
    bias = torch.zeros(8)

    def loads(bias):
        scores = torch.rand(4096, 8, generator=g) * 0.5 + skew
        return torch.bincount((scores + bias).topk(2, -1).indices.flatten(), minlength=8)

    before = loads(bias)
    for _ in range(200):
        bias = router_bias_update(bias, loads(bias), 0.002)
    after = loads(bias)
    assert before.max() / before.float().mean() > 1.5
    assert after.max() / after.float().mean() < 1.15
    assert math.isclose(after.sum().item(), before.sum().item())
