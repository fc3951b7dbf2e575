"""The verifier of this task. See grade.py."""

from grade import begin, evaluate, finish

begin()
CASES = {
    "d('2024-02-28', '2024-03-01')": "2",
    "d('2023-02-28', '2023-03-01')": "1",
    "d('1900-02-28', '1900-03-01')": "1",
    "d('2000-01-01', '2001-01-01')": "366",
    "d('2024-03-01', '2024-01-31')": "-30",
    "d('1600-01-01', '2031-12-31')": "157784",
    "d('2024-12-31', '2025-01-01')": "1",
    "d('2023-02-29', '2024-01-01')": "ValueError",
    "d('2024-13-01', '2024-01-01')": "ValueError",
    "d('2024-04-31', '2024-01-01')": "ValueError",
}
SETUP = """\
from days import days_between as d
"""
found = evaluate("/app", SETUP, list(CASES))
finish({case: found[i] == expected for i, (case, expected) in enumerate(CASES.items())})
