"""`glm5 serve --mesh`: real processes, one of which is killed; meshes that do not fit are refused before any starts."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from glm5.cli.main import main
from glm5.model.generate import generate
from glm5.model.weights import load_model
from support.served import ask, save_small

COMMAND = [sys.executable, "-m", "glm5", "serve"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_small(tmp_path_factory.mktemp("served") / "small")


def ranks(pid: int) -> dict[int, int]:
    """Processes of the ranks that a launcher has started, by rank."""
    found = {}
    for child in Path(f"/proc/{pid}/task").glob("*/children"):
        for one in map(int, child.read_text().split()):
            rank = re.search(rb"\0RANK=(\d+)\0", b"\0" + Path(f"/proc/{one}/environ").read_bytes())
            if rank is not None:
                found[int(rank[1])] = one
    return found


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks at processes as Linux does")
@pytest.mark.parametrize(("mesh", "stopped_by"), [("tp=2", signal.SIGTERM), ("dp=2,ep=2", signal.SIGKILL)])
def test_a_mesh_answers_and_ends(checkpoint: Path, tmp_path: Path, mesh: str, stopped_by: signal.Signals) -> None:
    given = ["--mesh", mesh, "--device", "cpu", "--port", "0", "--drafts", "2", "--memory-gib", "0.02"]
    log = tmp_path / "log"
    with log.open("w") as out:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        server = subprocess.Popen([*COMMAND, str(checkpoint), *given], stderr=out, env=environment)
    started: dict[int, int] = {}
    try:
        end = time.monotonic() + 300
        while not (found := re.search(r"listening on (\S+)", log.read_text())):
            assert server.poll() is None and time.monotonic() < end, log.read_text()  # noqa: PT018
            time.sleep(0.1)
        address, started = found[1], ranks(server.pid)
        assert sorted(started) == [0, 1]
        prompts = [[7, 8, 9] * n for n in (1, 30, 60, 61)]
        greedy = {"max_new_tokens": 12, "temperature": 0, "ignore_eos": True}
        with ThreadPoolExecutor(4) as pool:  # so that every engine has some of them
            bodies = [{"input_ids": ids, "sampling_params": greedy} for ids in prompts]
            answers = list(pool.map(lambda body: ask(address, "/generate", body), bodies))
        model = load_model(checkpoint)
        for ids, answer in zip(prompts, answers, strict=True):
            assert answer["output_ids"] == list(generate(model, ids, max_new_tokens=12, stop_ids=()))
        new = {"model_path": str(checkpoint), "weight_version": "2"}
        assert ask(address, "/update_weights_from_disk", new)["success"]
        again = ask(address, "/generate", bodies[1])
        assert again["output_ids"] == answers[1]["output_ids"]
        assert again["meta_info"]["weight_version"] == "2"
        info = ask(address, "/server_info")
        if "dp" in mesh:
            assert '"name": "dp-0"' in json.dumps(info)
            assert '"name": "dp-1"' in json.dumps(info)

        os.kill(server.pid if stopped_by == signal.SIGTERM else started[1], stopped_by)
        status = server.wait(120)
        said = log.read_text()
        if stopped_by == signal.SIGTERM:
            assert status == 128 + signal.SIGTERM
            assert "error:" not in said
        else:
            assert status == 1
            assert len(re.findall("^error: .*rank", said, re.MULTILINE)) == 1, said
        assert "Traceback" not in said
        end = time.monotonic() + 60
        while not all(map(gone, started.values())):
            assert time.monotonic() < end
            time.sleep(0.1)
    finally:
        server.kill()
        for pid in started.values():
            if not gone(pid):
                os.kill(pid, signal.SIGKILL)


def test_a_mesh_that_finds_no_front_says_so(checkpoint: Path) -> None:
    given = ["--mesh", "tp=2", "--device", "cpu", "--join", "127.0.0.1:1", "--memory-gib", "0.02"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLM5_WORKER_KEY": "between us"}
    done = subprocess.run(
        [*COMMAND, str(checkpoint), *given], capture_output=True, text=True, env=environment, timeout=300
    )
    assert done.returncode == 2, done.stderr
    assert "the front at 127.0.0.1:1" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("given", "what"),
    [
        (["--mesh", "tp=3"], "mesh.tp=3: must divide num_attention_heads"),
        (["--mesh", "dp=3,ep=3"], "mesh.ep=3: must divide n_routed_experts"),
        (["--mesh", "dp=2,ep=3"], "mesh.ep=3: must divide dp x cp"),
        (["--mesh", "pp=2"], "mesh.pp=2: is of training only"),
        (["--mesh", "tp"], "no axis=number"),
        (["--mesh", "tp=2", "--prefill-workers", "1", "--decode-workers", "1"], "beside prefill or decode workers"),
        (["--mesh", "cp=2", "--invariant"], "mesh.cp=2: does not go with --invariant"),
        (["--mesh", "tp=2", "--device", "cuda:0"], "device='cuda:0'"),
    ],
)
def test_what_does_not_fit_is_refused(
    checkpoint: Path, given: list[str], what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", str(checkpoint), *given]) == 2
    said = capsys.readouterr().err
    assert what in said
    assert said.count("error:") == 1
