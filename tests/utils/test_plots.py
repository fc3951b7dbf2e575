"""The HTML report: one self-contained, well-formed file that shows what it was given."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm5.utils.errors import FileError
from glm5.utils.plots import HEIGHT, WIDTH, Report, format_number, line_chart, thin, ticks


class Outline(HTMLParser):
    """Tags of a page, checking that each that is opened is closed in its turn."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def example() -> Report:
    curve = [(i, 5 * math.exp(-i / 100)) for i in range(500)]
    return (
        Report("A <small> GLM-5")
        .figures({"bits per byte": 1.2345678, "parameters": 3_412_000})
        .section("Loss & more", "First.\n\nSecond <b>.")
        .chart({"dense <1>": curve, "sparse": curve[::2]}, y="loss", caption="Loss by step")
        .table(["file", "ratio"], [["<x>.py", 0.25], ["y.py", None]], caption="Files")
        .code("if a < b:\n    pass")
    )


def test_page_is_well_formed_and_needs_nothing_else(tmp_path: Path) -> None:
    path = example().save(tmp_path / "out" / "report.html")
    page = path.read_text(encoding="utf-8")
    outline = Outline()
    outline.feed(page)
    assert outline.open == []
    assert {"table", "svg", "pre", "h1", "h2", "figure"} <= set(outline.tags)
    assert not {"script", "link", "img", "iframe"} & set(outline.tags)
    assert "http" not in page
    assert "prefers-color-scheme: dark" in page


def test_text_is_escaped_everywhere() -> None:
    page = example().html()
    for text in (
        "A &lt;small&gt; GLM-5",
        "Second &lt;b&gt;.",
        "dense &lt;1&gt;",
        "&lt;x&gt;.py",
        "if a &lt; b:",
        "Loss &amp;",
    ):
        assert text in page
    for text in ("<small>", "<x>", "<1>"):
        assert text not in page


def test_numbers_are_aligned_and_rounded_and_a_gap_is_shown() -> None:
    page = example().html()
    assert "<b>1.235</b>" in page
    assert "<b>3,412,000</b>" in page
    assert '<td class="n">0.25</td>' in page
    assert '<td class="n">–</td>' in page
    assert "<td>y.py</td>" in page


def test_table_refuses_a_ragged_row() -> None:
    with pytest.raises(ValueError, match="3 cells in a table of 2"):
        Report("r").table(["a", "b"], [[1, 2], [1, 2, 3]])


def test_read_only_directory(tmp_path: Path, read_only: Callable[[Path], AbstractContextManager[None]]) -> None:
    with read_only(tmp_path), pytest.raises(FileError, match="report"):
        example().save(tmp_path / "report.html")


def parsed(svg: str) -> ElementTree.Element:
    return ElementTree.fromstring(svg)  # noqa: S314 (our own text)


def coordinates(svg: str) -> list[list[tuple[float, float]]]:
    """The points of each curve in an SVG element, in its units."""
    paths = [e.attrib["d"] for e in parsed(svg).iter("path") if e.attrib.get("class") == "curve"]
    return [[(float(a), float(b)) for a, b in re.findall(r"([\d.]+) ([\d.]+)", d)] for d in paths]


def test_chart_places_points_by_value() -> None:
    (curve,) = coordinates(line_chart({"a": [(0, 0.0), (5, 5.0), (10, 10.0)]}))
    (x0, y0), (x1, y1), (x2, y2) = curve
    assert x0 < x1 < x2
    assert y0 > y1 > y2  # SVG counts downwards
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.1)
    assert y0 - y1 == pytest.approx(y1 - y2, abs=0.1)


def test_log_axis_makes_a_power_law_straight() -> None:
    (curve,) = coordinates(line_chart({"a": [(0, 1.0), (1, 0.1), (2, 0.01)]}, log_y=True))
    assert curve[1][1] - curve[0][1] == pytest.approx(curve[2][1] - curve[1][1], abs=0.1)


def test_points_that_cannot_be_drawn_are_gaps() -> None:
    points = [(0, 1.0), (1, 2.0), (2, math.nan), (3, 2.0), (4, 3.0), (5, math.inf), (6, 1.0)]
    svg = line_chart({"a": points})
    assert [len(c) for c in coordinates(svg)] == [2, 2]
    assert svg.count("<circle") == 1
    assert [len(c) for c in coordinates(line_chart({"a": [(0, 1.0), (1, 2.0), (2, 0.0), (3, -1)]}, log_y=True))] == [2]
    for nothing in ({}, {"a": []}, {"a": [(0, math.nan)]}):
        assert "no data" in line_chart(nothing)


@given(
    points=st.lists(
        st.tuples(st.floats(-1e12, 1e12), st.floats(min_value=1e-12, max_value=1e12)), min_size=1, max_size=40
    ),
    log_y=st.booleans(),
)
def test_every_chart_stays_inside_its_frame(points: list[tuple[float, float]], log_y: bool) -> None:
    svg = line_chart({"a": sorted(points)}, log_y=log_y)
    root = parsed(svg)
    for curve in coordinates(svg):
        for x, y in curve:
            assert 0 <= x <= WIDTH
            assert 0 <= y <= HEIGHT
    for circle in root.iter("circle"):
        assert 0 <= float(circle.attrib["cy"]) <= HEIGHT
    assert len(list(root.iter("text"))) <= 30


def test_thin_keeps_ends_and_extremes() -> None:
    points = [(float(i), math.sin(i)) for i in range(10_000)]
    points[4321] = (4321.0, 99.0)
    points[7000] = (7000.0, -99.0)
    thinned = thin(points, 100)
    assert len(thinned) <= 102
    assert {points[0], points[-1], points[4321], points[7000]} <= set(thinned)
    assert thinned == sorted(thinned)
    assert thin(points[:100], 100) == points[:100]


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 10, [0, 2, 4, 6, 8, 10]),
        (0.13, 0.58, [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]),
        (-1, 1, [-1, -0.5, 0, 0.5, 1]),
        (3, 3, [3]),
    ],
)
def test_ticks(low: float, high: float, expected: list[float]) -> None:
    assert ticks(low, high) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("value", "text"),
    [(2.0, "2"), (1.23456, "1.235"), (1_234_567, "1,234,567"), (1.234e-5, "1.234e-05"), (0, "0"), (12345.6, "12,346")],
)
def test_format_number(value: float, text: str) -> None:
    assert format_number(value) == text
