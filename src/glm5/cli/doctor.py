"""`glm5 doctor`: what this machine has, and which version of each operator runs here and why.

Versions, processors, CUDA devices, disk, the dispatch table of `glm5.kernels`, and with --measure the rate of a
matrix multiplication, which is the yardstick for every speed that the project states. Read next:
`glm5.kernels.dispatch`.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from glm5.utils.config_io import parse
from glm5.utils.errors import FileError
from glm5.utils.files import format_bytes, require_writable
from glm5.utils.runlog import describe_environment

if TYPE_CHECKING:
    import torch

Rows = list[tuple[str, str]]


@dataclass(frozen=True)
class DoctorOptions:
    """Show versions, devices, and which version of each operator runs here and why."""

    json: bool = False
    """Print JSON."""
    measure: bool = False
    """Also measure the rate of a matrix multiplication on each device (a few seconds)."""
    directory: Path = Path()
    """Where runs will be written: its disk is examined."""


def main(argv: list[str]) -> int:
    """Parse `argv` (without the command's name) and run. Returns 0, or 1 if something is not as it must be."""
    options = parse(DoctorOptions, argv, prog="glm5 doctor", config_option=False)
    found = examine(options.directory, measure=options.measure)
    if options.json:
        print(json.dumps(found, indent=2))
    else:
        _show(found)
    return 1 if found["problems"] else 0


def examine(directory: Path = Path(), *, measure: bool = False) -> dict[str, Any]:
    """Everything that `glm5 doctor` knows, as JSON values.

    Returns:
        keys environment, cpu, cuda, operators, disk, sandbox (by what programs are isolated, or why they cannot be),
        problems (sentences; empty when all is well) and, if asked for, matmul (device -> dtype -> TFLOP/s).
    """
    from glm5.agents.sandbox import describe as describe_sandbox
    from glm5.kernels.dispatch import describe  # imports torch, which takes a second

    found: dict[str, Any] = {
        "environment": describe_environment(),
        "cpu": _cpu(),
        "cuda": _cuda(),
        "operators": describe(),
        "disk": _disk(directory),
        "sandbox": describe_sandbox(),
    }
    if measure:
        found["matmul"] = measure_matmul()
    found["problems"] = _problems(found)
    return found


# --------------------------------------------------------------------------- examining
def _cpu() -> dict[str, Any]:
    import torch

    info = _cpuinfo()
    flags = (info.get("flags") or info.get("Features") or "").split()
    return {
        "model": info.get("model name") or platform.processor() or platform.machine(),
        "cores": describe_environment()["cpu_cores"],
        "threads": torch.get_num_threads(),
        "simd": torch.backends.cpu.get_cpu_capability(),
        "bf16": [f for f in ("amx_bf16", "avx512_bf16", "bf16") if f in flags],
        "memory_bytes": _memory(),
    }


def _cpuinfo() -> dict[str, str]:
    """The first processor's entries in /proc/cpuinfo; none where there is no such file."""
    try:
        first = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0]
    except OSError:
        return {}
    pairs = (line.split(":", 1) for line in first.splitlines() if ":" in line)
    return {name.strip(): value.strip() for name, value in pairs}


def _memory() -> int:
    """Bytes of memory that this process may use: the machine's, or its control group's if that is less."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            limits.append(int(Path(path).read_text()))
        except (OSError, ValueError):
            continue  # no such limit here ("max" is no number)
    return min(limits)


def _cuda() -> list[dict[str, Any]]:
    import torch

    devices = []
    for i in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(i)
        devices.append(
            {
                "name": p.name,
                "capability": f"{p.major}.{p.minor}",
                "memory_bytes": p.total_memory,
                "processors": p.multi_processor_count,
            }
        )
    return devices


def _disk(directory: Path) -> dict[str, Any]:
    there = next(p for p in [directory.resolve(), *directory.resolve().parents] if p.is_dir())
    try:
        require_writable(there)
        complaint = ""
    except FileError as e:
        complaint = str(e)
    return {"directory": str(there), "free_bytes": shutil.disk_usage(there).free, "complaint": complaint}


def _problems(found: dict[str, Any]) -> list[str]:
    problems = []
    if found["disk"]["complaint"]:
        problems.append(found["disk"]["complaint"])
    elif found["disk"]["free_bytes"] < 1 << 30:
        problems.append(f"only {format_bytes(found['disk']['free_bytes'])} are free for runs; the demo needs 1 GiB")
    if found["cpu"]["memory_bytes"] < 4 << 30:
        problems.append(f"only {format_bytes(found['cpu']['memory_bytes'])} of memory; the demo may need 4 GiB")
    if found["cpu"]["threads"] > found["cpu"]["cores"]:
        threads, cores = found["cpu"]["threads"], found["cpu"]["cores"]
        problems.append(f"{threads} threads on {cores} cores slow each other down: set OMP_NUM_THREADS={cores}")
    return problems


def measure_matmul(seconds: float = 0.5) -> dict[str, dict[str, float]]:
    """TFLOP/s of square matrix products, for each device and dtype; see `matmul_rate`."""
    import torch

    devices = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    return {
        device: {name: round(matmul_rate(device, dtype, seconds) / 1e12, 4) for name, dtype in dtypes.items()}
        for device in devices
    }


def matmul_rate(device: str, dtype: torch.dtype, seconds: float = 0.5) -> float:
    """Operations a second of square matrix products, n x n as 2 n^3: the best of at least 3, and of `seconds`.

    n is 2,048 on a CPU, which uses as many threads as torch is set to, and 8,192 on a GPU.
    """
    import torch

    n = 2048 if device == "cpu" else 8192
    a = torch.randn(n, n, device=device).to(dtype)
    a @ a  # the first one pays for set-up
    times: list[float] = []
    while len(times) < 3 or sum(times) < seconds:
        if device != "cpu":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        a @ a
        if device != "cpu":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return 2 * n**3 / min(times)


# --------------------------------------------------------------------------- showing
def _show(found: dict[str, Any]) -> None:
    environment, cpu = found["environment"], found["cpu"]
    machine: Rows = [
        ("python", f"{environment['python']} on {environment['platform']}"),
        ("packages", ", ".join(f"{name} {version}" for name, version in environment["packages"].items())),
        ("processor", cpu["model"]),
        ("", f"{cpu['cores']} cores, {cpu['threads']} threads, {', '.join([cpu['simd'], *cpu['bf16']])}"),
        ("memory", format_bytes(cpu["memory_bytes"])),
    ]
    for i, d in enumerate(found["cuda"]):
        size = format_bytes(d["memory_bytes"])
        machine.append((f"cuda:{i}", f"{d['name']}, capability {d['capability']}, {size}, {d['processors']} SMs"))
    if not found["cuda"]:
        machine.append(("cuda", "no device"))
    machine.append(("disk", f"{format_bytes(found['disk']['free_bytes'])} free in {found['disk']['directory']}"))
    machine.append(("sandbox", found["sandbox"]))
    for device, rates in found.get("matmul", {}).items():
        listed = ", ".join(f"{rate:.3g} TFLOP/s in {dtype}" for dtype, rate in rates.items())
        machine.append(("matmul", f"{device}: {listed}"))
    operators = [(o["operator"], o["version"], o["why"]) for o in found["operators"]]
    console = Console(highlight=False)
    if console.is_terminal:
        _show_rich(console, machine, operators)
    else:
        for name, value in machine:
            print(f"{name:<10} {value}")
        widths = [max(len(row[i]) for row in operators) for i in (0, 1)]
        print()
        for operator, version, why in operators:
            print(f"{operator:<{widths[0]}}  {version:<{widths[1]}}  {why}")
    print()
    for problem in found["problems"]:
        print(f"problem: {problem}")
    if not found["problems"]:
        print("nothing is wrong")


def _show_rich(console: Console, machine: Rows, operators: list[tuple[str, str, str]]) -> None:
    grid = Table.grid(padding=(0, 2))
    for name, value in machine:
        grid.add_row(Text(name, style="dim"), Text(value))
    table = Table("operator", "version", "why", box=None, padding=(0, 2, 0, 0), title_justify="left")
    for operator, version, why in operators:
        table.add_row(
            Text(operator), Text(version, style="green" if version != "torch" else ""), Text(why, style="dim")
        )
    console.print(grid)
    console.print()
    console.print(table)
