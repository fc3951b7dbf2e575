"""Devices that a plan can name, with the vendors' nominal figures.

Memory is the vendor's number with 1 GB = 10^9 bytes; most cards report a little more, so "fits" errs on the safe
side. Rates are dense BF16 tensor throughput and memory bandwidth from the data sheets; None where a sheet for one
device is not public. Read next: `memory`.
"""

from __future__ import annotations

from dataclasses import dataclass

from glm5.utils.errors import UserError


@dataclass(frozen=True)
class Device:
    """One accelerator, or the memory of one CPU host.

    Args:
        memory: bytes.
        bf16_flops: peak dense BF16 FLOP/s.
        bandwidth: memory bytes/s.
    """

    name: str
    memory: int
    bf16_flops: float | None = None
    bandwidth: float | None = None


_GB = 10**9
DEVICES: dict[str, Device] = {
    d.name: d
    for d in (
        Device("h100", 80 * _GB, 989e12, 3.35e12),
        Device("h200", 141 * _GB, 989e12, 4.8e12),
        Device("b200", 180 * _GB, 2250e12, 8.0e12),
        Device("a100-80", 80 * _GB, 312e12, 2.039e12),
        Device("l40s", 48 * _GB, 362e12, 0.864e12),
        Device("rtx4090", 24 * _GB, 165e12, 1.008e12),
        # One die of the two in a package: an Atlas 800T A3 has 16 of them.
        Device("ascend-910c", 64 * _GB),
    )
}


def device(name: str) -> Device:
    """The device called `name`; `cpu:NN` is a host with NN GB of memory.

    Raises:
        UserError: there is no such device, or the size is not a positive number.
    """
    key = name.strip().lower()
    if key in DEVICES:
        return DEVICES[key]
    kind, _, size = key.partition(":")
    if kind == "cpu":
        try:
            gb = float(size)
        except ValueError:
            gb = 0.0
        if not 0 < gb < 1e6:
            raise UserError(f"device {name!r} has no memory size", "Write cpu:NN with NN in GB, for example cpu:32")
        return Device(key, int(gb * _GB))
    raise UserError(f"unknown device {name!r}", f"Choose one of {', '.join(DEVICES)}, or cpu:NN with NN in GB")
