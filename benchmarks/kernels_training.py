"""Time the operators of training on one Hopper GPU beside torch and beside the chip's limit.

    python benchmarks/kernels_training.py [--only mla_backward,indexer,warmup,experts,head,muon,swiglu] [--json FILE]

Medians of calls between two events; inputs are random and larger than the L2 cache. The error is the largest relative
2-norm of a gradient against fp32 where it is given; the tests check the rest. Floors as in `benchmarks/kernels.py`.
Read next: docs/kernels.md.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
from torch import Tensor

from glm5.kernels import cuda
from glm5.kernels.cross_entropy import linear_cross_entropy
from glm5.kernels.newton_schulz import newton_schulz
from glm5.kernels.triton import basic_backward, indexer_loss, indexer_warmup, moe_backward
from glm5.kernels.triton import cross_entropy as head
from glm5.kernels.visibility import Visibility
from inputs import random_selection
from timing import Table, floor_us, main, relative

SCALE = 1 / 16


# ---- sparse MLA ---------------------------------------------------------------------------------------------------


def mla_oracle(q: Tensor, kv: Tensor, selected: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """fp32: dq [N, 64, 576] and the rows' gradient [S, 576] of one sequence's queries."""
    dq, drows = torch.zeros_like(q, dtype=torch.float32), torch.zeros_like(kv, dtype=torch.float32)
    for n in range(q.shape[0]):
        index = selected[n].long()
        rows, query, g = kv[index].float(), q[n].float(), grad[n].float()
        p = (query @ rows.T * SCALE).softmax(-1)
        dp = g @ rows[:, :512].T
        ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * SCALE
        dq[n] = ds @ rows
        drow = ds.T @ query
        drow[:, :512] += p.T @ g
        drows.index_add_(0, index, drow)
    return dq, drows


def bench_mla(table: Table) -> None:
    for slots in (8192, 32768):
        bench_mla_case(table, slots)


def bench_mla_case(table: Table, slots: int) -> None:
    queries, keys = 4096, 2048
    floor = floor_us(0, 2.0 * queries * keys * 64 * (3 * 576 + 2 * 512))
    q = torch.randn(1, queries, 64, 576, device="cuda", dtype=torch.bfloat16)
    kv = torch.randn(1, slots, 576, device="cuda", dtype=torch.bfloat16)
    grad = torch.randn(1, queries, 64, 512, device="cuda", dtype=torch.bfloat16)
    selected = random_selection(queries, slots, keys)[None]
    few = 16
    oracle = mla_oracle(q[0, :few], kv[0], selected[0, :few], grad[0, :few])
    out, lse = cuda.sparse_mla(q, kv, selected, value_dim=512, scale=SCALE)
    for fixed in (False, True):

        def ours(n: int = queries, fixed: bool = fixed) -> tuple[Tensor, Tensor]:
            parts = (q[:, :n], kv, selected[:, :n], out[:, :n], lse[:, :n], grad[:, :n])
            return cuda.sparse_mla_backward(*parts, scale=SCALE, deterministic=fixed)

        found = ours(few)
        error = max(relative(found[0][0], oracle[0]), relative(found[1][0], oracle[1]))
        name = "ours (CUDA), fixed order" if fixed else "ours (CUDA)"
        table.add_call("MLA backward", f"4096 of {slots}", name, ours, floor, error)

    def plain() -> None:  # 256 queries, gathered, by autograd
        leaves = [x.detach().requires_grad_() for x in (q[0, :256], kv[0])]
        rows = leaves[1].index_select(0, selected[0, :256].flatten()).view(256, keys, 576)
        p = (torch.bmm(leaves[0], rows.mT).float() * SCALE).softmax(-1).bfloat16()
        torch.bmm(p, rows[..., :512]).backward(grad[0, :256])

    table.add_call(
        "MLA fwd+bwd",
        f"256 of {slots}",
        "torch, gathered",
        plain,
        floor_us(0, 2.0 * 256 * keys * 64 * 3840),
        0.0,
    )


# ---- the indexer's loss -------------------------------------------------------------------------------------------


def index_inputs(queries: int, slots: int) -> tuple[Tensor, Tensor, Tensor]:
    iq = torch.randn(1, queries, 32, 128, device="cuda", dtype=torch.bfloat16)
    ik = torch.randn(1, slots, 128, device="cuda", dtype=torch.bfloat16)
    return iq, torch.randn(1, queries, 32, device="cuda") / 64, ik


def bench_indexer(table: Table) -> None:
    queries, slots, keys, few = 4096, 32768, 2048, 16
    iq, iw, ik = index_inputs(queries, slots)
    q = torch.randn(1, queries, 64, 576, device="cuda", dtype=torch.bfloat16)
    kv = torch.randn(1, slots, 576, device="cuda", dtype=torch.bfloat16)
    selected = random_selection(queries, slots, keys)[None]
    _, lse = cuda.sparse_mla(q, kv, selected, value_dim=512, scale=SCALE)
    wanted = torch.zeros(few, keys, device="cuda")
    for n in range(few):
        wanted[n] = (q[0, n].float() @ kv[0, selected[0, n].long()].float().T * SCALE).softmax(-1).mean(0)

    def distribution() -> tuple[Tensor, Tensor]:
        return cuda.sparse_mla_target(q, kv, selected, lse, scale=SCALE)

    target = distribution()[0]
    floor = floor_us(0, 2.0 * queries * keys * 64 * 576)
    table.add_call(
        "distribution", "4096 of 32768", "ours (CUDA)", distribution, floor, relative(target[0, :few], wanted)
    )
    floor = floor_us(0, 2.0 * queries * keys * 32 * 128 * 4)
    for fixed in (False, True):
        name = "ours (Triton), fixed order" if fixed else "ours (Triton)"
        call = lambda fixed=fixed: indexer_loss.selected_loss(iq, iw, ik, selected, target, deterministic=fixed)  # noqa: E731
        table.add_call("indexer KL", "4096 of 32768", name, call, floor, 0.0)


def bench_warmup(table: Table) -> None:
    for tokens in (4096, 8192):
        bench_warmup_case(table, tokens)


def bench_warmup_case(table: Table, tokens: int) -> None:
    iq, iw, ik = index_inputs(tokens, tokens)
    q, k = (torch.randn(1, tokens, 64, 256, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    seen = Visibility.causal(1, tokens, device="cuda")
    bounds = (seen.first_BT, seen.last_BT, tokens)
    floor = floor_us(0, float(tokens) ** 2 * (64 * 256 + 3 * 32 * 128))

    def ours() -> object:
        return indexer_warmup.interval_loss(iq, iw, ik, q, k, *bounds, SCALE, 2048, select=cuda.stable_topk)

    table.add_call("warm-up KL", f"{tokens} causal", "ours (Triton)", ours, floor, 0.0)


# ---- experts, head, Muon, SwiGLU ----------------------------------------------------------------------------------


def bench_experts(table: Table) -> None:
    experts, width, inner = 256, 6144, 2048
    gate_up = torch.empty(experts, 2 * inner, width, device="cuda", dtype=torch.bfloat16).normal_(std=width**-0.5)
    down = torch.empty(experts, width, inner, device="cuda", dtype=torch.bfloat16).normal_(std=inner**-0.5)
    weights = [gate_up.requires_grad_(), down.requires_grad_()]
    for tokens in (4096, 16384):
        bench_experts_case(table, weights, tokens)


def bench_experts_case(table: Table, weights: list[Tensor], tokens: int) -> None:
    (gate_up, down), choices = weights, 8
    experts, width, inner = down.shape
    x = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    expert = torch.rand(tokens, experts, device="cuda").topk(choices, -1).indices
    mixture = torch.rand(tokens, choices, device="cuda", requires_grad=True)
    grad = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16)
    leaves = (x, *weights, mixture)

    def ours() -> None:
        torch.autograd.grad(moe_backward.GroupedSwiGLU.apply(x, *weights, expert, mixture), leaves, grad)

    def library() -> None:
        order = expert.flatten().argsort(stable=True)
        ends = torch.bincount(expert.flatten(), minlength=experts).cumsum(0).int()
        hidden = torch._grouped_mm(x[order // choices], gate_up.transpose(1, 2), offs=ends)
        gate, up = hidden.chunk(2, -1)
        part = torch._grouped_mm(torch.nn.functional.silu(gate) * up, down.transpose(1, 2), offs=ends)
        whole = torch.empty_like(part).index_copy(0, order, part).view(tokens, choices, width)
        torch.autograd.grad((whole.float() * mixture[..., None]).sum(1).bfloat16(), leaves, grad)

    pairs = tokens * choices
    flop, moved = 6.0 * pairs * width * inner, 2.0 * experts * 3 * width * inner
    floor = 3 * floor_us(moved, flop)
    table.add_call("experts fwd+bwd", f"{tokens} tokens", "ours", ours, floor, 0.0)
    table.add_call("experts fwd+bwd", f"{tokens} tokens", "torch._grouped_mm, autograd", library, floor, 0.0)


def bench_head(table: Table) -> None:
    tokens, width, vocab, few = 4096, 6144, 154880, 64
    hidden = torch.randn(tokens, width, device="cuda").bfloat16()
    weight = (torch.randn(vocab, width, device="cuda") * 2 * width**-0.5).bfloat16()
    targets, factors = torch.randint(0, vocab, (tokens,), device="cuda"), torch.rand(tokens, device="cuda")

    def ours(n: int = tokens) -> tuple[Tensor | None, ...]:
        options = {"with_entropy": True, "grad_hidden": True, "grad_weight": True}
        return head.linear_cross_entropy(hidden[:n], weight, targets[:n], factors[:n], **options)

    p = (hidden[:few].float() @ weight.float().T).softmax(-1)
    p[torch.arange(few), targets[:few]] -= 1.0
    p *= factors[:few, None]
    found = ours(few)
    assert found[2] is not None
    assert found[3] is not None
    error = max(relative(found[2], p @ weight.float()), relative(found[3], p.T @ hidden[:few].float()))
    floor = floor_us(0, 6.0 * tokens * width * vocab)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    ours()
    extra = torch.cuda.max_memory_allocated() - before - weight.nbytes - tokens * width * 4
    print(f"head: {extra / 2**30:.2f} GiB besides the two gradients")
    table.add_call("head and loss", "4096 x 154880", "ours, with entropy", ours, floor, error)
    leaves = hidden.requires_grad_(), weight.requires_grad_()

    def full() -> None:
        loss = torch.nn.functional.cross_entropy((hidden @ weight.T).float(), targets, reduction="none") @ factors
        torch.autograd.grad(loss, leaves)

    def specification() -> None:
        torch.autograd.grad(linear_cross_entropy(hidden, weight, targets, factors).loss_sum, leaves)

    table.add_call("head and loss", "4096 x 154880", "ours, through autograd", specification, floor, error)
    table.add_call("head and loss", "4096 x 154880", "torch, all logits", full, floor, 0.0)
    try:
        from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction as Liger
    except Exception as problem:
        print(f"Liger takes no part: {problem}")
        return

    def liger() -> None:
        found = Liger.apply(hidden, weight, targets)
        torch.autograd.grad(found[0] if isinstance(found, tuple) else found, leaves)

    table.add_call("head and loss", "4096 x 154880", "Liger", liger, floor, 0.0)


def bench_muon(table: Table) -> None:
    for n, rows, columns in ((16, 2048, 6144), (2, 6144, 16384), (64, 256, 2048)):
        x = torch.randn(n, rows, columns, device="cuda", dtype=torch.bfloat16)
        floor = floor_us(0, 10.0 * n * rows * rows * (1.5 * columns + 0.5 * rows))
        for name, mode in (("ours", ""), ("torch", "torch")):
            os.environ["GLM5_KERNELS"] = mode
            table.add_call("Newton-Schulz", f"{n} x {rows} x {columns}", name, lambda x=x: newton_schulz(x), floor, 0.0)
        os.environ["GLM5_KERNELS"] = ""


def bench_swiglu(table: Table) -> None:
    shape = (8192, 12288)
    gate, up = (torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    grad = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    floor = floor_us(8.0 * gate.nbytes)
    plain = lambda gate, up: torch.nn.functional.silu(gate) * up  # noqa: E731
    for name, call in (("ours (Triton)", basic_backward.SwiGLU.apply), ("torch", plain)):
        run = lambda call=call: torch.autograd.grad(call(gate, up), (gate, up), grad)  # noqa: E731
        table.add_call("SwiGLU fwd+bwd", "8192 x 12288", name, run, floor, 0.0)


BENCHES: dict[str, Callable[[Table], None]] = {
    "mla_backward": bench_mla,
    "indexer": bench_indexer,
    "warmup": bench_warmup,
    "experts": bench_experts,
    "head": bench_head,
    "muon": bench_muon,
    "swiglu": bench_swiglu,
}


if __name__ == "__main__":
    main(__doc__, BENCHES)
