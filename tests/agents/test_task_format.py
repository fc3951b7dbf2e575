"""Harbor's directories read: what a task holds, and refusals that name file, field and line."""

from __future__ import annotations

from pathlib import Path

import pytest

from glm5.agents.tasks import TaskError, read_task, read_tasks
from glm5.agents.tasks.dockerfile import read_dockerfile
from glm5.utils.errors import DataError
from support.tasks import EXAMPLES, make


def test_a_task_and_its_defaults(tmp_path: Path) -> None:
    toml = """
        version = "1.0"
        [metadata]
        tags = ["x"]
        [verifier]
        timeout_sec = 12
        env = { KEY = "value" }
        [environment]
        memory_mb = 64
    """
    task = read_task(make(tmp_path / "hello", toml))
    assert (task.name, task.instruction) == ("hello", "Do it.\n")
    assert (task.agent_s, task.verifier_s, task.memory_bytes) == (600, 12, 64 << 20)
    assert (task.verifier_environment, task.metadata) == ({"KEY": "value"}, {"tags": ["x"]})
    assert task.image().workdir == "/app"
    assert (task.network, task.allowlist, task.separate, task.artifacts, task.agent_user) == (
        True,
        False,
        False,
        (),
        None,
    )


def test_what_containers_alone_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toml = """
        artifacts = ["/srv/out", { source = "/srv/log.txt" }]
        [agent]
        user = 1000
        network_mode = "no-network"
        [verifier]
        user = "judge"
        env = { KEY = "a${GLM5_SET}b", OTHER = "${GLM5_NOT_SET:-c}" }
        [verifier.environment]
        docker_image = "them/judge:1"
        [environment]
        cpus = 0.5
        workdir = "/srv"
        network_mode = "public"
    """
    monkeypatch.setenv("GLM5_SET", "-")
    task = read_task(make(tmp_path / "hello", toml))
    assert task.artifacts == ("/srv/out", "/srv/log.txt")
    assert (task.separate, task.verifier_image) == (True, "them/judge:1")
    assert (task.agent_user, task.verifier_user, task.cpus, task.workdir) == ("1000", "judge", 0.5, "/srv")
    assert task.verifier_environment == {"KEY": "a-b", "OTHER": "c"}
    assert task.network is False  # the strictest of what is asked for


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("[agent]\ntimeout_sec = -1", r"agent.timeout_sec=-1.0|agent.timeout_sec=-1"),
        ('[agent]\ntimeout_sec = "long"', "agent.timeout_sec='long': must be a number"),
        ("[agent]\ntimeout_sec = true", "agent.timeout_sec=True"),
        ("[environment]\nmemory_mb = nan", "environment.memory_mb=nan"),
        ("agent = 3", "agent.[a-z_]+: a table"),
        ("[environment]\ngpus = 1", "no GPU"),
        ("[verifier]\nenv = { A = 1 }", "verifier.env: must be a table of texts"),
        ("[[steps]]\nname = 'one'", "several steps"),
        ("[verifier]\nenvironment_mode = 'else'", "environment_mode='else'"),
        ("[verifier]\nenvironment_mode = 'shared'\n[verifier.environment]\ncpus = 1", "environment_mode='shared'"),
        ("[environment.healthcheck]\ncommand = 'true'", "environment.healthcheck: health checks"),
        ("[environment]\nos = 'windows'", "only Linux"),
        ("[environment]\nnetwork_mode = 'private'", "network_mode='private': is not known"),
        ("[environment.env]\nA = '${GLM5_NO_SUCH_VARIABLE}'", r"\$\{GLM5_NO_SUCH_VARIABLE\} is not set"),
        ("artifacts = ['out.txt']", "Only absolute|absolute path"),
        ("artifacts = ['/a/../b']", "absolute path"),
        ("artifacts = [{ source = '/a', service = 'db' }]", "Only absolute paths"),
        ("a = [", "task.toml is no TOML"),
    ],
)
def test_fields_are_checked(tmp_path: Path, toml: str, message: str) -> None:
    with pytest.raises(TaskError, match=message):
        read_task(make(tmp_path, toml))


@pytest.mark.parametrize("name", ["task.toml", "instruction.md", "tests/test.sh", "environment/Dockerfile"])
def test_missing_files_are_named(tmp_path: Path, name: str) -> None:
    (make(tmp_path) / name).unlink()
    with pytest.raises(TaskError, match=name):
        read_task(tmp_path)


def test_several_containers_are_refused(tmp_path: Path) -> None:
    (make(tmp_path) / "environment/docker-compose.yaml").touch()
    with pytest.raises(TaskError, match="several containers"):
        read_task(tmp_path)


def test_a_directory_without_tasks(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="holds no task"):
        read_tasks(tmp_path)


def test_a_dockerfile_that_can_be_followed(tmp_path: Path) -> None:
    path = tmp_path / "Dockerfile"
    (tmp_path / "x.sh").touch()
    path.write_text(
        "# comment\nFROM debian:12 AS base\nENV ROOT=/srv/data LANG=C \\\n  # inside\n    A='b c'\nENV OLD form\n"
        "WORKDIR $ROOT\nWORKDIR sub\nCOPY one.txt two.txt ./\nCOPY --chmod=755 x.sh /opt/x.sh\n"
        'RUN echo a \\\n && echo b\nRUN ["true", "x"]\nRUN [ -f x ]\nCMD ["sleep"]\n'
    )
    image = read_dockerfile(path)
    assert (image.base, image.workdir) == ("debian:12", "/srv/data/sub")
    assert image.environment == {"ROOT": "/srv/data", "LANG": "C", "A": "b c", "OLD": "form"}
    assert [s.kind for s in image.steps] == ["copy", "copy", "run", "run", "run"]
    assert image.steps[2].words == ("bash", "-c", "echo a   && echo b")
    assert [s.words for s in image.steps[3:]] == [("true", "x"), ("bash", "-c", "[ -f x ]")]
    assert [s.line for s in image.steps] == [9, 10, 11, 13, 14]
    assert image.directories == ("/opt", "/srv/data")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("FROM other", ":2: FROM: a second stage"),
        ("COPY --from=x a b", ":2: COPY: only local"),
        ("ADD https://x.invalid/a /app/", ":2: ADD: addresses"),
        ("USER nobody", ":2: USER: cannot"),
        ("COPY a /usr/bin/", "writes to /usr/bin"),
        ("WORKDIR /", "writes to /,"),
        ("VOLUME /x", ":2: VOLUME"),
    ],
)
def test_a_dockerfile_that_cannot(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "Dockerfile"
    path.write_text(f"FROM debian\n{line}\n")
    with pytest.raises(DataError, match=message):
        read_dockerfile(path)


def test_a_dockerfile_without_from(tmp_path: Path) -> None:
    path = tmp_path / "Dockerfile"
    path.write_text("WORKDIR /app\n")
    with pytest.raises(DataError, match="no FROM"):
        read_dockerfile(path)


def test_our_tasks_are_in_order() -> None:
    tasks = read_tasks(EXAMPLES)
    assert len(tasks) >= 20
    assert all((task.directory / "solution/solve.sh").is_file() and "/app" in task.instruction for task in tasks)
    assert len({task.name for task in tasks}) == len(tasks)
    tools = {(task.directory / "tests/grade.py").read_text() for task in tasks}
    assert len(tools) == 1  # one text, a copy in each: a task's directory stands alone
