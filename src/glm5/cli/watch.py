"""`glm5 watch RUN`: the curves of a run in the terminal, from its metrics.jsonl.

Follows a running run, and shows a finished or interrupted one; piped, or with --once, it prints one picture and ends.
The curves are braille dots, two across and four down a character, drawn here. Read next: `glm5.utils.runlog`, which
wrote the numbers.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from glm5.cli.watch_agents import agents
from glm5.utils.config_io import parse
from glm5.utils.errors import ConfigError, UserError
from glm5.utils.files import file_errors
from glm5.utils.plots import format_number
from glm5.utils.progress import format_seconds
from glm5.utils.runlog import METRICS, MetricsReader, find_runs, flatten, run_status

# Shown when no metric is asked for: as many of these as the run has, the loop's most telling first.
PREFERRED = (
    *("reward", "reverse_kl", "entropy", "train_rollout_logprob_abs_diff", "is_masked_low", "is_masked_high"),
    *("loss", "bits_per_byte", "indexer_kl", "indexer_recall", "mtp_loss_1", "grad_norm", "tokens_per_second"),
    *("rollouts.running", "rollouts.open", "rollouts.idle", "rollouts.version"),
)
Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class WatchOptions:
    """Draw a run's curves in the terminal, while it runs or after."""

    run: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="[RUN]")] = ""
    """The run's directory, or one above it, whose most recent run is taken. Default: runs."""
    metric: tuple[str, ...] = ()
    """Metrics to draw, by dotted name; part of a name draws all that contain it. Default: the loss and a few others."""
    once: bool = False
    """Print one picture and end."""
    height: int = 8
    """Lines of each curve."""
    every: float = 1.0
    """Seconds between pictures."""
    profile: bool = False
    """Ask the running training run for a profiler trace of its next step (RUN/profiles), and end."""


def main(argv: list[str]) -> int:
    """Parse `argv` (without the command's name) and run. Returns the exit status."""
    return watch(parse(WatchOptions, argv, prog="glm5 watch", config_option=False))


def watch(options: WatchOptions) -> int:
    """Draw until the run ends (or once). Returns 0.

    Raises:
        UserError: there is no such run (it lists those that are there), or it has no such metric.
        ConfigError: an option is out of range.
    """
    for name in ("height", "every"):
        if not getattr(options, name) > 0:
            raise ConfigError(name, getattr(options, name), "must be positive")
    run = _find(options.run)
    if options.profile:
        return _ask_for_trace(run)
    reader = MetricsReader(run)
    console = Console(highlight=False)
    if options.once or not console.is_terminal:
        for line in picture(run, reader, options, shutil.get_terminal_size((100, 30)).columns):
            print(line)
        return 0
    # Ctrl-C is how one stops watching a run that goes on.
    with suppress(KeyboardInterrupt), Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        while True:
            live.update(_styled(picture(run, reader, options, console.width)), refresh=True)
            if run_status(run) != "running":
                break
            time.sleep(options.every)
    return 0


def _find(name: str) -> Path:
    """The run in directory `name`, or the most recent one below it (a demo is several runs, one a stage)."""
    if name and (Path(name) / METRICS).is_file():
        return Path(name)
    inside = find_runs(name or "runs")
    if inside:
        return inside[0]
    there = ", ".join(map(str, find_runs()[:12]))
    mend = f"Choose one of: {there}" if there else "Start one with `glm5 demo` or `glm5 pretrain`"
    raise UserError(f"there is no run in {name or 'runs'}", mend)


def _ask_for_trace(run: Path) -> int:
    if run_status(run) != "running":
        raise UserError(f"{run} does not run", "Name a step beforehand: --train.profile STEP")
    with file_errors(run / "profile", "make"):
        (run / "profile").touch()
    print(f"asked     {run} for a trace of its next step; it comes into {run / 'profiles'}")
    return 0


# --------------------------------------------------------------------------- the picture
def picture(run: Path, reader: MetricsReader, options: WatchOptions, width: int) -> list[str]:
    """The lines to show: a heading, then each metric's name, latest value and curve.

    Raises:
        UserError: none of the run's metrics has the name that was asked for; it lists those it has.
    """
    read = reader.poll()
    records = [flatten(record) for record in read]
    status = run_status(run)
    if not records:
        return [f"{run}  {status}, no metrics yet"]
    last = records[-1]
    lines = [f"{run}  {status}  step {last['step']:,.0f}  after {format_seconds(last['time'])} of work"]
    lines += _machine({name: value for record in records for name, value in record.items()})
    lines += agents(read)
    lines += _alerts(read)
    for name in _choose(records, options.metric):
        points = [(r["step"], r[name]) for r in records if name in r]
        values = [v for _, v in points if math.isfinite(v)]
        spread = f"  (lowest {format_number(min(values))}, highest {format_number(max(values))})" if values else ""
        lines += ["", f"{name} {format_number(points[-1][1])}{spread}", *curve(points, width, options.height)]
    return lines


def _alerts(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the run's monitors said: of each, its first word, the last time."""
    latest = {text.partition(":")[0]: (record["step"], text) for record in records for text in record.get("alert", ())}
    return [f"alert  step {step:,}  {text}" for step, text in sorted(latest.values())]


def _machine(last: Mapping[str, float]) -> list[str]:
    """What the run makes of its machine, by the latest figures: speed, and memory by kind."""
    words = [f"{last['tokens_per_second']:,.0f} tokens/s"] if "tokens_per_second" in last else []
    if "tflops_per_device" in last:
        words.append(f"{last['tflops_per_device']:,.3g} TFLOP/s a device")
    if "mfu.all" in last:
        words.append(f"MFU {last['mfu.all']:.1%} ({_kinds(last, 'mfu.', '{:.1%}', without='all')})")
    if "bubble" in last:
        played = f" (of its schedule {last['bubble_played']:.0%})" if "bubble_played" in last else ""
        words.append(f"bubble {last['bubble']:.0%}{played}")
    if "exposed_communication" in last:
        words.append(f"exposed communication {last['exposed_communication']:.0%}")
    lines = [f"speed     {', '.join(words)}"] if words else []
    if "memory.rest" in last:
        most = last.get("memory_mib", 0.0)
        lines.append(f"memory    at most {most:,.0f} MiB a rank: {_kinds(last, 'memory.', '{:,.0f}')}")
    return lines


def _kinds(last: Mapping[str, float], prefix: str, form: str, without: str = "") -> str:
    kinds = {n.removeprefix(prefix): v for n, v in last.items() if n.startswith(prefix)}
    return ", ".join(f"{n.replace('_', ' ')} {form.format(v)}" for n, v in kinds.items() if n != without)


def _choose(records: Sequence[dict[str, float]], asked: Sequence[str]) -> list[str]:
    names = [n for n in dict.fromkeys(n for r in records for n in r) if n not in ("step", "time")]
    if not asked:
        return [n for n in PREFERRED if n in names][:4] or names[:4]
    chosen: list[str] = []
    for part in asked:
        found = [part] if part in names else [n for n in names if part in n]
        if not found:
            raise UserError(f"the run has no metric {part!r}", f"It has: {', '.join(names) or 'none'}")
        chosen += [n for n in found if n not in chosen]
    return chosen


def _styled(lines: Sequence[str]) -> RenderableType:
    """Curves in colour; names and axes stay plain."""
    return Group(*(Text(line, style="cyan" if "│" in line else "", no_wrap=True) for line in lines))


def curve(points: Points, width: int, height: int) -> list[str]:
    """A curve as `height` lines of braille with a labelled y axis, and one line for the x axis.

    Args:
        points: (x, y) in the order of x; those that are not finite are gaps.
        width: characters of a line, axis included.
        height: lines of the curve.
    """
    finite = [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]
    if not finite:
        return ["  (no finite value)"]
    x0, x1 = finite[0][0], finite[-1][0]
    low, high = min(y for _, y in finite), max(y for _, y in finite)
    labels = [format_number(high), format_number(low)]
    margin = max(map(len, labels)) + 1
    columns = max(8, width - margin - 2)
    rows = braille(points, columns, height, (x0, x1), (low, high))
    axis = [labels[0].rjust(margin)] + [" " * margin] * (height - 2) + ([labels[1].rjust(margin)] if height > 1 else [])
    first, last = format_number(x0), format_number(x1)
    foot = " " * (margin + 2) + first + last.rjust(max(columns - len(first), len(last) + 1))
    return [f"{a} │{row}".rstrip() for a, row in zip(axis, rows, strict=True)] + [foot]


def braille(points: Points, columns: int, rows: int, x: tuple[float, float], y: tuple[float, float]) -> list[str]:
    """`points` joined by lines, as `rows` strings of `columns` braille characters (2 x 4 dots each).

    Args:
        points: (x, y) in the order of x; a non-finite one is a gap.
        columns, rows: the size in characters.
        x, y: the intervals that fill the width and the height.
    """
    wide, tall = 2 * columns, 4 * rows
    cells = [[0] * columns for _ in range(rows)]
    # Bits of Unicode's braille patterns, by row and column of the dot.
    bits = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))

    def place(value: float, interval: tuple[float, float], size: int) -> int:
        low, high = interval
        share = (value - low) / (high - low) if high > low else 0.5
        return round(min(max(share, 0.0), 1.0) * (size - 1))

    before: tuple[int, int] | None = None
    for px, py in points:
        if not (math.isfinite(px) and math.isfinite(py)):
            before = None
            continue
        column, row = place(px, x, wide), tall - 1 - place(py, y, tall)
        for c, r in _line(before or (column, row), (column, row)):
            cells[r // 4][c // 2] |= bits[r % 4][c % 2]
        before = (column, row)
    return ["".join(chr(0x2800 + cell) if cell else " " for cell in line) for line in cells]


def _line(start: tuple[int, int], end: tuple[int, int]) -> list[tuple[int, int]]:
    """The dots of a straight line, both ends included."""
    steps = max(abs(end[0] - start[0]), abs(end[1] - start[1]))
    return [
        (
            round(start[0] + (end[0] - start[0]) * i / max(steps, 1)),
            round(start[1] + (end[1] - start[1]) * i / max(steps, 1)),
        )
        for i in range(steps + 1)
    ]
