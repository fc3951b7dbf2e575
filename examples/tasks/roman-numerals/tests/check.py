"""The verifier of this task. See grade.py."""

from grade import begin, evaluate, finish

begin()
CASES = {
    "t(1994)": "'MCMXCIV'",
    "t(3999)": "'MMMCMXCIX'",
    "t(444)": "'CDXLIV'",
    "f('MMXXXI')": "2031",
    "f('XC')": "90",
    "all(f(t(n)) == n for n in range(1, 4000))": "True",
    "t(0)": "ValueError",
    "t(4000)": "ValueError",
    "f('')": "ValueError",
    "f('IIII')": "ValueError",
    "f('IC')": "ValueError",
    "f('VX')": "ValueError",
    "f('xi')": "ValueError",
}
SETUP = """\
from roman import to_roman as t, from_roman as f
"""
found = evaluate("/app", SETUP, list(CASES))
finish({case: found[i] == expected for i, (case, expected) in enumerate(CASES.items())})
