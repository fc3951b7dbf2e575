"""The verifier of this task. See grade.py."""

import os
import stat

from grade import begin, finish, read

begin()
expected = {
    ".": (0o755, None),
    "bin": (0o755, None),
    "private": (0o755, None),
    "private/deep": (0o755, None),
    "index.html": (0o644, "home\n"),
    "data.csv": (0o644, "a,b\n"),
    "run.sh": (0o750, "#!/bin/sh\n"),
    "bin/start now.sh": (0o750, "#!/bin/sh\n"),
    "private/key.pem": (0o600, "k\n"),
    "private/deep/rotate.sh": (0o600, "#!/bin/sh\n"),
}
found = {}
for directory, folders, names in os.walk("/app/site"):
    for name in [".", *names] if directory == "/app/site" else names:
        path = os.path.normpath(os.path.join(directory, name))
        mode = stat.S_IMODE(os.lstat(path).st_mode)
        found[os.path.relpath(path, "/app/site")] = (mode, read(path))
    for name in folders:
        path = os.path.join(directory, name)
        found[os.path.relpath(path, "/app/site")] = (stat.S_IMODE(os.lstat(path).st_mode), None)
finish({"permissions and contents": found == expected})
