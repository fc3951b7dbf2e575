"""Everything between a layer's input and attention: two joined products, a norm, and one launch for all the rest.

The launch does, for every token: RMSNorm of the latent and RoPE of the shared key, which together are its cache row;
LayerNorm and RoPE of the index key; RoPE of all queries and index queries, in place; and the index heads' weights with
both scales. One program per token does the rows that are cached, others a block of heads each. Source: report section 5
(MLAPO). Read next: `absorbed`; `glm5.model.mla` and `glm5.model.indexer` for the specification.
"""

# mypy: disallow-untyped-defs=false, disallow-incomplete-defs=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from glm5.kernels.basic import side_by_side
from glm5.kernels.triton.basic import product, rms_norm
from glm5.kernels.triton.early import begin, early
from glm5.kernels.triton.row import WIDEST_NORM, is_row, row_product

HEADS_EACH = 16


@triton.jit
def _turned(x_GR, cos, sin, G: tl.constexpr, HALF: tl.constexpr):
    """Pairs (0, 1), (2, 3), … of each row of fp32 x_GR, rotated; cos and sin: [1, HALF]."""
    even, odd = tl.split(tl.reshape(x_GR, [G, HALF, 2]))
    return tl.reshape(tl.join(even * cos - odd * sin, odd * cos + even * sin), [G, 2 * HALF])


@triton.jit
def _turn_heads(
    x_ptr, rope_ptr, heads, first, WIDTH: tl.constexpr, OFFSET: tl.constexpr, HALF: tl.constexpr, G: tl.constexpr
):
    """Rotate columns [OFFSET, OFFSET + 2 HALF) of heads first … first + G - 1, in place."""
    head_G = first + tl.arange(0, G)
    cos, sin = tl.split(tl.reshape(tl.load(rope_ptr + tl.arange(0, 2 * HALF)), [1, HALF, 2]))
    at = x_ptr + head_G[:, None] * WIDTH + OFFSET + tl.arange(0, 2 * HALF)[None, :]
    x_GR = tl.load(at, mask=(head_G < heads)[:, None], other=0.0).to(tl.float32)
    tl.store(at, _turned(x_GR, cos, sin, G, HALF).to(x_ptr.dtype.element_ty), mask=(head_G < heads)[:, None])


@triton.jit
def _prepare(
    q_ptr, iq_ptr, kv_ptr, ik_ptr, iw_ptr, rope_ptr, kv_gain_ptr, k_gain_ptr, k_bias_ptr,
    row_ptr, key_ptr, place_ptr, weight_ptr,
    up_stride, down_stride, kv_eps, k_eps, w_scale,
    H: tl.constexpr, J: tl.constexpr, N: tl.constexpr, HALF: tl.constexpr, L: tl.constexpr, I: tl.constexpr,
    G: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr, PLACED: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    begin(EARLY)
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    rope_ptr += token * 2 * HALF
    query_parts = (H + G - 1) // G
    if part > query_parts:
        _turn_heads(iq_ptr + token * up_stride, rope_ptr, J, (part - 1 - query_parts) * G, I, 0, HALF, G)
    elif part > 0:
        _turn_heads(q_ptr + token * up_stride, rope_ptr, H, (part - 1) * G, N + 2 * HALF, N, HALF, G)
    else:
        kind = row_ptr.dtype.element_ty
        kv_ptr += token * down_stride
        ik_ptr += token * down_stride
        place = tl.load(place_ptr + token) if PLACED else token
        row_ptr += place * (L + 2 * HALF)
        key_ptr += place * I
        turn = tl.arange(0, 2 * HALF)
        cos, sin = tl.split(tl.reshape(tl.load(rope_ptr + turn), [1, HALF, 2]))
        # The cache row: normed latent, rotated key.
        col = tl.arange(0, BLOCK_L)
        real = col < L
        latent = tl.load(kv_ptr + col, mask=real, other=0.0).to(tl.float32)
        latent = latent / tl.sqrt(tl.sum(latent * latent, 0) / L + kv_eps)
        gain = tl.load(kv_gain_ptr + col, mask=real, other=0.0)
        tl.store(row_ptr + col, latent.to(kind) * gain.to(kind), mask=real)
        key = tl.reshape(tl.load(kv_ptr + L + turn).to(tl.float32), [1, 2 * HALF])
        tl.store(row_ptr + L + turn, tl.reshape(_turned(key, cos, sin, 1, HALF), [2 * HALF]).to(kind))
        # The index key: normed as a whole, its first columns rotated.
        col = tl.arange(0, BLOCK_I)
        real = col < I
        x = tl.load(ik_ptr + col, mask=real, other=0.0).to(tl.float32)
        mean = tl.sum(x, 0) / I
        away = tl.where(real, x - mean, 0.0)
        inverse = 1.0 / tl.sqrt(tl.sum(away * away, 0) / I + k_eps)
        gain = tl.load(k_gain_ptr + col, mask=real, other=0.0).to(tl.float32)
        bias = tl.load(k_bias_ptr + col, mask=real, other=0.0).to(tl.float32)
        tl.store(key_ptr + col, (away * inverse * gain + bias).to(kind), mask=real & (col >= 2 * HALF))
        gain, bias = tl.load(k_gain_ptr + turn).to(tl.float32), tl.load(k_bias_ptr + turn).to(tl.float32)
        key = ((tl.load(ik_ptr + turn).to(tl.float32) - mean) * inverse * gain + bias).to(kind).to(tl.float32)
        key = _turned(tl.reshape(key, [1, 2 * HALF]), cos, sin, 1, HALF)
        tl.store(key_ptr + turn, tl.reshape(key, [2 * HALF]).to(kind))
        # The index heads' weights.
        head = tl.arange(0, BLOCK_J)
        weight = tl.load(iw_ptr + token * down_stride + head, mask=head < J, other=0.0).to(tl.float32)
        tl.store(weight_ptr + token * J + head, weight * w_scale, mask=head < J)


def prepare(
    up: tuple[Tensor, Tensor],
    down: tuple[Tensor, Tensor, Tensor],
    rope: Tensor,
    kv_norm: tuple[Tensor, float],
    k_norm: tuple[Tensor, Tensor, float],
    heads: tuple[int, int],
    into: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What attention and cache take, from the products that an attention layer makes of its input.

    Args:
        up: q [B, T, H * (N + R)] and index_q [B, T, J * I], parts of one contiguous product; rotated in place.
        down: kv [B, T, L + R], index_k [B, T, I] and index_w [B, T, J], parts of another.
        rope: rotations, complex [B, T, R / 2]. kv_norm: gain, eps. k_norm: gain, bias, eps. heads: H and J.
        into: where rows and index keys go: to rows int64 [B * T] of two contiguous pools [..., L + R] and [..., I].

    Returns:
        q [B, T, H, N + R], rows [B, T, L + R], index_keys [B, T, I], index_q [B, T, J, I], and head weights fp32
        [B, T, J] with both scales in; with `into` the pools in place of rows and index_keys.

    Raises:
        ValueError: half of the rotary width is no power of two.
    """
    (q, index_q), (kv, index_k, index_w), (main, index) = up, down, heads
    batch, tokens = q.shape[:2]
    half, index_width = rope.shape[-1], index_k.shape[-1]
    latent, nope = kv.shape[-1] - 2 * half, q.shape[-1] // main - 2 * half
    if half & (half - 1):
        raise ValueError(f"prepare takes rotary widths that are powers of two, not {2 * half}")
    if into is None:
        rows, keys = (kv.new_empty(batch, tokens, width) for width in (latent + 2 * half, index_width))
    else:
        rows, keys = into[1:]
    weights = torch.empty(batch, tokens, index, dtype=torch.float32, device=q.device)
    (kv_gain, kv_eps), (k_gain, k_bias, k_eps) = kv_norm, k_norm
    if batch * tokens:
        group = min(HEADS_EACH, triton.next_power_of_2(max(main, index)))
        parts = 1 + triton.cdiv(main, group) + triton.cdiv(index, group)
        _prepare[(batch * tokens, parts)](
            q, index_q, kv, index_k, index_w, torch.view_as_real(rope.contiguous()), kv_gain, k_gain, k_bias,
            rows, keys, rows if into is None else into[0], weights,
            q.stride(1), kv.stride(1), kv_eps, k_eps, (index * index_width) ** -0.5,
            H=main, J=index, N=nope, HALF=half, L=latent, I=index_width, G=group,
            BLOCK_L=triton.next_power_of_2(latent), BLOCK_I=triton.next_power_of_2(index_width),
            BLOCK_J=triton.next_power_of_2(index), PLACED=into is not None, num_warps=4, **early(q),
        )  # fmt: skip
    return q.unflatten(-1, (main, -1)), rows, keys, index_q.unflatten(-1, (index, -1)), weights


def project(
    x_BTD: Tensor,
    rope: Tensor,
    query: tuple[Tensor, Tensor, Tensor],
    latent: tuple[Tensor, Tensor],
    indexer: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    heads: tuple[int, int],
    eps: tuple[float, float, float],
    into: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Everything that an attention layer makes of x up to attention.

    Args:
        rope: rotations [B, T, R / 2].
        query: q_a [Q, D], its norm's gain [Q], q_b [H * (N + R), Q]. latent: kv_a [L + R, D], its norm's gain [L].
        indexer: wq_b [J * I, Q], wk [I, D], its norm's gain and bias [I], weights_proj [J, D].
        heads: H and J. eps: of the three norms, in that order. into: see `prepare`.

    Returns:
        As `prepare`.
    """
    (q_a, q_gain, q_b), (kv_a, kv_gain), (wq_b, wk, k_gain, k_bias, weights) = query, latent, indexer
    downs, ups = (q_a, kv_a, wk, weights), (q_b, wq_b)
    q_latent, kv, index_k, index_w = product(x_BTD, *downs).split_with_sizes([w.shape[0] for w in downs], -1)
    joined = side_by_side(*ups) if is_row(x_BTD) and is_row(q_latent, WIDEST_NORM) else None
    if joined is not None:
        up = row_product(q_latent, joined, q_gain, eps[0])
    else:
        up = product(rms_norm(q_latent, q_gain, eps[0]), *ups)
    q, index_q = up.split_with_sizes([w.shape[0] for w in ups], -1)
    norms = (kv_gain, eps[1]), (k_gain, k_bias, eps[2])
    return prepare((q, index_q), (kv, index_k, index_w), rope, *norms, heads, into)
