"""Containers: the words that start them, against a stand-in; and real ones, where an engine runs."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from glm5.agents.sandbox import Limits, SandboxError
from glm5.agents.sandbox.container import Container, Engine, _require
from glm5.agents.tasks import InContainer, Judged, Trial, attempt, read_task, solve
from glm5.utils.errors import ConfigError
from glm5.utils.outcome import Outcome
from support import images
from support.tasks import make

# --------------------------------------------------------------------------- a stand-in
STAND_IN = """#!{python}
import json, os, sys
with open({log!r}, "a") as log:
    log.write(json.dumps(sys.argv) + "\\n")
verb = sys.argv[1]
if verb == "info" and os.path.exists({log!r} + ".down"):
    sys.exit("Cannot connect to the daemon")
if verb == "run":
    print("ready", flush=True)
    sys.stdin.read()
elif verb == "exec":
    text = " ".join(sys.argv)
    if "reward.json" in text:
        sys.exit(1)
    if "reward.txt" in text:
        print("1")
    if "as the agent" in text:
        print("done")
elif verb == "cp":
    sys.stdin.buffer.read()
"""


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A command `docker` that writes down how it is called. Returns where."""
    log, program = tmp_path / "calls", tmp_path / "bin/docker"
    program.parent.mkdir()
    program.write_text(STAND_IN.format(python=sys.executable, log=str(log)))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent))
    _require.cache_clear()
    yield log
    _require.cache_clear()


def calls(log: Path) -> list[list[str]]:
    return [json.loads(line)[1:] for line in log.read_text().splitlines()]


def test_the_words_of_a_trial(stand_in: Path, tmp_path: Path) -> None:
    """Everything that a task's directory says, in the engine's words."""
    toml = """
        [agent]
        user = "agent"
        [verifier]
        env = { KEY = "${NO_SUCH_VARIABLE:-k}" }
        [environment]
        cpus = 1.5
        memory_mb = 300
        workdir = "/srv"
        env = { A = "1" }
    """
    task = read_task(make(tmp_path / "task", toml))
    where = InContainer(Engine("docker", network=True), Limits(processes=77, open_files=99, file_bytes=1 << 20))
    with Trial(task, where) as trial:
        assert trial.act("echo as the agent").stdout == b"done\n"
        assert trial.judge() == Judged(Outcome.OK, 1.0)
        trial.act("ls")
    info, build, run, act, kill, renew, put, verify, none, read, remove, again = calls(stand_in)
    assert info[0] == "info"
    assert build[:3] == ["build", "--quiet", "--tag"]
    assert build[-1] == str(tmp_path / "task/environment")
    name = run[run.index("--name") + 1]
    assert run == [
        *("run", "--rm", "--interactive", "--name", name, "--hostname", "task"),
        *("--memory", str(300 << 20), "--memory-swap", str(300 << 20), "--cpus", "1.5", "--pids-limit", "77"),
        *("--security-opt", "no-new-privileges", "--cap-drop=NET_RAW", "--cap-drop=MKNOD", "--cap-drop=AUDIT_WRITE"),
        *("--ulimit=core=0:0", "--ulimit=nofile=99:99", "--ulimit=fsize=1048576:1048576", "--ulimit=nproc=4096:4096"),
        *(
            "--env",
            "A=1",
            "--entrypoint",
            "bash",
            "--user",
            "0",
            build[3],
            "-c",
            "trap '' CHLD; echo ready; exec cat > /dev/null",
        ),
    ]
    bash = ["bash", "-c", "echo as the agent"]
    assert act == ["exec", "--interactive", "--workdir", "/srv", "--user", "agent", name, *bash]
    assert kill[:4] == ["exec", "--user", "0", name]
    assert renew[-2:] == ["/tests", "/logs"]
    assert put == ["cp", "-", f"{name}:/tests"]
    assert "KEY=k" in verify
    assert "--user" not in verify
    assert "/logs/verifier/reward.json" in none
    assert "/logs/verifier/reward.txt" in read
    assert remove[-3:] == ["-rf", "/logs", "/tests"]  # an agent that goes on must not read them
    assert again[-1] == "ls"


@pytest.mark.parametrize(
    ("engine", "toml", "given"),
    [
        (False, "", False),
        (True, "", True),
        (True, '[environment]\nnetwork_mode = "no-network"', False),
        (True, "[environment]\nallow_internet = false", False),
        (True, '[agent]\nnetwork_mode = "no-network"', False),
        (False, '[environment]\nnetwork_mode = "allowlist"\nallowed_hosts = ["a.example"]', False),
    ],
)
def test_a_network_is_given_where_both_say_so(
    stand_in: Path, tmp_path: Path, engine: bool, toml: str, given: bool
) -> None:
    with Trial(read_task(make(tmp_path / "task", toml)), InContainer(Engine("docker", network=engine))):
        pass
    (run,) = [call for call in calls(stand_in) if call[0] == "run"]
    assert (run[run.index("--network") + 1] == "none" if "--network" in run else "default") == (
        "default" if given else True
    )


def test_some_addresses_only_are_refused(stand_in: Path, tmp_path: Path) -> None:
    toml = '[environment]\nnetwork_mode = "allowlist"\nallowed_hosts = ["a.example"]'
    judged = solve(read_task(make(tmp_path / "task", toml)), InContainer(Engine("docker", network=True)))
    assert judged.outcome is Outcome.ENV_CRASH
    assert "allowlist" in judged.detail


def test_an_image_that_is_named_is_not_built(stand_in: Path, tmp_path: Path) -> None:
    directory = make(tmp_path / "task", '[environment]\ndocker_image = "them/theirs:3"')
    (directory / "environment/Dockerfile").unlink()
    solve(read_task(directory), InContainer(Engine("docker")))
    made = {call[0]: call for call in calls(stand_in)}
    assert "build" not in made
    assert "them/theirs:3" in made["run"]


def test_no_engine_is_an_error_and_nothing_else_is_taken(stand_in: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="docker, podman"):
        Engine("lxc")  # type: ignore[arg-type]
    task = read_task(make(tmp_path / "task"))
    judged = solve(task, InContainer(Engine("podman")))
    assert (judged.outcome, judged.reward) == (Outcome.ENV_CRASH, None)
    assert "Install podman" in judged.detail
    stand_in.with_name("calls.down").touch()
    judged = solve(task, InContainer(Engine("docker")))
    assert "docker info failed (1): Cannot connect to the daemon" in judged.detail
    assert {call[0] for call in calls(stand_in)} == {"info"}


# --------------------------------------------------------------------------- real ones
@pytest.fixture(scope="module")
def podman() -> Iterator[Engine]:
    """Podman with storage of its own and the small image; skips where it cannot run."""
    place = Path(tempfile.mkdtemp(prefix="glm5-podman-"))
    (place / "storage.conf").write_text(
        f'[storage]\ndriver = "overlay"\ngraphroot = "{place}/graph"\nrunroot = "{place}/run"\n'
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CONTAINERS_STORAGE_CONF", str(place / "storage.conf"))
        _require.cache_clear()
        engine = Engine("podman")
        try:
            engine.require()
            images.load("podman")
            with Container(engine, images.NAME) as box:
                box.run(["true"])
            yield engine
        except (SandboxError, OSError, subprocess.SubprocessError) as e:
            said = getattr(e, "stderr", None) or b""
            pytest.skip(f"containers are not tested: {e} {said.decode(errors='replace')[-300:]}")
        finally:
            own = ["podman", "--root", f"{place}/graph", "--runroot", f"{place}/run"]
            # Podman mounts the place upon itself.
            for line in ([*own, "rmi", "--all", "--force"], ["umount", "--lazy", f"{place}/graph/overlay"]):
                with suppress(OSError, subprocess.SubprocessError):
                    subprocess.run(line, capture_output=True, check=False, timeout=120)
            shutil.rmtree(place, ignore_errors=True)


DOCKER = f"""FROM {images.NAME}
ENV WHO=me
WORKDIR /srv/in
COPY a.txt .
RUN touch /etc/system && echo $WHO > who
"""
VERIFY = 'cd /srv/in; test "$(cat who)" = me && test -e /etc/system && test -e done\n'
VERIFY += "echo $((1 - $?)) > /logs/verifier/reward.txt\n"


def task_of(directory: Path, toml: str = "") -> Path:
    make(directory, toml, DOCKER)
    (directory / "environment/a.txt").write_text("A")
    (directory / "tests/test.sh").write_text(VERIFY)
    (directory / "solution/solve.sh").write_text("cat a.txt && touch done")
    return directory


def test_a_task_in_its_image(podman: Engine, tmp_path: Path) -> None:
    task, where = read_task(task_of(tmp_path)), InContainer(podman)
    assert solve(task, where).outcome is Outcome.OK
    with Trial(task, where) as trial:
        assert trial.judge().reward == 0.0
        done = trial.act("pwd; id -u; ls /sys/class/net; ls /tests /solution /logs", wall_s=60)
        assert done.stdout.decode().split() == ["/srv/in", "0", "lo"]
        assert done.stderr.count(b"No such file") == 3
        trial.act(
            "for d in /tests /logs /solution; do ln -s /srv $d; done; mkdir -p /srv/verifier; echo 1 > reward.txt"
        )
        assert trial.judge().reward == 0.0
        assert trial.act("ls -A /srv").stdout == b"in\nverifier\n"  # no link was followed
        trial.act("touch done")
        assert trial.judge().reward == 1.0


def test_a_verifier_in_its_own_container(podman: Engine, tmp_path: Path) -> None:
    """What the agent did to the system does not reach it; declared artifacts do, and no links among them."""
    toml = 'artifacts = ["/srv/in"]\n[verifier]\nenvironment_mode = "separate"\n'
    task_of(tmp_path, toml)
    (tmp_path / "tests/Dockerfile").write_text(f"FROM {images.NAME}\nCOPY . /tests/\n")
    (tmp_path / "tests/test.sh").write_text(
        "cd /srv/in; test -e done && test ! -e link && test -e /logs/artifacts/more && test ! -e /etc/system\n"
        "echo $((1 - $?)) > /logs/verifier/reward.txt\n"
    )
    task, where = read_task(tmp_path), InContainer(podman)
    with Trial(task, where) as trial:
        trial.act("touch done /logs/artifacts/more; ln -s /tests link")
        trial.solve()
        assert trial.act("ls -d /tests /solution").stdout == b""
        assert trial.judge().reward == 1.0
        trial.act("rm done; for p in /bin/* /usr/bin/*; do test -f $p && echo 'exit 0' > $p; done")
        assert trial.judge().reward == 0.0
    (tmp_path / "tests/Dockerfile").unlink()  # then it is a fresh copy of the agent's image, with the tests laid in
    (tmp_path / "tests/test.sh").write_text(VERIFY)
    assert solve(task, where).outcome is Outcome.OK


def test_limits(podman: Engine) -> None:
    limits = Limits(memory_bytes=64 << 20, processes=20, file_bytes=1 << 20, output_bytes=1000)
    with Container(podman, images.NAME, limits) as box:
        assert box.run(["bash", "-c", "head -c 3M /dev/zero > /tmp/x"]).code not in (0, None)
        assert box.run(["bash", "-c", "x=$(head -c 200M /dev/zero | tail -c 200M)"]).code not in (0, None)
        assert box.run(["bash", "-c", "while :; do echo xxxxxxxxxxxxxxxxxxxxxx; done"]).ending == "output"
        late = box.run(["bash", "-c", "sleep 1000 & sleep 1000"], wall_s=3)
        assert (late.ending, late.code) == ("wall_time", None)
        assert b"sleep" not in box.run(["bash", "-c", "cat /proc/[0-9]*/comm"]).stdout
        assert box.run(["bash", "-c", "exit 7"]).code == 7
        assert box.run(["cat"], stdin=b"in").stdout == b"in"
    with pytest.raises(SandboxError, match="ended"):
        box.run(["true"])


def test_what_goes_on_while_the_verifier_runs(podman: Engine, tmp_path: Path) -> None:
    """Nothing of the agent's; or, if asked for, what it started, as Harbor has it."""
    task_of(tmp_path)
    test = (
        "cat /proc/[0-9]*/comm | while read name; do test $name = sleep && echo 1 > /logs/verifier/reward.txt; done\n"
    )
    (tmp_path / "tests/test.sh").write_text(f"echo 0 > /logs/verifier/reward.txt\n{test}")
    task = read_task(tmp_path)
    rewards = [
        attempt(
            task,
            lambda trial: trial.act("sleep 1000 > /dev/null 2>&1 &") and None,
            InContainer(podman, keep_processes=k),
        )
        for k in (False, True)
    ]
    assert [judged.reward for judged in rewards] == [0.0, 1.0]


@pytest.mark.parametrize("spoil", ["rm -rf /bin /usr", "while :; do (:) & sleep 1000 & done"])
def test_a_spoiled_container_is_a_failed_task(podman: Engine, tmp_path: Path, spoil: str) -> None:
    task = read_task(task_of(tmp_path))
    where = InContainer(podman, Limits(processes=30))
    judged = attempt(task, lambda trial: trial.act(spoil, wall_s=3) and None, where)
    assert (judged.outcome, judged.reward) == (Outcome.TASK_FAILED, 0.0), judged


def test_a_container_ends_with_its_maker(podman: Engine) -> None:
    text = (
        "import sys\nfrom glm5.agents.sandbox.container import *\n"
        f"box = Container(Engine('podman'), {images.NAME!r})\nprint(box.name, flush=True)\nsys.stdin.read()\n"
    )
    with subprocess.Popen([sys.executable, "-c", text], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as maker:
        assert maker.stdout is not None
        name = maker.stdout.readline().decode().strip()
        assert name in _names()
        os.kill(maker.pid, signal.SIGKILL)
    for _ in range(600):
        if name not in _names():
            return
        time.sleep(0.1)
    pytest.fail("the container is still there")


def test_dockers_own_command(podman: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other engine's command takes the same words: here it asks Podman, which answers in Docker's place."""
    if shutil.which("docker") is None:
        pytest.skip("the command docker is not installed")
    socket = f"unix://{tmp_path}/socket"
    monkeypatch.setenv("DOCKER_HOST", socket)
    _require.cache_clear()
    with subprocess.Popen(["podman", "system", "service", "--time=0", socket], stderr=subprocess.PIPE) as service:
        try:
            for _ in range(600):
                if (tmp_path / "socket").exists() or service.poll() is not None:
                    break
                time.sleep(0.1)
            task, where = read_task(task_of(tmp_path / "task")), InContainer(Engine("docker"))
            assert solve(task, where) == Judged(Outcome.OK, 1.0)
            assert attempt(task, lambda trial: None, where) == Judged(Outcome.TASK_FAILED, 0.0)
        finally:
            service.kill()
            _require.cache_clear()


def _names() -> str:
    command = ["podman", "ps", "--all", "--format", "{{.Names}}"]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
