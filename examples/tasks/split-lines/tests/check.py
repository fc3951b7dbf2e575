"""The verifier of this task. See grade.py."""

import hashlib
import os
import tempfile

from grade import begin, finish, read, run

begin()


def holds(text, limit, parts):
    with tempfile.TemporaryDirectory() as d:
        with open(os.path.join(d, "in"), "w") as f:
            f.write(text)
        status, _ = run(["python3", "/app/split.py", os.path.join(d, "in"), str(limit), os.path.join(d, "out")])
        wanted = {f"part-{i:03d}": part for i, part in enumerate(parts)}
        lines = [f"{n} {len(p.encode())} {hashlib.sha256(p.encode()).hexdigest()}\n" for n, p in wanted.items()]
        wanted["MANIFEST"] = "".join(lines)
        there = os.listdir(os.path.join(d, "out")) if os.path.isdir(os.path.join(d, "out")) else []
        return status == 0 and {n: read(os.path.join(d, "out", n)) for n in there} == wanted


finish(
    {
        "as many as fit": holds("aa\nbb\ncc\n", 6, ["aa\nbb\n", "cc\n"]),
        "a longer line": holds("a\nlonger than that\nb\nc", 4, ["a\n", "longer than that\n", "b\nc"]),
        "bytes, not letters": holds("éé\nb\n", 6, ["éé\n", "b\n"]),
        "nothing": holds("", 5, []),
    }
)
