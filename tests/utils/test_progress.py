"""The progress display: plain when piped, live on a terminal."""

from __future__ import annotations

import io
import math
from contextlib import suppress

import pytest
from rich.console import Console

from glm5.utils.progress import Progress, format_seconds, sparkline


class Clock:
    """A clock that a test turns."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def run(console: Console, steps: int = 100, every_s: float = 10.0) -> None:
    clock = Clock()
    with Progress("pretrain", steps, every_s=every_s, console=console, clock=clock) as progress:
        for step in range(1, steps + 1):
            clock.now += 1.0
            progress.update(step, loss=5.0 / step, bits_per_byte=1.5, tokens_per_second=12_345.6, stage="dense")
            if step == 50:
                progress.note("checkpoint saved: [bold]step-50[/bold]")


def test_piped_output_is_plain_lines_at_intervals() -> None:
    out = io.StringIO()
    run(Console(file=out, width=40, highlight=False))
    lines = out.getvalue().splitlines()
    assert "\x1b" not in out.getvalue()
    assert lines[0] == "pretrain  step 1/100  loss 5  bits/byte 1.5  12,346 tok/s  stage dense  left 1m39s"
    assert lines[-1].startswith("pretrain  step 100/100  loss 0.05 ")
    assert lines[-1].endswith("left 0s")
    steps = [int(line.split()[2].split("/")[0]) for line in lines if "step " in line]
    assert steps == [1, 11, 21, 31, 41, 51, 61, 71, 81, 91, 100]
    assert "checkpoint saved: [bold]step-50[/bold]" in lines


def test_a_figure_of_another_step_is_not_shown() -> None:
    out = io.StringIO()
    with Progress("p", 2, every_s=0, console=Console(file=out, width=80), clock=Clock()) as progress:
        progress.update(1, loss=2.0, indexer_kl=0.5)
        progress.update(2, loss=1.0)
    first, second = out.getvalue().splitlines()
    assert "indexer_kl 0.5" in first
    assert "indexer_kl" not in second


def test_an_interrupted_run_tells_where_it_stopped() -> None:
    out = io.StringIO()
    progress = Progress("p", 100, console=Console(file=out), clock=Clock())
    with suppress(KeyboardInterrupt), progress:
        for step in (1, 2, 3):
            progress.update(step, loss=1.0)
        raise KeyboardInterrupt
    assert [line.split()[2] for line in out.getvalue().splitlines()] == ["1/100", "3/100"]


def test_a_terminal_gets_a_live_panel_with_the_same_figures() -> None:
    out = io.StringIO()
    run(Console(file=out, width=100, force_terminal=True, highlight=False))
    shown = out.getvalue()
    for text in ("\x1b[", "pretrain", "100/100", "bits/byte", "12,346", "█"):
        assert text in shown


def test_time_left_counts_from_the_resumed_step() -> None:
    clock = Clock()
    progress = Progress("p", 1000, start=900, console=Console(file=io.StringIO()), clock=clock)
    assert progress.eta_s() is None
    clock.now = 20.0
    progress.update(910)
    assert progress.eta_s() == pytest.approx(180.0)


@pytest.mark.parametrize(
    ("values", "width", "line"),
    [
        ([], 5, ""),
        ([1.0], 0, ""),
        ([3.0], 5, "▁"),
        ([0, 1, 2, 3, 4, 5, 6, 7], 8, "▁▂▃▄▅▆▇█"),
        ([0, 0, 7, 7], 2, "▁█"),
        ([0, math.nan, 7], 3, "▁x█"),
        ([math.inf, math.inf], 5, "xx"),
        (list(range(1000)), 4, "▁▃▆█"),
    ],
)
def test_sparkline(values: list[float], width: int, line: str) -> None:
    assert sparkline(values, width) == line


@pytest.mark.parametrize(("seconds", "text"), [(0.2, "0s"), (59.6, "1m00s"), (125, "2m05s"), (3725, "1h02m")])
def test_format_seconds(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text
