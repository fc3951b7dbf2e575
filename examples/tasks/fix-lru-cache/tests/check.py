"""The verifier of this task. See grade.py."""

from grade import begin, evaluate, finish

begin()
CASES = {
    "play(2, ('a', 1), ('b', 2), ('a',), ('c', 3), ('a',), ('b',), ('c',))": "([1, 1, 'none', 3], 2)",
    "play(2, ('a', 1), ('b', 2), ('a', 5), ('c', 3), ('a',), ('b',))": "([5, 'none'], 2)",
    "play(2, ('a', None), ('a',), ('b', 0), ('b',))": "([None, 0], 2)",
    "play(1, ('a', 1), ('a', 2), ('a',), ('b', 3), ('a',), ('b',))": "([2, 'none', 3], 1)",
    "Cache(0)": "ValueError",
}
SETUP = """\
from cache import Cache
def play(size, *moves):
 c, seen = Cache(size), []
 for m in moves:
  if len(m) == 1: seen.append(c.get(m[0], 'none'))
  else: c.put(*m)
 return seen, len(c)
"""
found = evaluate("/app", SETUP, list(CASES))
finish({case: found[i] == expected for i, (case, expected) in enumerate(CASES.items())})
