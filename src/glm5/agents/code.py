"""Programs that a model wrote, held against tests in the sandbox.

What is expected never enters the sandbox, so a program cannot read it: a case is an input and the output that must
come, or an expression and the value that it must have. Asserts of the form `assert f(x) == literal` become the second;
others are run beside the program, which is weaker: a program could reach into the frame that judges it.
Source: the report's section 3.2 (code among the domains of reasoning RL). Read next: `sandbox.bubblewrap`.
"""

from __future__ import annotations

import ast
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from glm5.agents.sandbox import Finished, Limits, Sandbox, SandboxError
from glm5.agents.sandbox.limits import MIB
from glm5.utils.errors import DataError

LIMITS = Limits(wall_s=10, cpu_s=10, memory_bytes=512 * MIB, disk_bytes=32 * MIB, file_bytes=16 * MIB, processes=32)
PYTHON = ("/usr/bin/python3", "-I", "-B")
# Its directory can be read only, so no case can change the program, or keep the next one from being laid out.
PROGRAM = "/program/program.py"
_FENCE = re.compile(r"^(`{3,}|~{3,})[ \t]*([\w+-]*)[^\n]*\n(.*?)^\1[ \t]*$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class InputOutput:
    """Given `stdin`, a program must exit with 0 and write `stdout`; spaces at line ends and a last newline are free."""

    stdin: str
    stdout: str


@dataclass(frozen=True)
class Value:
    """After the program, `expression` must equal `value`, which is made of Python literals."""

    expression: str
    value: Any


@dataclass(frozen=True)
class Assertion:
    """After the program, these lines must run to their end."""

    text: str


Case = InputOutput | Value | Assertion


@dataclass(frozen=True)
class Judgement:
    """Args:
    verdict: `correct` (every case passed), `wrong`, or `no_verdict`: the cases or the sandbox are at fault.
    passed: cases passed before the first that did not, which is the last that ran.
    total: cases there are.
    detail: for a reader: what the first failure was.
    """

    verdict: Literal["correct", "wrong", "no_verdict"]
    passed: int
    total: int
    detail: str = ""


def cases_of(tests: Any) -> list[Case]:
    """Cases from data: a list of {"stdin", "stdout"}, {"expression", "value"} or {"assert"}, or asserts as a text.

    Raises:
        DataError: there is none, or one is of no such form.
    """
    if isinstance(tests, str):
        found = [_assertion(node, tests) for node in _parsed(tests).body]
    elif isinstance(tests, Sequence):
        found = [case for i, test in enumerate(tests) for case in _case(i, test)]
    else:
        raise DataError(f"tests={tests!r:.80} are no list", "Give a list of cases, or asserts as a text")
    if not found:
        raise DataError("there is no case", "Give at least one: without cases every program would be right")
    return found


def program_of(response: str) -> str | None:
    """The program of a response: its last fenced block, of Python if some are, after its thinking; None without one."""
    text = response.rpartition("</think>")[2]
    blocks = [(m.group(2).lower(), m.group(3)) for m in _FENCE.finditer(text)]
    python = [code for language, code in blocks if language in ("python", "py", "python3")]
    return python[-1] if python else blocks[-1][1] if blocks else None


def judge(program: str, tests: Any, limits: Limits = LIMITS, total_s: float | None = None) -> Judgement:
    """Hold a Python program against cases (see `cases_of`); each runs in processes of its own, in one sandbox.

    Too slow, too large or crashing is wrong, also where all cases together take longer than `total_s`. Nothing is
    raised on what a model wrote.
    """
    end = None if total_s is None else time.monotonic() + total_s
    try:
        cases = cases_of(tests)
    except DataError as e:
        return Judgement("no_verdict", 0, 0, str(e))
    total = len(cases)
    try:
        source = program.encode()
    except UnicodeEncodeError:
        return Judgement("wrong", 0, total, "the program is no valid Unicode")
    try:
        with Sandbox(limits, writable=["/workspace", "/program"]) as box:
            box.put(PROGRAM, source)
            for i, case in enumerate(cases):
                seconds = limits.wall_s if end is None else min(limits.wall_s, end - time.monotonic())
                fault = _fault(box, case, seconds) if seconds > 0 else f"no time is left of {total_s:g} s"
                if fault:
                    return Judgement("wrong", i, total, f"case {i}: {fault}")
    except SandboxError as e:
        return Judgement("no_verdict", 0, total, str(e))
    return Judgement("correct", total, total)


def judge_response(
    response: str, answer: Any, info: Mapping[str, Any] | None = None, total_s: float | None = None
) -> Judgement:
    """As `judge`, of the program in a response against the cases in `answer`. info: `wall_s`, seconds of each case.

    A response without a program is wrong.
    """
    try:
        total = len(cases_of(answer))
        seconds = float((info or {}).get("wall_s", LIMITS.wall_s))
        limits = Limits(**{**vars(LIMITS), "wall_s": seconds})
    except (TypeError, ValueError, DataError) as e:
        return Judgement("no_verdict", 0, 0, str(e))
    program = program_of(response)
    if program is None:
        return Judgement("wrong", 0, total, "no fenced program")
    return judge(program, answer, limits, total_s)


# --------------------------------------------------------------------------- running
def _fault(box: Sandbox, case: Case, seconds: float) -> str:
    """What a program does wrong in a case, or nothing."""
    if isinstance(case, InputOutput):
        done = _run(box, PROGRAM, case.stdin, seconds)
        if not done.ok:
            return _ended(done)
        if done.lost:
            return "too much output"
        found = done.stdout.decode(errors="replace")
        return "" if _lines(found) == _lines(case.stdout) else f"it wrote {found[:80]!r}"
    mark = secrets.token_hex(16)
    done = _run(box, "-", _after(case, mark), seconds)
    *_, last = done.stdout.decode(errors="replace").splitlines() or [""]
    if not done.ok:
        return _ended(done)
    if not last.startswith(mark):
        return "it ended before its test did"
    if isinstance(case, Assertion):
        return ""
    try:
        value = ast.literal_eval(last[len(mark) :])
        same = bool(value == case.value)
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        return f"{case.expression[:80]} is no plain value: {last[len(mark) :][:80]}"
    return "" if same else f"{case.expression[:80]} is {value!r:.80}"


def _run(box: Sandbox, script: str, stdin: str, seconds: float) -> Finished:
    return box.run([*PYTHON, script], stdin=stdin.encode(), wall_s=seconds, read_only=["/program"])


def _after(case: Value | Assertion, mark: str) -> str:
    """A program that runs the given one, then the case. It is read from stdin, which is at its end by then."""
    lines = ["g = {'__name__': 'program', '__builtins__': __builtins__}", "import io, sys", "sys.stdin = io.StringIO()"]
    lines += [f"exec(compile(open({PROGRAM!r}, encoding='utf-8').read(), 'program.py', 'exec'), g)"]
    if isinstance(case, Value):
        lines += [f"v = ascii(eval({case.expression!r}, g))"]
    else:
        lines += [f"exec({case.text!r}, g)", "v = ''"]
    return "\n".join([*lines, f"print('\\n' + {mark!r} + v, flush=True)", ""])


def _ended(done: Finished) -> str:
    if done.ending != "exited":
        return f"it ended by its limit, {done.ending}"
    last = done.text.strip().splitlines()[-1:] or [f"status {done.code}"]
    return last[0][:200]


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


# --------------------------------------------------------------------------- reading
def _case(i: int, test: Any) -> list[Case]:
    match test:
        case {"stdin": str(stdin), "stdout": str(stdout)}:
            return [InputOutput(stdin, stdout)]
        case {"expression": str(expression), "value": value}:
            return [Value(expression, value)]
        case {"assert": str(text)}:
            return [_assertion(node, text) for node in _parsed(text).body]
        case str(text):
            return [_assertion(node, text) for node in _parsed(text).body]
    raise DataError(f"case {i}: {test!r:.80}", "It has stdin and stdout, or expression and value, or assert, as texts")


def _parsed(text: str) -> ast.Module:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as e:
        raise DataError(f"asserts {text!r:.80} are no Python: {e}", "Mend them") from None


def _assertion(node: ast.stmt, text: str) -> Case:
    """`assert a == literal` as a value; any other assert as it stands."""
    if not isinstance(node, ast.Assert):
        raise DataError(f"{ast.unparse(node)!r:.80} in {text!r:.80} is no assert", "Write asserts only")
    test = node.test
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq):
        try:
            return Value(ast.unparse(test.left), ast.literal_eval(test.comparators[0]))
        except ValueError:
            pass
    return Assertion(ast.unparse(node))
