"""The verifier of this task. See grade.py."""

from grade import begin, finish, run

begin()
CASES = {
    "3 4 +\n1 2 / 3 *\n": "7\n3/2\n",
    "1 0 /\n\n+\n1 2\n": "error\nerror\nerror\nerror\n",
    "5 1 2 + 4 * + 3 -\n-3 2 /\n4 -2 /\n": "14\n-3/2\n-2\n",
    "1 x +\n1 2 ^\n1.5 2 +\n": "error\nerror\nerror\n",
    "123456789123456789 987654321 *\n": "121932631234567900112635269\n",
}


def gives(stdin, expected):
    status, out = run(["python3", "/app/rpn.py"], stdin)
    return status == 0 and out.split("\n") == expected.split("\n")


finish({repr(stdin)[:60]: gives(stdin, expected) for stdin, expected in CASES.items()})
