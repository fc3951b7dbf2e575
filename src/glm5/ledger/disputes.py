"""What no arithmetic settles: where sources disagree in words, and what only the publisher could measure.

Sources are named as in `published`. Read next: `table`.
"""

from __future__ import annotations

from dataclasses import dataclass

WORDS = "Sources that disagree in words"
MEASURED = "Measured by the publisher"


@dataclass(frozen=True)
class Disagreement:
    """Two readings of one matter. `ours` is the reading that this project follows, and `why`."""

    key: str
    label: str
    ours: str
    other: str
    source: str
    why: str


DISAGREEMENTS: tuple[Disagreement, ...] = (
    Disagreement(
        "distillation_stage",
        "when cross-stage distillation runs",
        "a final stage (report 3.5)",
        "throughout the process",
        "report, introduction",
        "the method section defines the teachers as the final checkpoints of earlier stages",
    ),
    Disagreement(
        "browsecomp_strategy",
        "context management behind BrowseComp 75.9",
        "discard-all (report 6.1.3, B.2)",
        "keep-recent with discard-all",
        "report 4.2.4",
        "two sections with settings say discard-all; the third says both",
    ),
    Disagreement(
        "vendors",
        "seventh chip vendor",
        "MetaX (report v2; audit)",
        "Biren",
        "summary",
        "the report's second version lists MetaX",
    ),
    Disagreement(
        "agentic_objective",
        "agentic RL objective as printed",
        "with the log-probability factor (report, eq. 3-5)",
        "E[(1/K) Σ (r − mean r)]",
        "report 4.1",
        "deviations from a mean sum to zero: the printed line has no gradient",
    ),
    Disagreement(
        "indexer_relu",
        "ReLU in the index score",
        "present (report 5; audit; transformers; DeepSeek's kernel)",
        "absent for GLM-5",
        "Megatron-LM, comments",
        "every engine that serves the published weights applies it",
    ),
    Disagreement(
        "latent_eps",
        "epsilon of the latent norms",
        "1e-6 (transformers), a switch here",
        "1e-5",
        "vLLM; SGLang",
        "config.json has one rms_norm_eps, 1e-5; transformers builds the latent norms with its default, 1e-6",
    ),
)


@dataclass(frozen=True)
class Measurement:
    """A figure that only the publisher's weights, data or hardware give."""

    key: str
    label: str
    text: str
    source: str
    needs: str


_WEIGHTS = "the published weights and the benchmark"
_RUNS = "the publisher's own training runs"

MEASUREMENTS: tuple[Measurement, ...] = (
    Measurement(
        "attention_saving",
        "attention computation saved on long sequences",
        "1.5–2×",
        "report 2.1.1",
        "its hardware; by operations see 'attention work of prefill'",
    ),
    Measurement(
        "redundancy", "attention entries that are redundant", "90%", "report; audit", "V3.2-Exp's attention maps"
    ),
    Measurement(
        "dsa_vs_mla",
        "DSA against MLA: MQ-NIAH, MV-NIAH, SQuAD, HotpotQA",
        "100.0/100.0, 97.0/95.5, 86.0/79.7, 63.0/66.3",
        "report, Table 3",
        _WEIGHTS,
    ),
    Measurement("table1_gqa", "Table 1, GQA-8 (six tasks)", "77.3 61.2 79.6 53.3 47.6 38.5", "report, Table 1", _RUNS),
    Measurement("table1_mla", "Table 1, MLA", "77.3 61.5 77.8 48.9 46.2 33.5", "report, Table 1", _RUNS),
    Measurement("table1_split", "Table 1, MLA + Muon Split", "77.8 62.5 79.9 51.8 45.0 36.7", "report, Table 1", _RUNS),
    Measurement(
        "table1_256", "Table 1, MLA-256 + Muon Split", "77.4 62.0 79.6 51.3 47.5 36.6", "report, Table 1", _RUNS
    ),
    Measurement(
        "accept_length",
        "accept length at 4 draft steps, GLM-5 and V3.2",
        "2.76 and 2.55",
        "report, Table 2",
        "its private prompts",
    ),
    Measurement(
        "mtp_depths",
        "training depths of the one MTP block",
        "3",
        "report 2.1",
        "the training code; the files hold one block",
    ),
    Measurement(
        "token_inclusion",
        "whether 28.5T includes the adaptation tokens",
        "not stated",
        "audit, data",
        "the training log",
    ),
    Measurement(
        "learning_rates",
        "peak rates: pre-training, warm-up, adaptation",
        "2e-4, 5e-3, 1e-5",
        "report",
        "the training log",
    ),
    Measurement("swe_bench", "SWE-bench Verified, Multilingual", "77.8, 73.3", "report, Table 7", _WEIGHTS),
    Measurement(
        "terminal_terminus",
        "Terminal-Bench 2.0, Terminus-2 (verified version)",
        "56.2 (60.7)",
        "report, Table 7",
        _WEIGHTS,
    ),
    Measurement(
        "terminal_claude",
        "Terminal-Bench 2.0, Claude Code (verified version)",
        "56.2 (61.1)",
        "report, Table 7",
        _WEIGHTS,
    ),
    Measurement("browsecomp", "BrowseComp, keep-recent and discard-all", "62.0, 75.9", "report, Table 7", _WEIGHTS),
    Measurement("tau2", "τ²-Bench", "89.7", "report, Table 7", _WEIGHTS),
    Measurement("mcp_atlas", "MCP-Atlas, public set", "67.8", "report, Table 7", _WEIGHTS),
    Measurement("vending", "Vending-Bench 2", "$4,432", "Andon Labs", _WEIGHTS),
    Measurement("rollouts", "concurrent rollouts", "> 1,000", "report 4.1", "its cluster"),
)
