"""A command on a leash ends with whoever started it, however that ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.waiting import until

COMMAND = [sys.executable, "-c", "import os, time; print('here', os.getpid(), flush=True); time.sleep(600)"]
LEASHED = [sys.executable, "-m", "glm5.utils.leash", *COMMAND]
OWNER = f"import subprocess, time; p = subprocess.Popen({LEASHED!r}, stdin=subprocess.PIPE); time.sleep(600)"


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def require_end(pid: int) -> None:
    until(lambda: not alive(pid), "it was left behind")


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="looks into /proc")
@pytest.mark.parametrize("how", ["closed", "killed"])
def test_the_command_ends(how: str) -> None:
    line = LEASHED if how == "closed" else [sys.executable, "-c", OWNER]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        assert owner.stdin is not None
        word, pid = owner.stdout.readline().split()
        assert word == "here"
        assert alive(int(pid))
        if how == "closed":
            owner.stdin.close()
        else:
            owner.kill()
        assert owner.stdout.read() == "ended with status -15\n"
        require_end(int(pid))


def test_the_status_of_a_command_that_ends_by_itself_is_told() -> None:
    line = [sys.executable, "-m", "glm5.utils.leash", sys.executable, "-c", "raise SystemExit(3)"]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        assert owner.stdout.read() == "ended with status 3\n"
