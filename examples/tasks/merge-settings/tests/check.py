"""The verifier of this task. See grade.py."""

import os
import tempfile

from grade import begin, finish, run

begin()


def gives(base, override, expected):
    with tempfile.TemporaryDirectory() as d:
        paths = [os.path.join(d, name) for name in ("base.ini", "override.ini")]
        for path, text in zip(paths, (base, override), strict=True):
            with open(path, "w") as f:
                f.write(text)
        return run(["python3", "/app/merge.py", *paths]) == (0, expected)


finish(
    {
        "replace": gives("[a]\nX = 1\ny = 2\n", "[a]\nX = 3\n", "[a]\nX = 3\ny = 2\n"),
        "add": gives("[b]\nk = v\n", "[a]\nz = 100%\n[b]\nj = w\n", "[a]\nz = 100%\n\n[b]\nj = w\nk = v\n"),
        "remove": gives("[a]\nk = v\n[b]\nm = n\no = p\n", "[a]\nk = unset\n[b]\no = unset\n", "[b]\nm = n\n"),
    }
)
