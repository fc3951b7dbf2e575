"""The verifier of programs, in its pool: right, wrong, and never without a verdict through a program's own doing."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from glm5.agents.sandbox import SandboxError, require
from glm5.posttrain.prompts import prompts_from_rows
from glm5.posttrain.verify import code
from glm5.posttrain.verify.pool import Task, VerifierPool
from glm5.utils.errors import UserError

DOUBLE = [{"stdin": "3\n", "stdout": "6\n"}, {"stdin": "-1\n", "stdout": "-2\n"}]


@pytest.fixture(scope="module")
def isolated() -> None:
    try:
        require()
    except SandboxError as e:
        pytest.skip(str(e))


@pytest.fixture(scope="module")
def pool(isolated: None) -> Iterator[VerifierPool]:
    with VerifierPool(workers=2, timeout_s=60) as made:
        made.require(["code"])
        yield made


def fenced(program: str) -> str:
    return f"<think>hm</think>Here it is:\n```python\n{program}\n```\n"


def test_programs_of_a_prompt_file(pool: VerifierPool) -> None:
    row = {"prompt": "Double a number.", "answer": DOUBLE, "verifier": "code", "domain": "code"}
    (prompt,) = prompts_from_rows([row])
    said = [fenced("print(2 * int(input()))"), fenced("print(6)"), "print(2 * int(input()))", fenced("print(")]
    before = pool.counts.copy()
    verdicts = pool.check_all([prompt.task(response) for response in said])
    assert [v.reward for v in verdicts] == [1.0, 0.0, 0.0, 0.0]
    assert [v.detail for v in verdicts[1:3]] == ["case 1: it wrote '6\\n'", "no fenced program"]
    assert pool.counts - before == {"right": 1, "wrong": 3}


def test_asserts_and_partial_rewards(pool: VerifierPool) -> None:
    tests = "assert f(1) == 1\nassert f(2) == 4\nassert f(3) == 9\nassert f(4) == 16"
    right, half = fenced("def f(x): return x * x"), fenced("def f(x): return [0, 1, 4][x]")
    tasks = [Task("code", r, tests, {"partial": p}) for r in (right, half) for p in (False, True)]
    assert [v.reward for v in pool.check_all(tasks)] == [1.0, 1.0, 0.0, 0.5]


def test_cases_that_cannot_be_read_are_no_verdict(pool: VerifierPool) -> None:
    found = pool.check(Task("code", fenced("print(1)"), [{"stdin": "x"}]))
    assert (found.reward, found.cause) == (None, "error")
    assert "stdin and stdout" in found.detail


@pytest.mark.usefixtures("isolated")
@pytest.mark.parametrize(
    "program",
    [
        "import time\nwhile True: time.sleep(1)",
        "import os, signal\nfor n in (2, 15): signal.signal(n, 1)\nos.fork()\nwhile True: pass",
        "import time; time.sleep(0.6); print(2 * int(input()))",  # within a case's time, and not within all of it
    ],
)
def test_a_slow_program_is_wrong_before_its_check_is_killed(program: str) -> None:
    """Otherwise a policy could take its bad answers out of a group by letting them hang."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(code, "_SHARE", 0.01)  # far from the check's end, on any machine
        found = code.check(fenced(program), DOUBLE * 2, {"check_s": 100, "wall_s": 5})
    assert found.reward == 0.0
    assert "wall_time" in found.detail or "no time is left" in found.detail


def test_a_killed_check_leaves_nothing_running(pool: VerifierPool) -> None:
    mark = f"98765.{os.getpid()}"
    program = f"import os; os.execvp('sleep', ['sleep', '{mark}'])"
    found = []
    with VerifierPool(workers=1, timeout_s=300) as mine:
        asking = threading.Thread(
            target=lambda: found.append(mine.check(Task("code", fenced(program), DOUBLE, {"wall_s": 200})))
        )
        asking.start()
        _wait(lambda: _running(mark))
        process = mine._all[0]._process
        assert process is not None
        os.killpg(process.pid, signal.SIGKILL)
        asking.join(60)
        assert [v.cause for v in found] == ["crash"]
        _wait(lambda: not _running(mark))


def test_refused_where_programs_cannot_be_isolated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When verifiers are loaded, before any answer is drawn; what is judged all the same has no verdict."""
    monkeypatch.setenv("PATH", str(tmp_path))
    with VerifierPool(workers=1) as mine:
        with pytest.raises(UserError, match=r"no sandbox: .*bubblewrap.* missing"):
            mine.require(["code"])
        found = mine.check(Task("code", fenced("print(6)"), DOUBLE))
    assert (found.reward, found.cause) == (None, "error")
    assert "apt-get install" in found.detail


def _running(argument: str) -> bool:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if argument.encode() in path.read_bytes().split(b"\0"):
                return True
        except OSError:
            continue
    return False


def _wait(holds: object) -> None:
    assert callable(holds)
    for _ in range(6000):
        if holds():
            return
        time.sleep(0.01)
    pytest.fail("it never came to hold")
