"""A comparison's result: rows of figures by seed, verdicts on the claims, curves. Plain data, ready for JSON.

Read next: `table1`, which makes one; `glm5.cli.reproduce_report` shows it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from glm5.train.reproduce.verdict import Verdict


@dataclass(frozen=True)
class Column:
    """One measured quantity. digits: after the point, in print; None prints a whole number."""

    name: str
    digits: int | None = 3


@dataclass(frozen=True)
class Row:
    """One variant. by_seed: column -> its figure for every seed. fixed: column -> a figure that no seed changes."""

    name: str
    by_seed: Mapping[str, Sequence[float]]
    fixed: Mapping[str, float]


@dataclass(frozen=True)
class ReportTable:
    """The report's figures: name of each row -> its cells (numbers, or text)."""

    columns: Sequence[str]
    rows: Mapping[str, Sequence[float | str]]
    caption: str


@dataclass(frozen=True)
class Chart:
    """series: name -> points (x, y) in the order of x."""

    caption: str
    x: str
    y: str
    series: Mapping[str, Sequence[tuple[float, float]]]


@dataclass(frozen=True)
class Comparison:
    """Everything that a table's run found.

    Args:
        title, about: what is compared, and how it differs from the report's experiment.
        report: the report's own table. columns, rows: ours.
        seeds: of the figures `by_seed`, in their order.
        notes: what a reader must know to judge it, and facts that follow from the configuration alone.
    """

    title: str
    about: str
    report: ReportTable
    columns: Sequence[Column]
    rows: Sequence[Row]
    seeds: Sequence[int]
    verdicts: Sequence[Verdict]
    charts: Sequence[Chart] = ()
    notes: Sequence[str] = ()
