"""The chunked head and loss against full logits in float64: every chunk size, weights, dtypes, shared heads."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from glm5.kernels.cross_entropy import linear_cross_entropy, linear_logprobs
from glm5.utils.errors import DataError

N, D, V = 1100, 12, 90


def _inputs(n=N, d=D, v=V, seed=0):
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(n, d, generator=g, dtype=torch.float64)
    weight = torch.randn(v, d, generator=g, dtype=torch.float64)
    targets = torch.randint(0, v, (n,), generator=g)
    weights = torch.rand(n, generator=g, dtype=torch.float64)
    weights[::5] = 0
    return hidden, weight, targets, weights


def _reference(hidden, weight, targets, weights, scale=1.0):
    """Loss, log-probabilities, entropies and gradients by autograd on the full float64 logits."""
    hidden, weight = (t.detach().double().requires_grad_() for t in (hidden, weight))
    logp = F.log_softmax(hidden @ weight.T, -1)
    picked = logp.gather(1, targets[:, None]).squeeze(1)
    loss = -(picked * weights.double()).sum()
    (loss * scale).backward()
    entropy = -(logp.exp() * logp).sum(-1)
    return loss.detach(), picked.detach(), entropy.detach(), hidden.grad, weight.grad


@pytest.mark.parametrize("chunk", [1, 2, 7, 64, 1024, 1099, 1100, 1101, None])
@pytest.mark.parametrize(("dtype", "tol"), [(torch.float64, 1e-12), (torch.float32, 2e-5)])
def test_every_chunk_size_equals_full_float64_logits(chunk, dtype, tol):
    hidden, weight, targets, weights = _inputs()
    loss, logprobs, entropy, grad_hidden, grad_weight = _reference(hidden, weight, targets, weights, scale=0.37)
    h, w = (t.to(dtype).requires_grad_() for t in (hidden, weight))
    out = linear_cross_entropy(h, w, targets, weights, chunk=chunk, with_entropy=True)
    (out.loss_sum * 0.37).backward()
    close = lambda a, b: torch.testing.assert_close(a.double(), b, atol=tol, rtol=tol)  # noqa: E731
    close(out.loss_sum, loss)
    close(out.logprobs_N, logprobs)
    close(out.entropy_N, entropy)
    close(h.grad, grad_hidden)
    close(w.grad, grad_weight)
    assert not out.logprobs_N.requires_grad
    assert not out.entropy_N.requires_grad


def test_gradient_of_gradcheck():
    hidden, weight, targets, weights = _inputs(5, 3, 7)
    weights[1] = -0.5

    def loss(h, w):
        return linear_cross_entropy(h, w, targets, weights, chunk=2).loss_sum

    assert torch.autograd.gradcheck(loss, (hidden.requires_grad_(), weight.requires_grad_()))


def test_bf16_inputs_keep_fp32_logits_and_an_fp32_accumulator():
    hidden, weight, targets, weights = _inputs(512, 16, 64)
    h, w = hidden.bfloat16().requires_grad_(), weight.bfloat16().requires_grad_()
    loss, logprobs, _, grad_hidden, grad_weight = _reference(h.detach(), w.detach(), targets, weights)
    out = linear_cross_entropy(h, w, targets, weights, chunk=1)
    out.loss_sum.backward()
    assert out.loss_sum.dtype == out.logprobs_N.dtype == torch.float32
    torch.testing.assert_close(out.loss_sum.double(), loss, rtol=1e-6, atol=0)
    torch.testing.assert_close(out.logprobs_N.double(), logprobs, rtol=0, atol=1e-5)
    # 512 chunks added in bf16 would drift; here each gradient is the right one, rounded once.
    for got, want in ((h.grad, grad_hidden), (w.grad, grad_weight)):
        assert got.dtype == torch.bfloat16
        torch.testing.assert_close(got.double(), want, rtol=2**-8, atol=1e-5)


def test_weight_zero_ignores_a_token_exactly():
    hidden, weight, targets, weights = _inputs()
    kept = weights > 0
    h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    linear_cross_entropy(h, w, targets, weights, chunk=9).loss_sum.backward()
    assert not h.grad[~kept].any()
    h2, w2 = hidden[kept].clone().requires_grad_(), weight.clone().requires_grad_()
    linear_cross_entropy(h2, w2, targets[kept], weights[kept]).loss_sum.backward()
    torch.testing.assert_close(w.grad, w2.grad, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(h.grad[kept], h2.grad, atol=1e-12, rtol=1e-12)


def test_weights_default_to_one():
    hidden, weight, targets, _ = _inputs()
    out = linear_cross_entropy(hidden, weight, targets)
    torch.testing.assert_close(out.loss_sum, F.cross_entropy(hidden @ weight.T, targets, reduction="sum"))


def test_one_head_used_twice_gets_both_gradients():
    hidden, weight, targets, weights = _inputs()
    other = hidden.flip(0)
    w = weight.clone().requires_grad_()
    main = linear_cross_entropy(hidden, w, targets, weights, chunk=13).loss_sum
    mtp = linear_cross_entropy(other, w, targets, weights, chunk=17).loss_sum
    (main + 0.1 * mtp).backward()
    one = _reference(hidden, weight, targets, weights)[4]
    two = _reference(other, weight, targets, weights)[4]
    torch.testing.assert_close(w.grad, one + 0.1 * two, atol=1e-12, rtol=1e-12)


def test_backward_can_be_walked_twice_with_the_same_result():
    hidden, weight, targets, weights = _inputs()
    h, w = hidden.requires_grad_(), weight.requires_grad_()
    loss = linear_cross_entropy(h, w, targets, weights).loss_sum
    first = torch.autograd.grad(loss, (h, w), torch.tensor(3.0, dtype=torch.float64), retain_graph=True)
    again = torch.autograd.grad(loss, (h, w), torch.tensor(3.0, dtype=torch.float64))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("which", ["hidden", "weight"])
def test_only_the_gradient_that_is_needed(which):
    hidden, weight, targets, weights = _inputs()
    *_, grad_hidden, grad_weight = _reference(hidden, weight, targets, weights)
    leaf = hidden if which == "hidden" else weight
    leaf.requires_grad_()
    linear_cross_entropy(hidden, weight, targets, weights).loss_sum.backward()
    torch.testing.assert_close(leaf.grad, grad_hidden if which == "hidden" else grad_weight)


def test_without_grad_the_values_are_the_same_bits():
    hidden, weight, targets, weights = _inputs()
    with_grad = linear_cross_entropy(hidden, weight.requires_grad_(), targets, weights, chunk=10)
    with torch.no_grad():
        without = linear_cross_entropy(hidden, weight, targets, weights, chunk=10)
    assert not without.loss_sum.requires_grad
    assert torch.equal(with_grad.loss_sum.detach(), without.loss_sum)
    assert torch.equal(with_grad.logprobs_N, without.logprobs_N)


def test_full_logits_are_never_held():
    hidden, weight, targets, weights = _inputs(256, 8, 512)
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for t in out if isinstance(out, (tuple, list)) else (out,):
                if isinstance(t, torch.Tensor):
                    largest = max(largest, t.untyped_storage().nbytes() // t.element_size())
            return out

    h, w = hidden.requires_grad_(), weight.requires_grad_()
    with Watch():
        linear_cross_entropy(h, w, targets, weights, chunk=16).loss_sum.backward()
    assert 16 * 512 <= largest <= 16 * 512 * 1.01


def test_large_logits_neither_overflow_nor_vanish():
    hidden = torch.tensor([[1000.0], [-1000.0]])
    weight = torch.tensor([[1.0], [0.0], [-1.0]])
    out = linear_cross_entropy(hidden, weight, torch.tensor([2, 2]), with_entropy=True)
    torch.testing.assert_close(out.logprobs_N, torch.tensor([-2000.0, 0.0]))
    assert torch.equal(out.entropy_N, torch.zeros(2))


def test_uniform_logits_have_known_values():
    out = linear_cross_entropy(torch.zeros(3, 4), torch.ones(8, 4), torch.tensor([0, 5, 7]), with_entropy=True)
    log8 = torch.full((3,), 8.0).log()
    torch.testing.assert_close(out.logprobs_N, -log8)
    torch.testing.assert_close(out.entropy_N, log8)
    torch.testing.assert_close(out.loss_sum, log8.sum())


def test_linear_logprobs_for_evaluation():
    hidden, weight, targets, _ = _inputs()
    logits = hidden @ weight.T
    out = linear_logprobs(hidden.requires_grad_(), weight, targets, chunk=11, with_argmax=True)
    torch.testing.assert_close(out.logprobs_N, F.log_softmax(logits, -1).gather(1, targets[:, None])[:, 0])
    assert torch.equal(out.argmax_N, logits.argmax(-1))
    assert out.entropy_N is None
    assert not out.logprobs_N.requires_grad
    tie = linear_logprobs(torch.ones(1, 1), torch.ones(5, 1), torch.tensor([3]), with_argmax=True)
    assert tie.argmax_N.item() == 0


@pytest.mark.parametrize("bad", [-100, -1, V])
def test_a_target_outside_the_vocabulary_is_named(bad):
    hidden, weight, targets, weights = _inputs()
    targets[4] = bad
    weights[4] = 0
    with pytest.raises(DataError, match=f"target {bad} .* vocabulary of {V}"):
        linear_cross_entropy(hidden, weight, targets, weights)
    with pytest.raises(DataError, match=f"target {bad} "):
        linear_logprobs(hidden, weight, targets)


def test_no_tokens_make_a_zero_loss_and_zero_gradients():
    w = torch.ones(5, 3, requires_grad=True)
    out = linear_cross_entropy(torch.zeros(0, 3), w, torch.zeros(0, dtype=torch.int64))
    out.loss_sum.backward()
    assert out.loss_sum.item() == 0
    assert not w.grad.any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(targets=torch.zeros(N, dtype=torch.int32)), "int64"),
        (dict(targets=torch.zeros(N + 1, dtype=torch.int64)), "targets"),
        (dict(weights=torch.ones(N - 1)), "weights"),
        (dict(weight=torch.ones(V, D + 1)), "hidden"),
        (dict(chunk=0), "chunk"),
    ],
)
def test_misshapen_arguments_are_refused(change, message):
    hidden, weight, targets, weights = _inputs()
    arguments = dict(hidden=hidden, weight=weight, targets=targets, weights=weights, chunk=None) | change
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(
            arguments["hidden"],
            arguments["weight"],
            arguments["targets"],
            arguments["weights"],
            chunk=arguments["chunk"],
        )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("chunk", [33, None])
def test_bf16_on_a_gpu_equals_float64(chunk):
    hidden, weight, targets, weights = (t.cuda() for t in _inputs(256, 64, 1000))
    h, w = hidden.bfloat16().requires_grad_(), weight.bfloat16().requires_grad_()
    loss, logprobs, _, grad_hidden, grad_weight = _reference(h.detach(), w.detach(), targets, weights)
    out = linear_cross_entropy(h, w, targets, weights, chunk=chunk)
    out.loss_sum.backward()
    torch.testing.assert_close(out.loss_sum.double(), loss, rtol=1e-5, atol=0)
    torch.testing.assert_close(out.logprobs_N.double(), logprobs, rtol=0, atol=1e-4)
    for got, want in ((h.grad, grad_hidden), (w.grad, grad_weight)):
        assert ((got.double() - want).norm() / want.norm()).item() < 2**-7
