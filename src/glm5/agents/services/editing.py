"""Files to be mended over several turns, by tests that fail before and pass after.

A task is one TOML file: the files as they are, as they should be, and tests, of which some must fail on the first and
all must pass on the second (`prove` shows both). The model looks and edits with tools; the files lie in this process,
where nothing runs, and tests run in the sandbox with their expected values outside. So the model cannot reach tests.
Source: the report, sections 3.3 and 4.2 (software engineering). Read next: `tools`, `glm5.agents.sandbox`.
"""

from __future__ import annotations

import ast
import secrets
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from glm5.agents.code import PYTHON
from glm5.agents.protocol import Result, Rollout, judged
from glm5.agents.sandbox import Limits, Sandbox, require
from glm5.agents.sandbox.limits import MIB
from glm5.agents.service import Policy, TaskService
from glm5.agents.services.tools import Tool, talk
from glm5.utils.errors import DataError

SYSTEM = (
    "Mend the program. Look at its files with `list_files` and `view`, change them with `replace` and `create`, and "
    "try what you did with `run_tests`. When it is done, say so without calling a tool."
)
LIMITS = Limits(wall_s=10, cpu_s=10, memory_bytes=256 * MIB, disk_bytes=64 * MIB, processes=16, output_bytes=1 << 16)
LONGEST = 1 << 16  # characters of a file
# passed; failed: another value, or an exception; not_run: the module could not be loaded, or the test did not end.
Status = Literal["passed", "failed", "not_run"]


@dataclass(frozen=True)
class Check:
    """After `setup`, `expression` must equal `value`, made of Python literals. hidden: the model is not shown it."""

    name: str
    expression: str
    value: Any
    hidden: bool = False


@dataclass(frozen=True)
class Edit:
    """A task.

    Args:
        setup: a line of Python before each test.
        files, fixed: name -> text, before and after; a TOML file gives of `fixed` what differs.
        given: files that tests use: the model sees them, and cannot change them.
    """

    name: str
    instruction: str
    setup: str
    files: Mapping[str, str]
    fixed: Mapping[str, str]
    given: Mapping[str, str]
    checks: tuple[Check, ...]


def read_edit(path: Path) -> Edit:
    """Read a task.

    Raises:
        DataError: the file is no such task; the message names what is missing or wrong.
    """
    mend = "A task has instruction, setup, [files], [fixed] and [[tests]] with name, expression and value"
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
        checks = tuple(
            Check(t["name"], t["expression"], ast.literal_eval(t["value"]), t.get("hidden", False))
            for t in table["tests"]
        )
        files, fixed, given = table["files"], table["fixed"], table.get("given", {})
        edit = Edit(path.stem, table["instruction"], table["setup"], files, {**files, **fixed}, given, checks)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, KeyError, TypeError, ValueError, SyntaxError) as e:
        raise DataError(f"{path}: {type(e).__name__}: {e}", mend) from None
    for name in (*edit.files, *edit.fixed, *edit.given):
        if fault := _fault(name):
            raise DataError(f"{path}: file {name!r}: {fault}", "Name files by plain relative paths")
    if len({check.name for check in checks}) != len(checks) or not checks:
        raise DataError(f"{path}: tests need names, each its own", mend)
    return edit


def read_edits(directory: Path) -> list[Edit]:
    """All tasks of a directory, by name. Raises DataError where one is not in order, or there is none."""
    found = [read_edit(path) for path in sorted(directory.glob("*.toml"))]
    if not found:
        raise DataError(f"{directory} holds no task", "Name a directory of TOML files")
    return found


def run_checks(edit: Edit, files: Mapping[str, str], checks: Sequence[Check] = ()) -> dict[str, tuple[Status, str]]:
    """Each test's status, and what a reader sees of it, on these files. All are run by default.

    Raises:
        SandboxError: there is no sandbox.
    """
    with Sandbox(LIMITS, writable=["/workspace", "/program"], cwd="/program") as box:
        laid = {**files, **edit.given}
        box.put_tree({name: (text.encode(errors="replace"), 0o644) for name, text in laid.items()}, "/program")
        return {check.name: _run(box, edit.setup, check) for check in checks or edit.checks}


def prove(edit: Edit) -> tuple[list[str], list[str]]:
    """Prove a task: names of the tests that fail before and pass after, and of those that pass before and after.

    Raises:
        DataError: a test fails on the fixed files, or none fails before. SandboxError: there is no sandbox.
    """
    before, after = run_checks(edit, edit.files), run_checks(edit, edit.fixed)
    for name, (status, shown) in after.items():
        if status != "passed":
            raise DataError(f"task {edit.name}: test {name!r} on the fixed files: {shown}", "Mend the fix or the test")
    to_pass = [name for name, (status, _) in before.items() if status != "passed"]
    if not to_pass:
        raise DataError(f"task {edit.name}: all tests pass before", "Add one that fails")
    return to_pass, [name for name in before if name not in to_pass]


class Workspace:
    """Files under a model's hands. Every method is a tool, and answers in words."""

    def __init__(self, edit: Edit) -> None:
        self.edit, self.files, self.tests = edit, dict(edit.files), 0

    def list_files(self) -> str:
        return "\n".join(f"{name} ({len(text.splitlines())} lines)" for name, text in sorted(self._seen.items()))

    def view(self, path: str, first: int = 1, last: int = 200) -> str:
        if path not in self._seen:
            return f"Error: there is no file {path!r}"
        lines = self._seen[path].splitlines()
        first = max(first, 1)
        return "\n".join(f"{n}\t{line}" for n, line in enumerate(lines[first - 1 : last], first)) or "[no such lines]"

    def replace(self, path: str, old: str, new: str) -> str:
        if path not in self.files:
            return f"Error: there is no file {path!r} that can be changed"
        count = self.files[path].count(old) if old else 0
        if count != 1:
            return f"Error: the old text is there {count} times; give one that is there once"
        return self._keep(path, self.files[path].replace(old, new))

    def create(self, path: str, text: str) -> str:
        if fault := _fault(path):
            return f"Error: {fault}"
        if path in self.edit.given:
            return f"Error: {path!r} is given, and cannot be changed"
        if any(path.startswith(f"{name}/") or name.startswith(f"{path}/") for name in self._seen):
            return "Error: a file cannot be a directory, too"
        if path not in self.files and len(self.files) >= 100:
            return "Error: there are 100 files already"
        return self._keep(path, text)

    def run_tests(self) -> str:
        self.tests += 1
        shown = [check for check in self.edit.checks if not check.hidden]
        found = run_checks(self.edit, self.files, shown)
        return "\n".join(f"{status.upper()} {name}: {text}" for name, (status, text) in found.items())

    @property
    def _seen(self) -> dict[str, str]:
        return {**self.files, **self.edit.given}

    def _keep(self, path: str, text: str) -> str:
        if len(text) > LONGEST:
            return f"Error: a file may have {LONGEST} characters"
        self.files[path] = text
        return f"Written: {path}, {len(text.splitlines())} lines"

    @property
    def tools(self) -> list[Tool]:
        path = ("string", "of the file")
        lines = {"path": path, "first": ("integer", "line, from 1"), "last": ("integer", "line, shown too")}
        old_new = {"path": path, "old": ("string", "text that is there once"), "new": ("string", "in its place")}
        written = {"path": path, "text": ("string", "all of the file")}
        return [
            Tool("list_files", "Names of all files.", {}, self.list_files),
            Tool("view", "Lines of a file, with their numbers.", lines, self.view, optional=["first", "last"]),
            Tool("replace", "Replace a text in a file.", old_new, self.replace),
            Tool("create", "Write a file, new or in the place of another.", written, self.create),
            Tool("run_tests", "Run the tests.", {}, self.run_tests),
        ]


class EditingService(TaskService):
    """Each group gets one task, in their order, again and again. The reward is 1 if all tests pass, hidden ones too.

    Args:
        name: of the task, for the ledger. edits: at least one. turns: messages of the model at most; what is there by
            then is judged. sampling: fields of each request, as max_tokens.
    """

    def __init__(
        self, name: str, edits: Sequence[Edit], *, turns: int = 12, sampling: Mapping[str, Any] | None = None
    ) -> None:
        if not edits:
            raise DataError(f"task {name} has no task", "Give at least one")
        self.name, self.edits, self.turns, self.sampling = name, list(edits), turns, dict(sampling or {})

    async def start(self) -> None:
        """Raises SandboxError where this host cannot isolate the model's code."""
        require()

    def rollout(self, asked: Rollout, policy: Policy) -> Result:
        edit = self.edits[asked.index % len(self.edits)]
        space = Workspace(edit)
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": edit.instruction}]
        went = talk(asked, policy, messages, space.tools, self.turns, self.sampling)
        found = run_checks(edit, space.files)
        failed = [f"{name}: {status}" for name, (status, _) in found.items() if status != "passed"]
        metrics = {**went.metrics, "test_runs": space.tests, "tests_passed": 1 - len(failed) / len(found)}
        return judged(float(not failed), "; ".join(failed)[:500], **metrics)


# --------------------------------------------------------------------------- inside
def _run(box: Sandbox, setup: str, check: Check) -> tuple[Status, str]:
    """In a process of its own, which never has the expected value: it could forge an answer, not know the right one."""
    begun, mark = secrets.token_hex(16), secrets.token_hex(16)
    lines = ["import sys", "sys.path.insert(0, '/program')", setup, f"print('\\n' + {begun!r}, flush=True)"]
    lines += [f"print('\\n' + {mark!r} + ascii(({check.expression})), flush=True)", ""]
    done = box.run([*PYTHON, "-"], stdin="\n".join(lines).encode(), read_only=["/program"])
    said = done.stdout.decode(errors="replace").splitlines()
    asked = f"{check.expression} should be {check.value!r}"
    if done.ending != "exited":
        return "not_run", f"{asked}, but it ended by its limit, {done.ending}"
    *_, last = [line for line in said if line.strip()] or [""]
    if not last.startswith(mark) or not done.ok:
        reason = (done.stderr.decode(errors="replace").strip().splitlines() or [f"status {done.code}"])[-1][:200]
        return ("failed" if begun in said else "not_run"), f"{asked}: {reason}"
    try:
        value = ast.literal_eval(last[len(mark) :])
        same = bool(value == check.value) and type(value) is type(check.value)
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        return "failed", f"{asked}, but is no plain value"
    return ("passed", asked.replace("should be", "is")) if same else ("failed", f"{asked}, but is {value!r:.200}")


def _fault(path: str) -> str:
    """What is wrong with a file's name, or nothing."""
    if not path or len(path) > 200 or not path.isprintable() or path.startswith("/"):
        return "a path must be short, relative and plain"
    return "a path must not hold . or .. or empty parts" if {"", ".", ".."} & set(path.split("/")) else ""
