"""Programs against cases: what is correct, wrong, and no verdict; and programs that try to look correct."""

from __future__ import annotations

import pytest

from glm5.agents import code
from glm5.agents.code import Assertion, InputOutput, Value, cases_of, judge, judge_response, program_of
from glm5.agents.sandbox import Limits, SandboxError
from glm5.utils.errors import DataError

ECHO = [{"stdin": "3 4\n", "stdout": "7\n"}, {"stdin": "-1 1", "stdout": "0"}]
ADD = "assert add(2, 3) == 5\nassert add('a', 'b') == 'ab'\n"
QUICK = Limits(**{**vars(code.LIMITS), "wall_s": 1.5})


def test_cases_from_data() -> None:
    assert cases_of(ECHO) == [InputOutput("3 4\n", "7\n"), InputOutput("-1 1", "0")]
    assert cases_of(ADD) == [Value("add(2, 3)", 5), Value("add('a', 'b')", "ab")]
    assert cases_of(["assert f(1) == -2.5", {"assert": "assert f(2) > 1"}, {"expression": "f(0)", "value": [1]}]) == [
        Value("f(1)", -2.5),
        Assertion("assert f(2) > 1"),
        Value("f(0)", [1]),
    ]
    assert cases_of("assert f(1) == g(1)") == [Assertion("assert f(1) == g(1)")]


@pytest.mark.parametrize(
    "tests", [[], "", None, 3, [{"stdin": "x"}], ["f(1)"], ["assert ("], [{"expression": 1, "value": 2}]]
)
def test_cases_that_are_none(tests: object) -> None:
    with pytest.raises(DataError):
        cases_of(tests)
    assert judge("print(1)", tests).verdict == "no_verdict"


def test_the_program_of_a_response() -> None:
    assert program_of("x = 1") is None
    assert program_of("```python\na\n```\ntext\n```python\nb\n```\n```\noutput\n```") == "b\n"
    assert program_of("<think>```python\na\n```</think>\n```\nc\n```") == "c\n"
    assert program_of("````py\n```\nx\n```\n````") == "```\nx\n```\n"
    assert judge_response("no program", ECHO).verdict == "wrong"
    assert judge_response("```\nx\n```", ECHO, {"wall_s": "soon"}).verdict == "no_verdict"


def test_without_isolation_there_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(limits: Limits, **_: object) -> None:
        raise SandboxError("no sandbox: bubblewrap missing", "apt-get install bubblewrap")

    monkeypatch.setattr(code, "Sandbox", refuse)
    found = judge("print(7)", ECHO)
    assert (found.verdict, found.total) == ("no_verdict", 2)
    assert "apt-get install bubblewrap" in found.detail


@pytest.mark.usefixtures("isolation")
@pytest.mark.parametrize(
    ("program", "passed"),
    [
        ("print(sum(map(int, input().split())))", 2),
        ("print(' 7  ' if False else sum(map(int, input().split())), ' ')\nprint()", 2),
        ("print(7)", 1),
        ("print('7')\nraise SystemExit(1)", 0),
        ("import sys; print(7, file=sys.stderr)", 0),
        ("", 0),
        ("print(7", 0),
        ("while True: pass", 0),
        ("x = b'x' * (1 << 30)", 0),
        ("while True: print('7')", 0),
        ("import os\nwhile True: os.fork()", 0),
        ("print('\ud800')", 0),
        ("open('program.py', 'w').write('print(0)')\nprint(7)", 1),
    ],
)
def test_inputs_and_outputs(program: str, passed: int) -> None:
    found = judge(program, ECHO, QUICK if "while True" in program else code.LIMITS)
    assert (found.verdict, found.passed, found.total) == ("correct" if passed == 2 else "wrong", passed, 2), (
        found.detail
    )


@pytest.mark.usefixtures("isolation")
@pytest.mark.parametrize(
    ("program", "verdict"),
    [
        ("def add(a, b): return a + b", "correct"),
        ("print('hello')\ndef add(a, b):\n print('x', end='')\n return a + b", "correct"),
        ("def add(a, b): return 5", "wrong"),
        ("def add(a, b): return b + a", "wrong"),
        ("def other(): pass", "wrong"),
        ("import os\nprint('True')\nos._exit(0)", "wrong"),
        ("raise SystemExit(0)", "wrong"),
        # Equal to all things, where the comparison would run beside it.
        ("class Any:\n def __eq__(self, other): return True\ndef add(a, b): return Any()", "wrong"),
        ("class Any:\n def __repr__(self): return '5'\ndef add(a, b): return Any()", "wrong"),  # right once, by luck
        ("import builtins\nbuiltins.ascii = lambda x: 'True'\ndef add(a, b): return 0", "wrong"),
    ],
)
def test_asserts(program: str, verdict: str) -> None:
    found = judge(program, ADD)
    assert found.verdict == verdict, found.detail


@pytest.mark.usefixtures("isolation")
def test_values_and_other_asserts() -> None:
    program = "import math\ndef f(x): return {x: (1, [x])}\ndef g(x): return math.sqrt(x)"
    tests = ["assert f(1) == {1: (1, [1])}", "assert abs(g(2) - 1.41421356) < 1e-6", "assert set(f(3)) == {3}"]
    assert judge(program, tests).verdict == "correct"
    assert judge(program, ["assert g(2) > 2"]).detail == "case 0: AssertionError"
    assert judge(program, [{"expression": "f", "value": 1}]).detail.startswith(
        "case 0: f is no plain value: <function f"
    )
    assert judge(program, [{"expression": "f(", "value": 1}]).verdict == "wrong"
    assert judge_response(f"Here:\n```python\n{program}\n```\n", tests).verdict == "correct"


@pytest.mark.usefixtures("isolation")
@pytest.mark.parametrize(
    ("spoil", "passed"),
    [
        ("f = open('full', 'wb')\nwhile True: f.write(b'x' * (1 << 20))", 2),
        ("for i in range(99999): open(f'/tmp/{i}', 'w')", 2),
        ("for d in ('/tmp', '.'): os.chmod(d, 0)", 1),
        ("os.chmod('/program', 0)", 2),
        ("os.rename('/program/program.py', '/program/other')", 2),
        ("open('/program/program.py', 'w').write('print(0)')", 2),
    ],
)
def test_a_program_cannot_spoil_the_next_case(spoil: str, passed: int) -> None:
    """It is right or wrong, and never without a verdict."""
    lines = ["import os", "print(sum(map(int, input().split())), flush=True)", f"try: exec({spoil!r})"]
    found = judge("\n".join([*lines, "except OSError: pass"]), ECHO)
    assert (found.verdict, found.passed) == ("correct" if passed == 2 else "wrong", passed), found.detail


@pytest.mark.usefixtures("isolation")
def test_all_cases_together_are_bounded() -> None:
    found = judge("import time\ntime.sleep(0.4)\nprint(7)", ECHO[:1] * 50, total_s=2)
    assert found.verdict == "wrong"
    assert 0 < found.passed < 5, found
    assert "no time is left" in found.detail or "wall_time" in found.detail
