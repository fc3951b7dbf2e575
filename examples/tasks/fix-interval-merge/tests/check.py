"""The verifier of this task. See grade.py."""

from grade import begin, evaluate, finish

begin()
CASES = {
    "merge([(1, 10), (2, 3)])": "[(1, 10)]",
    "merge([(1, 2), (2, 3)])": "[(1, 3)]",
    "merge([])": "[]",
    "merge([(5, 6), (1, 2), (4, 4)])": "[(1, 2), (5, 6)]",
    "kept([(5, 6), (1, 2)])": "[(5, 6), (1, 2)]",
    "merge([(0, 9), (1, 2), (3, 12), (20, 21), (12, 13)])": "[(0, 13), (20, 21)]",
}
SETUP = """\
from intervals import merge
def kept(x):
 merge(x); return x
"""
found = evaluate("/app", SETUP, list(CASES))
finish({case: found[i] == expected for i, (case, expected) in enumerate(CASES.items())})
