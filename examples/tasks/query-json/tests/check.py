"""The verifier of this task. See grade.py."""

from grade import begin, evaluate, finish

begin()
CASES = {
    "get(V, 'a.b[0].c')": "7",
    "get(V, 'a.b[1]', 5)": "None",
    "get(V, 'a.b[2]', 5)": "5",
    "get(V, '[\"x.y\"][1][-1]')": "3",
    "get(V, '') is V": "True",
    "get(V, 'a.z', 'no')": "'no'",
    "get(V, 'a.b.c', 'no')": "'no'",
    "get([1, [2]], '[1][0]')": "2",
    "get(V, 'n.m', 4)": "4",
    "get({}, 'a..b')": "ValueError",
    "get({}, 'a[')": "ValueError",
    "get({}, 'a[x]')": "ValueError",
    "get({}, 'a.')": "ValueError",
    "get('text', '[0]', 'no')": "'no'",
}
SETUP = """\
from query import get
V = {'a': {'b': [{'c': 7}, None]}, 'x.y': [1, [2, 3]], 'n': None}
"""
found = evaluate("/app", SETUP, list(CASES))
finish({case: found[i] == expected for i, (case, expected) in enumerate(CASES.items())})
