"""The indexer's loss on the selected set, and its gradients, in Triton.

The target, the main attention's distribution over a query's selected positions averaged over heads, is one number a
pair (`cuda.sparse_mla_target`). The kernel scores the same positions with the indexer twice: once for the log-sum-exp
of the scores, once for the KL and its gradients to index queries, weights and keys. Read next:
`glm5.kernels.indexer_loss`, the specification.
"""

# mypy: disallow-untyped-defs=false, disallow-incomplete-defs=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from glm5.kernels.inverse import inverse_index


@triton.jit
def _learn(
    iq_ptr, iw_ptr, ik_ptr, selected_ptr, target_ptr, kl_ptr, mass_ptr, diq_ptr, diw_ptr, dik_ptr,
    keys, queries, slots, first, ik_batch_stride, ik_stride,
    J: tl.constexpr, I: tl.constexpr, BLOCK_K: tl.constexpr, GRAD: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """KL of one query, and its gradients; index queries and weights are contiguous. `first`: number of query 0."""
    row = tl.program_id(0).to(tl.int64)
    head_J = tl.arange(0, J)
    col_I = tl.arange(0, I)
    iq_JI = tl.load(iq_ptr + (row * J + head_J[:, None]) * I + col_I[None, :])
    w_J = tl.load(iw_ptr + row * J + head_J).to(tl.float32)
    ik_base = ik_ptr + ((first + row) // queries) * ik_batch_stride
    top = -float("inf")
    total = 0.0
    for start in range(0, keys, BLOCK_K):
        at_K = start + tl.arange(0, BLOCK_K)
        slot_K = tl.load(selected_ptr + row * keys + at_K, mask=at_K < keys, other=-1)
        real_K = slot_K >= 0
        ik_KI = tl.load(
            ik_base + tl.maximum(slot_K, 0).to(tl.int64)[:, None] * ik_stride + col_I[None, :],
            mask=real_K[:, None],
            other=0.0,
        )
        dots_KJ = tl.dot(ik_KI, tl.trans(iq_JI))
        score_K = tl.sum(tl.maximum(dots_KJ, 0.0) * w_J[None, :], 1)
        score_K = tl.where(real_K, score_K, -float("inf"))
        new = tl.maximum(top, tl.max(score_K, 0))
        shift = tl.where(new == -float("inf"), 0.0, new)
        total = total * tl.exp(top - shift) + tl.sum(tl.exp(score_K - shift), 0)
        top = new
    lse = tl.where(total > 0.0, top + tl.log(tl.where(total > 0.0, total, 1.0)), 0.0)
    kl = 0.0
    mass = 0.0
    diw_J = tl.zeros([J], tl.float32)
    diq_IJ = tl.zeros([I, J], tl.float32)
    for start in range(0, keys, BLOCK_K):
        at_K = start + tl.arange(0, BLOCK_K)
        slot_K = tl.load(selected_ptr + row * keys + at_K, mask=at_K < keys, other=-1)
        target_K = tl.load(target_ptr + row * keys + at_K, mask=at_K < keys, other=0.0)
        real_K = slot_K >= 0
        from_K = tl.maximum(slot_K, 0).to(tl.int64)
        ik_KI = tl.load(ik_base + from_K[:, None] * ik_stride + col_I[None, :], mask=real_K[:, None], other=0.0)
        dots_KJ = tl.dot(ik_KI, tl.trans(iq_JI))
        relu_KJ = tl.maximum(dots_KJ, 0.0)
        guess_K = tl.sum(relu_KJ * w_J[None, :], 1) - lse
        log_K = tl.log(tl.where(target_K > 0.0, target_K, 1.0))
        kl += tl.sum(tl.where(target_K > 0.0, target_K * (log_K - guess_K), 0.0), 0)
        mass += tl.sum(target_K, 0)
        if GRAD:
            slope_K = tl.where(real_K, tl.exp(guess_K) - target_K, 0.0)
            diw_J += tl.sum(relu_KJ * slope_K[:, None], 0)
            slope_KJ = tl.where(dots_KJ > 0.0, slope_K[:, None] * w_J[None, :], 0.0).to(ik_KI.dtype)
            diq_IJ = tl.dot(tl.trans(ik_KI), slope_KJ, acc=diq_IJ)
            dik_KI = tl.dot(slope_KJ, iq_JI)
            if ADD:
                to = dik_ptr + (((first + row) // queries) * slots + from_K)[:, None] * I + col_I[None, :]
                tl.atomic_add(to, dik_KI, mask=real_K[:, None], sem="relaxed")
            else:
                to = dik_ptr + (row * keys + at_K)[:, None] * I + col_I[None, :]
                tl.store(to, dik_KI.to(dik_ptr.dtype.element_ty), mask=real_K[:, None])
    tl.store(kl_ptr + row, kl)
    tl.store(mass_ptr + row, mass)
    if GRAD:
        tl.store(diw_ptr + row * J + head_J, diw_J)
        tl.store(diq_ptr + (row * J + head_J[None, :]) * I + col_I[:, None], diq_IJ)


@triton.jit
def _sum_rows(part_ptr, order_ptr, start_ptr, out_ptr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """out[row] += the parts that `order` lists for the row, in that order."""
    row = tl.program_id(0).to(tl.int64)
    begin = tl.load(start_ptr + row)
    end = tl.load(start_ptr + row + 1)
    col = tl.arange(0, WIDTH)
    acc = tl.zeros([WIDTH], tl.float32)
    for first in range(begin, end, BLOCK):
        at = first + tl.arange(0, BLOCK)
        entry = tl.load(order_ptr + at, mask=at < end, other=0).to(tl.int64)
        part = tl.load(part_ptr + entry[:, None] * WIDTH + col[None, :], mask=(at < end)[:, None], other=0.0)
        acc += tl.sum(part.to(tl.float32), 0)
    tl.store(out_ptr + row * WIDTH + col, tl.load(out_ptr + row * WIDTH + col) + acc)


LEARN = (64, 4, 3)  # positions that a program takes at a time, warps, stages, at GLM-5's widths


def selected_loss(
    iq_BTJI: Tensor,
    iw_BTJ: Tensor,
    ik_BSI: Tensor,
    selected_BTK: Tensor,
    target_BTK: Tensor,
    *,
    grad: bool = True,
    deterministic: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """sum over queries of KL(target || softmax of index scores) over the selected positions, and its gradients.

    Args:
        iq_BTJI, iw_BTJ, ik_BSI: as in `indexer.index_scores`; J and I are powers of two from 16. target_BTK: fp32.
        deterministic: sum keys' gradients in a fixed order; else their last bits depend on a race.

    Returns:
        kl and the target's mass, fp32 scalars; diq_BTJI, diw_BTJ, dik_BSI fp32, or None without `grad`.
    """
    batch, queries, heads, width = iq_BTJI.shape
    slots, keys, rows = ik_BSI.shape[1], selected_BTK.shape[-1], batch * queries
    device = iq_BTJI.device
    kl, mass = (torch.empty(rows, dtype=torch.float32, device=device) for _ in range(2))
    diq = torch.empty(iq_BTJI.shape if grad else 0, dtype=torch.float32, device=device)
    diw = torch.empty(iw_BTJ.shape if grad else 0, dtype=torch.float32, device=device)
    dik = torch.zeros(ik_BSI.shape if grad else 0, dtype=torch.float32, device=device)
    # With stored parts, tiles of queries whose parts take a GiB at most.
    tile = rows if not (grad and deterministic) else max(1, (1 << 30) // (keys * width * ik_BSI.element_size()))
    parts = dik if tile >= rows and not deterministic else ik_BSI.new_empty(min(tile, rows), keys, width)
    iq, iw = iq_BTJI.contiguous().view(rows, heads, width), iw_BTJ.contiguous().view(rows, heads)
    block, warps, stages = LEARN
    for start in range(0, rows, max(tile, 1)):
        part = slice(start, min(start + tile, rows))
        count = part.stop - start
        of = selected_BTK.view(rows, keys)[part]
        _learn[(count,)](
            iq[part], iw[part], ik_BSI, of, target_BTK.view(rows, keys)[part], kl[part], mass[part],
            diq.view(-1, heads, width)[part], diw.view(-1, heads)[part], parts,
            keys, queries, slots, start, ik_BSI.stride(0), ik_BSI.stride(1),
            J=heads, I=width, BLOCK_K=block, GRAD=grad, ADD=not deterministic, num_warps=warps, num_stages=stages,
        )  # fmt: skip
        if grad and deterministic:
            order, starts = inverse_index(of, queries, batch, slots, start)
            _sum_rows[(batch * slots,)](parts, order, starts, dik, WIDTH=width, BLOCK=16)
    return kl.sum(), mass.sum(), *((diq, diw, dik) if grad else (None, None, None))
