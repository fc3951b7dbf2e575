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


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks at processes as Linux does")
def test_a_mesh_fetches_the_pages_that_another_worker_has_read(checkpoint: Path, tmp_path: Path) -> None:
    """A prefill worker of one process, a decode worker of two, and their front."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLM5_WORKER_KEY": "between us"}
    names, processes = ("front", "prefill", "decode"), []

    def start(name: str, *given: str) -> None:
        options = ["--drafts", "1", "--pages", "24", "--device", "cpu", *given]
        with (tmp_path / name).open("w") as out:
            processes.append(subprocess.Popen([*COMMAND, str(checkpoint), *options], stderr=out, env=environment))

    def said() -> str:
        return "\n".join(f"{name}: {(tmp_path / name).read_text()}" for name in names if (tmp_path / name).exists())

    def wait_for(pattern: str) -> str:
        end = time.monotonic() + 300
        while not (found := re.search(pattern, said())):
            assert all(p.poll() is None for p in processes), said()
            assert time.monotonic() < end, said()
            time.sleep(0.1)
        return found[1]

    started: dict[int, int] = {}
    try:
        start("front", "--port", "0", "--workers-at", "127.0.0.1:0")
        address, workers_at = wait_for(r"listening on (\S+)"), wait_for(r"hosts join at (\S+)")
        start("prefill", "--join", workers_at, "--role", "prefill")
        start("decode", "--join", workers_at, "--mesh", "tp=2")
        end = time.monotonic() + 300
        while not all(ask(address, "/server_info").get(role) for role in ("prefill", "decode")):
            assert all(p.poll() is None for p in processes), said()
            assert time.monotonic() < end, said()
            time.sleep(0.1)
        started = ranks(processes[2].pid)
        prompts = [[40 + (7 * i + j) % 200 for j in range(150 + i)] for i in range(4)]
        sampling = {"temperature": 0, "max_new_tokens": 5, "ignore_eos": True}
        told = ask(address, "/generate", {"input_ids": prompts, "sampling_params": sampling})
        model = load_model(checkpoint)
        for ids, answer in zip(prompts, told, strict=True):
            assert answer["output_ids"] == list(generate(model, ids, max_new_tokens=5, stop_ids=()))
        (prefill,), (decode,) = (ask(address, "/server_info")[role] for role in ("prefill", "decode"))
        assert decode["tp"] == 2
        assert "tp" not in prefill
        assert "is read here" not in said()  # as a prompt is whose pages do not come
        processes[0].send_signal(signal.SIGTERM)
        for process in processes[1:]:
            assert process.wait(120) == 0, said()
        assert "Traceback" not in said()
    finally:
        for process in processes:
            process.kill()
        for pid in started.values():
            if not gone(pid):
                os.kill(pid, signal.SIGKILL)


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
