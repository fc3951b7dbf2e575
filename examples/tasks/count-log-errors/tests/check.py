"""The verifier of this task. See grade.py."""

from grade import begin, finish, read

begin()
counts = {"auth": 20, "billing": 30, "search": 15, "mail": 30}
expected = [f"{s} {n}" for s, n in sorted(counts.items(), key=lambda p: (-p[1], p[0]))]
finish({"the report": (read("/app/report.txt") or "").split("\n") == [*expected, ""]})
