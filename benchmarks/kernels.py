"""Time every operator on one Hopper GPU beside public kernels and beside the chip's limit: one table, in one run.

    python benchmarks/kernels.py [--only mla,topk,index,select,...] [--sweep] [--json FILE] [--seconds N]

Each implementation is checked against an fp32 oracle on fresh random inputs, then timed by CUDA-graph replays over
rotated inputs that together exceed the L2 cache; the table gives the median per call in microseconds. Operators in
8 bits are in `kernels_fp8`, those of training in `kernels_training`; this command runs them all. FlashMLA, DeepGEMM and
Liger take part where they are installed. Read next: `timing`; docs/kernels.md.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

import kernels_fp8
import kernels_training
from glm5.kernels import basic, cuda, triton
from inputs import index_inputs, neighbourly_selection, random_selection, wrong_rows
from timing import Table, floor_us, main, relative, sets_for

# ---- sparse MLA ---------------------------------------------------------------------------------------------------


def attention_oracle(q: Tensor, kv: Tensor, selected: Tensor, scale: float) -> Tensor:
    """fp32, on the first rows only: q [N, H, X], kv [N or 1, S, X], selected [N, K]."""
    out = []
    for n in range(min(8, q.shape[0])):
        rows = kv[n % kv.shape[0], selected[n].clamp(min=0).long()].float()
        logits = (q[n].float() @ rows.T * scale).masked_fill(selected[n] < 0, -torch.inf)
        out.append(logits.softmax(-1) @ rows[:, :512])
    return torch.stack(out)


def bench_mla(table: Table) -> None:
    cases = [("decode", b) for b in (1, 16, 64, 128)] + [("prefill", t) for t in (1024, 4096)]
    for mode, n in [*cases, ("shared prefill", 4096)]:
        bench_mla_case(table, mode, n)
        torch.cuda.empty_cache()


def bench_mla_case(table: Table, mode: str, n: int) -> None:
    scale, keys, slots = 1 / 16, 2048, 32768
    batch, queries = (n, 1) if mode == "decode" else (1, n)
    gathered = n * keys * 1152.0
    sets = sets_for(gathered) if mode == "decode" else 3
    kv = torch.randn(batch, slots, 576, device="cuda", dtype=torch.bfloat16)
    q = torch.randn(sets, batch, queries, 64, 576, device="cuda", dtype=torch.bfloat16)
    choose = neighbourly_selection if mode == "shared prefill" else random_selection
    selected = torch.stack([choose(n, slots, keys) for _ in range(sets)]).view(sets, batch, queries, keys)
    moved = (gathered if mode == "decode" else slots * 1152) + n * (64 * (576 + 512) * 2 + keys * 4)
    floor = floor_us(moved, 2.0 * n * keys * 64 * (576 + 512))
    oracle = attention_oracle(q[0].view(n, 64, 576), kv, selected[0].view(n, keys), scale)

    def check(result: object) -> float:
        return relative(result[0].reshape(n, 64, 512)[: oracle.shape[0]], oracle)  # type: ignore[index]

    def ours(i: int, **options: int) -> object:
        return cuda.sparse_mla(q[i], kv, selected[i], value_dim=512, scale=scale, **options)

    def portable(i: int) -> object:
        return triton.sparse_mla(q[i], kv, selected[i], value_dim=512, scale=scale)

    case = f"{mode} {n}"
    table.add("sparse MLA", case, "ours (CUDA)", ours, sets, floor, check)
    if table.sweep and mode == "decode":
        for splits in (1, 2, 4, 5, 6, 7, 8, 16):
            name = f"ours (CUDA), splits {splits}"
            table.add("sparse MLA", case, name, lambda i, s=splits: ours(i, splits=s), sets, floor, check)
    table.add("sparse MLA", case, "ours (Triton)", portable, sets, floor, check)
    flat_kv = kv.view(batch * slots, 1, 576)
    offset = torch.arange(batch, device="cuda", dtype=torch.int32)[:, None, None] * slots
    flat = torch.stack([(s + offset).view(n, 1, keys) for s in selected])
    try:
        from flash_mla import flash_mla_sparse_fwd
    except ImportError as problem:
        print(f"FlashMLA takes no part: {problem}")
    else:

        def flash(i: int) -> object:
            return flash_mla_sparse_fwd(q[i].view(n, 64, 576), flat_kv, flat[i], scale, 512, use_legacy=True)

        table.add("sparse MLA", case, "FlashMLA bf16", flash, sets, floor, check)
    if n <= 1024:

        def plain(i: int) -> object:
            rows = flat_kv[:, 0].index_select(0, flat[i].flatten()).view(n, keys, 576)
            logits = torch.bmm(q[i].view(n, 64, 576), rows.transpose(1, 2)).float() * scale
            return (torch.bmm(logits.softmax(-1).bfloat16(), rows[..., :512]),)

        table.add("sparse MLA", case, "torch", plain, min(sets, 8), floor, check)


# ---- top-k and indexer --------------------------------------------------------------------------------------------


def bench_topk(table: Table) -> None:
    cases = [(1, 8192), (1, 32768), (1, 131072), (64, 8192), (64, 32768), (64, 131072), (1024, 32768), (16, 131072)]
    for rows, slots in cases:
        bench_topk_case(table, rows, slots)
        torch.cuda.empty_cache()


def bench_topk_case(table: Table, rows: int, slots: int) -> None:
    k = 2048
    bytes_each = rows * slots * 4.0
    sets = sets_for(bytes_each)
    scores = torch.randn(sets, rows, slots, device="cuda")
    floor = floor_us(bytes_each + rows * k * 4)
    case = f"{rows} x {slots}"

    def check(result: object) -> float:
        return wrong_rows(result, scores[0], k)  # type: ignore[arg-type]

    table.add("top-k", case, "ours (CUDA)", lambda i: cuda.stable_topk(scores[i], k), sets, floor, check)
    if table.sweep and rows <= 64:
        for cluster in (1, 2, 4, 8, 16):
            name = f"ours (CUDA), cluster {cluster}"
            call = lambda i, c=cluster: cuda.stable_topk(scores[i], k, cluster=c)  # noqa: E731
            table.add("top-k", case, name, call, sets, floor, check)
    plain = lambda i: torch.topk(scores[i], k, dim=-1, sorted=False).indices  # noqa: E731
    table.add("top-k", case, "torch (unstable)", plain, min(sets, 8), floor, check)
    tied = (scores * 2).round_()
    name = "ours (CUDA), heavy ties"
    ties = lambda result: wrong_rows(result, tied[0], k)  # noqa: E731
    table.add("top-k", case, name, lambda i: cuda.stable_topk(tied[i], k), sets, floor, ties)


INDEX_CASES = [(1, 1, 131072), (16, 1, 32768), (64, 1, 32768), (64, 1, 131072), (1, 1024, 32768)]
INDEX_SWEEP = [(4, 128, 4, 2), (4, 64, 4, 2)]
DECODE_SWEEP = [(1, 64, 4, 4), (1, 64, 4, 3), (1, 128, 4, 3)]


def bench_index(table: Table) -> None:
    for batch, queries, slots in INDEX_CASES:
        bench_index_case(table, batch, queries, slots)
        torch.cuda.empty_cache()


def bench_index_case(table: Table, batch: int, queries: int, slots: int) -> None:
    key_bytes = batch * slots * 256.0
    sets = sets_for(key_bytes)
    q, w, k, first, last = index_inputs(sets, batch, queries, slots)
    keys = [k] * sets if batch * slots > 2**20 else [k.clone() for _ in range(sets)]
    out = torch.empty(batch, queries, slots, device="cuda")
    floor = floor_us(key_bytes + out.nbytes, 2.0 * batch * queries * slots * 32 * 128)
    case = f"{batch} x {queries} x {slots}"
    rows = min(queries, 4)
    oracle = torch.einsum("btji,bsi->btjs", q[0][:4, -rows:].float(), k[:4].float()).relu_()
    oracle = torch.einsum("btjs,btj->bts", oracle, w[0][:4, -rows:])
    seen = torch.arange(slots, device="cuda") <= last[:4, -rows:, None]

    def check(result: object) -> float:
        ours = result[:4, -rows:]  # type: ignore[index]
        return relative(ours[seen], oracle[seen]) if bool((ours[~seen] == -torch.inf).all()) else float("nan")

    def ours(i: int, **options: int) -> object:
        return triton.index_scores(q[i], w[i], keys[i], first, last, out=out, **options)

    def hopper(i: int, **options: int) -> object:
        return cuda.index_scores(q[i], w[i], keys[i], first, last, out=out, **options)

    table.add("index scores", case, "ours (Triton)", ours, sets, floor, check)
    if queries > 1:
        table.add("index scores", case, "ours (CUDA)", hopper, sets, floor, check)
    if table.sweep:
        for bq, bs, warps, stages in INDEX_SWEEP if queries > 1 else DECODE_SWEEP:
            for programs in (132, 132 * 2):
                options = dict(block_q=bq, block_s=bs, warps=warps, stages=stages, programs=programs)
                name = f"ours {bq},{bs},{warps},{stages},{programs}"
                table.add("index scores", case, name, lambda i, o=options: ours(i, **o), sets, floor, check)


def bench_select(table: Table) -> None:
    """Score and select together."""
    for batch, queries, slots in INDEX_CASES:
        bench_select_case(table, batch, queries, slots)
        torch.cuda.empty_cache()


def bench_select_case(table: Table, batch: int, queries: int, slots: int) -> None:
    key_bytes = batch * slots * 256.0
    sets = sets_for(key_bytes)
    q, w, k, first, last = index_inputs(sets, batch, queries, slots)
    keys = [k] * sets if batch * slots > 2**20 else [k.clone() for _ in range(sets)]
    floor = floor_us(key_bytes + batch * queries * 8192.0, 2.0 * batch * queries * slots * 32 * 128)
    scores = triton.index_scores(q[0], w[0], keys[0], first, last).flatten(0, 1)
    case = f"{batch} x {queries} x {slots}"

    def check(result: object) -> float:
        return wrong_rows(result.flatten(0, 1)[:64], scores[:64], 2048)  # type: ignore[attr-defined]

    # In tiles of queries whose scores stay in the second cache, and all at once where they fit 256 MiB.
    for mib in (256, 32) if queries > 1 else (256,):
        name = f"ours, two steps, {mib} MiB"
        two = lambda i, mib=mib: cuda.index_select(q[i], w[i], keys[i], first, last, 2048, tile_bytes=mib * 2**20)  # noqa: E731
        table.add("score+select", case, name, two, sets, floor, check)
    streamed = lambda i: triton.stream_select(q[i], w[i], keys[i], first, last, 2048)  # noqa: E731
    table.add("score+select", case, "ours, streamed", streamed, sets, floor, check)


# ---- around attention ---------------------------------------------------------------------------------------------


def bench_prepare(table: Table) -> None:
    """A layer's input to queries that meet the cache, index queries and weights, and the cache's own new rows."""
    for tokens in (1, 16, 64):
        bench_prepare_case(table, tokens)
        torch.cuda.empty_cache()


def bench_prepare_case(table: Table, tokens: int) -> None:
    width, q_latent, latent, heads, nope, turned, index, index_width, sets = 6144, 2048, 512, 64, 192, 64, 32, 128, 3

    def random(*size: int) -> Tensor:
        return torch.randn(*size, device="cuda").mul_(size[-1] ** -0.5 if len(size) > 1 else 1.0).bfloat16()

    layers = []
    for _ in range(sets):
        q_a, kv_a, wk, weights = (
            random(q_latent, width),
            random(latent + turned, width),
            random(128, width),
            random(32, width),
        )
        q_b, wq_b = random(heads * (nope + turned), q_latent), random(index * index_width, q_latent)
        basic.lay_side_by_side(q_a, kv_a, wk, weights)
        basic.lay_side_by_side(q_b, wq_b)
        gains = [random(n) for n in (q_latent, latent, index_width, index_width)]
        layers.append(
            (
                (q_a, gains[0], q_b),
                (kv_a, gains[1]),
                (wq_b, wk, gains[2], gains[3], weights),
                random(heads, nope, latent),
            )
        )
    x = torch.randn(sets, 1, tokens, width, device="cuda", dtype=torch.bfloat16)
    rope = basic.rotations(torch.randint(100_000, (1, tokens), device="cuda"), turned, 1e6)
    pools = random(4096, latent + turned), random(4096, index_width)
    row_N = torch.randperm(4096, device="cuda")[:tokens]

    def ours(i: int) -> object:
        query, kv, indexer, w_uk = layers[i]
        into = (row_N, *pools)
        q, _, _, *index_q = triton.project(x[i], rope, query, kv, indexer, (heads, index), (1e-6,) * 3, into)
        return triton.by_head(q[0, ..., :nope], w_uk, q[0, ..., nope:]), *index_q

    def plain(i: int, kind: torch.dtype = torch.bfloat16) -> object:
        (q_a, q_gain, q_b), (kv_a, kv_gain), (wq_b, wk, k_gain, k_bias, weights), w_uk = (
            tuple(t.to(kind) for t in part) if isinstance(part, tuple) else part.to(kind) for part in layers[i]
        )
        h = x[i].to(kind)
        q_latent = rms(h @ q_a.T, q_gain)
        q = (q_latent @ q_b.T).unflatten(-1, (heads, -1))
        q_rope = basic.rope_interleaved(q[..., nope:], rope.unsqueeze(-2))
        full = torch.cat((torch.einsum("nhx,hxy->nhy", q[0, ..., :nope], w_uk), q_rope[0]), -1)
        row = h @ kv_a.T
        rows = torch.cat((rms(row[..., :latent], kv_gain), basic.rope_interleaved(row[..., latent:], rope)), -1)
        key = basic.layer_norm(h @ wk.T, k_gain, k_bias)
        keys = torch.cat((basic.rope_interleaved(key[..., :turned], rope), key[..., turned:]), -1)
        pools[0].index_copy_(0, row_N, rows[0].bfloat16())
        pools[1].index_copy_(0, row_N, keys[0].bfloat16())
        iq = (q_latent @ wq_b.T).unflatten(-1, (index, -1))
        iq = torch.cat((basic.rope_interleaved(iq[..., :turned], rope.unsqueeze(-2)), iq[..., turned:]), -1)
        return full, iq, (h @ weights.T).float() * (index * index_width) ** -0.5

    def rms(h: Tensor, gain: Tensor) -> Tensor:
        return (h * (h.float().square().mean(-1, keepdim=True) + 1e-6).rsqrt()).to(h.dtype) * gain

    oracle = plain(0, torch.float32)

    def check(result: object) -> float:
        return max(relative(a, b) for a, b in zip(result, oracle, strict=True))  # type: ignore[call-overload]

    parameters = sum(t.numel() for part in layers[0] for t in (part if isinstance(part, tuple) else (part,)))
    floor = floor_us(2.0 * parameters, 2.0 * parameters * tokens)
    for name, call in (("ours", ours), ("torch", plain)):
        table.add("preparation", f"{tokens} tokens", name, call, sets, floor, check)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        ours(0)
        torch.cuda.synchronize()
    launches = sum(e.count for e in found.key_averages() if e.self_device_time_total > 0)
    print(f"preparation of {tokens} tokens: {launches} launches", flush=True)


def bench_router(table: Table) -> None:
    weight = torch.randn(256, 6144, device="cuda") * 0.02
    bias = torch.zeros(256, device="cuda")
    for tokens in (1, 64, 4096, 16384):
        x = torch.randn(4, tokens, 6144, device="cuda", dtype=torch.bfloat16)
        exact = (x[0].double() @ weight.double().T).float()
        floor = floor_us(weight.nbytes + x[0].nbytes + tokens * 2048.0)

        def check(result: object, exact: Tensor = exact) -> float:
            return relative(result[0], exact)  # type: ignore[index]

        def ours(i: int, x: Tensor = x) -> object:
            return triton.router(x[i], weight, bias, 8, normalise=True, scaling=2.5)

        def plain(i: int, x: Tensor = x) -> object:
            logits = torch.nn.functional.linear(x[i].float(), weight)
            score = logits.sigmoid()
            expert = (score + bias).topk(8, -1).indices
            share = score.gather(-1, expert)
            return logits, expert, share / share.sum(-1, keepdim=True) * 2.5

        table.add("router", f"{tokens} tokens", "ours (Triton)", ours, 4, floor, check)
        table.add("router", f"{tokens} tokens", "torch (unstable)", plain, 4, floor, check)


# ---- experts ------------------------------------------------------------------------------------------------------

MOE_SWEEP: dict[int, Sequence[tuple[tuple[int, ...], tuple[int, ...]]]] = {
    16: [((16, 64, 256, 4, 3), (16, 128, 256, 4, 3)), ((16, 64, 256, 4, 2), (16, 128, 128, 4, 5))],
    256: [((32, 64, 128, 4, 4), (32, 128, 128, 4, 4)), ((32, 64, 256, 4, 2), (32, 128, 256, 4, 2))],
    4096: [
        ((128, 128, 64, 8, 4), (128, 256, 64, 8, 4)),
        ((128, 64, 64, 4, 4), (128, 128, 64, 4, 4)),
        ((128, 128, 128, 8, 2), (128, 256, 64, 8, 4)),
        ((128, 128, 64, 8, 4), (128, 128, 128, 8, 3)),
        ((128, 128, 64, 4, 4), (128, 256, 64, 8, 4)),
    ],
}


def bench_moe(table: Table) -> None:
    experts, width, inner = 256, 6144, 2048
    gate_up = torch.empty(experts, 2 * inner, width, device="cuda", dtype=torch.bfloat16).normal_(std=width**-0.5)
    down = torch.empty(experts, width, inner, device="cuda", dtype=torch.bfloat16).normal_(std=inner**-0.5)
    for tokens in (1, 16, 256, 4096):
        bench_moe_case(table, gate_up, down, tokens)
    bench_whole_moe(table, gate_up, down)


def bench_whole_moe(table: Table, gate_up: Tensor, down: Tensor) -> None:
    """Router, experts and a shared expert of their width, of one token."""
    (experts, width, inner), sets = down.shape, 8

    def matrix(*size: int) -> Tensor:
        return (torch.randn(*size, device="cuda") * size[-1] ** -0.5).bfloat16()

    shared = [(matrix(inner, width), matrix(inner, width), matrix(width, inner)) for _ in range(sets)]
    router = torch.randn(experts, width, device="cuda") * 0.02, torch.zeros(experts, device="cuda")
    x = torch.randn(sets, 1, width, device="cuda", dtype=torch.bfloat16)
    how = dict(normalise=True, scaling=2.5)
    floor = floor_us(8 * 6.0 * width * inner + 6.0 * width * inner + router[0].nbytes)

    def separate(i: int) -> Tensor:
        _, expert, weight, _ = triton.router(x[i], *router, 8, **how)
        y = triton.grouped_swiglu(x[i], gate_up, down, expert, weight)
        return y + triton.swiglu(x[i], *shared[i])

    def ours(i: int) -> object:
        return triton.moe_row(x[i], router, (gate_up, down), shared[i], top_k=8, **how)

    oracle = separate(0)
    for name, call in (("ours", ours), ("ours, separate operators", separate)):
        table.add("whole MoE", "1 token", name, call, sets, floor, lambda y: relative(y, oracle))  # type: ignore[arg-type]


def bench_moe_case(table: Table, gate_up: Tensor, down: Tensor, tokens: int) -> None:
    experts, width, inner = down.shape
    choices = 8
    sets = 8 if tokens <= 16 else 2
    x = torch.randn(sets, tokens, width, device="cuda", dtype=torch.bfloat16)
    expert = torch.rand(sets, tokens, experts, device="cuda").topk(choices, -1).indices
    weight = torch.rand(sets, tokens, choices, device="cuda")
    hit = statistics.mean(len(e.unique()) for e in expert)
    flop = 6.0 * tokens * choices * width * inner
    floor = floor_us(hit * 3 * width * inner * 2 + tokens * width * 4, flop)
    rows = []
    for n in range(min(tokens, 8)):
        e = expert[0, n]
        gate, up = (gate_up[e].float() @ x[0, n].float()).chunk(2, -1)
        hidden = torch.nn.functional.silu(gate) * up
        rows.append((torch.bmm(down[e].float(), hidden[..., None])[..., 0] * weight[0, n, :, None]).sum(0))
    oracle = torch.stack(rows)

    def check(result: object) -> float:
        return relative(result[: oracle.shape[0]], oracle)  # type: ignore[index]

    def ours(i: int, **options: object) -> object:
        return triton.grouped_swiglu(x[i], gate_up, down, expert[i], weight[i], **options)

    def hopper(i: int) -> object:
        return cuda.grouped_swiglu(x[i], gate_up, down, expert[i], weight[i], many=0)

    table.add("experts", f"{tokens} tokens", "ours (Triton)", ours, sets, floor, check)
    if tokens >= 256:
        table.add("experts", f"{tokens} tokens", "ours (CUDA)", hopper, sets, floor, check)
    if table.sweep:
        for tiles in MOE_SWEEP.get(tokens, []):
            name = f"ours {tiles[0]} {tiles[1]}".replace(" ", "")
            table.add("experts", f"{tokens} tokens", name, lambda i, t=tiles: ours(i, tiles=t), sets, floor, check)

    def grouped(i: int) -> object:
        order = expert[i].flatten().argsort(stable=True)
        ends = torch.histc(expert[i].flatten().float(), experts, 0, experts - 1).cumsum(0).int()
        hidden = torch._grouped_mm(x[i][order // choices], gate_up.transpose(1, 2), offs=ends)
        gate, up = hidden.chunk(2, -1)
        part = torch._grouped_mm(torch.nn.functional.silu(gate) * up, down.transpose(1, 2), offs=ends)
        whole = torch.empty_like(part).index_copy_(0, order, part).view(tokens, choices, width)
        return (whole.float() * weight[i][..., None]).sum(1).bfloat16()

    table.add("experts", f"{tokens} tokens", "torch._grouped_mm", grouped, sets, floor, check)


BENCHES: dict[str, Callable[[Table], None]] = {
    "mla": bench_mla,
    "topk": bench_topk,
    "index": bench_index,
    "select": bench_select,
    "prepare": bench_prepare,
    "router": bench_router,
    "moe": bench_moe,
    **kernels_fp8.BENCHES,
    **kernels_training.BENCHES,
}

if __name__ == "__main__":
    main(__doc__, BENCHES)
