"""The verifier of this task. See grade.py."""

import os
import tempfile

from grade import begin, finish, read, run

begin()


def holds(files, target):
    with tempfile.TemporaryDirectory() as d:
        for name, text in files.items():
            path = os.path.join(d, "from here", name)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "w") as f:
                f.write(text)
        os.makedirs(os.path.join(d, "from here"), exist_ok=True)
        status, out = run(["bash", "/app/backup.sh", os.path.join(d, "from here"), os.path.join(d, target)], cwd=d)
        wanted = {name + ".bak": text for name, text in files.items() if name.endswith(".txt")}
        found = {}
        for directory, _, names in os.walk(os.path.join(d, target)):
            for name in names:
                path = os.path.join(directory, name)
                found[os.path.relpath(path, os.path.join(d, target))] = read(path)
        return status == 0 and out.strip() == str(len(wanted)) and found == wanted


finish(
    {
        "plain": holds({"a.txt": "1", "b.md": "2"}, "out"),
        "spaces and depth": holds({"x y/a b.txt": "1", "x y/c.txt": "2", "a b.txt": "3", "*.txt": "4"}, "to here/too"),
        "none": holds({"b.md": "2"}, "new"),
    }
)
