"""The verifier of this task. See grade.py."""

import os

from grade import begin, finish, read

begin()
kept = {"a/one.txt": "alpha\n", "b/two.txt": "beta\n", "b/empty": "", "d/four.txt": "gamma\n", "z.txt": "delta\n"}
found = {}
for directory, _, names in os.walk("/app/store"):
    for name in names:
        path = os.path.join(directory, name)
        found[os.path.relpath(path, "/app/store")] = read(path)
finish(
    {
        "what is left": found == kept,
        "the list": read("/app/removed.txt") == "b/one.txt\nc.txt\nd/three with space.txt\n",
    }
)
