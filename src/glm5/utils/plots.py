"""A report as one HTML file: text, tables and line charts, readable without a network, a script or a font.

The charts are SVG written here; colours come from CSS variables, so the page follows the reader's light or dark mode.
Read next: `glm5.cli.demo_report`, which writes the demo's `report.html` with this.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from glm5.utils.files import write_text

Series = Mapping[str, Sequence[tuple[float, float]]]

WIDTH, HEIGHT = 720, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 14, 12, 44
_COLOURS = 6
_MAX_POINTS = 600

_STYLE = """
:root { color-scheme: light dark; --ink: #1c1f24; --dim: #626b77; --line: #d9dde3; --page: #ffffff; --card: #f6f7f9;
  --c0: #2563b0; --c1: #c2521b; --c2: #2c7a4b; --c3: #8a3fa0; --c4: #a07a00; --c5: #0f7c8a; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8eb; --dim: #9aa3ae; --line: #363c45; --page: #14171b;
  --card: #1d2127; --c0: #6ea8f0; --c1: #f0915a; --c2: #6cc490; --c3: #cf92e0; --c4: #d9b548; --c5: #5cc3d1; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2rem 1.25rem 4rem; max-width: 50rem; background: var(--page); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", sans-serif; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 .5rem; }
h2 { font-size: 1.15rem; margin: 2.2rem 0 .4rem; }
p { margin: .5rem 0; }
figure, .scroll { margin: 1rem 0; overflow-x: auto; }
figcaption, caption { color: var(--dim); font-size: .875rem; text-align: left; padding: .25rem 0; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .8rem .3rem 0; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top; }
th { color: var(--dim); font-weight: 600; }
td.n, th.n { text-align: right; }
pre { background: var(--card); padding: .8rem 1rem; border-radius: .4rem; overflow-x: auto; font-size: .85rem;
  line-height: 1.45; }
.tiles { display: flex; flex-wrap: wrap; gap: .75rem; margin: 1rem 0; }
.tile { background: var(--card); border-radius: .4rem; padding: .6rem .9rem; min-width: 8rem; }
.tile b { display: block; font-size: 1.35rem; font-weight: 600; }
.tile span { color: var(--dim); font-size: .85rem; }
svg { display: block; width: 100%; min-width: 30rem; height: auto; font: 12px system-ui, sans-serif; }
svg .grid { stroke: var(--line); } svg text { fill: var(--dim); } svg .curve { fill: none; stroke-width: 1.8; }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1.1rem; font-size: .875rem; }
.legend i { display: inline-block; width: 1rem; height: .2rem; margin: 0 .4rem .2rem 0; vertical-align: middle; }
"""


class Report:
    """Builds a page from top to bottom; every method returns the report, so calls can be chained.

    Args:
        title: the page's title and first heading.
    """

    def __init__(self, title: str) -> None:
        self.title = title
        self._parts: list[str] = []

    def section(self, heading: str, text: str = "") -> Report:
        """A heading, and paragraphs (separated by empty lines) under it."""
        self._parts.append(f"<h2>{escape(heading)}</h2>")
        return self.text(text) if text else self

    def text(self, text: str) -> Report:
        """Paragraphs, separated by empty lines."""
        self._parts += [f"<p>{escape(p.strip())}</p>" for p in text.split("\n\n") if p.strip()]
        return self

    def code(self, text: str) -> Report:
        """Preformatted text: a program, a completion, a command."""
        self._parts.append(f"<pre>{escape(text)}</pre>")
        return self

    def figures(self, figures: Mapping[str, Any]) -> Report:
        """The few numbers that matter most, each large above its name."""
        tiles = "".join(
            f'<div class="tile"><b>{_cell(v)}</b><span>{escape(k)}</span></div>' for k, v in figures.items()
        )
        self._parts.append(f'<div class="tiles">{tiles}</div>')
        return self

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[Any]], caption: str = "") -> Report:
        """A table; a column whose cells are all numbers is aligned to the right.

        Raises:
            ValueError: a row has more or fewer cells than there are columns.
        """
        for row in rows:
            if len(row) != len(columns):
                raise ValueError(f"a row of {len(row)} cells in a table of {len(columns)} columns: {row!r}")
        numeric = [all(_is_number(r[i]) or r[i] is None for r in rows) for i in range(len(columns))]
        classes = [' class="n"' if n and rows else "" for n in numeric]
        head = "".join(f"<th{c}>{escape(name)}</th>" for c, name in zip(classes, columns, strict=True))
        cells = ["".join(f"<td{c}>{_cell(v)}</td>" for c, v in zip(classes, row, strict=True)) for row in rows]
        body = "".join(f"<tr>{row}</tr>" for row in cells)
        title = f"<caption>{escape(caption)}</caption>" if caption else ""
        self._parts.append(
            f'<div class="scroll"><table>{title}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
        )
        return self

    def chart(
        self,
        series: Series,
        *,
        x: str = "step",
        y: str = "",
        caption: str = "",
        log_y: bool = False,
    ) -> Report:
        """A line chart.

        Args:
            series: name -> points (x, y) in the order of x. Points that are not finite break the line.
            x, y: the axes' names.
            caption: what the chart shows.
            log_y: a logarithmic y axis; points at or below 0 are then left out.
        """
        legend = "".join(
            f'<span><i style="background:var(--c{i % _COLOURS})"></i>{escape(name)}</span>'
            for i, name in enumerate(series)
        )
        note = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
        label = caption or f"{y or 'value'} by {x}"
        picture = line_chart(series, x=x, y=y, log_y=log_y, label=label)
        self._parts.append(f'<figure><div class="legend">{legend}</div>{picture}{note}</figure>')
        return self

    def html(self) -> str:
        """The whole page."""
        return (
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<title>{escape(self.title)}</title><style>{_STYLE}</style></head>\n"
            f"<body><h1>{escape(self.title)}</h1>\n" + "\n".join(self._parts) + "\n</body></html>\n"
        )

    def save(self, path: str | Path) -> Path:
        """Write the page to `path`, atomically.

        Raises:
            FileError: it cannot be written.
        """
        write_text(path, self.html())
        return Path(path)


# --------------------------------------------------------------------------- charts
def line_chart(series: Series, *, x: str = "", y: str = "", log_y: bool = False, label: str = "") -> str:
    """One SVG element of the curves in `series` (see `Report.chart`); without a drawable point, it says so."""
    drawable = {name: [p for p in points if _drawable(p, log_y)] for name, points in series.items()}
    points = [p for curve in drawable.values() for p in curve]
    opening = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label)}">'
    if not points:
        return f'{opening}<text x="{WIDTH / 2}" y="{HEIGHT / 2}" text-anchor="middle">no data</text></svg>'

    def height(value: float) -> float:
        return math.log10(value) if log_y else value

    x0, x1 = _spread(min(p[0] for p in points), max(p[0] for p in points))
    y0, y1 = _spread(min(height(p[1]) for p in points), max(height(p[1]) for p in points))
    x_ticks, y_ticks = ticks(x0, x1), _log_ticks(y0, y1) if log_y else ticks(y0, y1)
    y0, y1 = min(y0, height(y_ticks[0])), max(y1, height(y_ticks[-1]))

    def px(value: float) -> float:
        return _LEFT + (value - x0) / (x1 - x0) * (WIDTH - _LEFT - _RIGHT)

    def py(value: float) -> float:
        return HEIGHT - _BOTTOM - (height(value) - y0) / (y1 - y0) * (HEIGHT - _TOP - _BOTTOM)

    parts = [opening]
    for value in y_ticks:
        parts.append(f'<path class="grid" d="M{_LEFT} {py(value):.1f}H{WIDTH - _RIGHT}"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{py(value) + 4:.1f}" text-anchor="end">{format_number(value)}</text>')
    for value in (v for v in x_ticks if x0 <= v <= x1):
        parts.append(
            f'<text x="{px(value):.1f}" y="{HEIGHT - _BOTTOM + 18}" text-anchor="middle">{format_number(value)}</text>'
        )
    middle = (HEIGHT - _BOTTOM + _TOP) / 2
    parts.append(f'<text x="{(WIDTH + _LEFT) / 2}" y="{HEIGHT - 6}" text-anchor="middle">{escape(x)}</text>')
    parts.append(f'<text transform="translate(14 {middle}) rotate(-90)" text-anchor="middle">{escape(y)}</text>')
    for i, (name, curve) in enumerate(series.items()):
        stroke = f"var(--c{i % _COLOURS})"
        tip = f"<title>{escape(name)}</title>"
        for run in _runs(curve, log_y):
            if len(run) == 1:
                dot = f'cx="{px(run[0][0]):.1f}" cy="{py(run[0][1]):.1f}"'
                parts.append(f'<circle {dot} r="3" style="fill:{stroke}">{tip}</circle>')
            else:
                path = "L".join(f"{px(a):.1f} {py(b):.1f}" for a, b in thin(run, _MAX_POINTS))
                parts.append(f'<path class="curve" style="stroke:{stroke}" d="M{path}">{tip}</path>')
    return "".join([*parts, "</svg>"])


def _drawable(point: tuple[float, float], log_y: bool) -> bool:
    return math.isfinite(point[0]) and math.isfinite(point[1]) and not (log_y and point[1] <= 0)


def _runs(curve: Sequence[tuple[float, float]], log_y: bool) -> Iterator[list[tuple[float, float]]]:
    """Stretches of drawable points: a NaN is a gap, not a straight line over it."""
    run: list[tuple[float, float]] = []
    for point in curve:
        if _drawable(point, log_y):
            run.append(point)
        elif run:
            yield run
            run = []
    if run:
        yield run


def thin(points: Sequence[tuple[float, float]], most: int) -> list[tuple[float, float]]:
    """At most about `most` points of a curve that keep its ends and, of every stretch, its lowest and highest."""
    if len(points) <= most:
        return list(points)
    stretches = max(1, (most - 2) // 2)
    kept = {0, len(points) - 1}
    for i in range(stretches):
        stretch = range(i * len(points) // stretches, (i + 1) * len(points) // stretches)
        kept |= {min(stretch, key=lambda j: points[j][1]), max(stretch, key=lambda j: points[j][1])}
    return [points[j] for j in sorted(kept)]


def ticks(low: float, high: float) -> list[float]:
    """Round values that cover [low, high]: multiples of 1, 2 or 5 times a power of ten, about five of them."""
    if high <= low:
        return [low]
    raw = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [i * step for i in range(first, last + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    """Ticks for exponents in [low, high]: at most seven powers of ten; below two decades, round values."""
    if high - low < 2:
        return [value for value in ticks(10**low, 10**high) if value > 0]
    powers = range(math.floor(low + 1e-9), math.ceil(high - 1e-9) + 1)
    return [10.0**p for p in powers[:: math.ceil(len(powers) / 7)]]


def _spread(low: float, high: float) -> tuple[float, float]:
    """The interval, widened if it is a point, so that a constant lies in the middle of its axis."""
    return (low, high) if high > low else (low - (abs(low) or 1) / 10, low + (abs(low) or 1) / 10)


# --------------------------------------------------------------------------- numbers
def format_number(value: float) -> str:
    """A number for a reader: 1_234_567 is "1,234,567", 0.00001234 is "1.234e-05", 2.0 is "2"."""
    if isinstance(value, int) or (math.isfinite(value) and abs(value) >= 10_000):
        return f"{value:,.0f}" if abs(value) < 1e15 else f"{value:.4g}"
    return f"{value:.4g}"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    return format_number(value) if _is_number(value) else escape(str(value))
