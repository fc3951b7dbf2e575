"""What a person sees while a run goes on: a live panel on a terminal, plain lines when piped.

Shows what the loop knows (loss, bits per byte, tokens/s) and what follows (share done, time left, the loss so far as
a row of blocks). Writes to standard error, so that a command's results can be piped. Read next: `runlog`, which
keeps what is shown here.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

BLOCKS = "▁▂▃▄▅▆▇█"
# Names of metrics that are shown with their own wording and unit; others are shown as they come.
_LABELS = {"loss": "loss", "bits_per_byte": "bits/byte", "tokens_per_second": "tok/s"}


class Progress:
    """Shows the progress of one run of `total` steps; use it in a `with` block.

    Args:
        title: the name of the run or stage.
        total: steps of the whole run, counting those before a resume.
        start: steps that are done already.
        every_s: seconds between plain lines when the output is not a terminal.
        console: where to write; by default standard error.
        clock: seconds, monotonic; for tests.
    """

    def __init__(
        self,
        title: str,
        total: int,
        *,
        start: int = 0,
        every_s: float = 10.0,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.title, self.total, self.start, self.every_s = title, total, start, every_s
        self.console = console or Console(stderr=True, highlight=False)
        self._clock = clock
        self._began = clock()
        self._last_line = -math.inf
        self._step = start
        self._metrics: dict[str, float | str] = {}
        self._losses: list[float] = []
        self._shown = start - 1
        self._live: Live | None = None

    def update(self, step: int, **metrics: float | str) -> None:
        """Show that `step` steps are done, with the loop's figures.

        Args:
            step: finished steps.
            metrics: name -> value; loss, bits_per_byte and tokens_per_second have their own wording.
        """
        self._step = step
        self._metrics = metrics  # those of this step alone: some are measured now and then
        loss = metrics.get("loss")
        if isinstance(loss, int | float):
            self._losses.append(float(loss))
        if self._live is not None:
            self._live.update(self._panel())
        elif not self.console.is_terminal:
            # The first step tells at once whether the run goes as meant.
            due = self._clock() - self._last_line >= self.every_s
            if due or step >= self.total:
                self._print_line()

    def note(self, text: str) -> None:
        """Print a line (a checkpoint was saved, a warning) above the panel or between the lines."""
        self.console.print(Text(text), soft_wrap=True)  # paths stay whole

    def eta_s(self) -> float | None:
        """Seconds left at the rate since this start; None before its first step is done."""
        done = self._step - self.start
        if done <= 0:
            return None
        return (self._clock() - self._began) / done * max(0, self.total - self._step)

    # ------------------------------------------------------------------ drawing
    def _figures(self) -> list[tuple[str, str]]:
        figures = [(_LABELS.get(name, name), _number(value)) for name, value in self._metrics.items()]
        eta = self.eta_s()
        return figures if eta is None else [*figures, ("left", format_seconds(eta))]

    def _print_line(self) -> None:
        self._last_line, self._shown = self._clock(), self._step
        # The unit follows a rate, as in "1,250 tok/s"; other names come first, as in "loss 2.1".
        words = [f"{value} {name}" if name == "tok/s" else f"{name} {value}" for name, value in self._figures()]
        line = "  ".join([f"{self.title}  step {self._step}/{self.total}", *words])
        self.console.print(Text(line), soft_wrap=True)

    def _panel(self) -> RenderableType:
        head = Table.grid(padding=(0, 2))
        bar = ProgressBar(total=max(self.total, 1), completed=min(self._step, self.total), width=30)
        head.add_row(Text(self.title, style="bold"), bar, Text(f"{self._step}/{self.total}"))
        figures = Text("  ")
        for name, value in self._figures():
            figures.append(f"{name} ", style="dim").append(f"{value}   ")
        if not self._losses:
            return Group(head, figures)
        curve = Text("  ").append(sparkline(self._losses, 60), style="cyan")
        return Group(head, figures, curve)

    def __enter__(self) -> Progress:
        if self.console.is_terminal:
            self._live = Live(self._panel(), console=self.console, refresh_per_second=4)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.update(self._panel(), refresh=True)
            self._live.stop()
            self._live = None
        elif self._shown != self._step:
            self._print_line()  # where it stopped


def sparkline(values: Sequence[float], width: int) -> str:
    """`values` as at most `width` block characters, each the mean of its stretch; a non-finite one is an x."""
    if not values or width <= 0:
        return ""
    n = min(width, len(values))
    cells = []
    for i in range(n):
        stretch = values[i * len(values) // n : (i + 1) * len(values) // n]
        cells.append(sum(stretch) / len(stretch))
    finite = [c for c in cells if math.isfinite(c)]
    if not finite:
        return "x" * n
    low, span = min(finite), (max(finite) - min(finite)) or 1.0
    level = {c: BLOCKS[round((c - low) / span * (len(BLOCKS) - 1))] for c in finite}
    return "".join(level.get(c, "x") for c in cells)


def format_seconds(seconds: float) -> str:
    """A duration for a reader: 45 is "45s", 3_725 is "1h02m"."""
    s = round(seconds)
    if s < 60:
        return f"{s}s"
    if s < 3600:
        return f"{s // 60}m{s % 60:02}s"
    return f"{s // 3600}h{s % 3600 // 60:02}m"


def _number(value: float | str) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, int) or (math.isfinite(value) and abs(value) >= 1000):
        return f"{value:,.0f}"
    return f"{value:.4g}"
