"""`glm5 serve` with processes for prefill and decode: real ones, one of which is killed, and one on "another host"."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from glm5.cli.main import main
from glm5.model.generate import generate
from glm5.model.weights import load_model
from support.served import ask, save_small
from support.waiting import until

COMMAND = [sys.executable, "-c", "import sys; from glm5.cli.main import main; sys.exit(main())", "serve"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_small(tmp_path_factory.mktemp("served") / "small")


def children(pid: int) -> list[int]:
    """Processes that a process has started, in order."""
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z"


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks at processes as Linux does")
def test_processes_answer_and_survive_a_killed_one(checkpoint: Path) -> None:
    options = ["--port", "0", "--pages", "16", "--drafts", "1", "--log-level", "warning"]
    options += ["--prefill-workers", "1", "--decode-workers", "1", "--workers-at", "127.0.0.1:0"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLM5_WORKER_KEY": "between us"}
    with subprocess.Popen(
        [*COMMAND, str(checkpoint), *options], stderr=subprocess.PIPE, text=True, env=environment
    ) as p:
        assert p.stderr is not None
        said = []
        for line in p.stderr:
            said.append(line)
            if line.startswith("listening"):
                break
        address = said[-1].split()[-1]
        workers_at = next(m[1] for line in said if (m := re.match(r"workers of other hosts join at (\S+)", line)))
        processes = children(p.pid)
        assert len(processes) == 2
        other = subprocess.Popen(  # a decode worker that reads pages over TCP
            [*COMMAND, str(checkpoint), "--join", workers_at, "--pages", "16", "--drafts", "1"],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            until(lambda: len(ask(address, "/server_info")["decode"]) >= 2, seconds=300)
            model = load_model(checkpoint)
            prompts = [[40 + (7 * i + j) % 200 for j in range(150 + i)] for i in range(6)]
            sampling = {"temperature": 0, "max_new_tokens": 5, "ignore_eos": True}
            want = [list(generate(model, ids, max_new_tokens=5, stop_ids=())) for ids in prompts]

            def answers() -> list[list[int]]:
                told = ask(address, "/generate", {"input_ids": prompts, "sampling_params": sampling})
                return [one["output_ids"] for one in told]

            assert answers() == want
            info = ask(address, "/server_info")
            assert [w["name"] for w in info["prefill"]] == ["prefill-0"]
            os.kill(processes[1], signal.SIGKILL)
            assert answers() == want
            os.kill(processes[0], signal.SIGKILL)
            assert answers() == want
            p.send_signal(signal.SIGTERM)
            assert p.wait(timeout=240) == -signal.SIGTERM
            told = other.communicate(timeout=120)[1]
            assert other.returncode == 0, told
            assert f"works for {workers_at}" in told
        finally:
            other.kill()
            p.kill()
    assert all(gone(pid) for pid in processes)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--prefill-workers", "1"], "decode_workers"),
        (["--decode-workers", "-1"], "count processes"),
        (["--join", "127.0.0.1:1"], "GLM5_WORKER_KEY"),
        (["--role", "prefill"], "--join"),
    ],
)
def test_settings_that_cannot_work(
    options: list[str], said: str, checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GLM5_WORKER_KEY", raising=False)
    assert main(["serve", str(checkpoint), "--port", "0", *options]) == 2
    assert said in capsys.readouterr().err


def test_a_worker_that_finds_no_front_says_so(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLM5_WORKER_KEY", "between us")
    assert main(["serve", str(checkpoint), "--join", "127.0.0.1:1", "--pages", "4"]) == 2
    said = capsys.readouterr().err
    assert said.count("error: ") == 1
    assert "error: the front at 127.0.0.1:1: cannot reach 127.0.0.1:1" in said


def test_a_worker_that_cannot_start_ends_the_server(checkpoint: Path) -> None:
    options = ["--port", "0", "--context", "100000", "--decode-workers", "1", "--log-level", "critical"]
    done = subprocess.run([*COMMAND, str(checkpoint), *options], capture_output=True, text=True, timeout=240)
    assert done.returncode == 2
    assert "decode-0: context=100000" in done.stderr
    assert "a worker did not start" in done.stderr
