"""`glm5 gateway`: a process before an engine behind HTTP."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from glm5.cli.main import main
from support.scripted import Scripted, chat_tokenizer
from support.serving import HI, served


def test_agents_attach(tmp_path: Path) -> None:
    chat_tokenizer().save(tmp_path)
    command = [sys.executable, "-c", "import sys; from glm5.cli.main import main; sys.exit(main())", "gateway"]
    with served(Scripted()) as engine:
        command += ["--engines", engine, "http://127.0.0.1:9", "--tokenizer", str(tmp_path), "--version", "1"]
        command += ["--port", "0", "--log-level", "warning", "--name", "m", "--context", "4096"]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            assert process.stderr is not None
            assert process.stderr.readline() == "1 of 2 engines answer with weights 1\n"
            found = re.match(r"agents attach at (http://127\.0\.0\.1:\d+)/sessions/NAME/v1", process.stderr.readline())
            assert found is not None
            body = {"model": "m", "messages": HI}
            answer = httpx.post(f"{found[1]}/sessions/s/v1/chat/completions", json=body, timeout=60)
            assert answer.status_code == 200, answer.text
            (trajectory,) = httpx.delete(f"{found[1]}/sessions/s", timeout=60).json()["trajectories"]
            assert sum(trajectory["drawn"]) > 2
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=60) == -signal.SIGTERM


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "no engine is named"),
        (["--engines", "here:80"], "http://HOST:PORT"),
        (["--engines", "http://here", "--tokenizer", "nowhere"], "no such directory"),
    ],
)
def test_mistakes(options: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gateway", *options]) == 2
    assert said in capsys.readouterr().err
