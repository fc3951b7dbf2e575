"""A comparison for its readers: on the terminal and as one page. Variants stand across, figures down.

Read next: `reproduce`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from glm5.train.reproduce.outcome import Column, Comparison, Row
from glm5.train.reproduce.verdict import RULE, Verdict, spread
from glm5.utils.plots import Report, format_number

Lines = list[list[str]]
VERDICT_HEADS = ("claim", "the report", "here (95% interval)", "verdict")


def print_comparison(comparison: Comparison, console: Console | None = None) -> None:
    """The report's table, ours below it under the same heads, and the verdicts."""
    # Piped, rich would fold everything to 80 columns.
    out = console or Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    out.print(f"\n[bold]{comparison.title}[/bold]\n")
    heads = ["", *(row.name for row in comparison.rows)]
    for caption, lines in (
        (comparison.report.caption, report_lines(comparison)),
        (_here(comparison), our_lines(comparison)),
    ):
        out.print(_table(caption, heads, lines, right=True))
    out.print(_table("Verdicts", VERDICT_HEADS, verdict_lines(comparison.verdicts)))
    for note in comparison.notes:
        out.print(note)
    out.print(f"\n{RULE}\n")


def _table(caption: str, heads: Sequence[str], lines: Lines, *, right: bool = False) -> Table:
    table = Table(title=caption, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for i, name in enumerate(heads):
        table.add_column(name, justify="right" if right and i else "left")
    for line in lines:
        table.add_row(*line)
    return table


def write_page(comparison: Comparison, result: dict[str, Any], path: Path) -> None:
    """The same as a page, with charts, what it ran on, and every figure by seed."""
    page = Report(comparison.title)
    reproduced = [v.reproduced for v in comparison.verdicts]
    page.text(comparison.about)
    page.figures(
        {
            "claims reproduced": reproduced.count(True),
            "claims contradicted": reproduced.count(False),
            "within noise": reproduced.count(None),
            "seeds": len(comparison.seeds),
        }
    )
    heads = ["", *(row.name for row in comparison.rows)]
    page.section("The report")
    page.table(heads, report_lines(comparison), comparison.report.caption)
    page.section("Here")
    page.table(heads, our_lines(comparison), _here(comparison))
    page.section("Verdicts", RULE)
    page.table(VERDICT_HEADS, verdict_lines(comparison.verdicts))
    for note in comparison.notes:
        page.text(note)
    page.section("Curves")
    for chart in comparison.charts:
        page.chart(chart.series, x=chart.x, y=chart.y, caption=chart.caption)
    page.section("By seed")
    rows = [
        [row.name, name, *(format_number(v) for v in values)]
        for row in comparison.rows
        for name, values in row.by_seed.items()
    ]
    page.table(["variant", "figure", *(f"seed {s}" for s in comparison.seeds)], rows)
    page.section("How it was run")
    environment = result["environment"]
    facts = {
        "command": f"glm5 reproduce {result['table']} --size {result['size']} --seeds {len(comparison.seeds)} "
        f"--steps {result['settings']['steps']} --corpus {result['corpus']['source']}",
        "date": result["date"],
        "device": f"{result['device']}, {environment['threads']} CPU threads",
        "torch": environment["packages"]["torch"],
        "training tokens in the corpus": format_number(result["corpus"]["training_tokens"]),
        "tokens in pretraining": format_number(_tokens(result["settings"])),
    }
    page.table(["", "value"], [[k, v] for k, v in facts.items()])
    page.save(path)


def report_lines(comparison: Comparison) -> Lines:
    """One line for each column of the report's table; a variant that it lacks has a dash."""
    cells = comparison.report.rows
    return [
        [name, *(str(cells[row.name][i]) if row.name in cells else "-" for row in comparison.rows)]
        for i, name in enumerate(comparison.report.columns)
    ]


def our_lines(comparison: Comparison) -> Lines:
    """One line for each of our figures: mean and spread over seeds, or a figure that no seed changes."""
    return [[c.name, *(_figure(row, c) for row in comparison.rows)] for c in comparison.columns]


def verdict_lines(verdicts: Sequence[Verdict]) -> Lines:
    """Claim, the report's figures, our difference with its interval, and the outcome in words."""
    return [[v.claim.text, v.claim.report, difference(v), _outcome(v)] for v in verdicts]


def difference(verdict: Verdict) -> str:
    """The mean difference and its 95% interval in the claim's unit, as "+1.20% ± 0.31%"."""
    if verdict.claim.unit == "%":
        mean, half, unit = f"{verdict.mean:+.2%}", verdict.half_width, ""
        width = None if half is None else f"{half:.2%}"
    else:
        mean, half, unit = f"{verdict.mean:+.3f}", verdict.half_width, f" {verdict.claim.unit}"
        width = None if half is None else f"{half:.3f}"
    return f"{mean}{unit}" if width is None else f"{mean} ± {width}{unit}"


def _outcome(verdict: Verdict) -> str:
    if verdict.half_width is None:
        return f"{verdict.outcome}: one seed has no spread; not reproduced"
    return verdict.outcome if verdict.reproduced else f"{verdict.outcome}: not reproduced"


def _figure(row: Row, column: Column) -> str:
    if column.name in row.fixed:
        return format_number(row.fixed[column.name])
    values = row.by_seed[column.name]
    mean, deviation = sum(values) / len(values), spread(values)
    text = f"{mean:.{column.digits}f}"
    return text if deviation is None else f"{text} ± {deviation:.{column.digits}f}"


def _here(comparison: Comparison) -> str:
    n = len(comparison.seeds)
    return f"Here, mean ± deviation over {n} seeds" if n > 1 else "Here, one seed"


def _tokens(settings: dict[str, Any]) -> int:
    return settings["steps"] * settings["rows"] * settings["seq_len"]
