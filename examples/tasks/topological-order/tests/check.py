"""The verifier of this task. See grade.py."""

from grade import begin, finish, run

begin()
CASES = {
    "shirt tie\ntie jacket\ntrousers jacket\nhat\n": "hat\nshirt\ntie\ntrousers\njacket\n",
    "b a\n": "b\na\n",
    "a b\nb c\nc a\nd\n": "cycle\n",
    "a a\n": "cycle\n",
    "": "",
    "c a\nc a\nb\n": "b\nc\na\n",
    "z\n\ny x\n": "y\nx\nz\n",
}


def gives(stdin, expected):
    status, out = run(["python3", "/app/order.py"], stdin)
    return status == 0 and out.split("\n") == expected.split("\n")


finish({repr(stdin)[:60]: gives(stdin, expected) for stdin, expected in CASES.items()})
