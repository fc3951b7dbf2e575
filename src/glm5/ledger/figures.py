"""What follows from a configuration alone: every figure with its formula, for any `ModelConfig`.

Double entry: `value` is summed from the tensor list or a closed form in `params`, `compute` and `memory`; `formula`
is the same figure written out in plain arithmetic on the configuration's numbers. The tests evaluate each formula
and compare. Read next: `published`, what the sources print for these figures.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from glm5.ledger import compute, params
from glm5.ledger.memory import cache_bytes, tensor_bytes
from glm5.model.config import ModelConfig
from glm5.model.presets import gqa_8, mla_192

# Sections, in the order in which they are shown.
SHAPE = "Shape"
PARAMETERS = "Parameters"
ACTIVE = "Active parameters"
CACHE = "Cache"
PAIRS = "Attention candidates"
COMPUTE = "Compute"
REPLAY = "Index replay"
VARIANTS = "Attention variants (Table 1)"


@dataclass(frozen=True)
class Figure:
    """One figure.

    Args:
        key: its name in `published` and in the JSON.
        section: where the table shows it.
        label: what it is.
        formula: arithmetic (+ − × / and brackets) that gives `value`; empty for a plain field.
        value: exact, in base units (elements, bytes, FLOP, tokens, pairs, or a ratio).
        unit: how to print it (see `claims.UNITS`).
        note: what a reader should know about it.
    """

    key: str
    section: str
    label: str
    formula: str
    value: Fraction
    unit: str = ""
    note: str = ""


class _Sheet:
    """Collects figures of one section after another."""

    def __init__(self) -> None:
        self.figures: list[Figure] = []
        self.section = ""

    def add(self, key: str, label: str, formula: str, value: int | Fraction, unit: str = "", note: str = "") -> None:
        self.figures.append(Figure(key, self.section, label, formula, Fraction(value), unit, note))


def figures(config: ModelConfig, context: int | None = None) -> list[Figure]:
    """Every figure of `config`, at `context` tokens (default: all its positions), in order of the sections."""
    context = config.max_position_embeddings if context is None else context
    sheet = _Sheet()
    parts: list[tuple[str, Callable[[_Sheet, ModelConfig, int], None]]] = [
        (SHAPE, _shape),
        (PARAMETERS, _parameters),
        (ACTIVE, _active),
        (CACHE, _cache),
        (PAIRS, _pairs),
        (COMPUTE, _compute),
        (REPLAY, _replay),
        (VARIANTS, _variants),
    ]
    for section, fill in parts:
        sheet.section = section
        fill(sheet, config, context)
    return sheet.figures


# --------------------------------------------------------------------------- sections
def _shape(s: _Sheet, c: ModelConfig, context: int) -> None:
    dense, moe = _dense_and_moe(c)
    s.add("layers", "trunk layers", f"{dense} + {moe}", c.num_hidden_layers, note="dense + MoE feed-forward")
    s.add("mtp_blocks", "stored MTP blocks", "", c.num_nextn_predict_layers)
    s.add("hidden", "model width", "", c.hidden_size)
    s.add("vocab", "vocabulary", "", c.vocab_size)
    s.add("positions", "positions", "", c.max_position_embeddings)
    s.add("rope_theta", "RoPE base", "", Fraction(c.rope_theta))
    s.add("heads", "attention heads", "", c.num_attention_heads)
    if c.attention == "gqa":
        s.add("kv_heads", "key-value heads", "", c.num_key_value_heads)
        s.add("head_width", "head width", "", c.head_dim)
    else:
        s.add("q_latent", "query latent width", "", c.q_lora_rank)
        formula = f"{c.qk_nope_head_dim} + {c.qk_rope_head_dim}"
        s.add("qk_width", "query-key head width", formula, c.qk_head_dim, note="non-rotary + rotary")
        s.add("v_width", "value head width", "", c.v_head_dim)
        formula = f"{c.kv_lora_rank} + {c.qk_rope_head_dim}"
        s.add("latent", "cached latent elements", formula, c.latent_dim, note="latent + one shared rotary key")
        s.add("index_heads", "index heads", "", c.index_n_heads)
        s.add("index_width", "index key width", "", c.index_head_dim)
        formula = f"{c.index_n_heads} × {c.index_head_dim}"
        s.add("index_query", "index query elements", formula, c.index_n_heads * c.index_head_dim)
        s.add("topk", "selected positions k", "", c.index_topk)
    if moe or c.num_nextn_predict_layers:
        s.add("experts", "routed experts", "", c.n_routed_experts)
        s.add("experts_per_token", "routed experts a token", "", c.num_experts_per_tok)
        s.add("shared_experts", "shared experts", "", c.n_shared_experts)
        s.add("expert_width", "expert width", "", c.moe_intermediate_size)
        s.add("groups", "router groups", "", c.n_group)
        s.add("routed_scaling", "routed weights' factor", "", Fraction(str(c.routed_scaling_factor)))
        share = Fraction(c.num_experts_per_tok, c.n_routed_experts)
        formula = f"{c.num_experts_per_tok} / {c.n_routed_experts}"
        s.add("expert_share", "share of routed experts used", formula, share, "%")


def _parameters(s: _Sheet, c: ModelConfig, context: int) -> None:
    d = c.hidden_size
    dense, moe = _dense_and_moe(c)
    counts = params.parameters(c)
    mtp_layer = c.num_hidden_layers
    sample = params.by_group(params.layer_tensors(c, _first(c, "dense") if dense else 0))
    attention, indexer = sample["attention"], sample["indexer"]
    label = "MLA of one layer" if c.attention == "mla" else "GQA of one layer"
    s.add("attention", label, _attention_formula(c), attention)
    if indexer:
        j, i = c.index_n_heads, c.index_head_dim
        formula = f"{_n(c.q_lora_rank)} × {j} × {i} + {_n(d)} × {i} + {_n(d)} × {j} + 2 × {i}"
        s.add("indexer", "indexer of one layer", formula, indexer)
    common = attention + indexer + 2 * d
    formula = " + ".join([_n(attention)] + ([_n(indexer)] if indexer else []) + [f"2 × {_n(d)}"])
    s.add("common", "attention and norms of one layer", formula, common)
    if dense:
        s.add("dense_ffn", "dense FFN of one layer", f"3 × {_n(d)} × {_n(c.intermediate_size)}", sample["dense_ffn"])
    moe_layer = 0
    if moe or c.num_nextn_predict_layers:
        block = params.by_group(params.layer_tensors(c, _first(c, "sparse") if moe else mtp_layer))
        e, f = c.n_routed_experts, c.moe_intermediate_size
        s.add("one_expert", "one expert", f"3 × {_n(d)} × {_n(f)}", 3 * d * f)
        s.add("routed", "routed experts of one layer", f"{e} × 3 × {_n(d)} × {_n(f)}", block["routed_experts"])
        if c.n_shared_experts:
            formula = f"3 × {_n(d)} × {_n(f)} × {c.n_shared_experts}"
            s.add("shared", "shared experts of one layer", formula, block["shared_experts"])
        s.add("router", "router of one layer", f"{e} × {_n(d)} + {e}", block["router"], note="with fp32 bias")
        moe_layer = block["routed_experts"] + block["shared_experts"] + block["router"]
        terms = [block["routed_experts"], block["shared_experts"], block["router"]]
        s.add("moe_layer", "MoE part of one layer", " + ".join(_n(t) for t in terms if t), moe_layer)
    terms_ = [f"{c.num_hidden_layers} × {_n(common)}"]
    terms_ += [f"{dense} × {_n(sample['dense_ffn'])}"] if dense else []
    terms_ += [f"{moe} × {_n(moe_layer)}"] if moe else []
    s.add("trunk", "trunk and final norm", " + ".join([*terms_, _n(d)]), counts.trunk)
    s.add("embedding", "token embedding", f"{_n(c.vocab_size)} × {_n(d)}", counts.embedding)
    if counts.head:
        s.add("head", "output head (untied)", f"{_n(c.vocab_size)} × {_n(d)}", counts.head)
    if counts.mtp:
        formula = f"{_n(common)} + {_n(moe_layer)} + 2 × {_n(d)} × {_n(d)} + 3 × {_n(d)}"
        s.add("mtp", "MTP block", formula, counts.mtp)
    stored = [counts.trunk, counts.embedding, counts.head, counts.mtp]
    s.add("total", "all parameters", " + ".join(_n(x) for x in stored if x), counts.total)
    blocks = moe + c.num_nextn_predict_layers
    s.add("fp32", "of which fp32", f"{blocks} × {c.n_routed_experts}", counts.fp32, note="correction biases")
    s.add(
        "bf16", "of which in the model's dtype", f"{_n(counts.total)} − {_n(counts.fp32)}", counts.total - counts.fp32
    )
    vocab = counts.trunk + counts.embedding + counts.head
    formula = " + ".join(_n(x) for x in (counts.trunk, counts.embedding, counts.head) if x)
    s.add("without_mtp", "trunk, embedding and head", formula, vocab)
    if counts.mtp:
        formula = f"{_n(counts.trunk)} + {_n(counts.mtp)}"
        s.add("without_vocab", "trunk and MTP block", formula, counts.trunk + counts.mtp, note="the report's wording")
    width = 4 if c.dtype == "float32" else 2
    stored_bytes = sum(tensor_bytes(t, "fp32" if width == 4 else "bf16") for t in params.checkpoint_tensors(c))
    formula = f"{width} × {_n(counts.total - counts.fp32)} + 4 × {_n(counts.fp32)}"
    s.add("bytes", f"tensor bytes in {c.dtype}", formula, stored_bytes, "bytes")
    s.add("tensors", "tensors in the files", _tensors_formula(c), counts.tensors)


def _active(s: _Sheet, c: ModelConfig, context: int) -> None:
    counts, active = params.parameters(c), params.active_parameters(c)
    _, moe = _dense_and_moe(c)
    unused = c.n_routed_experts - c.num_experts_per_tok
    expert = 3 * c.hidden_size * c.moe_intermediate_size
    formula = f"{_n(counts.trunk)} − {moe} × {unused} × {_n(expert)}" if moe else _n(counts.trunk)
    s.add("active", "trunk, active a token", formula, active.trunk)
    if active.mtp:
        idle = f"{unused} × {_n(expert)}"
        formula = f"{_n(active.trunk)} + {_n(counts.mtp)} − {idle}"
        s.add("active_mtp", "trunk and MTP block, active", formula, active.trunk + active.mtp)
    formula = f"{_n(active.trunk)} + {_n(c.vocab_size)} × {_n(c.hidden_size)}"
    s.add("active_head", "trunk and head, active", formula, active.trunk + active.head)
    width = 4 if c.dtype == "float32" else 2
    s.add("active_bytes", "bytes of the active trunk", f"{width} × {_n(active.trunk)}", width * active.trunk, "bytes")


def _cache(s: _Sheet, c: ModelConfig, context: int) -> None:
    precision, width = ("fp32", 4) if c.dtype == "float32" else ("bf16", 2)
    each, n = cache_bytes(c, precision), c.num_hidden_layers  # type: ignore[arg-type]
    if c.attention == "gqa":
        elements = f"2 × {c.num_key_value_heads} × {c.head_dim}"
        content = "K and V"
    else:
        elements = f"({c.kv_lora_rank} + {c.qk_rope_head_dim})"
        content = "MLA latent and rotary key"
    rows = [("mla", content, elements, each.content)]
    if each.index:
        rows.append(("index", "index keys", f"{c.index_head_dim}", each.index))
        rows.append(("all", "together", f"({elements.strip('()')} + {c.index_head_dim})", each.total))
    for key, label, element, size in rows:
        formula = f"{n} × {element} × {width}"
        s.add(f"cache_{key}_token", f"{label}, one token", formula, n * size, "bytes", f"{n} layers, {c.dtype}")
        formula = f"{n} × {element} × {width} × {_n(context)}"
        s.add(f"cache_{key}", f"{label}, {_n(context)} tokens", formula, n * size * context, "bytes")
    if c.num_nextn_predict_layers:
        formula = f"{n + 1} × {_n(each.total)} × {_n(context)}"
        total = (n + 1) * each.total * context
        s.add("cache_with_mtp", "with the MTP block's own cache", formula, total, "bytes", "speculative decoding")


def _pairs(s: _Sheet, c: ModelConfig, context: int) -> None:
    n = _n(context)
    dense = compute.dense_pairs(context)
    s.add("dense_pairs", f"dense causal pairs, {n} tokens", f"{n} × ({n} + 1) / 2", dense, note="L(L + 1) / 2")
    if c.attention == "gqa":
        return
    k = c.index_topk
    kept = min(k, context)
    sparse = compute.sparse_pairs(context, k)
    formula = f"{_n(kept)} × ({_n(kept)} + 1) / 2 + ({n} − {_n(kept)}) × {_n(k)}"
    s.add("sparse_pairs", f"top-{_n(k)} causal pairs", formula, sparse, note="Σ min(t, k), t = 1 … L")
    s.add("last_query", "last query's share", f"{_n(kept)} / {n}", Fraction(kept, context), "%")
    s.add("last_query_ratio", "last query, dense over sparse", f"{n} / {_n(kept)}", Fraction(context, kept), "×")
    s.add("prefill_share", "prefill's share", f"{_n(sparse)} / {_n(dense)}", Fraction(sparse, dense), "%")
    s.add("prefill_ratio", "prefill, dense over sparse", f"{_n(dense)} / {_n(sparse)}", Fraction(dense, sparse), "×")


def _compute(s: _Sheet, c: ModelConfig, context: int) -> None:
    active, n, layers = params.active_parameters(c), _n(context), c.num_hidden_layers
    s.add("macs", "matrix elements a token meets", "", active.macs, "", "trunk matrices and head, without vectors")
    s.add("linear_flops", "linear work a token, forward", f"2 × {_n(active.macs)}", compute.linear_flops(c), "FLOP")
    formula = f"3 × 2 × {_n(active.macs)}"
    s.add("linear_training", "linear work a token, training", formula, 3 * compute.linear_flops(c), "FLOP")
    h = c.num_attention_heads
    if c.attention == "gqa":
        pair, decode = f"2 × {h} × ({c.head_dim} + {c.head_dim})", compute.decode_attention_flops(c, context)
        formula = f"{layers} × {n} × {pair}"
        s.add("decode_dense", f"attention of one query at {n}", formula, decode.total, "FLOP")
        return
    pair = f"2 × {h} × ({c.latent_dim} + {c.kv_lora_rank})"
    kept = min(context, c.index_topk)
    dense = compute.decode_attention_flops(c, context, sparse=False)
    sparse = compute.decode_attention_flops(c, context)
    label = f"dense attention of one query at {n}"
    s.add("decode_dense", label, f"{layers} × {n} × {pair}", dense.main, "FLOP", "absorbed form")
    s.add("decode_sparse", "sparse attention of it", f"{layers} × {_n(kept)} × {pair}", sparse.main, "FLOP")
    formula = f"{layers} × {n} × 2 × {c.index_n_heads} × {c.index_head_dim}"
    s.add("decode_indexer", "index scores for it", formula, sparse.indexer, "FLOP", "scores every position")
    before = compute.prefill_attention_flops(c, context, sparse=False)
    after = compute.prefill_attention_flops(c, context)
    expanded = f"2 × {h} × ({c.qk_head_dim} + {c.v_head_dim})"
    index = f"2 × {c.index_n_heads} × {c.index_head_dim}"
    d_pairs, s_pairs = _n(compute.dense_pairs(context)), _n(compute.sparse_pairs(context, c.index_topk))
    formula = f"{d_pairs} × {expanded} / ({s_pairs} × {pair} + {d_pairs} × {index})"
    note = "by operations: dense expanded over sparse absorbed with indexer"
    s.add("prefill_work", "attention work of prefill, reduced", formula, Fraction(before.total, after.total), "×", note)
    crossover = compute.crossover_length(c)
    if crossover is not None:
        note = "shortest prefill that sparse attention makes cheaper, indexer included"
        s.add("crossover", "break-even length", "", crossover, note=note)


def _replay(s: _Sheet, c: ModelConfig, context: int) -> None:
    if c.attention == "gqa":
        return
    formula = f"{c.num_hidden_layers} × {_n(c.index_topk)} × 4"
    value = c.num_hidden_layers * c.index_topk * 4
    note = "int32 ids of every layer; why RL keeps top-k deterministic and replays none"
    s.add("replay", "selected ids of one token", formula, value, "bytes", note)


def _variants(s: _Sheet, c: ModelConfig, context: int) -> None:
    """The report's alternatives at this size, where its head geometry divides: the earlier MLA, and GQA-8."""
    narrower = c.qk_head_dim * 3 // 4 > c.qk_rope_head_dim and c.qk_head_dim // 2 >= c.qk_rope_head_dim
    if c.attention == "gqa" or c.qk_head_dim % 4 or c.num_attention_heads % 2 or not narrower:
        return
    old, gqa = mla_192(c), gqa_8(c)
    formula = f"2 × {gqa.num_key_value_heads} × {gqa.head_dim}"
    s.add(
        "gqa_cache",
        f"GQA-{gqa.num_key_value_heads} cache elements",
        formula,
        cache_bytes(gqa).content // 2,
        note="a token and layer",
    )
    h, h_old = c.num_attention_heads, old.num_attention_heads
    s.add("fewer_heads", "heads fewer than earlier MLA", f"1 − {h} / {h_old}", 1 - Fraction(h, h_old))
    new_pair, old_pair = (compute.pair_flops(x, absorbed=True) for x in (c, old))
    pair = f"({c.latent_dim} + {c.kv_lora_rank})"
    formula = f"{h} × {pair} / ({h_old} × {pair})"
    s.add("decode_pair_ratio", "decode work a pair, over earlier MLA", formula, Fraction(new_pair, old_pair))
    new_pair, old_pair = (compute.pair_flops(x, absorbed=False) for x in (c, old))
    formula = f"{h} × ({c.qk_head_dim} + {c.v_head_dim}) / ({h_old} × ({old.qk_head_dim} + {old.v_head_dim}))"
    note = "earlier MLA taken as heads of 128 + 64 with values of 128" if h == 64 else ""
    s.add("train_pair_ratio", "training work a pair, over earlier MLA", formula, Fraction(new_pair, old_pair), "", note)
    new_all, old_all = params.parameters(c).total, params.parameters(old).total
    s.add(
        "variant_params", "parameters, over earlier MLA", f"{_n(new_all)} / {_n(old_all)}", Fraction(new_all, old_all)
    )
    new_macs, old_macs = params.active_parameters(c).macs, params.active_parameters(old).macs
    formula = f"{_n(new_macs)} / {_n(old_macs)}"
    s.add("variant_macs", "linear work a token, over earlier MLA", formula, Fraction(new_macs, old_macs))


# --------------------------------------------------------------------------- helpers
def _n(x: int) -> str:
    return f"{x:,}"


def _dense_and_moe(c: ModelConfig) -> tuple[int, int]:
    return c.layer_types.count("dense"), c.layer_types.count("sparse")


def _first(c: ModelConfig, kind: str) -> int:
    return c.layer_types.index(kind)


def _attention_formula(c: ModelConfig) -> str:
    d, h = _n(c.hidden_size), c.num_attention_heads
    if c.attention == "gqa":
        g, w = c.num_key_value_heads, c.head_dim
        terms = [f"{d} × {h} × {w}", f"2 × {d} × {g} × {w}", f"{h} × {w} × {d}"]
        if c.attention_bias:
            terms.append(f"{h} × {w} + 2 × {g} × {w} + {d}")
        return " + ".join(terms)
    q, kv = _n(c.q_lora_rank), _n(c.kv_lora_rank)
    terms = [
        f"{d} × {q} + {q}",
        f"{q} × {h} × {c.qk_head_dim}",
        f"{d} × {c.latent_dim} + {kv}",
        f"{kv} × {h} × ({c.qk_nope_head_dim} + {c.v_head_dim})",
        f"{h} × {c.v_head_dim} × {d}",
    ]
    if c.attention_bias:
        terms.append(f"{q} + {c.latent_dim} + {d}")
    return " + ".join(terms)


def _tensors_formula(c: ModelConfig) -> str:
    """Tensors of the files: blocks of a kind times tensors of one, the MTP block's four, and the top level."""
    dense, moe = _dense_and_moe(c)

    def each(layer: int) -> int:
        return sum(t.copies for t in params.layer_tensors(c, layer))

    terms = ["2" if c.tie_word_embeddings else "3"]
    terms += [f"{dense} × {each(_first(c, 'dense'))}"] if dense else []
    terms += [f"{moe} × {each(_first(c, 'sparse'))}"] if moe else []
    terms += [_n(each(c.num_hidden_layers))] if c.num_nextn_predict_layers else []
    return " + ".join(terms)
