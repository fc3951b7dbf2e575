"""The verifier of this task. See grade.py."""

from grade import begin, finish, read

begin()
finish({"the token": (read("/app/answer.txt") or "").strip() == "5eed51de"})
