"""The language-model head and its cross-entropy in one operator, in chunks of the sequence: no full logits.

GLM-5's head has 154,880 rows, so the logits of one 4,096-token sequence in fp32 take 2.5 GB, and as much again
for their gradient. The report (section 2.4.1) runs projection and loss, forward and backward, chunk by
chunk. Here the forward pass already makes the gradients of each chunk while its logits are at hand: three matrix
multiplications a chunk, none repeated, and a backward pass that only scales. Everything is a sum, never a mean:
the caller divides once by the global token count, so a gradient does not depend on how a batch was split.

Legend: N tokens · D model width · V vocabulary · c tokens of one chunk. Read next: `train.losses`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from glm5.kernels.dispatch import pick
from glm5.utils.errors import DataError

# Elements of one chunk's logits. On a CPU they should stay near the cache; a GPU wants large products.
CHUNK_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 28}


class LinearCrossEntropy(NamedTuple):
    """What `linear_cross_entropy` returns. Only `loss_sum` carries a gradient.

    Attributes:
        loss_sum: scalar fp32, the sum of weight times -log p(target), in nats.
        logprobs_N: fp32, log p(target) of every token, whatever its weight.
        entropy_N: fp32, entropy of every token's distribution in nats, or None when not asked for.
    """

    loss_sum: Tensor
    logprobs_N: Tensor
    entropy_N: Tensor | None


class LinearLogprobs(NamedTuple):
    """What `linear_logprobs` returns: like `LinearCrossEntropy`; int64 `argmax_N` is None unless asked for."""

    logprobs_N: Tensor
    argmax_N: Tensor | None
    entropy_N: Tensor | None


def linear_cross_entropy(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    weights_N: Tensor | None = None,
    *,
    chunk: int | None = None,
    with_entropy: bool = False,
) -> LinearCrossEntropy:
    """Cross-entropy of `softmax(hidden @ weight.T)` against `targets`, summed with a weight for each token.

    Logits, softmax and the accumulator of the head's gradient are fp32, also for bf16 inputs (float64 for float64
    inputs). On CUDA a bf16 chunk's softmax is rounded to bf16 for the two gradient products.

    Args:
        hidden_ND: final hidden states, after the last norm.
        weight_VD: the head; it may be used by several calls (MTP shares it), and gradients add up.
        targets_N: int64 ids in [0, V), also where the weight is 0.
        weights_N: weight of each token; 0 ignores it; None means 1 for all. Negative weights are allowed: a
            policy gradient is this loss with the (detached) coefficient of each token as its weight.
        chunk: tokens to a chunk; by default as many as `CHUNK_ELEMENTS` allows.
        with_entropy: also return entropies (one more buffer of a chunk's size).

    Raises:
        ValueError: shapes or dtypes do not fit together.
        DataError: a target lies outside the vocabulary.
    """
    _check(hidden_ND, weight_VD, targets_N, weights_N, chunk)
    chunk = chunk or _default_chunk(weight_VD)

    def run(weights_N: Tensor, grad_hidden: bool, grad_weight: bool) -> Pass:
        return _forward(
            hidden_ND, weight_VD, targets_N, weights_N, chunk, with_entropy, False, grad_hidden, grad_weight
        )

    return summed(hidden_ND, weight_VD, weights_N, run)


@torch.no_grad()
def linear_logprobs(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    *,
    chunk: int | None = None,
    with_argmax: bool = False,
    with_entropy: bool = False,
) -> LinearLogprobs:
    """log p(target) of every token, for evaluation; arguments and errors as `linear_cross_entropy`."""
    _check(hidden_ND, weight_VD, targets_N, None, chunk)
    chunk = chunk or _default_chunk(weight_VD)
    run = _forward(hidden_ND, weight_VD, targets_N, None, chunk, with_entropy, with_argmax, False, False)
    return LinearLogprobs(run.logprobs_N, run.argmax_N, run.entropy_N)


class Pass(NamedTuple):
    """What one pass over the chunks gives. Gradients, where asked for, are those of -sum(weights * logprobs), in the
    accumulation dtype."""

    logprobs_N: Tensor
    entropy_N: Tensor | None
    argmax_N: Tensor | None
    grad_hidden_ND: Tensor | None
    grad_weight_VD: Tensor | None


def summed(
    hidden_ND: Tensor, weight_VD: Tensor, weights_N: Tensor | None, run: Callable[[Tensor, bool, bool], Pass]
) -> LinearCrossEntropy:
    """The loss of a pass over hidden states and (rows of) a head, with its gradient.

    Args:
        run: the pass, given the weights, and whether it must make the gradients to hidden states and to the head.
    """
    accum = torch.promote_types(hidden_ND.dtype, torch.float32)
    if weights_N is None:
        weights_N = torch.ones((), dtype=accum, device=hidden_ND.device).expand(hidden_ND.shape[0])
    weights_N = weights_N.detach().to(accum)
    if torch.is_grad_enabled() and (hidden_ND.requires_grad or weight_VD.requires_grad):
        return LinearCrossEntropy(*_Summed.apply(hidden_ND, weight_VD, weights_N, run))
    out = run(weights_N, False, False)
    return LinearCrossEntropy(-(out.logprobs_N @ weights_N), out.logprobs_N, out.entropy_N)


class _Summed(torch.autograd.Function):
    """Gradients are made in the forward pass, for an output gradient of 1; backward multiplies by the real one."""

    @staticmethod
    def forward(
        ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, weights_N: Tensor, run: Callable[[Tensor, bool, bool], Pass]
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        out = run(weights_N, *ctx.needs_input_grad[:2])
        ctx.save_for_backward(out.grad_hidden_ND, out.grad_weight_VD)
        ctx.dtypes = hidden_ND.dtype, weight_VD.dtype
        ctx.mark_non_differentiable(*(t for t in (out.logprobs_N, out.entropy_N) if t is not None))
        ctx.set_materialize_grads(False)
        return -(out.logprobs_N @ weights_N), out.logprobs_N, out.entropy_N

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        if grad_loss is None:
            return (None,) * 4
        # Never in place: the graph may be kept and walked again. Straight into the input's dtype, with no fp32 copy.
        saved = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        scaled = [g if g is None else _scaled(g, grad_loss, d) for g, d in saved]
        return (*scaled, None, None)


def _forward(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    weights_N: Tensor | None,
    chunk: int,
    with_entropy: bool,
    with_argmax: bool,
    grad_hidden: bool,
    grad_weight: bool,
) -> Pass:
    fast = pick("linear_cross_entropy", hidden_ND, weight_VD) if not with_argmax else None
    if fast is not None:
        logprobs_N, entropy_N, *grads = fast(
            hidden_ND, weight_VD, targets_N, weights_N, with_entropy, grad_hidden, grad_weight
        )
        return Pass(logprobs_N, entropy_N, None, *grads)
    (n, d), v = hidden_ND.shape, weight_VD.shape[0]
    accum = torch.promote_types(hidden_ND.dtype, torch.float32)
    # Tensor cores multiply bf16 into fp32 directly; elsewhere operands are brought to `accum` first.
    mixed = hidden_ND.is_cuda and hidden_ND.dtype == weight_VD.dtype and hidden_ND.dtype != accum
    operand = hidden_ND.dtype if mixed else accum
    weight_VD = weight_VD.to(operand)

    new = hidden_ND.new_empty
    logprobs_N = new(n, dtype=accum)
    entropy_N = new(n, dtype=accum) if with_entropy else None
    argmax_N = new(n, dtype=torch.int64) if with_argmax else None
    grad_hidden_ND = new((n, d), dtype=accum) if grad_hidden else None
    grad_weight_VD = hidden_ND.new_zeros((v, d), dtype=accum) if grad_weight else None
    buffer_cV = new((min(chunk, n), v), dtype=accum)

    for start in range(0, n, chunk):
        part = slice(start, min(start + chunk, n))
        hidden_cD = hidden_ND[part].to(operand)
        target_c1 = targets_N[part, None]
        exp_cV = buffer_cV[: hidden_cD.shape[0]]
        product(hidden_cD, weight_VD.T, out=exp_cV)
        if argmax_N is not None:
            argmax_N[part] = exp_cV.argmax(-1)

        exp_cV.sub_(exp_cV.amax(-1, keepdim=True))
        target_logit_c1 = exp_cV.gather(1, target_c1)
        shifted_cV = exp_cV.clone() if entropy_N is not None else None
        sum_c1 = exp_cV.exp_().sum(-1, keepdim=True)
        log_sum_c1 = sum_c1.log()
        logprobs_N[part] = (target_logit_c1 - log_sum_c1).squeeze(1)
        if entropy_N is not None and shifted_cV is not None:
            # A logit of -inf has probability 0 and contributes 0, not 0 * -inf.
            shifted_cV.clamp_min_(torch.finfo(accum).min)
            mean_c = shifted_cV.mul_(exp_cV).sum(-1) / sum_c1.squeeze(1)
            entropy_N[part] = log_sum_c1.squeeze(1) - mean_c

        if weights_N is not None and (grad_hidden_ND is not None or grad_weight_VD is not None):
            # d loss / d logits = (weight / sum) * (exp - sum * onehot). The factor in front belongs to the row,
            # so it is applied to the narrow operands (D wide) and not to the logits (V wide).
            row_c1 = weights_N[part, None] / sum_c1
            exp_cV.scatter_add_(1, target_c1, -sum_c1)
            error_cV = exp_cV.to(operand)
            if grad_hidden_ND is not None:
                product(error_cV, weight_VD, out=grad_hidden_ND[part])
                grad_hidden_ND[part].mul_(row_c1)
            if grad_weight_VD is not None:
                product(error_cV.T, (hidden_cD * row_c1).to(operand), out=grad_weight_VD, add=True)
    return Pass(logprobs_N, entropy_N, argmax_N, grad_hidden_ND, grad_weight_VD)


def _scaled(grad: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    fast = pick("scaled", grad)
    if fast is not None:
        found: Tensor = fast(grad, factor, dtype)
        return found
    return torch.mul(grad, factor, out=torch.empty_like(grad, dtype=dtype))


def product(a: Tensor, b: Tensor, *, out: Tensor, add: bool = False) -> None:
    """out = a @ b, or out += a @ b; bf16 operands (CUDA) arrive in an fp32 `out` with no rounding between."""
    if a.dtype == out.dtype:
        torch.addmm(out, a, b, beta=int(add), out=out)
    else:
        torch.addmm(out, a, b, out_dtype=out.dtype, beta=int(add), out=out)


def _default_chunk(weight_VD: Tensor) -> int:
    elements = CHUNK_ELEMENTS.get(weight_VD.device.type, CHUNK_ELEMENTS["cuda"])
    return max(1, elements // weight_VD.shape[0])


def _check(
    hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, weights_N: Tensor | None, chunk: int | None
) -> None:
    n = hidden_ND.shape[0]
    if hidden_ND.ndim != 2 or weight_VD.ndim != 2 or hidden_ND.shape[1] != weight_VD.shape[1]:
        raise ValueError(f"need hidden [N, D] and weight [V, D]: {list(hidden_ND.shape)}, {list(weight_VD.shape)}")
    if targets_N.shape != (n,) or targets_N.dtype != torch.int64:
        raise ValueError(f"targets must be int64 [{n}], got {targets_N.dtype} {list(targets_N.shape)}")
    if weights_N is not None and weights_N.shape != (n,):
        raise ValueError(f"weights must be [{n}], got {list(weights_N.shape)}")
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk={chunk}: must be at least 1")
    vocab = weight_VD.shape[0]
    inside = ((targets_N >= 0) & (targets_N < vocab)).all()
    if targets_N.is_cuda:
        # No wait for the device: the launch fails there instead.
        torch._assert_async(inside, f"a target lies outside the vocabulary of {vocab}")
    elif not inside:
        bad = targets_N[(targets_N < 0) | (targets_N >= vocab)][0].item()
        raise DataError(
            f"target {bad} lies outside the vocabulary of {vocab}",
            "Tokenize with this model's tokenizer; to ignore a token give it weight 0 and any valid id",
        )
