"""Triton's operators of training against their specifications: on a GPU in bf16, else interpreted in fp32.

The oracle is the specification in fp32, fed with the same inputs. Skipped, saying so, where triton is not installed.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from support import triton_interpreter
from support.naive import relative_error

triton_interpreter.ask()

from glm5.kernels import balance, basic, moe
from glm5.kernels import newton_schulz as newton_schulz_spec
from glm5.kernels.cross_entropy import linear_cross_entropy as cross_entropy
from glm5.kernels.indexer_loss import indexer_loss
from glm5.kernels.inverse import inverse_index
from glm5.kernels.triton import balance as sequence_balance
from glm5.kernels.triton import (
    basic_backward,
    heads_backward,
    moe_backward,
    muon,
    newton_schulz,
    norm_backward,
    pairs,
    routing_backward,
)
from glm5.kernels.triton import cross_entropy as fast_cross_entropy
from glm5.kernels.triton import indexer_loss as fast_loss
from glm5.kernels.triton import indexer_warmup as warmup
from glm5.kernels.visibility import Visibility

triton_interpreter.mend()

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
DTYPE = torch.bfloat16 if CUDA else torch.float32
TOLERANCE = 5e-3 if CUDA else 2e-6

pytestmark = pytest.mark.usefixtures("specification")  # what is compared with is plain PyTorch


def _random(*size: int, seed: int, scale: float = 1.0, dtype: torch.dtype = DTYPE) -> Tensor:
    return (torch.randn(*size, generator=torch.Generator().manual_seed(seed)) * scale).to(DEVICE, dtype)


def _gradients(call: Callable[..., Tensor], inputs: tuple[Tensor, ...], wide: bool) -> list[Tensor]:
    """The result and the gradients to every input, of the function itself or of its arithmetic in fp32."""
    leaves = [(x.float() if wide else x).detach().clone().requires_grad_() for x in inputs]
    out = call(*leaves)
    out.backward(_random(*out.shape, seed=99).to(out.dtype))
    return [out.detach(), *(x.grad for x in leaves if x.grad is not None)]


def _agree(ours: Callable[..., Tensor], oracle: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    results = _gradients(ours, inputs, wide=False)
    expected = _gradients(oracle, inputs, wide=True)
    assert len(results) == len(inputs) + 1 == len(expected)
    for result, wanted in zip(results, expected, strict=True):
        assert relative_error(result, wanted) < TOLERANCE
    return results


def test_swiglu() -> None:
    both = _random(2, 5, 72, seed=1)
    _agree(basic_backward.SwiGLU.apply, basic.swiglu, both[..., :36], both[..., 36:])


# --------------------------------------------------------------------------- experts
def _experts(tokens: int, experts: int, choices: int, width: int, inner: int) -> tuple[Tensor, ...]:
    x = _random(tokens, width, seed=tokens)
    gate_up = _random(experts, 2 * inner, width, seed=2, scale=width**-0.5)
    down = _random(experts, width, inner, seed=3, scale=inner**-0.5)
    pick = torch.rand(tokens, experts - 1, generator=torch.Generator().manual_seed(4))  # the last expert: nobody's
    weight = torch.rand(tokens, choices, generator=torch.Generator().manual_seed(5)).to(DEVICE)
    return x, gate_up, down, pick.argsort(-1)[:, :choices].to(DEVICE), weight


@pytest.mark.parametrize(("tokens", "experts", "choices"), [(1, 8, 2), (37, 5, 3), (90, 4, 2)])
def test_experts(tokens: int, experts: int, choices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if not CUDA:
        monkeypatch.setattr(moe_backward, "ROWS", (16, 32, 32, 4, 2))
        monkeypatch.setattr(moe_backward, "WEIGHTS", (16, 32, 16, 4, 2))
    x, gate_up, down, expert, weight = _experts(tokens, experts, choices, 48, 40)  # neither a multiple of the tiles
    results = _agree(
        lambda x, g, d, w: moe_backward.GroupedSwiGLU.apply(x, g, d, expert, w),
        lambda x, g, d, w: moe.grouped_swiglu(x, g, d, expert, w),
        *(x, gate_up, down, weight),
    )
    assert not results[2][-1].any(), "an expert without tokens has no gradient"
    assert not results[3][-1].any()


# --------------------------------------------------------------------------- linear cross-entropy
@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_linear_cross_entropy(blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_cross_entropy, "PIECE", 64)
    monkeypatch.setattr(fast_cross_entropy, "STRIPE", 128)
    tokens, width, vocab = 11, 24, 300  # neither pieces nor stripes divide the vocabulary
    hidden, head = _random(tokens, width, seed=1), _random(vocab, width, seed=2)
    targets = torch.randint(0, vocab, (tokens,), generator=torch.Generator().manual_seed(3)).to(DEVICE)
    weights = _random(tokens, seed=4, dtype=torch.float32)
    weights[5] = 0.0
    wide = [t.clone().float().requires_grad_() for t in (hidden, head)]
    oracle = cross_entropy(*wide, targets, weights, with_entropy=True)
    oracle.loss_sum.backward()
    each = vocab * hidden.element_size() + 128 * 4
    logprobs, entropy, dhidden, dhead = fast_cross_entropy.linear_cross_entropy(
        hidden, head, targets, weights, with_entropy=True, grad_hidden=True, grad_weight=True,
        budget=tokens * each // blocks + each,
    )  # fmt: skip
    assert dhidden is not None
    assert dhead is not None
    assert oracle.entropy_N is not None
    torch.testing.assert_close(logprobs, oracle.logprobs_N, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(entropy, oracle.entropy_N, atol=1e-4, rtol=1e-4)
    assert wide[0].grad is not None
    assert wide[1].grad is not None
    assert relative_error(dhidden, wide[0].grad) < TOLERANCE
    assert relative_error(dhead, wide[1].grad) < TOLERANCE


def test_scaling_rounds_once() -> None:
    x, factor = _random(3, 700, seed=1), torch.tensor(1 / 4095, device=DEVICE)
    scaled = fast_cross_entropy.scaled(x, factor, DTYPE)
    assert torch.equal(scaled, (x.float() * factor).to(DTYPE))
    assert torch.equal(fast_cross_entropy.scaled(x[:, ::2].float(), factor, DTYPE), scaled[:, ::2])


def test_linear_cross_entropy_without_gradients_takes_no_weights() -> None:
    hidden, head = _random(5, 16, seed=1), _random(70, 16, seed=2)
    head[7] = 40.0 * hidden[0]  # one logit far above the rest
    targets = torch.tensor([7, 0, 69, 3, 3], device=DEVICE)
    logprobs, entropy, *grads = fast_cross_entropy.linear_cross_entropy(hidden, head, targets, None)
    expected = (hidden.float() @ head.float().T).log_softmax(-1).gather(1, targets[:, None])[:, 0]
    torch.testing.assert_close(logprobs, expected, atol=1e-3, rtol=1e-4)
    assert entropy is None
    assert grads == [None, None]


# --------------------------------------------------------------------------- the indexer's loss
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("heads", [5, 16])
def test_indexer_loss_on_the_selection(heads: int, deterministic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_loss, "LEARN", (16, 4, 2))
    batch, queries, slots, keys, index_heads, width, latent, rotary = 2, 3, 40, 24, 16, 16, 32, 16
    index_q, index_k = _random(batch, queries, index_heads, width, seed=1), _random(batch, slots, width, seed=2)
    index_w = _random(batch, queries, index_heads, seed=3, scale=0.2, dtype=torch.float32)
    q, rows = _random(batch, queries, heads, latent + rotary, seed=4), _random(batch, slots, latent + rotary, seed=5)
    generator = torch.Generator().manual_seed(6)
    order = torch.rand(batch, queries, slots, generator=generator).argsort(-1)[..., :keys].sort(-1).values
    count = torch.randint(1, keys + 1, (batch, queries), generator=generator)
    count[0, 0], count[-1, -1] = keys, 0
    selected = torch.where(torch.arange(keys) < count[..., None], order, -1).to(DEVICE, torch.int32)
    last = torch.full((batch, queries), slots - 1, device=DEVICE)
    last[-1, -1] = -1
    visible = Visibility(torch.zeros_like(last), last, slots)

    wide = [t.clone().float().requires_grad_() for t in (index_q, index_w, index_k)]
    oracle = indexer_loss(*wide, q.float(), rows.float()[:, :, None], visible, selected, 0.2, keys)
    oracle.kl.backward()
    chosen = rows.float()[torch.arange(batch, device=DEVICE)[:, None, None], selected.clamp(min=0).long()]
    logits = torch.einsum("bthx,btkx->bthk", q.float(), chosen) * 0.2
    logits = logits.masked_fill((selected < 0)[:, :, None], -torch.inf)
    target = logits.softmax(-1).nan_to_num(0.0).mean(2)
    kl, mass, *grads = fast_loss.selected_loss(index_q, index_w, index_k, selected, target, deterministic=deterministic)
    torch.testing.assert_close(kl, oracle.kl.detach(), atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(mass, oracle.recall_sum, atol=1e-4, rtol=1e-4)
    for ours, leaf in zip(grads, wide, strict=True):
        assert ours is not None
        assert leaf.grad is not None
        assert relative_error(ours, leaf.grad) < TOLERANCE


@pytest.mark.parametrize("scratch", [1 << 20, 8 * 45 * 20])
def test_indexer_loss_over_intervals(scratch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warmup, "SCRATCH", scratch)
    for tile in ("LSE", "TARGET", "QUERY", "KEY"):
        monkeypatch.setattr(warmup, tile, (16, 16, 4, 2))
    batch, queries, slots, heads, index_heads, width, topk = 2, 37, 45, 3, 5, 16, 9
    index_q, index_k = _random(batch, queries, index_heads, width, seed=1), _random(batch, slots, width, seed=2)
    index_w = _random(batch, queries, index_heads, seed=3, scale=0.2, dtype=torch.float32)
    q, k = _random(batch, queries, heads, 24, seed=4), _random(batch, slots, heads, 24, seed=5)
    last = torch.arange(8, 8 + queries, device=DEVICE).expand(batch, queries).clone()
    first = torch.zeros_like(last)
    first[1, 10:], last[0, 0] = 12, -1  # a second document; a query that sees nothing
    wide = [t.clone().float().requires_grad_() for t in (index_q, index_w, index_k)]
    oracle = indexer_loss(*wide, q.float(), k.float(), Visibility(first, last, slots), None, 0.2, topk)
    oracle.kl.backward()
    kl, mass, top, *grads = warmup.interval_loss(index_q, index_w, index_k, q, k, first, last, slots, 0.2, topk)
    torch.testing.assert_close(kl, oracle.kl.detach(), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(mass, oracle.recall_sum, atol=1e-2 if CUDA else 1e-4, rtol=1e-3)
    torch.testing.assert_close(top, oracle.logit_max_H, atol=1e-3, rtol=1e-3)
    for ours, leaf in zip(grads, wide, strict=True):
        assert ours is not None
        assert leaf.grad is not None
        assert relative_error(ours, leaf.grad) < TOLERANCE


# --------------------------------------------------------------------------- Newton-Schulz
@pytest.mark.parametrize("shape", [(3, 40, 72), (1, 16, 16), (2, 33, 48)])
def test_symmetric_products(shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    if not CUDA:
        monkeypatch.setattr(newton_schulz, "TILE", (16, 32, 16, 4, 2))
    x = _random(*shape, seed=sum(shape), scale=shape[-1] ** -0.5)
    gram = newton_schulz.symmetric_product(x)
    wide = x.float() @ x.float().mT
    assert relative_error(gram, wide) < TOLERANCE
    assert torch.equal(gram, gram.mT)
    if shape[1] % 8:  # rows that the copy engine cannot address
        return
    square = newton_schulz.symmetric_product(gram, gram, alpha=-0.3, beta=0.5)
    assert relative_error(square, 0.5 * gram.float() - 0.3 * gram.float() @ gram.float()) < TOLERANCE
    assert torch.equal(square, square.mT)


def test_inverse_index_lists_who_selected_a_row() -> None:
    selected = torch.tensor([[0, 3, -1], [3, 4, -1], [0, 1, 2]], dtype=torch.int32)  # queries 1, 2, 3 of 2 x 2
    order, starts = inverse_index(selected, queries=2, batch=2, slots=5, start=1)
    lists = [order[a:b].tolist() for a, b in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)]
    assert lists == [[0], [], [], [1], [], [6], [7], [8], [3], [4]]


# --------------------------------------------------------------------------- heads
@pytest.mark.parametrize(("heads", "nope", "rotary", "value"), [(3, 12, 4, 16), (20, 24, 8, 16), (2, 6, 6, 10)])
def test_heads_put_together(heads: int, nope: int, rotary: int, value: int) -> None:
    """Queries rotated as they are copied, keys joined: of more heads than a block, of widths that are no powers of two,
    with gradients as attention gives them (heads outermost)."""
    rotation = basic.rotations(torch.tensor([[0, 1, 2, 3, 0], [7, 8, 9, 10, 11]]), rotary, 1e4).to(DEVICE)
    q = _random(2, 5, heads, nope + rotary, seed=1)
    _agree(
        lambda x: heads_backward.Turned.apply(x, rotation).transpose(1, 2),
        lambda x: basic.rope_heads(x, rotation).transpose(1, 2),
        q,
    )
    up, rows = _random(2, 5, heads, nope + value, seed=2), _random(2, 5, 7 + rotary, seed=3)

    def joined(make: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., Tensor]:
        return lambda up, rows: torch.cat([x.transpose(1, 2) for x in make(up, rows[..., 7:], nope)], -1)

    _agree(joined(heads_backward.KeysAndValues.apply), joined(basic.keys_and_values), up, rows)


# --------------------------------------------------------------------------- norms
@pytest.mark.parametrize("width", [24, 100, 1024, 5000])
def test_norms(width: int) -> None:
    """Alone, of a view; behind a sum, whose own gradient goes past the norm; beside columns that are rotated."""
    tokens = 37 if width < 2000 else 3
    x, y = _random(2, tokens, width + 8, seed=1), _random(2, tokens, width, seed=2)
    weight = _random(width, seed=3)
    rotation = basic.rotations(torch.arange(2 * tokens).view(2, tokens), 8, 1e4).to(DEVICE)
    _agree(
        lambda x, w: norm_backward.Norm.apply(x[..., :width], w, 1e-5),
        lambda x, w: basic.rms_norm(x[..., :width], w, 1e-5),
        *(x, weight),
    )
    _agree(
        lambda x, w: torch.cat(norm_backward.NormBeside.apply(x, w, 1e-5), -1),
        lambda x, w: torch.cat(basic.rms_norm_beside(x, w, 1e-5), -1),
        *(y, weight),
    )
    _agree(
        lambda x, y, w: torch.cat(norm_backward.AddNorm.apply(x, y, w, 1e-5), -1),
        lambda x, y, w: torch.cat(basic.add_rms_norm(x, y, w, 1e-5), -1),
        *(y, x[..., 8:], weight),
    )
    _agree(
        lambda x, w: norm_backward.LatentRows.apply(x, w, rotation, 1e-6),
        lambda x, w: basic.latent_rows(x, w, rotation, 1e-6),
        *(x, weight),
    )


@pytest.mark.parametrize("normalise", [True, False])
def test_router(normalise: bool) -> None:
    x, bias = _random(34, 72, seed=1), _random(24, seed=2, dtype=torch.float32)
    weight = _random(24, 72, seed=3, scale=0.1, dtype=torch.float32)
    how = dict(normalise=normalise, scaling=2.5)
    chosen = moe.route(x.float() @ weight.T, bias, 3, **how)[0]

    def ours(x: Tensor, weight: Tensor) -> Tensor:
        logits, expert, mixed, score = routing_backward.Routed.apply(x, weight, bias, 3, *how.values())
        assert torch.equal(expert, chosen)
        return torch.cat((logits, mixed, score), 1)

    def oracle(x: Tensor, weight: Tensor) -> Tensor:
        logits = x @ weight.T
        _, mixed, score = moe.route(logits, bias, 3, **how)
        return torch.cat((logits, mixed, score), 1)

    _agree(ours, oracle, x, weight)
    for some in (slice(24, 27), slice(27, 51)):  # where only the weights, or only the scores, have a gradient
        _agree(lambda x, w, some=some: ours(x, w)[:, some], lambda x, w, some=some: oracle(x, w)[:, some], x, weight)


@pytest.mark.parametrize("padded", [True, False])
def test_loads_and_balance(padded: bool) -> None:
    scores = _random(2, 540, 24, seed=1, dtype=torch.float32).sigmoid()
    experts = scores.argsort(-1)[..., [0, 5, 2]]
    valid = None
    if padded:  # a slice, of which one sequence is padding throughout
        valid = torch.rand(2, 600, generator=torch.Generator().manual_seed(2)).to(DEVICE)[:, :540] > 0.3
        valid[1] = False

    def ours(scores: Tensor) -> Tensor:
        loads, loss = sequence_balance.SequenceBalance.apply(scores, experts, valid)
        assert torch.equal(loads, moe.expert_loads(experts, 24, valid))
        return loss[None]

    _agree(ours, lambda scores: balance.sequence_balance_loss(scores, experts, valid)[None], scores)


def test_tokens_by_pairs_and_back() -> None:
    order = torch.randperm(24, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    place = order.argsort().view(8, 3)
    x, part = _random(8, 72, seed=2), _random(24, 72, seed=3)
    weight = torch.rand(8, 3, generator=torch.Generator().manual_seed(4)).to(DEVICE)
    for here in (24, 15):  # all pairs, or those whose experts are here: the others' places are any
        held = (place < here).float()
        at = place.clamp(max=here - 1)
        options = (order[:here], at, None if here == 24 else held)
        _agree(
            lambda x, o=options: pairs.RowsByPair.apply(x, *o),
            lambda x, o=options: moe.rows_by_pair(x, *o),
            x,
        )
        _agree(
            lambda part, weight, o=options, held=held: pairs.SumByToken.apply(part, *o[:2], weight * held),
            lambda part, weight, o=options, held=held: moe.sum_by_token(part, *o[:2], weight * held),
            *(part[:here], weight),
        )


def test_tokens_of_which_no_pair_is_here() -> None:
    x, none = _random(8, 72, seed=2).requires_grad_(), torch.empty(0, dtype=torch.int64, device=DEVICE)
    any_ = torch.zeros(8, 3, dtype=torch.int64, device=DEVICE)
    pairs.RowsByPair.apply(x, none, any_, any_.float()).sum().backward()
    assert x.grad is not None
    assert not x.grad.any()


# --------------------------------------------------------------------------- Muon's elementwise parts
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("move", [False, True])
def test_momentum_input_and_update(turned: bool, move: bool) -> None:
    """What plain PyTorch does, in place, of matrices at any strides, and of nothing else around them."""
    grad = _random(3, 70, 33, seed=1, dtype=torch.bfloat16)
    held = [_random(3, 140, 33, seed=2, dtype=torch.float32) for _ in range(2)]  # every second row is another's
    out = [torch.zeros(3, 33, 70, device=DEVICE).mT if turned else torch.zeros(3, 70, 33, device=DEVICE)] * 2
    found = []
    for nesterov, update, m, x in zip(
        (muon.nesterov, newton_schulz_spec.nesterov_input),
        (muon.update, newton_schulz_spec.move_weights),
        held,
        [o.clone() for o in out],
        strict=True,
    ):
        nesterov(grad, m[:, ::2], 0.95, x, move=move)
        weights = m.clone()
        update(weights[:, ::2], x, 0.9, -0.3)
        found.append((m, x, weights))
    for ours, theirs in zip(*found, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-6, atol=1e-6)
    assert move == bool((held[0] != _random(3, 140, 33, seed=2, dtype=torch.float32)).any())


def test_matrices_over_their_norms() -> None:
    x, norm = _random(3, 5, 77, seed=1, dtype=torch.float32), _random(3, seed=2, dtype=torch.float32).abs() + 0.5
    assert torch.equal(muon.divided(x, norm, torch.float32), x / norm[:, None, None])


def test_momentum_moves_as_in_plain_steps() -> None:
    grad, ours = _random(3, 50, 70, seed=1), _random(3, 50, 70, seed=2, dtype=torch.float32)
    plain = ours.clone()
    muon.momentum(grad, ours, 0.95)
    newton_schulz_spec.move_momentum(grad, plain, 0.95)
    assert torch.equal(ours, plain)
