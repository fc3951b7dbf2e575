"""Repositories in tasks: nothing of their future can be read."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from glm5.agents.tasks import TaskError, read_task
from glm5.agents.tasks.repository import leaks, repositories, seal
from glm5.utils.errors import DataError
from support.tasks import make

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


def git(place: Path, *words: str) -> str:
    who = {f"GIT_{role}_{what}": "a@b.c" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    variables = {**os.environ, **who, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    done = subprocess.run(["git", *words], cwd=place, env=variables, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """A work tree of two commits, of which HEAD is the first, broken one."""
    place = make(tmp_path / "task") / "environment/repo"
    place.mkdir()
    git(place, "init", "--quiet", "--initial-branch=main")
    (place / "a.py").write_text("broken")
    git(place, "add", "a.py")
    git(place, "commit", "--quiet", "-m", "one")
    return place


def fix(place: Path) -> str:
    (place / "a.py").write_text("THE FIX")
    git(place, "commit", "--quiet", "-am", "two")
    return git(place, "rev-parse", "HEAD")


def readable(place: Path) -> bool:
    """Whether any object of the repository holds the fix."""
    names = git(place, "cat-file", "--batch-all-objects", "--batch-check=%(objectname) %(objecttype)").splitlines()
    return any("THE FIX" in git(place, "cat-file", *reversed(line.split())) for line in names if line.endswith("blob"))


def test_a_repository_without_a_future(work: Path) -> None:
    git(work, "tag", "-a", "v1", "-m", "one")
    (work / "b.py").write_text("staged")
    git(work, "add", "b.py")
    assert list(repositories(work.parent)) == [work / ".git"]
    assert leaks(work / ".git") == []
    assert read_task(work.parents[1]).name == "task"


@pytest.mark.parametrize(
    ("hide", "named"),
    [
        ("git tag fixed && git reset --quiet --hard HEAD~1", "ref refs/tags/fixed"),
        ("git tag -a fixed -m x && git reset --quiet --hard HEAD~1", "ref refs/tags/fixed"),
        ("git branch later && git reset --quiet --hard HEAD~1", "ref refs/heads/later"),
        ("git reset --quiet --hard HEAD~1", "objects that HEAD does not reach"),
        ("git reset --quiet --hard HEAD~1 && git reflog expire --expire=now --all", "objects that HEAD does not reach"),
        (
            "git clone --quiet --bare . ../far && git reset --quiet --hard HEAD~1 && git remote add up ../far",
            "remote up",
        ),
        ("git reset --quiet --soft HEAD~1 && git stash --quiet", "ref refs/stash"),
    ],
)
def test_what_is_to_come_is_found_and_taken_away(work: Path, hide: str, named: str) -> None:
    fix(work)
    who = "-c user.name=a -c user.email=a@b.c"
    subprocess.run(["bash", "-ec", hide.replace("git ", f"git {who} ")], cwd=work, check=True, capture_output=True)
    if (work.parent / "far").exists():
        (work.parent / "far").rename(work.parents[1] / "far")
    assert readable(work)
    assert any(named in leak for leak in leaks(work / ".git")), leaks(work / ".git")
    with pytest.raises(TaskError, match="an agent could find what is to come"):
        read_task(work.parents[1])
    before = git(work, "rev-parse", "HEAD")
    seal(work / ".git")
    assert not readable(work)
    assert git(work, "rev-parse", "HEAD") == before
    assert (work / "a.py").read_text() == "broken"
    assert read_task(work.parents[1]).name == "task"


def test_bare_repositories_and_borrowed_objects_are_seen(work: Path) -> None:
    git(work.parent, "clone", "--quiet", "--shared", "repo", "borrower")
    assert {path.name for path in repositories(work.parent)} == {".git"}
    found = leaks(work.parent / "borrower/.git")
    assert "objects/info/alternates" in found
    assert "remote origin" in found
    seal(work.parent / "borrower/.git")
    shutil.rmtree(work)
    assert git(work.parent / "borrower", "show", "HEAD:a.py") == "broken"


def test_a_broken_repository_is_named(work: Path) -> None:
    (work / ".git/HEAD").write_text("ref: refs/heads/nowhere\n")
    with pytest.raises(DataError, match=r"in .*\.git"):
        leaks(work / ".git")
