"""Runs that are killed at random file operations, again and again, end in the bytes and the ledger of one that was
not."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

VICTIM = Path(__file__).with_name("rl_victim.py")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["reason", "general", "distill"])
def test_killed_at_any_file_operation_it_ends_in_the_same_bytes(kind: str, tmp_path: Path) -> None:
    tests = VICTIM.parents[1]
    paths = [tests, tests / "posttrain", tests / "support", tests.parent / "src", os.environ.get("PYTHONPATH", "")]
    found = subprocess.run(
        [sys.executable, str(VICTIM), str(tmp_path), kind, "3"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=850,
    )
    assert found.returncode == 0, found.stderr
    counts = re.match(r"killed (\d+) times", found.stdout)
    assert counts, found.stdout
    assert int(counts[1]) >= 2
