"""What the sources print about GLM-5: claims on figures of its configuration, token budgets and other counts.

Sources, as the table names them: *config* is config.json of zai-org/GLM-5; *report* is arXiv:2602.15763; *audit* is
a Chinese-language audit of the public checkpoint, configuration and code; *summary* is a Chinese-language summary of
the report; *V3.2 report* is DeepSeek's. All of them are data here: nothing in this file is computed from another
claim. Read next: `disputes`, then `table`, which joins them.
"""

from __future__ import annotations

from fractions import Fraction

from glm5.ledger import params
from glm5.ledger.claims import Claim
from glm5.ledger.figures import Figure
from glm5.ledger.memory import tensor_bytes
from glm5.model.config import ModelConfig

TOKENS = "Training and adaptation tokens"
DRAFTS = "Drafts"
DEPLOYMENT = "Deployment"
PREDECESSOR = "GLM-4.5, counted the same way"
TABLES = "The report's other counts"

# The context for which the sources print caches and candidate pairs.
CONTEXT = 202_752
CONTEXT_KEYS = frozenset(
    "cache_mla cache_index cache_all dense_pairs sparse_pairs last_query last_query_ratio prefill_share "
    "prefill_ratio".split()
)


def _c(text: str, unit: str = "", source: str = "audit, parameters", **more: object) -> Claim:
    return Claim(text, unit, source, **more)  # type: ignore[arg-type]


_CONFIG = "config; audit, shape"
_UNCHANGED = {
    "within": Fraction(1, 10),
    "note": "'about unchanged' is read as within 10%; the report gives no size for Table 1",
}
_80_LAYERS = "config.json and Table 10 have 3 + 75 layers and one MTP block, 79 with it"
_NAME_NOTE = (
    "the appendix says that the count includes MTP and leaves out embedding and head: that gives 752B, and 744B "
    "is the trunk with both vocabulary matrices"
)

CLAIMS: dict[str, tuple[Claim, ...]] = {
    # Shape
    "layers": (_c("78", "", _CONFIG), _c("80", "", "report 2.1; summary", note=_80_LAYERS)),
    "mtp_blocks": (_c("1", "", _CONFIG),),
    "hidden": (_c("6,144", "", _CONFIG),),
    "vocab": (_c("154,880", "", _CONFIG),),
    "positions": (_c("202,752", "", _CONFIG),),
    "rope_theta": (_c("1,000,000", "", _CONFIG),),
    "heads": (_c("64", "", _CONFIG),),
    "q_latent": (_c("2,048", "", _CONFIG),),
    "qk_width": (
        _c("256", "", _CONFIG),
        _c("192", "", "summary, appendix A", note="192 is the non-rotary part; 64 rotary elements are added"),
    ),
    "v_width": (_c("256", "", _CONFIG),),
    "latent": (_c("576", "", "report 2.1; audit"),),
    "index_heads": (_c("32", "", _CONFIG),),
    "index_width": (_c("128", "", _CONFIG),),
    "topk": (_c("2,048", "", _CONFIG),),
    "experts": (_c("256", "", _CONFIG),),
    "experts_per_token": (_c("8", "", _CONFIG),),
    "shared_experts": (_c("1", "", _CONFIG),),
    "expert_width": (_c("2,048", "", _CONFIG),),
    "groups": (_c("1", "", _CONFIG),),
    "routed_scaling": (_c("2.5", "", _CONFIG),),
    "expert_share": (_c("8/256", "", "audit, overview"),),
    # Parameters
    "moe_layer": (_c("9.70", "B", "audit, experts"),),
    "trunk": (_c("742,008,052,992"), _c("742.008", "B")),
    "embedding": (_c("951,582,720"), _c("0.952", "B")),
    "head": (_c("951,582,720"), _c("0.952", "B")),
    "mtp": (_c("9,952,920,576"), _c("9.953", "B"), _c("10", "B")),
    "total": (
        _c("753,864,139,008"),
        _c("753.864", "B"),
        _c("750", "B", "report 5", step=Fraction(10), note="printed as about 750B"),
    ),
    "bf16": (_c("753,864,119,552"),),
    "fp32": (_c("19,456"),),
    "without_mtp": (_c("743.911", "B"), _c("744", "B", "report; release name")),
    "without_vocab": (_c("744", "B", "report, appendix note", note=_NAME_NOTE),),
    "bytes": (_c("1.508", "TB"), _c("1.371", "TiB")),
    # Active parameters
    "active": (_c("40", "B", "report; release name"),),
    "active_mtp": (_c("40", "B", "report, appendix note"),),
    "active_bytes": (
        _c("80", "GiB", "audit, deployment", note="40B × 2 bytes is 80 GB, which is 74.5 GiB: the unit is off"),
    ),
    # Cache, candidates, replay
    "cache_mla_token": (_c("87.75", "KiB", "audit, cache"),),
    "cache_mla": (_c("16.97", "GiB", "audit, cache"),),
    "cache_index_token": (_c("19.50", "KiB", "audit, cache"),),
    "cache_index": (_c("3.77", "GiB", "audit, cache"),),
    "cache_all_token": (_c("107.25", "KiB", "audit, cache"),),
    "cache_all": (_c("20.74", "GiB", "audit, cache"),),
    "dense_pairs": (_c("20,554,288,128", "", "audit, candidates"),),
    "sparse_pairs": (_c("413,139,968", "", "audit, candidates"),),
    "last_query": (_c("1.0101", "%", "audit, candidates"), _c("1.01", "%", "audit, overview")),
    "last_query_ratio": (_c("99", "×", "audit, candidates"),),
    "prefill_share": (_c("2.01", "%", "audit, candidates"),),
    "prefill_ratio": (_c("49.75", "×", "audit, candidates"),),
    "replay": (_c("638,976", "bytes", "audit, replay"), _c("624", "KiB", "audit, replay")),
    # Attention variants
    "gqa_cache": (_c("2,048", "", "report 2.1"),),
    "fewer_heads": (_c("1/3", "", "report 2.1"),),
    "train_pair_ratio": (_c("1", "", "report 2.1", **_UNCHANGED),),
    "variant_params": (_c("1", "", "report 2.1", **_UNCHANGED),),
    "variant_macs": (_c("1", "", "report 2.1", **_UNCHANGED),),
    # Tokens
    "tokens": (
        _c("28.55", "T", "audit, data"),
        _c("28.5", "T", "report; summary", note="50B short of the four budgets: at least one of the five is rounded"),
    ),
    "tokens_gap": (_c("50", "B", "audit, data"),),
    "tokens_gap_share": (_c("0.18", "%", "audit, data"),),
    "warmup": (_c("2.838528", "B", "audit, adaptation"),),
    "adaptation": (_c("22.838528", "B", "audit, adaptation"),),
    "v32_warmup": (_c("2.1", "B", "V3.2 report"),),
    "v32_sparse": (_c("943.7", "B", "V3.2 report; audit"),),
    "v32_over_both": (_c("41", "×", "audit, adaptation"),),
    "v32_over_sparse": (_c("47", "×", "audit, adaptation"),),
    # Drafts
    "accept_gain": (_c("8.2", "%", "audit, drafts"),),
    # Deployment
    "w4a8_share": (_c("0–100", "%", "report 5", note="'fits one Atlas 800T A3' read as 16 dies of 64 GB"),),
    "bf16_share": (),
    # Predecessor
    "glm45_wording": (_c("355", "B", "GLM-4.5 report; summary", note="so 355B follows the appendix note"),),
    "glm45_vocab": (
        _c("355", "B", "GLM-4.5 report; summary", note="counted as 744B is: 355B and 744B do not count alike"),
    ),
    "glm45_active": (_c("32", "B", "GLM-4.5 report; summary"),),
    "glm45_ratio": (_c("2", "×", "summary"),),
    # The report's other counts
    "swa_symbols": (_c("40", "", "report 2.1.2", note="the printed pattern is one symbol too long for 40 layers"),),
    "swa_gap_ruler": (_c("5.69", "", "report 2.1.2", note="against the searched pattern, not the best of one method"),),
    "swa_gap_repoqa": (_c("7.33", "", "report 2.1.2", note="against SimpleGDN: another method than the 5.69"),),
}

_SWA_PATTERN = "SFSSFFSSSFFFFSSFSFFFFFFSFSFSSFSSFSFSSFSSS"


def report_figures(config: ModelConfig) -> list[Figure]:
    """Figures that follow from numbers of the report, and from `config` (the published one) where it enters."""
    out: list[Figure] = []

    def add(section: str, key: str, label: str, formula: str, value: Fraction | int, unit: str = "") -> None:
        out.append(Figure(key, section, label, formula, Fraction(value), unit))

    trillion, billion = 10**12, 10**9
    budgets = [27 * trillion, trillion, trillion // 2, trillion // 20]
    total, printed = sum(budgets), 285 * trillion // 10
    sums = " + ".join(f"{b:,}" for b in budgets)
    add(TOKENS, "tokens", "pre-training and three mid-training stages", sums, total, "tokens")
    add(TOKENS, "tokens_gap", "sum minus the printed total", f"{total:,} − {printed:,}", total - printed, "tokens")
    gap = Fraction(total - printed, printed)
    add(TOKENS, "tokens_gap_share", "of the printed total", f"{total - printed:,} / {printed:,}", gap, "%")
    warmup, sparse = 1000 * 14 * CONTEXT, 20 * billion
    add(TOKENS, "warmup", "indexer warm-up", f"1,000 × 14 × {CONTEXT:,}", warmup, "tokens")
    both = warmup + sparse
    add(TOKENS, "adaptation", "warm-up and sparse adaptation", f"{warmup:,} + {sparse:,}", both, "tokens")
    v32 = 15_000 * 480 * 131_072
    add(TOKENS, "v32_warmup", "V3.2: indexer warm-up", "1,000 × 16 × 131,072", 1000 * 16 * 131_072, "tokens")
    add(TOKENS, "v32_sparse", "V3.2: sparse adaptation", "15,000 × 480 × 131,072", v32, "tokens")
    formula = f"943,700,000,000 / {both:,}"
    add(TOKENS, "v32_over_both", "V3.2 over GLM-5, both stages", formula, Fraction(943_700_000_000, both), "×")
    formula = f"943,700,000,000 / {sparse:,}"
    add(TOKENS, "v32_over_sparse", "V3.2 over GLM-5, sparse stage", formula, Fraction(943_700_000_000, sparse), "×")
    gain = Fraction(276, 255) - 1
    add(DRAFTS, "accept_gain", "accept length over V3.2's", "2.76 / 2.55 − 1", gain, "%")
    out += _deployment(config)
    out += _predecessor()
    s, f = _SWA_PATTERN.count("S"), _SWA_PATTERN.count("F")
    add(TABLES, "swa_symbols", "symbols of the searched SWA pattern", f"{s} + {f}", len(_SWA_PATTERN))
    add(
        TABLES,
        "swa_gap_ruler",
        "loss on RULER at 128K (Table 5)",
        "75.28 − 69.59",
        Fraction("75.28") - Fraction("69.59"),
    )
    add(TABLES, "swa_gap_repoqa", "loss on RepoQA at 128K", "65.83 − 58.50", Fraction("65.83") - Fraction("58.50"))
    return out


def _deployment(config: ModelConfig) -> list[Figure]:
    """The whole checkpoint on one Atlas 800T A3, 16 dies of 64 GB: in W4A8 and in BF16."""
    node = 16 * 64 * 10**9
    tensors = list(params.checkpoint_tensors(config))
    experts = [t for t in tensors if t.group == "routed_experts"]
    eight_bit = [t for t in tensors if t.quantized and t.group != "routed_experts"]
    rows = sum(t.copies * t.shape[0] for t in eight_bit)
    fp32 = params.count(t for t in tensors if t.fp32)
    others = params.count(t for t in tensors if not t.quantized and not t.fp32)
    scales = sum(t.copies * t.shape[0] * -(-t.shape[1] // 128) for t in experts)
    w4a8 = sum(tensor_bytes(t, "w4a8") for t in tensors)
    formula = (
        f"({params.count(experts):,} / 2 + 2 × {scales:,} + {params.count(eight_bit):,} + 4 × {rows:,} "
        f"+ 2 × {others:,} + 4 × {fp32:,}) / (16 × 64,000,000,000)"
    )
    bf16 = sum(tensor_bytes(t, "bf16") for t in tensors)
    return [
        Figure("w4a8_share", DEPLOYMENT, "W4A8 weights, of one Atlas 800T A3", formula, Fraction(w4a8, node), "%"),
        Figure(
            "bf16_share",
            DEPLOYMENT,
            "BF16 weights, of the same",
            f"{bf16:,} / (16 × 64,000,000,000)",
            Fraction(bf16, node),
            "%",
        ),
    ]


def glm_4_5() -> ModelConfig:
    """GLM-4.5's shape (Table 10 and its config.json), without its QKV biases and QK norms: under 2M parameters."""
    return ModelConfig(
        attention="gqa",
        vocab_size=151_552,
        hidden_size=5120,
        num_hidden_layers=92,
        num_attention_heads=96,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=12_288,
        moe_intermediate_size=1536,
        n_routed_experts=160,
        eos_token_id=(),
        pad_token_id=None,
    )


def _predecessor() -> list[Figure]:
    config = glm_4_5()
    p, active = params.parameters(config), params.active_parameters(config)
    vocab = p.trunk + p.embedding + p.head

    def figure(key: str, label: str, formula: str, value: Fraction | int, unit: str = "") -> Figure:
        return Figure(key, PREDECESSOR, label, formula, Fraction(value), unit)

    return [
        figure("glm45_wording", "GLM-4.5: trunk and MTP block", f"{p.trunk:,} + {p.mtp:,}", p.trunk + p.mtp),
        figure(
            "glm45_vocab", "GLM-4.5: trunk, embedding and head", f"{p.trunk:,} + {p.embedding:,} + {p.head:,}", vocab
        ),
        figure(
            "glm45_active",
            "GLM-4.5: trunk and MTP block, active",
            f"{active.trunk:,} + {active.mtp:,}",
            active.trunk + active.mtp,
        ),
        figure("glm45_ratio", "GLM-5's name over GLM-4.5's", "744 / 355", Fraction(744, 355), "×"),
    ]
