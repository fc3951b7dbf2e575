"""The command line: light to start, clear when wrong, and every command that it lists is there."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

import glm5
from glm5.cli import main as cli
from glm5.utils.errors import CheckpointError, ConfigError, UserError

CLI_DIRECTORY = Path(cli.__file__).parent


def run(*argv: str, **more: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "glm5.cli.main", *argv]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, **more)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`fake(function)` makes `glm5 fake` run that function."""

    def install(function: Any) -> None:
        monkeypatch.setitem(sys.modules, "glm5.cli.fake", SimpleNamespace(main=function))
        monkeypatch.setitem(cli.COMMANDS, "fake", cli.Command("a test", "glm5.cli.fake"))

    return install


# --------------------------------------------------------------------------- the table
def test_every_command_file_is_listed_and_every_listed_one_is_there() -> None:
    listed = {c.module.rpartition(".")[2] for c in cli.COMMANDS.values()}
    there = {p.stem for p in CLI_DIRECTORY.glob("*.py") if re.search(r"^def main\(", p.read_text(), re.MULTILINE)}
    assert listed == there - {"main"}


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_help_of_each_command(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([name, "--help"]) == 0
    shown = capsys.readouterr().out
    assert f"glm5 {name}" in shown
    assert "--help" in shown


def test_help_lists_each_command_once_with_its_line() -> None:
    out = run("--help").stdout
    for name, command in cli.COMMANDS.items():
        assert len(re.findall(rf"^  {name} +{re.escape(command.help)}$", out, re.MULTILINE)) == 1
    assert max(map(len, out.splitlines())) <= 110


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"], ["help"]])
def test_ways_to_ask_for_help(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(argv) == 0
    assert capsys.readouterr().out.startswith("usage: glm5 COMMAND")


@pytest.mark.parametrize("flag", ["--version", "-V"])
def test_version(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([flag]) == 0
    assert capsys.readouterr().out == f"glm5 {glm5.__version__}\n"


@pytest.mark.parametrize("argv", [["--help"], ["--version"], ["nope"], ["watch", "--help"], ["doctor", "--help"]])
def test_torch_is_not_imported_before_it_is_needed(argv: list[str]) -> None:
    code = (
        "import sys\nfrom glm5.cli.main import main\nmain(sys.argv[1:])\n"
        "heavy = {'torch', 'transformers', 'tokenizers', 'safetensors'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "light = sys.argv[1] in ('--help', '--version')\n"
        "assert not (light and {'tyro', 'rich', 'numpy'} & set(sys.modules))\n"
    )
    found = subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True, timeout=60)
    assert found.returncode == 0, found.stderr


# --------------------------------------------------------------------------- errors
def test_unknown_command_suggests_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["wacth"]) == 2
    assert capsys.readouterr().err == "error: no command 'wacth' / mend: Did you mean `glm5 watch`?\n"
    assert cli.main(["xyzzy"]) == 2
    assert "There are: demo, pretrain," in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (UserError("the disk is full", "Free some."), "error: the disk is full / mend: Free some.\n"),
        (ConfigError("optim.lr", -1, "must be positive"), "error: optim.lr=-1: must be positive\n"),
    ],
)
def test_user_error_is_one_line_and_status_2(
    fake: Any, error: UserError, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(argv: list[str]) -> NoReturn:
        raise error

    fake(fail)
    assert cli.main(["fake"]) == 2
    found = capsys.readouterr()
    assert found.err == line
    assert found.out == ""


def test_user_error_as_json_for_a_caller_that_asked_for_json(fake: Any, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(argv: list[str]) -> NoReturn:
        raise CheckpointError('no "x"', "Make one.")

    fake(fail)
    assert cli.main(["fake", "--json"]) == 2
    found = capsys.readouterr()
    assert json.loads(found.err) == {"error": 'no "x"', "mend": "Make one.", "kind": "CheckpointError"}


def test_a_bug_keeps_its_traceback(fake: Any) -> None:
    def fail(argv: list[str]) -> NoReturn:
        raise ZeroDivisionError

    fake(fail)
    with pytest.raises(ZeroDivisionError):
        cli.main(["fake"])


@pytest.mark.parametrize(
    ("outcome", "status"),
    [(KeyboardInterrupt(), 130), (SystemExit(0), 0), (SystemExit(None), 0), (SystemExit(2), 2)],
)
def test_statuses_of_exceptions(fake: Any, outcome: BaseException, status: int) -> None:
    def fail(argv: list[str]) -> NoReturn:
        raise outcome

    fake(fail)
    assert cli.main(["fake"]) == status


@pytest.mark.parametrize(("result", "status"), [(0, 0), (3, 3), (None, 0), (True, 1)])
def test_status_is_what_the_command_returns(fake: Any, result: Any, status: int) -> None:
    given: list[list[str]] = []
    fake(lambda argv: given.append(argv) or result)
    assert cli.main(["fake", "a", "--b=c"]) == status
    assert given == [["a", "--b=c"]]


def test_status_reaches_the_shell() -> None:
    assert run("nope").returncode == 2
    assert run("watch", "/nowhere/run").returncode == 2


def test_a_reader_that_has_gone_is_no_traceback() -> None:
    code = f"(sleep 0.5; {sys.executable} -m glm5.cli.main --help; echo status $? >&2) | true"
    buffered = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    found = subprocess.run(["bash", "-c", code], capture_output=True, text=True, timeout=60, env=buffered)
    assert found.stderr == "status 141\n"
