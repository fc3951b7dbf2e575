"""The verifier of this task. See grade.py."""

from grade import begin, finish, read

begin()
finish({"the line": (read("/app/plain.txt") or "").strip() == "the heron lands at nine"})
