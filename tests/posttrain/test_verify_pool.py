"""Verifiers in processes: hangs end, crashes are told from wrong answers, and every answer keeps its own verdict."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from glm5.posttrain.verify.pool import Task, VerifierPool
from glm5.utils.errors import ConfigError, UserError

CHECKS = """
import os, subprocess, sys, time
from glm5.posttrain.verify.verdict import judged

def check(response, answer, info):
    if response == "hang":
        while True:
            pass
    if response == "sleep in C":
        time.sleep(1000)
    if response == "child":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
        open(info["file"], "w").write(str(child.pid))
        time.sleep(1000)
    if response == "die":
        print("last words", file=sys.stderr, flush=True)
        os._exit(7)
    if response == "raise":
        raise RuntimeError("own fault")
    if response == "memory":
        return bytearray(1 << 40)
    if response == "chatter":
        print("this is no verdict")
    return judged(response == answer, str(os.getpid()))
"""


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[VerifierPool]:
    (tmp_path / "own_checks.py").write_text(CHECKS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    with VerifierPool(workers=2, timeout_s=2.0) as made:
        made.require(["own_checks:check"])
        yield made


def task(response: str, answer: str = "x", **info: str) -> Task:
    return Task("own_checks:check", response, answer, info)


def test_five_answers_of_which_some_cannot_be_judged(pool: VerifierPool) -> None:
    found = pool.check_all([task("x"), task("hang"), task("y"), task("die"), task("x")])
    assert [v.reward for v in found] == [1, None, 0, None, 1]
    assert [v.cause for v in found] == ["", "timeout", "", "crash", ""]
    assert "last words" in found[3].detail
    assert "status 7" in found[3].detail
    assert dict(pool.counts) == {"right": 2, "timeout": 1, "wrong": 1, "crash": 1}


def test_hangs_do_not_use_workers_up(pool: VerifierPool) -> None:
    """More hangs than workers, in Python and in C; then as many answers as ever are judged."""
    found = pool.check_all([task("hang"), task("sleep in C"), task("hang")])
    assert [v.cause for v in found] == ["timeout"] * 3
    assert [v.reward for v in pool.check_all([task("x")] * 6)] == [1.0] * 6


def test_what_a_check_started_is_killed_with_it(pool: VerifierPool, tmp_path: Path) -> None:
    file = tmp_path / "pid"
    assert pool.check(task("child", file=str(file))).cause == "timeout"
    child = int(file.read_text())
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            os.kill(child, 0)
            state = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0]
        except (ProcessLookupError, FileNotFoundError):
            break
        if state == "Z":  # dead, and nobody has asked for it yet
            break
        time.sleep(0.05)
    else:
        os.kill(child, signal.SIGKILL)
        pytest.fail("the child lives")


def test_faults_of_a_verifier_are_no_wrong_answers(pool: VerifierPool) -> None:
    found = pool.check_all([task("raise"), task("memory"), task("chatter", "chatter")])
    assert [v.cause for v in found] == ["error", "error", ""]
    assert found[0].detail == "RuntimeError: own fault"
    assert "MemoryError" in found[1].detail
    assert found[2].reward == 1


def test_any_thread_may_ask(pool: VerifierPool) -> None:
    """Alarms would fail here, and turn every answer to wrong."""
    found: list[float | None] = []
    threads = [threading.Thread(target=lambda: found.append(pool.check(task("x")).reward)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert found == [1.0] * 4


def test_maths_in_a_thread() -> None:
    with VerifierPool(workers=1, timeout_s=60.0) as pool:
        found = pool.check_all([Task("maths", r"\boxed{\frac{1}{2}}", "0.5"), Task("maths", "0.4", "0.5")])
    assert [v.reward for v in found] == [1, 0]


def test_workers_are_used_again(pool: VerifierPool) -> None:
    pids = {v.detail for v in pool.check_all([task("x")] * 8)}
    assert 1 <= len(pids) <= 2


def test_what_is_no_json_and_what_is_not_there(pool: VerifierPool) -> None:
    assert pool.check(Task("own_checks:check", "x", {1, 2})).cause == "error"  # type: ignore[arg-type]
    assert "not known" in pool.check(Task("no-such", "x", "x")).detail
    with pytest.raises(UserError, match="not known"):
        pool.require(["no-such"])
    with pytest.raises(ConfigError, match="workers=0"):
        VerifierPool(workers=0)
    with pytest.raises(ConfigError, match="timeout_s=0"):
        VerifierPool(timeout_s=0)


def test_a_large_answer_goes_through(pool: VerifierPool) -> None:
    text = "ä" * 1_000_000
    assert pool.check(task(text, text)).reward == 1


def test_a_worker_ends_itself_where_nobody_is_left_to_kill_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_checks.py").write_text(CHECKS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    lines = [{"load": "own_checks:check"}, {**vars(task("hang"))}]
    found = subprocess.run(
        [sys.executable, "-m", "glm5.posttrain.verify.worker", str(1 << 32), "0.5"],
        input="".join(json.dumps(x) + "\n" for x in lines),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert found.returncode == 1
    assert json.loads(found.stdout)["detail"] == "loaded"
    assert "own_checks.py" in found.stderr  # where it stood


def test_workers_are_light() -> None:
    code = "import glm5.posttrain.verify.worker, sys; assert not {'torch', 'numpy', 'sympy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
