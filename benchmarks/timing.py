"""What the operators' benchmarks share: timing on a GPU, a table with a roofline column, and one main.

Floors are the larger of bytes over 4.3 TB/s and operations over 790 TFLOP/s in bf16 or 1,400 in fp8, rates measured on
an H200 (fp8's is what products there come near). A row's share is its floor over its time. Read next: `kernels`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

BYTES_PER_US, FLOP_PER_US, FP8_FLOP_PER_US, L2_BYTES = 4.3e6, 790e6, 1400e6, 60e6
Call = Callable[[int], object]  # runs the operator on input set i


@dataclass(frozen=True)
class Row:
    """One line of the table. Times in microseconds; error is the relative 2-norm, or the share of wrong rows."""

    operator: str
    case: str
    implementation: str
    us: float
    floor_us: float
    error: float

    @property
    def share(self) -> float:
        return self.floor_us / self.us

    @property
    def ours(self) -> bool:
        return self.implementation.startswith("ours")


def floor_us(bytes_moved: float, flop: float = 0.0, rate: float = FLOP_PER_US) -> float:
    return max(bytes_moved / BYTES_PER_US, flop / rate)


def time_us(call: Call, sets: int, target_us: float = 20_000.0) -> float:
    """Median time of one call. A graph holds one call per input set; it is replayed for about `target_us` in all."""
    for i in range(min(sets, 3)):
        call(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    keep = []  # outputs stay alive, so that calls do not share memory
    with torch.cuda.graph(graph):
        for i in range(sets):
            keep.append(call(i))

    def once() -> float:
        return _between_events(graph.replay)

    once()
    first = once()
    times = [once() for _ in range(max(5, min(50, int(target_us / first))))]
    return statistics.median(times) / sets


def event_us(call: Callable[[], object], repeats: int = 7) -> float:
    """Median time of a call with its launches: for what takes milliseconds, or cannot be recorded as a graph."""
    call()
    return statistics.median(_between_events(call) for _ in range(repeats))


def _between_events(call: Callable[[], object]) -> float:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) * 1e3


def sets_for(bytes_each: float) -> int:
    return max(3, min(48, int(3.5 * L2_BYTES / bytes_each) + 1))


def relative(ours: Tensor, oracle: Tensor) -> float:
    return float((ours.float() - oracle.float()).norm() / oracle.float().norm())


class Table:
    """Collects rows; a failing implementation loses only its own."""

    def __init__(self, sweep: bool = False) -> None:
        self.rows: list[Row] = []
        self.sweep = sweep

    def add(
        self, operator: str, case: str, name: str, call: Call, sets: int, floor: float, check: Callable[[object], float]
    ) -> None:
        """Check and time a call by graph replays."""
        self._add(operator, case, name, floor, lambda: (check(call(0)), time_us(call, sets)))

    def add_call(
        self,
        operator: str,
        case: str,
        name: str,
        call: Callable[[], object],
        floor: float,
        error: float | Callable[[], float] = 0.0,
    ) -> None:
        """Time a call between events."""
        self._add(operator, case, name, floor, lambda: (error() if callable(error) else error, event_us(call)))

    def _add(
        self, operator: str, case: str, name: str, floor: float, measure: Callable[[], tuple[float, float]]
    ) -> None:
        try:
            error, us = measure()
        except Exception as problem:
            traceback.print_exc()
            print(f"{operator} {case} {name}: failed, {type(problem).__name__}", flush=True)
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            return
        row = Row(operator, case, name, us, floor, error)
        self.rows.append(row)
        times = f"{us:9.1f} us  floor {floor:8.1f}  {row.share:5.0%}"
        print(f"{operator:16} {case:22} {name:28} {times}  err {error:.1e}", flush=True)

    def print_summary(self) -> None:
        """A line for each case: our fastest, its share of the floor, and the fastest of the others."""
        print("\n| operator | case | floor, us | ours, us | share | fastest other, us | theirs over ours |")
        print("|---|---|---|---|---|---|---|")
        for operator, case in dict.fromkeys((row.operator, row.case) for row in self.rows):
            rows = [row for row in self.rows if (row.operator, row.case) == (operator, case)]
            ours = min((row for row in rows if row.ours), key=lambda row: row.us, default=None)
            other = min((row for row in rows if not row.ours), key=lambda row: row.us, default=None)
            mine = f"{ours.us:,.1f} | {ours.share:.0%}" if ours else "– | –"
            theirs = f"{other.us:,.1f}, {other.implementation}" if other else "–"
            ratio = f"{other.us / ours.us:.2f}" if ours and other else "–"
            print(f"| {operator} | {case} | {rows[0].floor_us:,.1f} | {mine} | {theirs} | {ratio} |")


def main(doc: str | None, benches: Mapping[str, Callable[[Table], None]]) -> None:
    """The command line of a benchmark: runs `benches`, prints rows as they come, then the table, and writes JSON."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(benches), help="comma-separated operators")
    parser.add_argument("--json", type=Path, help="write the rows here, anew after each operator")
    parser.add_argument("--sweep", action="store_true", help="also time other launch shapes")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no operator after so long")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    print(torch.cuda.get_device_name(), "torch", torch.__version__, flush=True)
    table, begun = Table(arguments.sweep), time.monotonic()
    for name in arguments.only.split(","):
        if time.monotonic() - begun > arguments.seconds:
            print(f"{name}: not begun, {arguments.seconds:.0f} seconds are over", flush=True)
            continue
        try:
            benches[name](table)
        except Exception as problem:  # the others' rows are worth having
            traceback.print_exc()
            print(f"{name}: failed, {type(problem).__name__}", flush=True)
        torch.cuda.empty_cache()
        if arguments.json:
            arguments.json.write_text(json.dumps([asdict(row) | {"share": row.share} for row in table.rows], indent=1))
    table.print_summary()
