"""Which device an option means on this machine. Imports torch only when asked. Read next: `errors`."""

from __future__ import annotations

import re

from glm5.utils.errors import ConfigError


def resolve_device(name: str) -> str:
    """`name` as torch understands it: "auto" is "cuda" where there is a GPU, otherwise "cpu"; others stay.

    Raises:
        ConfigError: it is none of auto, cpu, cuda and cuda:N, or there is no such GPU here.
    """
    import torch  # here, since a command that never asks must not wait for it

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    known = re.fullmatch(r"cpu|cuda(?::(\d+))?", name)
    if known is None:
        raise ConfigError("device", name, "must be auto, cpu, cuda or cuda:N")
    if name != "cpu" and int(known[1] or 0) >= torch.cuda.device_count():
        raise ConfigError("device", name, f"there are {torch.cuda.device_count()} CUDA devices here")
    return name
