"""`glm5 serve`: a process that listens, answers, and ends in order."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from glm5.cli.main import main
from glm5.model.glm5 import GLM5
from glm5.model.presets import nano
from glm5.model.weights import save_model
from glm5.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("served") / "small"
    tokenizer = Tokenizer.train([f"def hello(name):\n    print(name, {n})\n" for n in range(400)], 320)
    config = nano(vocab_size=320, num_hidden_layers=2, hidden_size=32, max_position_embeddings=512)
    save_model(GLM5(config, seed=0), path)
    tokenizer.save(path)
    return path


def test_listens_answers_and_ends(checkpoint: Path) -> None:
    command = [sys.executable, "-c", "import sys; from glm5.cli.main import main; sys.exit(main())"]
    command += ["serve", str(checkpoint), "--port", "0", "--pages", "16", "--drafts", "2", "--log-level", "warning"]
    environment = {**os.environ, "GLM5_API_KEY": "secret"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stderr is not None
        said = []
        for line in process.stderr:
            said.append(line)
            found = re.match(r"listening on (http://127\.0\.0\.1:\d+)", line)
            if found:
                break
        else:
            pytest.fail("".join(said))
        assert any("small: 16 pages of 64 tokens" in line for line in said)
        body = {"model": "small", "prompt": "def hello", "max_tokens": 5, "temperature": 0}
        headers = {"Content-Type": "application/json"}
        asked = urllib.request.Request(found[1] + "/v1/completions", json.dumps(body).encode(), headers)  # noqa: S310
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(asked, timeout=60)  # noqa: S310
        asked.add_header("Authorization", "Bearer secret")
        with urllib.request.urlopen(asked, timeout=60) as answer:  # noqa: S310
            usage = json.load(answer)["usage"]
        assert usage["completion_tokens"] == 5
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == -signal.SIGTERM  # uvicorn hands the signal on when all is closed


def test_ctrl_c_ends_a_long_answer_at_once(checkpoint: Path) -> None:
    command = [sys.executable, "-c", "import sys; from glm5.cli.main import main; sys.exit(main())"]
    command += ["serve", str(checkpoint), "--port", "0", "--pages", "16", "--log-level", "warning"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        address = next(m[1] for line in process.stderr if (m := re.match(r"listening on (http://\S+)", line)))
        body = {"prompt": "def hello", "max_tokens": 500, "ignore_eos": True, "stream": True, "temperature": 0}
        headers = {"Content-Type": "application/json"}
        asked = urllib.request.Request(address + "/v1/completions", json.dumps(body).encode(), headers)  # noqa: S310
        with urllib.request.urlopen(asked, timeout=60) as answer:  # noqa: S310
            assert answer.readline().startswith(b"data:")
            process.send_signal(signal.SIGINT)
            rest = answer.read()
        assert b'"finish_reason":"abort"' in rest.replace(b" ", b"") or b"error" in rest
        said = process.stderr.read()
        assert process.wait(timeout=60) in (0, 130, -signal.SIGINT)
    assert "Traceback" not in said


def test_a_port_in_use_is_said_in_a_line(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", str(checkpoint), "--port", str(port), "--pages", "16"]) == 2
    assert f"cannot listen on 127.0.0.1:{port}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "no checkpoint is named"),
        (["--drafts", "-1"], "drafts=-1"),
        (["--port", "70000"], "port=70000"),
        (["--context", "9999"], "context=9999"),
    ],
)
def test_mistakes(options: list[str], said: str, checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", *([str(checkpoint)] if options else []), *options]) == 2
    assert said in capsys.readouterr().err
