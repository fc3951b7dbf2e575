"""The verifier of this task. See grade.py."""

from grade import begin, finish, run

begin()


def gives(stdin, expected):
    return run(["python3", "/app/flatten.py"], stdin) == (0, expected)


finish(
    {
        "nested": gives('{"b": {"c": {"d": 1}}, "a": "x"}\n', "a,b.c.d\nx,1\n"),
        "missing keys": gives('{"a": 1}\n\n{"b": 2}\n', "a,b\n1,\n,2\n"),
        "kinds": gives('{"t": true, "n": null, "l": [1, "y"], "f": 2.5}\n', 'f,l,n,t\n2.5,"[1,""y""]",,true\n'),
        "quotes": gives('{"a": "x, \\"y\\"", "b": "é"}\n', 'a,b\n"x, ""y""",é\n'),
    }
)
