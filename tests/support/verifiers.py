"""Verifiers for tests, which workers find by `verifiers:NAME` where this directory is on their path."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from glm5.posttrain.verify.verdict import Verdict, judged


def even(response: str, answer: Any, info: Mapping[str, Any]) -> Verdict:
    """Right if the first letter has an even code: about half of what an untrained model says."""
    return judged(bool(response) and ord(response[0]) % 2 == 0)


def hang(response: str, answer: Any, info: Mapping[str, Any]) -> Verdict:
    """Never ends."""
    while True:
        time.sleep(1)


def die(response: str, answer: Any, info: Mapping[str, Any]) -> Verdict:
    """Ends its process."""
    os._exit(3)
