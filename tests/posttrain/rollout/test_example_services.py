"""The example of a service, in a process of its own: the real command, a scripted engine that can add, and keys."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from glm5.agents.protocol import bearer
from glm5.posttrain.outcome import Outcome
from glm5.posttrain.store import Store
from glm5.serve.gateway.app import GatewayOptions, create_gateway
from glm5.serve.request import Request
from support.scripted import Scripted, chat_tokenizer
from support.serving import served

ROOT = Path(__file__).parents[3]
T = chat_tokenizer()
KEYS = {"GLM5_API_KEY": "a key", "GLM5_GATEWAY_KEY": "another"}


def add(request: Request, index: int) -> str:
    """Right at once, right at the second try, or wrong, by what is to be added."""
    text = T.decode(request.input_ids)
    a, b = map(int, re.findall(r"(\d+) \+ (\d+) = \?", text)[0])
    wrong = (a + b) % 3 if "wrong" not in text else (a + b) % 3 == 2
    return f"hm</think>{a + b + bool(wrong)}<|user|>"


@contextmanager
def process(*command: str) -> Iterator[subprocess.Popen[str]]:
    made = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | KEYS)
    try:
        yield made
    finally:
        made.kill()
        made.communicate()


def asked(address: str, path: str) -> Any:
    request = urllib.request.Request(address + path, headers=bearer("a key"))  # noqa: S310
    with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310
        return answer.read().decode()


def test_sums(tmp_path: Path) -> None:
    path = tmp_path / "run" / "trajectories.sqlite"
    engine = Scripted(script=add, sizes=(4,))
    with served(create_gateway(engine, GatewayOptions(api_key="another"))) as gateway:
        orchestrate = (sys.executable, "-m", "glm5", "orchestrate", str(path), "--gateway", gateway, "--port", "0")
        with process(*orchestrate, "--group", "2", "--max-open", "24", "--temperature", "0.7") as command:
            assert command.stderr is not None
            line = command.stderr.readline()
            found = re.search(r"http://\S+", line)
            assert found, line + command.stderr.read()
            with process(sys.executable, str(ROOT / "examples/services/sums.py"), found[0]) as service:
                status: Any = {}
                while status.get("finished", 0) < 24:
                    assert service.poll() is None, service.communicate()
                    assert command.poll() is None, command.communicate()
                    status = json.loads(asked(found[0], "/status"))
                    time.sleep(0.1)
                metrics = asked(found[0], "/metrics")
                service.send_signal(signal.SIGTERM)
                service.wait(60)
                while json.loads(asked(found[0], "/status"))["tasks"]["sums"]["there"]:
                    time.sleep(0.1)  # it says that it leaves
            command.send_signal(signal.SIGINT)
            _, errors = command.communicate(timeout=60)
        assert command.returncode == 130, errors
    assert 'glm5:rollouts_task_outcomes{task="sums",kind="ok"}' in metrics
    assert status["tasks"]["sums"]["target"] == 1.0
    with Store(path, read_only=True) as store:
        samples = store.samples()
        record = store.records(samples[0].id)[0]
    assert len(samples) == 24, "as many as may be open"
    assert {sample.status for sample in samples} == {"delivered"}
    assert {(s.outcome, s.reward) for s in samples} == {
        (Outcome.OK, 1.0), (Outcome.OK, 0.5), (Outcome.TASK_FAILED, 0.0),
    }  # fmt: skip
    assert record.temperature == 0.7
    by_group = {sample.group: sample.reward for sample in samples}
    assert all(sample.reward == by_group[sample.group] for sample in samples), "members of a group have one prompt"
    log = [json.loads(line) for line in (path.parent / "rollouts/metrics.jsonl").read_text().splitlines()]
    assert log[-1]["rollouts"]["tasks"]["sums"]["delivered"] == 24
