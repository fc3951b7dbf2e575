"""The verifier of this task. See grade.py."""

from grade import begin, evaluate, finish

begin()
CASES = {
    "play([OSError(1), OSError(2), 7], 3)": "(7, 3)",
    "play([OSError(1), OSError(2), OSError(3), 7], 3)": "('OSError3', 3)",
    "play([KeyError(1), 7], 3)": "('KeyError1', 1)",
    "play([None], 2)": "(None, 1)",
    "play([FileNotFoundError(5), 0], 2)": "(0, 2)",
    "play([1], 0)[1], play([1], 0)[0][:10]": "(0, 'ValueError')",
}
SETUP = """\
from retry import retry
def play(outcomes, attempts, on=(OSError,)):
 calls = []
 def f():
  calls.append(1)
  o = outcomes[len(calls) - 1]
  if isinstance(o, Exception): raise o
  return o
 try: r = retry(f, attempts, on)
 except Exception as e: r = type(e).__name__ + str(e)
 return r, len(calls)
"""
found = evaluate("/app", SETUP, list(CASES))
finish({case: found[i] == expected for i, (case, expected) in enumerate(CASES.items())})
