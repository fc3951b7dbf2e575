"""The verifier of this task. See grade.py."""

import os

from grade import begin, finish, read

begin()
there = {}
for name in os.listdir("/app/links") if os.path.isdir("/app/links") else []:
    path = f"/app/links/{name}"
    there[name] = os.readlink(path) if os.path.islink(path) else read(path)
expected = {"real.txt": "here\n", "folder": None, "good": "real.txt", "chain": "good", "dir": "folder"}
finish(
    {
        "the list": read("/app/dangling.txt") == "bad\nbroken-chain\n",
        "what is left": there == expected and read("/app/links/folder/inner.txt") == "inner\n",
    }
)
