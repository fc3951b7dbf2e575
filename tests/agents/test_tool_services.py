"""Task services with tools: conversations, mathematics with Python, edits, terminals; with models that are scripted."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from glm5.agents.protocol import Result
from glm5.agents.sandbox import SandboxError
from glm5.agents.sandbox.container import Engine, _require
from glm5.agents.service import Hosted, TaskService
from glm5.agents.services.editing import EditingService, Workspace, prove, read_edit, read_edits, run_checks
from glm5.agents.services.maths import Problem, PythonToolService
from glm5.agents.services.terminal import TerminalService
from glm5.agents.services.tools import Tool
from glm5.agents.tasks import InContainer, InSandbox, read_task
from glm5.utils.errors import DataError
from glm5.utils.outcome import Outcome
from support.scripted_chat import Says, call, rollout, say, scripted
from support.tasks import EXAMPLES

EDITS = EXAMPLES.parent / "edits"
NAMES = sorted(path.stem for path in EDITS.glob("*.toml"))


def hold(service: TaskService, says: Says, *indexes: int, **asked: Any) -> tuple[list[Result], list[dict[str, Any]]]:
    """Results of rollouts, one after the other, and all requests."""

    async def main(url: str) -> list[Result]:
        hosted = Hosted(service)
        await hosted.start()
        try:
            return [await hosted.ask(rollout(url, index=i, **asked)) for i in indexes]
        finally:
            await hosted.stop()

    with scripted(says) as (url, requests):
        return asyncio.run(main(url)), requests


def steps(*messages: dict[str, Any]) -> Says:
    """A model that says these one after the other, by how many messages it has said."""
    return lambda history: messages[sum(m["role"] == "assistant" for m in history)]


# --------------------------------------------------------------------------- tools
@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        ('{"n": 2}', "2 None"),
        ('{"n": 2, "text": "a"}', "2 a"),
        ("{}", "Error: t needs 'n'"),
        ("", "Error: t needs 'n'"),
        ("{", "Error: the arguments are no JSON"),
        ("[2]", "Error: the arguments must be an object"),
        ('{"n": "2"}', "Error: n must be of the kind integer"),
        ('{"n": true}', "Error: n must be of the kind integer"),
        ('{"n": 2, "text": null}', "Error: text must be of the kind string"),
        ('{"n": 2, "m": 1}', "Error: t takes no 'm', but n, text"),
    ],
)
def test_what_a_model_does_wrong_is_told_to_it(arguments: str, answer: str) -> None:
    given = {"n": ("integer", "a number"), "text": ("string", "a text")}
    tool = Tool("t", "A tool.", given, lambda n, text=None: f"{n} {text}", optional=["text"])
    assert tool.answer(arguments).startswith(answer)
    assert tool.told["function"]["parameters"]["required"] == ["n"]


# --------------------------------------------------------------------------- mathematics with Python
def exact(problem: Problem, response: str) -> tuple[float | None, str]:
    if response == "?":
        return None, "timeout: the verifier was killed"
    return float(response == problem.answer), response


PROBLEMS = [Problem("What is 2 to the 100th?", str(2**100)), Problem("Say 3.", "3")]


@pytest.mark.usefixtures("isolation")
def test_python_is_a_tool_within_the_trajectory() -> None:
    """Variables last; what is printed comes back; a call that ends the interpreter says so; other tools are refused."""

    def says(history: list[dict[str, Any]]) -> dict[str, Any]:
        seen = [m["content"] for m in history if m["role"] == "tool"]
        script = ["x = 2 ** 100", "import sys; sys.exit()", "x", "print(2 ** 100)"]
        if len(seen) < len(script):
            return call("python", len(seen), code=script[len(seen)])
        return call("perl", 9, code="1") if len(seen) == len(script) else say(seen[3])

    (found,), requests = hold(PythonToolService("maths", PROBLEMS, exact), says, 0)
    assert (found.outcome, found.reward) == (Outcome.OK, 1.0)
    assert found.metrics == {"turns": 6, "calls": 5, "wrong_calls": 1, "unfinished": 0}
    history = requests[-1]["messages"]
    assert history[1]["content"] == "What is 2 to the 100th?"
    results = [m["content"] for m in history if m["role"] == "tool"]
    assert results[:2] == ["[no output]", "[ended: died; variables are lost]"]
    assert "NameError" in results[2]
    assert results[3:] == [str(2**100), "Error: there is no tool 'perl', but python"]
    assert [t["function"]["name"] for t in requests[0]["tools"]] == ["python"]


@pytest.mark.usefixtures("isolation")
def test_answers_and_their_verdicts() -> None:
    service = PythonToolService("maths", PROBLEMS, exact, turns=3, sampling={"max_tokens": 5})
    (right, wrong), requests = hold(service, lambda history: say("3"), 1, 2)
    assert (right.reward, wrong.reward) == (1.0, 0.0)  # problem 2 is 0 again
    assert requests[0]["max_tokens"] == 5
    ((nobody_knows,), _) = hold(service, lambda history: say("?"), 1)
    assert (nobody_knows.outcome, nobody_knows.reward) == (Outcome.VERIFIER_NO_VERDICT, None)
    ((endless,), requests) = hold(service, lambda history: call("python", len(history), code="1"), 1)
    assert (endless.outcome, endless.reward, len(requests)) == (Outcome.TASK_FAILED, 0.0, 3)
    assert endless.metrics["unfinished"] == 1


def test_without_isolation_a_service_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(control_group: bool = True) -> None:
        raise SandboxError("no sandbox: bubblewrap missing", "apt-get install bubblewrap")

    monkeypatch.setattr("glm5.agents.services.maths.require", refuse)
    monkeypatch.setattr("glm5.agents.services.editing.require", refuse)
    monkeypatch.setattr("glm5.agents.tasks.places.require", refuse)
    monkeypatch.setenv("PATH", "/nowhere")
    _require.cache_clear()
    task = read_task(EXAMPLES / "fix-retry")
    for service in (
        PythonToolService("a", PROBLEMS, exact),
        EditingService("b", read_edits(EDITS)),
        TerminalService("c", [task], InSandbox()),
        TerminalService("d", [task], InContainer(Engine("docker"))),
    ):
        with pytest.raises(SandboxError, match=r"apt-get install bubblewrap|Install docker"):
            asyncio.run(service.start())


# --------------------------------------------------------------------------- edits
@pytest.mark.usefixtures("isolation")
@pytest.mark.parametrize("name", NAMES)
def test_our_edits_fail_before_and_pass_after(name: str) -> None:
    edit = read_edit(EDITS / f"{name}.toml")
    to_pass, still = prove(edit)
    assert to_pass
    assert still
    assert any(check.hidden for check in edit.checks)
    assert set(to_pass) & {check.name for check in edit.checks if not check.hidden}  # the model sees one fail


SMALL = """
instruction = "Mend f."
setup = "from a import f"
files = { "a.py" = "def f(x):\\n    return x\\n" }
fixed = { "a.py" = "def f(x):\\n    return x + 1\\n" }
given = { "b.py" = "B = 1\\n" }
[[tests]]
name = "one"
expression = "f(1)"
value = "2"
[[tests]]
name = "bool"
hidden = true
expression = "f(False) is not None"
value = "True"
"""


def small(tmp_path: Path, text: str = SMALL) -> Path:
    (tmp_path / "small.toml").write_text(text)
    return tmp_path / "small.toml"


@pytest.mark.usefixtures("isolation")
def test_an_edit_over_turns(tmp_path: Path) -> None:
    edit = read_edit(small(tmp_path))
    model = steps(
        call("run_tests"),
        call("view", path="a.py", first=2),
        call("replace", path="a.py", old="return x", new="return x + 1"),
        call("run_tests"),
        say("Done."),
    )
    (found,), requests = hold(EditingService("edits", [edit]), model, 0)
    assert (found.outcome, found.reward) == (Outcome.OK, 1.0)
    assert found.metrics["test_runs"] == 2
    assert [m["content"] for m in requests[-1]["messages"] if m["role"] == "tool"] == [
        "FAILED one: f(1) should be 2, but is 1",
        "2\t    return x",
        "Written: a.py, 2 lines",
        "PASSED one: f(1) is 2",
    ]
    (nothing,), _ = hold(EditingService("edits", [edit]), lambda history: say("Done."), 0)
    assert (nothing.outcome, nothing.reward, nothing.detail) == (Outcome.TASK_FAILED, 0.0, "one: failed")
    assert nothing.metrics["tests_passed"] == 0.5


def test_what_a_workspace_refuses(tmp_path: Path) -> None:
    space = Workspace(read_edit(small(tmp_path)))
    assert space.list_files() == "a.py (2 lines)\nb.py (1 lines)"
    assert space.view("b.py") == "1\tB = 1"
    refused = [
        space.view("c.py"),
        space.replace("b.py", "1", "2"),
        space.create("b.py", "B = 2"),
        space.replace("a.py", "x", "y"),
        space.replace("a.py", "", "y"),
        space.create("../a.py", ""),
        space.create("/etc/passwd", ""),
        space.create("a.py/b", ""),
        space.create("d/./e", ""),
        space.create("a.py", "x" * 70_000),
    ]
    assert all(answer.startswith("Error: ") for answer in refused), refused
    assert space.files == read_edit(small(tmp_path)).files
    assert space.create("d/e.py", "E = 1") == "Written: d/e.py, 1 lines"


@pytest.mark.usefixtures("isolation")
@pytest.mark.parametrize(
    ("text", "status", "shown"),
    [
        ("def f(x): return x + 1", "passed", "f(1) is 2"),
        ("def f(x): return True + True", "passed", "f(1) is 2"),
        ("def f(x): return 2.0", "failed", "but is 2.0"),
        ("def f(x): return 1 / 0", "failed", "ZeroDivisionError"),
        ("def f(x): return f", "failed", "no plain value"),
        ("def f(x): return 2\n)", "not_run", "SyntaxError"),
        ("g = 1", "not_run", "ImportError"),
        ("import os\ndef f(x): os._exit(0)", "failed", "status 0"),
        ("import os\nos._exit(0)", "not_run", "status 0"),
        ("def f(x):\n while True: print('x' * 999)", "not_run", "output"),
        ("import sys\ndef f(x): print('2'); sys.exit()", "failed", "status 0"),
        (
            "class A:\n def __eq__(s, o): return True\n def __repr__(s): return 'A'\ndef f(x): return A()",
            "failed",
            "plain",
        ),
        ("open('/program/a.py', 'w')\ndef f(x): return 2", "not_run", "Read-only"),
    ],
)
def test_not_run_is_told_from_failed(tmp_path: Path, text: str, status: str, shown: str) -> None:
    edit = read_edit(small(tmp_path))
    found = run_checks(edit, {"a.py": text}, edit.checks[:1])["one"]
    assert found[0] == status, found
    assert shown in found[1]


@pytest.mark.usefixtures("isolation")
def test_edits_that_prove_nothing(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"test 'one' on the fixed files: .* but is 1"):
        prove(read_edit(small(tmp_path, SMALL.replace("x + 1", "x"))))
    with pytest.raises(DataError, match="all tests pass before"):
        prove(read_edit(small(tmp_path, SMALL.replace('"2"', '"1"').replace("x + 1", "1 * x"))))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('setup = "from a import f"', "", "'setup'"),
        ('value = "2"', 'value = "open(1)"', "ValueError"),
        ('"a.py" = "def f(x):\\n    return x\\n"', '"../a.py" = ""', "must not hold"),
        ('name = "bool"', 'name = "one"', "each its own"),
        ("instruction =", "instruction", "TOMLDecodeError"),
    ],
)
def test_edits_that_are_none(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in SMALL
    with pytest.raises(DataError, match=message):
        read_edit(small(tmp_path, SMALL.replace(old, new)))


# --------------------------------------------------------------------------- terminals
@pytest.mark.usefixtures("isolation")
def test_a_terminal_task(tmp_path: Path) -> None:
    task = read_task(EXAMPLES / "csv-totals")
    solution = (task.directory / "solution/solve.sh").read_text()
    model = steps(call("bash", command="cat sales.csv; exit 3"), call("bash", command=solution), say("Done."))
    (found,), requests = hold(TerminalService("terminal", [task], InSandbox()), model, 0)
    assert (found.outcome, found.reward) == (Outcome.OK, 1.0), found
    seen = [m["content"] for m in requests[-1]["messages"] if m["role"] == "tool"]
    assert seen[0].startswith("region,product")
    assert seen[0].endswith("[status 3]")
    assert seen[1] == "[no output]"
    flood = call("bash", command="yes | head -c 100000")
    (idle,), requests = hold(TerminalService("terminal", [task], InSandbox(), turns=2), lambda history: flood, 0)
    assert (idle.outcome, idle.reward) == (Outcome.TASK_FAILED, 0.0)
    assert "[92000 characters left out]" in requests[-1]["messages"][-1]["content"]
