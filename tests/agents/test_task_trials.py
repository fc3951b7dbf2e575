"""Attempts at tasks: our own ones proven, and verdicts when an agent cheats, is late, or something breaks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from glm5.agents.sandbox import Limits
from glm5.agents.tasks import AgentTimeout, InSandbox, Judged, Trial, attempt, prove, read_task, read_tasks, solve
from glm5.utils.errors import DataError
from glm5.utils.outcome import Outcome
from support.tasks import EXAMPLES, make

pytestmark = pytest.mark.usefixtures("isolation")
NAMES = sorted(path.parent.name for path in EXAMPLES.glob("*/task.toml"))


@pytest.mark.parametrize("name", NAMES)
def test_solved_by_its_solution_only(name: str) -> None:
    """1 for the reference solution; 0 for nothing done, for empty files, and for a planted verifier and reward."""
    task = read_task(EXAMPLES / name)
    judged = solve(task)
    assert (judged.outcome, judged.reward) == (Outcome.OK, 1.0), judged.detail
    with Trial(task) as trial:
        assert trial.judge().reward == 0.0
        named = sorted(set(re.findall(r"/app/[\w./-]*\w", task.instruction)))
        trial.act(f"find /app -type f -exec truncate -s 0 {{}} +; for f in {' '.join(named)}; do > $f; done")
        plant = "for d in /tests /logs/verifier /app/tests; do mkdir -p $d; echo 1 > $d/reward.txt; done"
        trial.act(f"{plant}; echo 'echo 1 > /logs/verifier/reward.txt' > /tests/test.sh; ln -s /logs /app/logs")
        assert trial.judge().reward == 0.0


def test_order_does_not_count_where_it_means_nothing() -> None:
    task = read_task(EXAMPLES / "csv-totals")
    turn = "import json; t = json.load(open('totals.json')); "
    turn += "json.dump({k: t[k] for k in reversed(t)}, open('totals.json', 'w'))"
    with Trial(task) as trial:
        trial.solve()
        before = trial.act("cat totals.json").stdout
        trial.act(["python3", "-c", turn])
        assert trial.act("cat totals.json").stdout != before
        assert trial.judge().reward == 1.0


def test_a_task_that_proves_nothing(tmp_path: Path) -> None:
    """One that is solved before, one whose solution does not solve it, and one that is right by chance."""
    make(tmp_path)
    with pytest.raises(DataError, match=r"doing nothing got 1\.0 \(ok\) in run 0"):
        prove(read_task(tmp_path))
    (tmp_path / "tests/test.sh").write_text("echo 0 > /logs/verifier/reward.txt")
    with pytest.raises(DataError, match=r"its solution got 0\.0"):
        prove(read_task(tmp_path))
    (tmp_path / "solution/solve.sh").write_text("exit 3")
    with pytest.raises(DataError, match=r"env_crash.*the solution failed"):
        prove(read_task(tmp_path))
    (tmp_path / "solution/solve.sh").write_text("touch done")
    (tmp_path / "tests/test.sh").write_text("test -e done; echo $((1 - $?)) > /logs/verifier/reward.txt")
    prove(read_task(tmp_path), runs=2)


def trial_of(directory: Path, verifier: str, docker: str = "FROM x\nWORKDIR /app\n", toml: str = "") -> Judged:
    make(directory, toml, docker)
    (directory / "tests/test.sh").write_text(verifier)
    return attempt(read_task(directory), lambda trial: None)


@pytest.mark.parametrize(
    ("verifier", "reward"),
    [
        ("echo 0.25 > /logs/verifier/reward.txt", 0.25),
        ("echo '{\"reward\": 1}' > /logs/verifier/reward.json", 1.0),
        ("echo '{\"tests\": 0.5}' > /logs/verifier/reward.json; exit 3", 0.5),
        ('echo 0 > /logs/verifier/reward.txt; echo \'{"a": 0.5, "reward": 1}\' > /logs/verifier/reward.json', 1.0),
        ('echo \'{"a": 0.5, "b": 1}\' > /logs/verifier/reward.json', None),
        ("echo '{}' > /logs/verifier/reward.json", None),
        ("head -c 900000 /dev/zero | tr '\\0' '[' > /logs/verifier/reward.json", None),
        ("printf 'reward: 0\\n1'; echo 1 > /logs/verifier/reward.txt; printf '0 FAILED'", 1.0),  # noise is no verdict
        ("true", None),
        ("kill -9 $$", None),
        ("echo nan > /logs/verifier/reward.txt", None),
        ("echo 2 > /logs/verifier/reward.txt", None),
        ("echo yes > /logs/verifier/reward.txt", None),
        ("> /logs/verifier/reward.txt", None),
        ("echo '{' > /logs/verifier/reward.json", None),
        ("ln -s /etc/passwd /logs/verifier/reward.txt", None),
        ("mkfifo /logs/verifier/reward.txt", None),
    ],
)
def test_no_reward_is_no_verdict(tmp_path: Path, verifier: str, reward: float | None) -> None:
    judged = trial_of(tmp_path, verifier)
    expected = Outcome.VERIFIER_NO_VERDICT if reward is None else Outcome.OK if reward == 1 else Outcome.TASK_FAILED
    assert (judged.outcome, judged.reward) == (expected, reward), judged.detail


def test_a_verifier_that_hangs(tmp_path: Path) -> None:
    judged = trial_of(tmp_path, "sleep 100", toml="[verifier]\ntimeout_sec = 0.5")
    assert judged.outcome is Outcome.VERIFIER_NO_VERDICT
    assert "wall_time" in judged.detail


def test_a_verifier_of_its_own_needs_containers(tmp_path: Path) -> None:
    judged = trial_of(tmp_path, "true", toml="[verifier]\nenvironment_mode = 'separate'")
    assert (judged.outcome, judged.reward) == (Outcome.ENV_CRASH, None)
    assert "Run it in containers" in judged.detail


def test_an_environment_that_breaks(tmp_path: Path) -> None:
    judged = trial_of(tmp_path, "true", "FROM x\nWORKDIR /app\nRUN apt-get install -y cowsay\n")
    assert (judged.outcome, judged.reward) == (Outcome.ENV_CRASH, None)
    assert "line 3 of its Dockerfile failed" in judged.detail
    assert "in a container" in judged.detail
    judged = trial_of(tmp_path, "true", "FROM x\nWORKDIR /app\nCOPY none.txt .\n")
    assert "there is no none.txt" in judged.detail
    judged = trial_of(tmp_path, "true", "FROM x\nWORKDIR /app\nCOPY ../solution /app\n")
    assert judged.outcome is Outcome.ENV_CRASH


def test_files_are_laid_out_as_docker_does(tmp_path: Path) -> None:
    docker = (
        "FROM x\nENV WHO=me\nWORKDIR /app/in\nCOPY a.txt .\nCOPY a.txt b.txt\nCOPY d /app/d\nCOPY d e/\n"
        "COPY --chmod=700 d/*.sh /data/\nRUN echo $WHO > who\n"
    )
    make(tmp_path, "", docker)
    (tmp_path / "environment/a.txt").write_text("A")
    (tmp_path / "environment/d/deep").mkdir(parents=True)
    (tmp_path / "environment/d/deep/f").write_text("F")
    (tmp_path / "environment/d/x.sh").write_text("echo")
    with Trial(read_task(tmp_path)) as trial:
        done = trial.act("pwd; cd /; find app data -type f | sort; cat app/in/who; stat -c %a data/x.sh app/d/x.sh")
    assert done.stdout.decode().split() == [
        *("/app/in", "app/d/deep/f", "app/d/x.sh", "app/in/a.txt", "app/in/b.txt"),
        *("app/in/e/deep/f", "app/in/e/x.sh", "app/in/who", "data/x.sh", "me", "700", "644"),
    ]


def test_an_agent_sees_neither_tests_nor_solution(tmp_path: Path) -> None:
    make(tmp_path)
    with Trial(read_task(tmp_path)) as trial:
        trial.judge()  # which lays the tests out
        trial.solve()
        done = trial.act("ls -A /tests /solution /logs; find / -name solve.sh -o -name test.sh 2>/dev/null")
    assert done.stdout == b""
    assert done.stderr.count(b"No such file") == 3


def test_what_an_agent_leaves_does_not_reach_the_verifier(tmp_path: Path) -> None:
    """A daemon that writes the reward, modules that Python would load, set-up files of shells."""
    make(tmp_path)
    (tmp_path / "tests/test.sh").write_text(
        "cd /app; sleep 0.3; python3 -c 'import json; print(json.__file__)' > out\n"
        "[ -e /logs/verifier/reward.txt ] || grep -q /usr/lib out && echo 0 > /logs/verifier/reward.txt\n"
    )

    def agent(trial: Trial) -> None:
        trial.act("setsid sh -c 'while :; do echo 1 > /logs/verifier/reward.txt; done' > /dev/null 2>&1 &")
        site = "~/.local/lib/python3.11/site-packages"
        cheat = "open('/logs/verifier/reward.txt', 'w').write('1'); import os; os._exit(0)"
        trial.act(f'mkdir -p {site}; for f in {site}/usercustomize.py json.py; do echo "{cheat}" > $f; done')
        trial.act("for f in ~/.bashrc ~/.profile ~/.bash_env; do echo 'echo 1 > /logs/verifier/reward.txt' > $f; done")

    judged = attempt(read_task(tmp_path), agent)
    assert (judged.outcome, judged.reward) == (Outcome.TASK_FAILED, 0.0), judged.detail


@pytest.mark.parametrize(
    "spoil",
    [
        "for d in . ~ /tmp /dev/shm; do cat /dev/zero > $d/full; done",
        "i=0; while mkdir /tmp/$i; do i=$((i+1)); done",
        "chmod 0 /tmp ~ /dev/shm .",
        "cd /app; rm -r in; ln -s /nowhere in",
    ],
)
def test_a_spoiled_environment_is_a_failed_task(tmp_path: Path, spoil: str) -> None:
    """Not a missing verdict, by which a policy would take its bad answers out of a group."""
    make(tmp_path, "[environment]\nstorage_mb = 16", "FROM x\nWORKDIR /app\nCOPY a .\nWORKDIR /app/in\n")
    (tmp_path / "environment/a").touch()
    (tmp_path / "tests/test.sh").write_text(
        "cat <<< text > $(mktemp) && test -e /app/done; echo $((1 - $?)) > /logs/verifier/reward.txt\n"
    )
    task = read_task(tmp_path)
    judged = attempt(task, lambda trial: trial.act(spoil) and None, InSandbox(Limits(files=500)))
    assert (judged.outcome, judged.reward) == (Outcome.TASK_FAILED, 0.0), judged
    judged = attempt(task, lambda trial: trial.act(f"touch /app/done; {spoil}") and None, InSandbox(Limits(files=500)))
    assert (judged.outcome, judged.reward) == (Outcome.OK, 1.0), judged


def test_a_program_that_attacks_its_verifier() -> None:
    """Run by the verifier, it tries to write the reward, kill, read the tests, hang, flood and eat memory."""
    task = read_task(EXAMPLES / "reverse-polish")
    attacks = {
        "a daemon": "import os\nif os.fork() == 0:\n os.setsid()\n while True:\n  try: open(R, 'w').write('1')\n"
        "  except OSError: pass",
        "kill": "import os, signal\nopen(R, 'w').write('1')\nos.kill(os.getppid(), signal.SIGKILL)",
        "read": "import os, sys\nfor d, _, n in os.walk('/tests'):\n for f in n: print(open(d + '/' + f).read())\n"
        "print(open(f'/proc/{os.getppid()}/mem', 'rb').read(9))",
        "flood": "while True: print('x' * 9999)",
        "memory": "x = [b'x' * (1 << 24) for _ in range(999)]",
    }
    for name, text in attacks.items():
        program = f"R = '/logs/verifier/reward.txt'\n{text}\n"
        judged = attempt(task, lambda trial, p=program: trial.act("cat > rpn.py", stdin=p.encode()) and None)
        if name == "kill":  # it can take the verdict away, but not give itself one
            assert judged.outcome is Outcome.VERIFIER_NO_VERDICT
            continue
        assert judged.reward == 0.0, (name, judged)


def test_an_agent_that_is_late(tmp_path: Path) -> None:
    make(tmp_path, "[agent]\ntimeout_sec = 0.5")
    (tmp_path / "tests/test.sh").write_text("test -e /app/done; echo $((1 - $?)) > /logs/verifier/reward.txt")
    task = read_task(tmp_path)
    judged = attempt(task, lambda trial: trial.act("sleep 100") and None)
    assert (judged.outcome, judged.reward) == (Outcome.TIMEOUT, 0.0)
    judged = attempt(task, lambda trial: trial.act("touch done; sleep 100") and None)
    assert (judged.outcome, judged.reward) == (Outcome.OK, 1.0)
    with Trial(task) as trial:
        assert trial.act("sleep 100", wall_s=0.1).ending == "wall_time"
        with pytest.raises(AgentTimeout):
            trial.act("sleep 100")
        with pytest.raises(AgentTimeout):
            trial.act("true")


def test_an_agents_own_fault_is_not_hidden(tmp_path: Path) -> None:
    def agent(trial: Trial) -> None:
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        attempt(read_task(make(tmp_path)), agent)


def test_memory_of_the_task_is_the_bound(tmp_path: Path) -> None:
    make(tmp_path, "[environment]\nmemory_mb = 48\nstorage_mb = 8")
    with Trial(read_task(tmp_path), InSandbox(Limits(processes=9))) as trial:
        assert trial.act("python3 -c 'x = b\"x\" * (200 << 20)'").ending == "memory"
        assert trial.act("head -c 20M /dev/zero > x").code == 1


def test_all_tasks_at_once_can_be_read() -> None:
    assert [task.directory.name for task in read_tasks(EXAMPLES)] == NAMES
