"""What this host can isolate, found by doing it once. Read next: `bubblewrap`."""

from __future__ import annotations

import os
import shutil
import subprocess
from functools import cache
from pathlib import Path

from glm5.agents.sandbox import cgroups, seccomp
from glm5.utils.errors import UserError

PROGRAMS = {  # what runs a sandbox, and Debian's package that has it
    "bwrap": "bubblewrap",
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "prlimit": "util-linux",
    "setpriv": "util-linux",
}
NOBODY = 65534


class SandboxError(UserError):
    """This host cannot isolate what it should, or a sandbox could not be made. Nothing was run."""


def unprivileged() -> list[str]:
    """Words before a command that take the superuser's rights from it, for good; none for any other user."""
    if os.geteuid() != 0:
        return []
    return ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--no-new-privs", "--"]


@cache
def require(control_group: bool = True) -> None:
    """Find out, once, whether a sandbox can be had; without `control_group`, whether the weaker one can.

    Raises:
        SandboxError: it cannot; what is missing, and the mend.
    """
    missing = sorted({package for program, package in PROGRAMS.items() if not shutil.which(program)})
    if missing:
        raise SandboxError(f"no sandbox: {', '.join(missing)} missing", f"apt-get install {' '.join(missing)}")
    if not Path("/usr/bin/prlimit").exists():
        raise SandboxError("no sandbox: /usr/bin/prlimit missing", "Install util-linux under /usr")
    if seccomp.program() is None:
        raise SandboxError(
            f"no sandbox: no filter of system calls is written for {os.uname().machine}",
            "Add its calls to glm5/agents/sandbox/seccomp.py",
        )
    trial = [*unprivileged(), "unshare", "--user", "--map-root-user", "--mount"]
    trial += ["mount", "-t", "tmpfs", "tmpfs", "/media"]
    done = subprocess.run(trial, capture_output=True, text=True, env={"PATH": search_path()}, timeout=30, check=False)
    if done.returncode:
        raise SandboxError(
            f"no sandbox: the kernel refuses namespaces to users ({_last(done.stderr)})",
            "Raise user.max_user_namespaces, set kernel.unprivileged_userns_clone=1 and "
            "kernel.apparmor_restrict_unprivileged_userns=0 where the kernel has them; in a container, let it unshare",
        )
    if control_group and cgroups.parents() is None:
        raise SandboxError(
            "no sandbox: no control group can be made here, so nothing bounds the memory of all processes together",
            "Run as root, or within systemd-run --user --scope -p Delegate=yes; or ask for the weaker bounds of "
            "Limits(control_group=False)",
        )


def describe() -> str:
    """For `glm5 doctor`: by what a sandbox can be had, or why not, and the mend."""
    try:
        require()
    except SandboxError as e:
        return str(e)
    version = subprocess.run(["bwrap", "--version"], capture_output=True, text=True, timeout=30, check=False)
    found = cgroups.parents()
    which = 2 if found and found[1] else 1
    return f"{version.stdout.strip()}, seccomp, control groups of version {which}"


def search_path() -> str:
    """PATH for the programs of a sandbox."""
    return os.environ.get("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")


def _last(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else "no reason given"
