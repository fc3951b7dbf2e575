"""The verifier of this task. See grade.py."""

from grade import begin, finish, run

begin()
CASES = {
    "f(a[1])\nf(a]\n(()\n": "ok\n4\n4\n",
    "\n)\n([)]\n": "ok\n1\n3\n",
    '"(" ()\n("a\\")" )\n"x\n': "ok\nok\n3\n",
    '{[()()]{}}\n{"]"\n': "ok\n5\n",
}


def gives(stdin, expected):
    status, out = run(["python3", "/app/brackets.py"], stdin)
    return status == 0 and out.split("\n") == expected.split("\n")


finish({repr(stdin)[:60]: gives(stdin, expected) for stdin, expected in CASES.items()})
