"""The report's Tables 1, 2 and 6, which the runs here are set beside. The claims are in the tables' own modules.

Its sizes and token counts for Table 1 are not published, nor the prompts of Table 2. Table 6 is a GLM-4.7-Flash on
RULER. Read next: `settings`.
"""

from __future__ import annotations

TABLE1_BENCHMARKS = ("HellaSwag", "MMLU", "C-Eval", "RACE", "BBH", "GSM8K", "HumanEval")
TABLE1 = {
    "GQA-8": (77.3, 61.2, 60.0, 79.6, 53.3, 47.6, 38.5),
    "MLA": (77.3, 61.5, 59.7, 77.8, 48.9, 46.2, 33.5),
    "MLA + Muon Split": (77.8, 62.5, 62.1, 79.9, 51.8, 45.0, 36.7),
    "MLA-256 + Muon Split": (77.4, 62.0, 59.9, 79.6, 51.3, 47.5, 36.6),
}

# Accept length with four speculative steps: DeepSeek-V3.2 trained one MTP depth, GLM-5 three with one shared block.
TABLE2_DRAFTS = 4
TABLE2 = {"one depth": ("DeepSeek-V3.2", 2.55), "three depths, one block": ("GLM-5", 2.76)}

# RULER by length in thousands of tokens. Its top-k is not stated there; GLM-5's, which DeepSeek-V3.2 has too, is 2,048.
TABLE6_LENGTHS = (4, 8, 16, 32, 64, 128)
TABLE6_TOPK = 2048
TABLE6 = {
    "dense": (97.44, 96.72, 95.83, 92.96, 85.34, 79.21),
    "warm-up only": (97.51, 96.54, 95.40, 90.09, 84.05, 71.35),
    "sparse-adapted": (96.77, 96.25, 96.69, 93.45, 87.06, 78.86),
}


def table1_mean(variant: str) -> float:
    """Mean of a variant's seven scores."""
    return sum(TABLE1[variant]) / len(TABLE1[variant])
