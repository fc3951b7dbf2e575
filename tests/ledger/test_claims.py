"""The rule of verdicts, and every figure of the audit against the ledger."""

from __future__ import annotations

from fractions import Fraction

import pytest

from glm5.ledger import published
from glm5.ledger.claims import UNITS, Claim, judge, number, show, show_as
from glm5.ledger.figures import figures
from glm5.ledger.table import VERDICTS, as_json, is_published, ledger, tally
from glm5.model.presets import PRESETS, glm5, gqa_8, mini, nano

ROWS = ledger(glm5())


def claim(text: str, unit: str = "", **more: object) -> Claim:
    return Claim(text, unit, "a test", **more)  # type: ignore[arg-type]


# --------------------------------------------------------------------------- the rule
@pytest.mark.parametrize(
    ("value", "said", "verdict"),
    [
        (78, claim("78"), "exact"),
        (78, claim("80"), "conflict"),
        (1000, claim("1,000"), "exact"),
        (Fraction(1, 3), claim("1/3"), "exact"),
        (Fraction(1, 3), claim("0.333"), "consistent"),
        (Fraction(1, 3), claim("0.334"), "conflict"),
        (89_856, claim("87.75", "KiB"), "exact"),
        (89_857, claim("87.75", "KiB"), "consistent"),
        (28_550_000_000_000, claim("28.55", "T"), "exact"),
        (28_550_000_000_000, claim("28.5", "T"), "conflict"),  # a half rounds up, to 28.6
        (28_549_999_999_999, claim("28.5", "T"), "consistent"),
        (753_864_139_008, claim("750", "B"), "conflict"),
        (753_864_139_008, claim("750", "B", step=Fraction(10)), "consistent"),
        (755_000_000_000, claim("750", "B", step=Fraction(10)), "conflict"),
        (Fraction(3, 2), claim("1.5–2", "×"), "consistent"),
        (Fraction(21, 10), claim("1.5–2", "×"), "conflict"),
        (Fraction(11, 10), claim("1", within=Fraction(1, 10)), "consistent"),
        (Fraction(111, 100), claim("1", within=Fraction(1, 10)), "conflict"),
    ],
)
def test_verdicts(value: Fraction | int, said: Claim, verdict: str) -> None:
    assert judge(Fraction(value), said) == verdict


@pytest.mark.parametrize(
    ("value", "places", "text"),
    [
        (Fraction(1_234_567), 0, "1,234,567"),
        (Fraction(5, 2), 3, "2.5"),
        (Fraction(1, 3), 3, "0.333…"),
        (Fraction(19_999, 10_000), 3, "1.999…"),
        (Fraction(2), 2, "2"),
        (Fraction(100), 2, "100"),
    ],
)
def test_numbers_are_exact_or_say_that_they_go_on(value: Fraction, places: int, text: str) -> None:
    assert number(value, places) == text


def test_units() -> None:
    assert show(Fraction(89_856), "bytes") == "87.75 KiB"
    assert show(Fraction(512), "bytes") == "512 bytes"
    assert show(Fraction(3 * 10**9), "FLOP") == "3 GFLOP"
    assert show(Fraction(1, 32), "%") == "3.125%"
    assert show_as(Fraction(753_864_139_008), claim("753.864", "B")) == "753.864139…B"
    assert UNITS["GiB"] == 2**30


# --------------------------------------------------------------------------- the audit, figure by figure
# (key, value in base units as the audit's digits give it, the claim as printed, verdict)
AUDIT = [
    ("layers", 78, "78", "exact"),
    ("layers", 78, "80", "conflict"),
    ("mtp_blocks", 1, "1", "exact"),
    ("hidden", 6144, "6,144", "exact"),
    ("vocab", 154_880, "154,880", "exact"),
    ("positions", 202_752, "202,752", "exact"),
    ("rope_theta", 1_000_000, "1,000,000", "exact"),
    ("heads", 64, "64", "exact"),
    ("q_latent", 2048, "2,048", "exact"),
    ("qk_width", 192 + 64, "256", "exact"),
    ("qk_width", 192 + 64, "192", "conflict"),
    ("v_width", 256, "256", "exact"),
    ("latent", 512 + 64, "576", "exact"),
    ("index_heads", 32, "32", "exact"),
    ("index_width", 128, "128", "exact"),
    ("topk", 2048, "2,048", "exact"),
    ("experts", 256, "256", "exact"),
    ("experts_per_token", 8, "8", "exact"),
    ("shared_experts", 1, "1", "exact"),
    ("expert_width", 2048, "2,048", "exact"),
    ("groups", 1, "1", "exact"),
    ("routed_scaling", Fraction(5, 2), "2.5", "exact"),
    ("expert_share", Fraction(8, 256), "8/256", "exact"),
    ("moe_layer", 9_702_998_272, "9.70B", "consistent"),
    ("trunk", 742_008_052_992, "742,008,052,992", "exact"),
    ("trunk", 742_008_052_992, "742.008B", "consistent"),
    ("embedding", 951_582_720, "951,582,720", "exact"),
    ("embedding", 951_582_720, "0.952B", "consistent"),
    ("head", 951_582_720, "951,582,720", "exact"),
    ("head", 951_582_720, "0.952B", "consistent"),
    ("mtp", 9_952_920_576, "9,952,920,576", "exact"),
    ("mtp", 9_952_920_576, "9.953B", "consistent"),
    ("mtp", 9_952_920_576, "10B", "consistent"),
    ("total", 753_864_139_008, "753,864,139,008", "exact"),
    ("total", 753_864_139_008, "753.864B", "consistent"),
    ("total", 753_864_139_008, "750B", "consistent"),
    ("bf16", 753_864_119_552, "753,864,119,552", "exact"),
    ("fp32", 19_456, "19,456", "exact"),
    ("without_mtp", 742_008_052_992 + 2 * 951_582_720, "743.911B", "consistent"),
    ("without_mtp", 742_008_052_992 + 2 * 951_582_720, "744B", "consistent"),
    ("without_vocab", 742_008_052_992 + 9_952_920_576, "744B", "conflict"),
    ("bytes", 2 * 753_864_119_552 + 4 * 19_456, "1.508 TB", "consistent"),
    ("bytes", 2 * 753_864_119_552 + 4 * 19_456, "1.371 TiB", "consistent"),
    ("active", 39_881_563_392, "40B", "consistent"),
    ("active_mtp", 40_472_797_440, "40B", "consistent"),
    ("active_bytes", 2 * 39_881_563_392, "80 GiB", "conflict"),
    ("cache_mla_token", 78 * (512 + 64) * 2, "87.75 KiB", "exact"),
    ("cache_mla", 78 * (512 + 64) * 2 * 202_752, "16.97 GiB", "consistent"),
    ("cache_index_token", 78 * 128 * 2, "19.50 KiB", "exact"),
    ("cache_index", 78 * 128 * 2 * 202_752, "3.77 GiB", "consistent"),
    ("cache_all_token", 78 * 704 * 2, "107.25 KiB", "exact"),
    ("cache_all", 78 * 704 * 2 * 202_752, "20.74 GiB", "consistent"),
    ("last_query", Fraction(2048, 202_752), "1.0101%", "consistent"),
    ("last_query", Fraction(2048, 202_752), "1.01%", "consistent"),
    ("last_query_ratio", 99, "99×", "exact"),
    ("dense_pairs", 20_554_288_128, "20,554,288,128", "exact"),
    ("sparse_pairs", 413_139_968, "413,139,968", "exact"),
    ("prefill_share", Fraction(413_139_968, 20_554_288_128), "2.01%", "consistent"),
    ("prefill_ratio", Fraction(20_554_288_128, 413_139_968), "49.75×", "consistent"),
    ("replay", 638_976, "638,976 bytes", "exact"),
    ("replay", 638_976, "624 KiB", "exact"),
    ("gqa_cache", 2 * 8 * 128, "2,048", "exact"),
    ("fewer_heads", Fraction(1, 3), "1/3", "exact"),
    ("train_pair_ratio", Fraction(64 * 512, 96 * 320), "1 (±10%)", "consistent"),
    ("variant_params", Fraction(753_864_139_008, 752_041_713_920), "1 (±10%)", "consistent"),
    ("variant_macs", Fraction(40_831_942_656, 39_032_586_240), "1 (±10%)", "consistent"),
    ("tokens", 28_550_000_000_000, "28.55T", "exact"),
    ("tokens", 28_550_000_000_000, "28.5T", "conflict"),
    ("tokens_gap", 50_000_000_000, "50B", "exact"),
    ("tokens_gap_share", Fraction(50, 28_500), "0.18%", "consistent"),
    ("warmup", 2_838_528_000, "2.838528B", "exact"),
    ("adaptation", 22_838_528_000, "22.838528B", "exact"),
    ("v32_warmup", 2_097_152_000, "2.1B", "consistent"),
    ("v32_sparse", 943_718_400_000, "943.7B", "consistent"),
    ("v32_over_both", Fraction(943_700_000_000, 22_838_528_000), "41×", "consistent"),
    ("v32_over_sparse", Fraction(9437, 200), "47×", "consistent"),
    ("accept_gain", Fraction(276 - 255, 255), "8.2%", "consistent"),
    ("glm45_wording", 355_232_649_280, "355B", "consistent"),
    ("glm45_vocab", 352_796_486_560, "355B", "conflict"),
    ("glm45_active", 32_480_956_480, "32B", "consistent"),
    ("glm45_ratio", Fraction(744, 355), "2×", "consistent"),
    ("swa_symbols", 41, "40", "conflict"),
    ("swa_gap_ruler", Fraction(569, 100), "5.69", "exact"),
    ("swa_gap_repoqa", Fraction(733, 100), "7.33", "exact"),
]


@pytest.mark.parametrize(("key", "value", "said", "verdict"), AUDIT)
def test_audit_figure(key: str, value: Fraction | int, said: str, verdict: str) -> None:
    (row,) = [r for r in ROWS if r.key == key and r.claim == said]
    assert (row.value, row.verdict) == (Fraction(value), verdict)


def test_no_claim_goes_untested() -> None:
    tested = {(key, said) for key, _, said, _ in AUDIT} | {("w4a8_share", "0–100%")}
    judged = {(r.key, r.claim) for r in ROWS if r.claim and r.value is not None}
    assert judged == tested


def test_w4a8_weights_fit_one_atlas_node_and_bf16_weights_do_not() -> None:
    w4a8, bf16 = (next(r for r in ROWS if r.key == key) for key in ("w4a8_share", "bf16_share"))
    experts = 76 * 256 * 3 * 6144 * 2048
    assert w4a8.value is not None
    assert bf16.value is not None
    assert experts / 2 < w4a8.value * 16 * 64e9 < 0.56 * 753_864_139_008
    assert w4a8.verdict == "consistent"
    assert bf16.value > 1


def test_conflicts_are_these() -> None:
    conflicts = [r.key for r in ROWS if r.verdict == "conflict"]
    computed = ["layers", "qk_width", "without_vocab", "active_bytes", "tokens", "glm45_vocab", "swa_symbols"]
    in_words = "distillation_stage browsecomp_strategy vendors agentic_objective indexer_relu latent_eps".split()
    assert conflicts == computed + in_words
    assert all(r.why for r in ROWS if r.verdict == "conflict")


def test_what_is_measured_is_not_computed() -> None:
    rows = [r for r in ROWS if r.verdict == "not computable"]
    assert {r.key for r in rows} >= {"attention_saving", "redundancy", "accept_length", "swe_bench", "vending"}
    assert all(r.value is None and not r.ours and r.why.startswith("needs ") for r in rows)


# --------------------------------------------------------------------------- which rows stand where
def test_every_claim_belongs_to_a_figure() -> None:
    keys = {f.key for f in figures(glm5())} | {f.key for f in published.report_figures(glm5())}
    assert set(published.CLAIMS) <= keys


def test_other_configurations_have_figures_without_claims() -> None:
    for config in (mini(), nano(), gqa_8(glm5()), glm5(num_hidden_layers=80), glm5(dtype="float32")):
        rows = ledger(config)
        assert rows
        assert not is_published(config)
        assert all(r.verdict is None and not r.claim and r.value is not None for r in rows)


def test_settings_that_change_no_figure_keep_the_claims() -> None:
    same = glm5(
        mlp_layer_types=("dense",) * 3 + ("sparse",) * 75,
        first_k_dense_replace=1,
        latent_norm_eps=1e-5,
        eos_token_id=(1,),
        pad_token_id=None,
        initializer_range=0.01,
    )
    assert is_published(same)
    assert [r.verdict for r in ledger(same)] == [r.verdict for r in ROWS]


def test_claims_about_the_longest_context_are_not_made_about_another() -> None:
    rows = {r.key: r for r in ledger(glm5(), 4096)}
    for key in published.CONTEXT_KEYS:
        assert rows[key].verdict is None
    assert rows["cache_all_token"].verdict == "exact"


def test_rows_for_machines() -> None:
    rows = ROWS
    out = {r.key: as_json(r) for r in rows}
    assert out["total"]["value"] == 753_864_139_008
    assert out["last_query"]["exact"] == "1/99"
    assert out["swe_bench"]["value"] is None
    assert sum(tally(rows).values()) == sum(r.verdict is not None for r in rows)
    assert tuple(tally(rows)) == VERDICTS


@pytest.mark.parametrize("name", PRESETS)
def test_every_row_says_what_it_is(name: str) -> None:
    for row in ledger(PRESETS[name]()):
        assert row.label
        assert row.section
        assert bool(row.claim) == bool(row.source) == (row.verdict is not None)
