"""The Python tool: variables last, calls are bounded, and what breaks is said."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from glm5.agents.sandbox import Limits, SandboxError
from glm5.agents.session import LIMITS, Observed, PythonSession

pytestmark = [pytest.mark.usefixtures("isolation"), pytest.mark.timeout(120)]


@pytest.fixture
def session() -> Iterator[PythonSession]:
    with PythonSession(Limits(**{**vars(LIMITS), "wall_s": 2.0})) as session:
        yield session


def test_variables_last_and_the_last_value_is_shown(session: PythonSession) -> None:
    assert session.call("x = 20\nimport math") == Observed("", "returned")
    assert session.call("print('a')\nx + 1") == Observed("a\n21\n", "returned")
    assert session.call("math.floor(2.5)").text == "2\n"
    assert session.call("None").text == ""
    assert session.call("").text == ""
    assert session.call("'é' + '\\u4e2d'").text == "'é中'\n"
    assert session.call("def f():\n    return x\n\nf()").text == "20\n"
    assert session.call("class A: pass\nA.__module__").text == "'__main__'\n"


def test_errors_are_shown_and_cost_nothing(session: PythonSession) -> None:
    session.call("x = 1")
    text = session.call("def f():\n    return 1 / 0\nf()").text
    assert text.startswith("Traceback")
    assert text.endswith("ZeroDivisionError: division by zero\n")
    assert 'File "<call>", line 2, in f' in text
    assert "SyntaxError" in session.call("x +").text
    assert "KeyboardInterrupt" in session.call("raise KeyboardInterrupt").text
    assert "RecursionError" in session.call("def g(): g()\ng()").text
    assert "EOFError" in session.call("input()").text
    assert session.call("x").text == "1\n"


def test_a_call_that_does_not_end(session: PythonSession) -> None:
    session.call("x = 1; open('kept', 'w').write('here')")
    late = session.call("print('begun', flush=True)\nwhile True: pass")
    assert (late.text, late.ending, late.lost_variables) == ("begun\n", "wall_time", True)
    assert "NameError" in session.call("x").text
    assert session.call("open('kept').read()").text == "'here'\n"


@pytest.mark.parametrize(
    ("code", "ending"),
    [
        ("import sys; sys.exit(3)", "died"),
        ("import os; os._exit(0)", "died"),
        ("import os; os.kill(os.getpid(), 9)", "died"),
        ("x = b'x' * (2 << 30)", "died"),
        ("while True: print('x' * 1000)", "output"),
        ("import os\nfor fd in range(256):\n try: os.close(fd)\n except OSError: pass", "died"),
    ],
)
def test_what_ends_the_interpreter(session: PythonSession, code: str, ending: str) -> None:
    assert session.call(code).ending == ending
    assert session.call("1 + 1") == Observed("2\n", "returned")


def test_long_output_loses_its_middle(session: PythonSession) -> None:
    found = session.call("print('a' * 6000 + 'b' * 6000 + 'c' * 6000)")
    assert found.ending == "returned"
    assert found.text == "a" * 4096 + "\n[9809 bytes left out]\n" + "c" * 4095 + "\n"


def test_output_of_children_and_of_the_error_stream(session: PythonSession) -> None:
    code = "import subprocess, sys\nsubprocess.run(['echo', 'child'])\nprint('err', file=sys.stderr)\nprint('out')"
    assert sorted(session.call(code).text.split()) == ["child", "err", "out"]


def test_a_large_program(session: PythonSession) -> None:
    assert session.call("x = '" + "y" * 500_000 + "'\nlen(x)").text == "500000\n"


def test_no_network_and_no_host(session: PythonSession) -> None:
    assert "Error" in session.call("import socket; socket.create_connection(('1.1.1.1', 53), 1)").text
    assert "FileNotFoundError" in session.call("open('/etc/shadow')").text


def test_calls_from_threads_that_end(session: PythonSession) -> None:
    for n in range(3):
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(session.call, f"y = {n}\ny").result().text == f"{n}\n"
    assert session.call("y").text == "2\n"


def test_closed(session: PythonSession) -> None:
    session.close()
    session.close()
    with pytest.raises(SandboxError, match="closed"):
        session.call("1")
