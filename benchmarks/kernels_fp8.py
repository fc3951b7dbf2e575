"""Time the operators in 8 bits on one Hopper GPU: index scores and selection, sparse MLA over an fp8 cache, experts.

    python benchmarks/kernels_fp8.py [--only index_fp8,select_fp8,mla_fp8,moe_fp8] [--sweep] [--json FILE]

Errors are against fp32 over the same 8-bit numbers; for selections, the share of rows that differ from a stable sort of
the implementation's own scores, or of the index scores in Triton for peers. Read next: `kernels`; docs/kernels.md.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
from torch import Tensor

from glm5.kernels import cuda, triton
from glm5.kernels.formats import BLOCK, Packed, pack, rounded, unpack
from glm5.kernels.indexer_fp8 import IndexKeys, round_keys, round_queries
from glm5.kernels.latent_rows import pack_rows, unpack_rows
from inputs import index_inputs, random_selection, wrong_rows
from timing import FP8_FLOP_PER_US, Table, floor_us, main, relative, sets_for

TOP = 2048

# ---- indexer ------------------------------------------------------------------------------------------------------

INDEX_CASES = [(1, 1, 131072), (16, 1, 32768), (64, 1, 32768), (64, 1, 131072), (1, 1024, 32768)]
SELECT_CASES = [(1, 1, 131072), (64, 1, 131072), (1, 1024, 32768)]


def fp8_inputs(
    sets: int, batch: int, queries: int, slots: int
) -> tuple[list[Tensor], list[Tensor], list[IndexKeys], tuple[Tensor, Tensor]]:
    q, w, k, first, last = index_inputs(sets, batch, queries, slots)
    turned = [round_queries(q[i], w[i]) for i in range(sets)]
    keys = IndexKeys(*(torch.cat(part) for part in zip(*map(round_keys, k.split(8)), strict=True)))  # less memory
    several = [keys] * sets if batch * slots > 2**21 else [IndexKeys(*(t.clone() for t in keys)) for _ in range(sets)]
    return [t[0] for t in turned], [t[1] for t in turned], several, (first, last)


def score_floor(batch: int, queries: int, slots: int, written: float) -> float:
    flop = 2.0 * batch * queries * slots * 32 * 128
    return floor_us(batch * slots * 132.0 + written, flop, FP8_FLOP_PER_US)


def bench_index(table: Table) -> None:
    for case in INDEX_CASES:
        bench_index_case(table, *case)
        torch.cuda.empty_cache()


def bench_index_case(table: Table, batch: int, queries: int, slots: int) -> None:
    sets = sets_for(batch * slots * 132.0)
    q, w, keys, bounds = fp8_inputs(sets, batch, queries, slots)
    out = torch.empty(batch, queries, slots, device="cuda")
    floor, case, rows = (
        score_floor(batch, queries, slots, out.nbytes),
        f"{batch} x {queries} x {slots}",
        min(queries, 4),
    )
    held = keys[0].values[:4].float()
    oracle = torch.einsum("btji,bsi->btjs", q[0][:4, -rows:].float(), held).relu_()
    oracle = torch.einsum("btjs,btj->bts", oracle, w[0][:4, -rows:]) * keys[0].scale[:4, None]
    seen = torch.arange(slots, device="cuda") <= bounds[1][:4, -rows:, None]

    def check(result: object) -> float:
        return relative(result[:4, -rows:][seen], oracle[seen])  # type: ignore[index]

    def call(i: int, version: Callable[..., Tensor], **options: int) -> Tensor:
        return version(q[i], w[i], keys[i].values, *bounds, key_scale_BS=keys[i].scale, out=out, **options)

    table.add("index scores fp8", case, "ours (Triton)", lambda i: call(i, triton.index_scores), sets, floor, check)
    if queries > 1:
        table.add("index scores fp8", case, "ours (CUDA)", lambda i: call(i, cuda.index_scores), sets, floor, check)
    if table.sweep:
        launches = [(4, 128, 8, 2), (4, 64, 4, 3), (8, 64, 8, 2)] if queries > 1 else [(1, 128, 4, 3), (1, 512, 8, 3)]
        for bq, bs, warps, stages in launches:
            options = dict(block_q=bq, block_s=bs, warps=warps, stages=stages)
            name = f"ours (Triton) {bq},{bs},{warps},{stages}"
            run = lambda i, o=options: call(i, triton.index_scores, **o)  # noqa: E731
            table.add("index scores fp8", case, name, run, sets, floor, check)
    logits = deep_gemm_logits(q, w, keys, bounds)
    if logits is not None:
        table.add(
            "index scores fp8", case, "DeepGEMM", logits, sets, floor, lambda r: check(r.view(batch, queries, -1))
        )  # type: ignore[attr-defined]


def deep_gemm_logits(
    q: list[Tensor], w: list[Tensor], keys: list[IndexKeys], bounds: tuple[Tensor, Tensor]
) -> Callable[[int], Tensor] | None:
    """DeepGEMM's logits of one sequence's queries, or of one query each over pages of 64."""
    try:
        import deep_gemm
    except Exception as problem:
        print(f"DeepGEMM takes no part: {problem}")
        return None
    batch, queries = q[0].shape[:2]
    slots = keys[0].values.shape[1]
    first, past = bounds[0].flatten(), bounds[1].flatten() + 1
    if batch == 1 and queries > 1:
        return lambda i: deep_gemm.fp8_mqa_logits(
            q[i][0], (keys[i].values[0], keys[i].scale[0]), w[i][0], first, past, clean_logits=False
        )
    if queries > 1 or slots % 64:
        return None
    pools = []
    for values, scale in {id(k): k for k in keys}.values():  # a page: its keys, then its scales
        parts = values.view(torch.uint8).view(-1, 64 * 128), scale.view(torch.uint8).view(-1, 64 * 4)
        pools.append(torch.cat(parts, 1).view(-1, 64, 1, 132))
    blocks = torch.arange(batch * slots // 64, device="cuda", dtype=torch.int32).view(batch, -1)
    plan = deep_gemm.get_paged_mqa_logits_metadata(past.view(batch, 1), 64, 132)

    def call(i: int) -> Tensor:
        found: Tensor = deep_gemm.fp8_paged_mqa_logits(
            q[i], pools[i % len(pools)], w[i].flatten(0, 1), past.view(batch, 1), blocks, plan, slots
        )
        return found

    return call


def bench_select(table: Table) -> None:
    for case in SELECT_CASES:
        bench_select_case(table, *case)
        torch.cuda.empty_cache()


def bench_select_case(table: Table, batch: int, queries: int, slots: int) -> None:
    """Score and select together."""
    sets = sets_for(batch * slots * 132.0)
    q, w, keys, bounds = fp8_inputs(sets, batch, queries, slots)
    floor = score_floor(batch, queries, slots, batch * queries * 8192.0)
    case, scale = f"{batch} x {queries} x {slots}", keys[0].scale

    def wrong(result: object, scores: Tensor) -> float:
        return wrong_rows(result.flatten(0, 1)[:64], scores.flatten(0, 1)[:64], TOP)  # type: ignore[attr-defined]

    def call(i: int, version: Callable[..., Tensor], **options: object) -> Tensor:
        return version(q[i], w[i], keys[i].values, *bounds, TOP, key_scale_BS=keys[i].scale, **options)

    def scores(version: Callable[..., Tensor], **options: object) -> Tensor:
        return version(q[0], w[0], keys[0].values, *bounds, key_scale_BS=scale, **options)

    of_two = scores(cuda.index_scores if queries > 1 else triton.index_scores)
    of_tiles = scores(triton.index_scores)
    check_two, check_tiles = (lambda r, s=s: wrong(r, s) for s in (of_two, of_tiles))  # type: ignore[misc]
    for mib in (256, 32) if queries > 1 else (256,):
        name = f"ours, two steps, {mib} MiB"
        run = lambda i, mib=mib: call(i, cuda.index_select, tile_bytes=mib * 2**20)  # noqa: E731
        table.add("score+select fp8", case, name, run, sets, floor, check_two)
    streamed = lambda i: call(i, triton.stream_select)  # noqa: E731
    table.add("score+select fp8", case, "ours, streamed", streamed, sets, floor, check_tiles)
    logits = deep_gemm_logits(q, w, keys, bounds)
    if logits is not None:
        run = lambda i: torch.topk(logits(i)[:, :slots], TOP, dim=-1, sorted=False).indices.view(batch, queries, -1)  # noqa: E731
        table.add("score+select fp8", case, "DeepGEMM, torch's top-k", run, sets, floor, lambda r: 0.0)


# ---- sparse MLA ---------------------------------------------------------------------------------------------------


def bench_mla(table: Table) -> None:
    for mode, n in [("decode", b) for b in (1, 16, 64, 128)] + [("prefill", 1024)]:
        bench_mla_case(table, mode, n)
        torch.cuda.empty_cache()


def bench_mla_case(table: Table, mode: str, n: int) -> None:
    scale, keys, slots = 1 / 16, TOP, 32768
    batch, queries = (n, 1) if mode == "decode" else (1, n)
    gathered = n * keys * 656.0
    sets = sets_for(gathered) if mode == "decode" else 3
    rows = pack_rows(torch.randn(batch, slots, 576, device="cuda", dtype=torch.bfloat16))
    q = torch.randn(sets, batch, queries, 64, 576, device="cuda", dtype=torch.bfloat16)
    selected = torch.stack([random_selection(n, slots, keys) for _ in range(sets)]).view(sets, batch, queries, keys)
    moved = (gathered if mode == "decode" else slots * 656) + n * (64 * (576 + 512) * 2 + keys * 4)
    floor = floor_us(moved, 2.0 * n * keys * 64 * (576 + 512))  # products in 16 bits
    flat = selected[0].view(n, keys)
    oracle = []
    for i in range(min(8, n)):
        held = unpack_rows(rows[i % batch, flat[i].long()])
        oracle.append((q[0].view(n, 64, 576)[i].float() @ held.T * scale).softmax(-1) @ held[:, :512])
    exact = torch.stack(oracle)

    def check(result: object) -> float:
        return relative(result[0].reshape(n, 64, 512)[: len(exact)], exact)  # type: ignore[index]

    def hopper(i: int, **options: int) -> object:
        return cuda.sparse_mla(q[i], rows, selected[i], value_dim=512, scale=scale, **options)

    def portable(i: int, **options: object) -> object:
        return triton.sparse_mla_fp8(q[i], rows, selected[i], scale=scale, **options)  # type: ignore[arg-type]

    case = f"{mode} {n}"
    table.add("sparse MLA fp8", case, "ours (CUDA)", hopper, sets, floor, check)
    if mode == "decode":
        table.add("sparse MLA fp8", case, "ours (Triton)", portable, sets, floor, check)
    if table.sweep and mode == "decode":
        for splits in (1, 2, 4, 6, 7, 8, 16):
            name = f"ours (CUDA), splits {splits}"
            table.add("sparse MLA fp8", case, name, lambda i, s=splits: hopper(i, splits=s), sets, floor, check)
        for options in (dict(kind=torch.bfloat16), dict(warps=4), dict(block_k=64, stages=2), dict(stages=2)):
            name = "ours (Triton), " + ", ".join(f"{k} {v}" for k, v in options.items())
            table.add("sparse MLA fp8", case, name, lambda i, o=options: portable(i, **o), sets, floor, check)
    if mode == "prefill":
        return
    try:
        from flash_mla import flash_mla_with_kvcache, get_mla_metadata
    except Exception as problem:
        print(f"FlashMLA takes no part: {problem}")
        return
    plan = get_mla_metadata()[0]
    pool = rows.view(batch * slots // 64, 64, 1, 656).view(torch.float8_e4m3fn)
    offset = torch.arange(batch, device="cuda", dtype=torch.int32)[:, None, None] * slots

    def flash(i: int) -> object:
        options = dict(softmax_scale=scale, indices=selected[i] + offset, use_legacy=True, kv_format="V32")
        return flash_mla_with_kvcache(q[i], pool, None, None, 512, plan, **options)

    table.add("sparse MLA fp8", case, "FlashMLA", flash, sets, floor, check)


# ---- experts ------------------------------------------------------------------------------------------------------


def bench_moe(table: Table) -> None:
    experts, width, inner = 256, 6144, 2048
    gate_up, down = (_random_experts(experts, rows, columns) for rows, columns in ((2 * inner, width), (width, inner)))
    for tokens in (1, 16, 256, 4096):
        bench_moe_case(table, gate_up, down, tokens)


def _random_experts(experts: int, rows: int, columns: int) -> Packed:
    """A few experts at a time: all of them in fp32 would take 19 GB."""
    parts = [
        pack(torch.randn(16, rows, columns, device="cuda") * columns**-0.5, "fp8", BLOCK, BLOCK)
        for _ in range(experts // 16)
    ]
    return Packed("fp8", torch.cat([p.values for p in parts]), torch.cat([p.scale for p in parts]), BLOCK, BLOCK)


def bench_moe_case(table: Table, gate_up: Packed, down: Packed, tokens: int) -> None:
    (experts, width, inner), choices = down.values.shape, 8
    sets = 8 if tokens <= 16 else 2
    x = torch.randn(sets, tokens, width, device="cuda", dtype=torch.bfloat16)
    expert = torch.rand(sets, tokens, experts, device="cuda").topk(choices, -1).indices
    weight = torch.rand(sets, tokens, choices, device="cuda")
    hit = statistics.mean(len(e.unique()) for e in expert)
    floor = floor_us(
        hit * 3 * width * inner + tokens * width * 4, 6.0 * tokens * choices * width * inner, FP8_FLOP_PER_US
    )
    exact = []
    for n in range(min(tokens, 4)):
        given, total = rounded(x[0, n : n + 1])[0], torch.zeros(width, device="cuda")
        for e, share in zip(expert[0, n].tolist(), weight[0, n].tolist(), strict=True):
            gate, up = (_matrix(gate_up, e) @ given).chunk(2)
            total += share * (_matrix(down, e) @ rounded((torch.nn.functional.silu(gate) * up)[None])[0])
        exact.append(total)
    oracle = torch.stack(exact)

    def check(result: object) -> float:
        return relative(result[: len(oracle)], oracle)  # type: ignore[index]

    def ours(i: int, tile: tuple[int, int, int] | None = None) -> object:
        return triton.grouped_swiglu_fp8(x[i], gate_up, down, expert[i], weight[i], tile=tile)

    def hopper(i: int, many: int = 0) -> object:
        return cuda.grouped_swiglu_fp8(x[i], gate_up, down, expert[i], weight[i], many=many)

    table.add("experts fp8", f"{tokens} tokens", "ours (Triton)", ours, sets, floor, check)
    if tokens >= 256:
        table.add("experts fp8", f"{tokens} tokens", "ours (CUDA)", hopper, sets, floor, check)
    peer = deep_gemm_products(x[0], gate_up, down, expert[0]) if tokens >= 256 else None
    if peer is not None:
        call, check_peer = peer
        name = "DeepGEMM, products only"
        table.add("experts fp8", f"{tokens} tokens", name, lambda _: call(), 1, floor, check_peer)  # type: ignore[arg-type]
    if table.sweep:
        tiles = {1: [(16, 4, 5)], 16: [(16, 4, 5), (16, 8, 4)], 256: [(16, 4, 4), (32, 8, 4), (32, 4, 5)]}
        for tile in tiles.get(tokens, [(128, 8, 4), (64, 4, 4)]):
            name = f"ours (Triton) {tile}"
            table.add("experts fp8", f"{tokens} tokens", name, lambda i, t=tile: ours(i, t), sets, floor, check)


def deep_gemm_products(
    x: Tensor, gate_up: Packed, down: Packed, expert: Tensor
) -> tuple[Callable[[], Tensor], Callable[[Tensor], float]] | None:
    """DeepGEMM's two grouped products alone, without what goes before, between and after, and a check of the first."""
    try:
        import deep_gemm
    except Exception as problem:
        print(f"DeepGEMM takes no part: {problem}")
        return None
    experts, width, inner = down.values.shape
    align = deep_gemm.get_mk_alignment_for_contiguous_layout()
    ids, order = expert.flatten().sort(stable=True)
    counts = torch.bincount(ids, minlength=experts)
    padded = (counts + align - 1) // align * align
    row = (padded.cumsum(0) - padded - counts.cumsum(0) + counts)[ids] + torch.arange(len(ids), device=ids.device)
    total = int(padded.sum())
    layout = torch.full((total,), -1, dtype=torch.int32, device=ids.device)
    layout[row] = ids.int()
    token = torch.zeros(total, dtype=torch.long, device=ids.device)
    token[row] = order // expert.shape[1]
    given = pack(x, "fp8", columns=BLOCK)
    left = given.values.view(torch.uint8)[token].view(given.values.dtype), given.scale[token]
    middle = pack(torch.randn(total, inner, device=ids.device), "fp8", columns=BLOCK)
    hidden, out = (torch.empty(total, n, device=ids.device, dtype=torch.bfloat16) for n in (2 * inner, width))

    def call() -> Tensor:
        deep_gemm.m_grouped_fp8_gemm_nt_contiguous(left, (gate_up.values, gate_up.scale), hidden, layout)
        deep_gemm.m_grouped_fp8_gemm_nt_contiguous(
            (middle.values, middle.scale), (down.values, down.scale), out, layout
        )
        return hidden

    first = int(row[0])
    exact = _matrix(gate_up, int(ids[0])) @ rounded(x[token[first]][None])[0]
    return call, lambda found: relative(found[first], exact)


def _matrix(p: Packed, e: int) -> Tensor:
    return unpack(Packed(p.kind, p.values[e], p.scale[e], p.rows, p.columns))


BENCHES: dict[str, Callable[[Table], None]] = {
    "index_fp8": bench_index,
    "select_fp8": bench_select,
    "mla_fp8": bench_mla,
    "moe_fp8": bench_moe,
}

if __name__ == "__main__":
    main(__doc__, BENCHES)
