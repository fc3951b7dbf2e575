"""The part of a Dockerfile that the sandbox can follow without a container.

The image itself is the host's read-only system, so `FROM` only says what the task expects; `WORKDIR`, `ENV` and
`COPY` of local files are done, and `RUN` is run in the sandbox, where it can neither reach the network nor change the
system. What cannot be followed is refused by its line, never passed over. Read next: `trial`.
"""

from __future__ import annotations

import json
import posixpath
import shlex
from dataclasses import dataclass, field
from pathlib import Path

from glm5.utils.errors import DataError

_NO_MATTER = (
    "CMD",
    "ENTRYPOINT",
    "EXPOSE",
    "LABEL",
    "MAINTAINER",
    "STOPSIGNAL",
    "HEALTHCHECK",
)  # of a running container
_SYSTEM = ("/bin", "/boot", "/dev", "/etc", "/lib", "/lib64", "/proc", "/run", "/sbin", "/sys", "/usr")
_MEND = "Run the task in a container, or write it with WORKDIR, ENV, COPY of its own files and RUN alone"


@dataclass(frozen=True)
class Step:
    """`copy` with source paths and a destination, or `run` with a command; both start in `workdir`."""

    kind: str
    words: tuple[str, ...]
    workdir: str
    environment: dict[str, str]
    line: int


@dataclass(frozen=True)
class Image:
    """What a Dockerfile makes: the steps in order, the last working directory and variables.

    directories: absolute paths, none below another, that the steps or the agent write in.
    """

    base: str = ""
    workdir: str = "/app"
    environment: dict[str, str] = field(default_factory=dict)
    steps: tuple[Step, ...] = ()
    directories: tuple[str, ...] = ("/app",)


def read_dockerfile(path: Path) -> Image:
    """Read a Dockerfile.

    Raises:
        DataError: a line that cannot be followed, named by its number.
    """
    base, workdir, environment = "", "/", dict[str, str]()
    steps: list[Step] = []
    written: set[str] = set()
    for number, text in _instructions(path):
        word, _, rest = text.partition(" ")
        name, rest = word.upper(), rest.strip()

        def refuse(reason: str, number: int = number, name: str = name) -> DataError:
            return DataError(f"{path}:{number}: {name}: {reason}", _MEND)

        if name == "FROM":
            if base:
                raise refuse("a second stage")
            base = rest.split()[0] if rest else ""
        elif name == "WORKDIR":
            workdir = posixpath.normpath(posixpath.join(workdir, _expand(rest.strip("\"'"), environment)))
            written.add(workdir)
        elif name == "ENV":
            environment = {**environment, **_variables(rest)}
        elif name in ("COPY", "ADD"):
            words = _listed(rest) or shlex.split(rest)
            paths = [_expand(word, environment) for word in words if not word.startswith("--")]
            options = [word for word in words if word.startswith("--")]
            if len(paths) < 2 or not all(word.startswith("--chmod=") for word in options):
                raise refuse("only local files, without --from or --chown")
            if name == "ADD" and any("://" in p or p.endswith((".tar", ".gz", ".tgz", ".xz")) for p in paths):
                raise refuse("addresses and archives are not fetched or unpacked")
            target = posixpath.normpath(posixpath.join(workdir, paths[-1]))
            one_file = len(paths) == 2 and (path.parent / paths[0]).is_file() and not paths[1].endswith("/")
            written.add(posixpath.dirname(target) if one_file and target not in written else target)
            steps.append(Step("copy", (*options, *paths), workdir, environment, number))
        elif name == "RUN":
            command = _listed(rest) or ["bash", "-c", rest]
            steps.append(Step("run", tuple(command), workdir, environment, number))
        elif name not in _NO_MATTER:
            raise refuse("cannot be followed")
    if not base:
        raise DataError(f"{path}: no FROM", _MEND)
    top = _outermost(written)
    for directory in top:
        if directory == "/" or "/" + directory.split("/")[1] in _SYSTEM:
            raise DataError(f"{path}: it writes to {directory}, which is the system's and cannot be written", _MEND)
    return Image(base, workdir, environment, tuple(steps), top)


def _instructions(path: Path) -> list[tuple[int, str]]:
    """Logical lines with their numbers: comments dropped, continued lines joined."""
    found: list[tuple[int, str]] = []
    parts: list[str] = []
    start = 0
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.lstrip().startswith("#") or (not line.strip() and not parts):
            continue
        start = start if parts else number
        if line.rstrip().endswith("\\"):
            parts.append(line.rstrip()[:-1])
            continue
        found.append((start, " ".join([*parts, line]).strip()))
        parts = []
    if parts:
        found.append((start, " ".join(parts).strip()))
    return found


def _listed(text: str) -> list[str]:
    """The words of a JSON list, if it is one: `[ -f x ]` is a command of the shell."""
    try:
        words = json.loads(text)
    except ValueError:
        return []
    return [str(word) for word in words] if isinstance(words, list) else []


def _variables(text: str) -> dict[str, str]:
    words = shlex.split(text)
    if words and "=" not in words[0]:  # the old form: ENV name value
        return {words[0]: " ".join(words[1:])}
    return dict(word.split("=", 1) for word in words if "=" in word)


def _expand(text: str, environment: dict[str, str]) -> str:
    for name, value in environment.items():
        text = text.replace(f"${{{name}}}", value).replace(f"${name}", value)
    return text


def _outermost(paths: set[str]) -> tuple[str, ...]:
    """Those of the paths that lie below no other."""
    kept: list[str] = []
    for path in sorted(paths):
        if not any(path == k or path.startswith(k.rstrip("/") + "/") for k in kept):
            kept.append(path)
    return tuple(kept or ["/app"])
