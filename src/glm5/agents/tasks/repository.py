"""Repositories in a task's environment, without their future: commits that hold the fix must not be readable.

An agent that looks for the answer finds tags, branches, remotes, the reflog, and objects that nothing refers to any
more. `leaks` names what there is beyond the history of HEAD; a task with any is refused; `seal` takes it away.
Source: the report, section 4.2 (software engineering). Read next: `harbor`.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

from glm5.utils.errors import DataError


def repositories(directory: Path) -> Iterator[Path]:
    """Git directories below a directory: of work trees, of submodules, and bare ones."""
    for head in sorted(directory.rglob("HEAD")):
        if head.is_file() and (head.parent / "objects").is_dir() and (head.parent / "refs").is_dir():
            yield head.parent


def leaks(repository: Path) -> list[str]:
    """What a git directory holds beyond the history of its HEAD and what is staged, in words.

    Raises:
        DataError: git is not there, or the repository is broken.
    """
    found = [f"remote {name}" for name in _git(repository, "remote").split()]
    found += [
        f"ref {name}" for name in _git(repository, "for-each-ref", "--format=%(refname)", "--no-merged", "HEAD").split()
    ]
    found += [name for name in ("FETCH_HEAD", "ORIG_HEAD", "objects/info/alternates") if (repository / name).exists()]
    reachable = {line.split()[0] for line in _git(repository, "rev-list", "--objects", "HEAD").splitlines()}
    reachable |= set(_git(repository, "for-each-ref", "--format=%(objectname)").split())  # of annotated tags
    if (repository / "index").exists():
        reachable |= {line.split()[1] for line in _git(repository, "ls-files", "--stage").splitlines()}
    everything = set(_git(repository, "cat-file", "--batch-all-objects", "--batch-check=%(objectname)").split())
    others = len(everything - reachable)
    return found + ([f"{others} objects that HEAD does not reach"] if others else [])


def seal(repository: Path) -> None:
    """Take away all that `leaks` names, for good; the work tree and HEAD stay as they are.

    Raises:
        DataError: something is left.
    """
    _git(repository, "repack", "-a", "-d", "-q")  # with what it borrows from another repository
    (repository / "objects/info/alternates").unlink(missing_ok=True)
    for name in _git(repository, "remote").split():
        _git(repository, "remote", "remove", name)
    for name in _git(repository, "for-each-ref", "--format=%(refname)", "--no-merged", "HEAD").split():
        _git(repository, "update-ref", "-d", name)
    for name in ("FETCH_HEAD", "ORIG_HEAD"):
        (repository / name).unlink(missing_ok=True)
    _git(repository, "reflog", "expire", "--expire=now", "--expire-unreachable=now", "--all")
    _git(repository, "gc", "--prune=now", "--quiet")
    if left := leaks(repository):
        raise DataError(f"{repository} still holds {', '.join(left)}", "Make it anew from an archive of HEAD")


def _git(repository: Path, *words: str) -> str:
    """What git says, without anybody's configuration, and running none of the repository's programs."""
    settings = {"GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": os.devnull, "GIT_TERMINAL_PROMPT": "0"}
    safe = ("safe.directory=*", "core.hooksPath=/dev/null", "core.fsmonitor=false")
    line = ["git", *(word for one in safe for word in ("-c", one)), f"--git-dir={repository}", *words]
    if words[0] == "ls-files":
        line.insert(-len(words), f"--work-tree={repository.parent}")
    try:
        done = subprocess.run(
            line, capture_output=True, text=True, env={**os.environ, **settings}, timeout=300, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as e:
        raise DataError(f"git cannot look into {repository}: {e}", "Install git") from None
    if done.returncode:
        raise DataError(f"git {words[0]} in {repository}: {done.stderr.strip()[-300:]}", "Mend the repository")
    return done.stdout
