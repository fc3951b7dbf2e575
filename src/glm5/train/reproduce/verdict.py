"""When does a difference between two variants count? One rule for all tables, stated here and printed with each.

Runs of two variants with the same seed share initial draws, data and order, so they are compared in pairs: one
difference for each seed, relative to the reference unless the claim says otherwise. The mean difference has the
interval mean +- t * s / sqrt(n), where s is the sample deviation over the n seeds and t the 97.5% quantile of
Student's distribution with n - 1 degrees of freedom. Zero inside the interval is "within noise"; outside it, the sign
decides between "same direction" and "opposite". Where the report claims that two variants match, the interval must lie
within +-1% ("match") or wholly outside it ("no match"). One seed has no spread, and proves nothing.
Read next: `table1`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

# A match is proven, or refuted, at this relative difference. Our choice: the report's own gap between MLA and GQA-8 is
# 3% of the mean score of Table 1, and what it calls a match 0.4%.
MARGIN = 0.01

RULE = (
    "Differences are taken seed by seed (same initial draws, same data in the same order). The mean difference counts "
    "if its 95% interval (Student's t over the seeds) excludes zero: then it has the report's direction, or the "
    f"opposite; otherwise it is within noise. A claimed match needs the whole interval within {MARGIN:.0%}, and is "
    "refuted by an interval wholly outside. Only claims with the report's direction, or a proven match, are reproduced."
)

# 97.5% quantiles of Student's t for 1 ... 30 degrees of freedom; beyond, the last one, which is slightly too wide.
_T = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip

Outcome = Literal["same direction", "opposite", "within noise", "match", "no match"]


@dataclass(frozen=True)
class Claim:
    """One statement of the report about a measured variant and a reference.

    Args:
        text: the statement.
        report: the figures that the report gives for it.
        direction: of the measured quantity against the reference's, as the report has it.
        unit: of the differences: "%" of the reference, or an absolute unit.
    """

    text: str
    report: str
    direction: Literal["higher", "lower", "equal"]
    unit: str = "%"


@dataclass(frozen=True)
class Verdict:
    """What the seeds say about a claim.

    Args:
        differences: measured less reference, by seed, in `claim.unit` (a share of 1 for "%").
        half_width: of the 95% interval around `mean`; None for a single seed.
        reproduced: None where the seeds cannot tell.
    """

    claim: Claim
    differences: tuple[float, ...]
    mean: float
    half_width: float | None
    outcome: Outcome
    reproduced: bool | None


def judge(claim: Claim, measured: Sequence[float], reference: Sequence[float]) -> Verdict:
    """Apply the rule to one claim.

    Args:
        measured, reference: the quantity by seed, in the same order of seeds.

    Raises:
        ValueError: there is no seed, the two differ in length, or a relative claim has a reference of 0.
    """
    pairs = list(zip(measured, reference, strict=True))
    if not pairs:
        raise ValueError("a claim needs at least one seed")
    if claim.unit == "%" and any(b == 0 for _, b in pairs):
        raise ValueError(f"{claim.text}: relative to a reference of 0")
    differences = tuple(a / b - 1 if claim.unit == "%" else a - b for a, b in pairs)
    mean = sum(differences) / len(differences)
    half = interval(differences)
    if claim.direction == "equal":
        outcome, reproduced = _match(mean, half)
    else:
        outcome, reproduced = _direction(mean if claim.direction == "higher" else -mean, half)
    return Verdict(claim, differences, mean, half, outcome, reproduced)


def _direction(mean: float, half: float | None) -> tuple[Outcome, bool | None]:
    if half is None or abs(mean) <= half:
        return "within noise", None
    return ("same direction", True) if mean > 0 else ("opposite", False)


def _match(mean: float, half: float | None) -> tuple[Outcome, bool | None]:
    if half is not None and abs(mean) + half <= MARGIN:
        return "match", True
    if half is not None and abs(mean) - half > MARGIN:
        return "no match", False
    return "within noise", None


def interval(values: Sequence[float]) -> float | None:
    """Half the width of the mean's 95% interval; None for fewer than two values."""
    deviation = spread(values)
    if deviation is None:
        return None
    return _T[min(len(values) - 1, len(_T)) - 1] * deviation / math.sqrt(len(values))


def spread(values: Sequence[float]) -> float | None:
    """Sample standard deviation; None for fewer than two values."""
    if len(values) < 2:
        return None
    mean = sum(values) / len(values)
    return math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1))
