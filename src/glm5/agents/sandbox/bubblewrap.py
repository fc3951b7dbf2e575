"""A sandbox on this host, by namespaces: bubblewrap, a filter of system calls, and a control group.

Each command runs in fresh namespaces of processes, mounts, network, users, names and messages, made by bubblewrap; when
it ends, or must end, the kernel kills all that it started, daemons too. What lasts from one command to the next are the
writable directories. They lie in one tmpfs of bounded size that a small process, the keeper, holds in a mount
namespace of its own, so the host has no path to them and nothing to clean up: they are gone with the keeper, which ends
when its input does, as it also would if this process were killed. Files go in and out through commands in the sandbox,
so no link in there is ever followed out here. Started by root, all of it runs as nobody.

    this process -> sh (joins the control group) -> setpriv -> nsenter (to the keeper) -> bwrap -> prlimit -> command

Read next: `limits`, `pipes`, `seccomp`.
"""

from __future__ import annotations

import json
import os
import posixpath
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from glm5.agents.sandbox import cgroups, seccomp
from glm5.agents.sandbox.files import pack, read_tree
from glm5.agents.sandbox.host import SandboxError, require, search_path, unprivileged
from glm5.agents.sandbox.limits import MIB, Ending, Finished, Limits, readable
from glm5.agents.sandbox.pipes import converse
from glm5.utils.errors import ConfigError

_HOLD = "/media"  # where the keeper's tmpfs lies, in its own namespace alone; every Linux has the directory
_SYSTEM = ("/usr",)
# What programs look up, none of it secret. /etc itself is not there.
_ETC = ("alternatives", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime", "mime.types", "protocols", "services")
_FILES = {
    "/etc/passwd": "root:x:0:0:root:/root:/bin/sh\nagent:x:1000:1000:agent:/home/agent:/bin/sh\n",
    "/etc/group": "root:x:0:\nagent:x:1000:\n",
    "/etc/hosts": "127.0.0.1 localhost\n::1 localhost\n",
    "/etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}
ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/home/agent",
    "USER": "agent",
    "LANG": "C.UTF-8",
    "TERM": "dumb",
    "PYTHONDONTWRITEBYTECODE": "1",
}
RESERVE = 64 * MIB
ALWAYS = ("/tmp", "/home/agent", "/dev/shm")  # noqa: S108  # paths in the sandbox, not here


class Sandbox:
    """Commands in isolation. A context manager: what it holds is freed at its end.

    Args:
        limits: see `Limits`.
        writable: absolute paths of directories that commands may write in, empty at first, beside /tmp, /home/agent
            and /dev/shm. A command sees only those that it is given; see `run`.
        cwd: where commands start; the first writable directory by default.
        apart: those of `writable` that lie in a second tmpfs, `RESERVE` large: they have room when the others are full.
        readable: directories or files of the host to show, read-only, beside /usr, under the same paths or, in a
            mapping, under others.
        environment: variables beside `ENVIRONMENT`. Nothing of this process's environment is passed on.

    Raises:
        SandboxError: this host cannot isolate commands as they must be.
        ConfigError: a path is not absolute, or covers the system.
    """

    def __init__(
        self,
        limits: Limits | None = None,
        *,
        writable: Sequence[str] = ("/workspace",),
        cwd: str | None = None,
        apart: Sequence[str] = (),
        readable: Iterable[str] | Mapping[str, str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.limits = limits or Limits()
        self.writable = tuple(writable)
        self.apart = tuple(apart)
        self.readable = dict(readable) if isinstance(readable, Mapping) else {path: path for path in readable}
        self.environment = {**ENVIRONMENT, **(environment or {})}
        for path in self.writable:
            _check_path("writable", path)
        for path in self.apart:
            if path not in self.writable:
                raise ConfigError("apart", path, "must be one of the writable directories")
        named = enumerate((*ALWAYS, *self.writable))
        self._places = {path: f"{_HOLD}/apart/{i}" if path in self.apart else f"{_HOLD}/{i}" for i, path in named}
        for source, path in self.readable.items():
            _check_path("readable", path)
            _check_source(source)
        self.cwd = cwd or (self.writable[0] if self.writable else "/tmp")  # noqa: S108
        self._closed = False
        require(self.limits.control_group)
        self._started: set[subprocess.Popen[bytes]] = set()
        self._group: cgroups.Group | None = None
        if self.limits.control_group:
            disk = self.limits.disk_bytes + (RESERVE if self.apart else 0)
            self._group = cgroups.make(self.limits.memory_bytes + disk, self.limits.processes + 8)
            if self._group is None:
                what = "no control group could be made for a sandbox"
                raise SandboxError(what, "Check /sys/fs/cgroup and its limits")
        try:
            self._keeper = self._keep()
        except BaseException:
            if self._group is not None:
                self._group.remove()
            raise

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End the sandbox: its directories and its control group are gone. Twice is once."""
        if self._closed:
            return
        self._closed = True
        if self._group is not None:
            self._group.kill()
        for process in list(self._started):  # all that one has started dies with it
            process.kill()
        self._keeper.kill()
        self._keeper.wait()
        for pipe in (self._keeper.stdin, self._keeper.stdout, self._keeper.stderr):
            assert pipe is not None
            pipe.close()
        if self._group is not None:
            self._group.remove()

    @property
    def _killed(self) -> int:
        return 0 if self._group is None else self._group.killed

    # ----------------------------------------------------------------------- commands
    def run(
        self,
        command: Sequence[str],
        *,
        stdin: bytes = b"",
        wall_s: float | None = None,
        cwd: str | None = None,
        environment: Mapping[str, str] | None = None,
        writable: Sequence[str] | None = None,
        read_only: Sequence[str] = (),
    ) -> Finished:
        """Run a command until it ends or a limit ends it. Any thread may call; commands may run side by side.

        Args:
            command: the program and its arguments; `["bash", "-c", text]` for a line of shell.
            stdin: what it may read.
            wall_s: seconds, in place of the limit.
            environment: variables beside the sandbox's.
            writable: which of the sandbox's writable directories it sees; all of them by default.
            read_only: those of them that it may not write in.

        Raises:
            SandboxError: the sandbox is closed or was broken; the command did not run.
        """
        seconds = self.limits.wall_s if wall_s is None else wall_s
        shown = self.writable if writable is None else tuple(writable)
        killed_before = self._killed
        with tempfile.TemporaryFile() as status:
            start = time.monotonic()
            process = self._start(
                command, status.fileno(), {**self.environment, **(environment or {})}, shown, read_only, cwd
            )
            ending, out, err = converse(process, stdin, start + seconds, self.limits.output_bytes)
            took = time.monotonic() - start
            status.seek(0)
            child, code = _status(status.read())
            _wait_for_end(child)
            self._started.discard(process)
        if child is None and ending == "exited" and self._killed == killed_before:
            raise SandboxError(f"the sandbox failed: {readable(err.bytes).strip()[-300:]}", "Make another")
        verdict: Ending = ending
        if ending == "exited":
            if self._killed > killed_before:
                verdict = "memory"
            elif code == 128 + 24 or (code == 128 + 9 and took >= self.limits.cpu_s):  # SIGXCPU; SIGKILL if ignored
                verdict = "cpu_time"
        return Finished(
            ending=verdict,
            code=code if ending == "exited" else None,
            stdout=out.bytes,
            stderr=err.bytes,
            lost=out.lost + err.lost,
            seconds=took,
        )

    def start(self, command: Sequence[str], pass_fds: Sequence[int] = ()) -> subprocess.Popen[bytes]:
        """Start a command that runs until it ends, is killed, or the sandbox is closed. It sees all that `run` shows.

        It also dies with the thread that called this, as the kernel has it, so that thread should wait for it.
        """
        return self._start(command, None, self.environment, self.writable, (), None, pass_fds)

    # ----------------------------------------------------------------------- files
    def put(self, path: str, data: bytes, mode: int = 0o644) -> None:
        """Write one file at an absolute path in a writable directory; its directories are made."""
        self.put_tree({posixpath.basename(path): (data, mode)}, posixpath.dirname(path))

    def put_tree(self, files: Mapping[str, tuple[bytes, int]] | Path, directory: str) -> None:
        """Write files, by relative name, below a directory: a mapping to bytes and mode, or all of a directory here.

        Raises:
            SandboxError: they do not fit, or a link stands in the way.
        """
        content = read_tree(files) if isinstance(files, Path) else files
        line = 'mkdir -p -- "$0" && tar --extract --no-same-owner --directory "$0"'
        done = self.run(["sh", "-c", line, directory], stdin=pack(content), cwd="/")
        if not done.ok:
            raise SandboxError(f"cannot write into {directory}: {done.text.strip()[-300:]}", "Raise limits.disk_bytes")

    def get(self, path: str, limit: int = MIB) -> bytes | None:
        """The first `limit` bytes of a file, read within the sandbox; None where it is no file that can be read."""
        line = 'test -f "$0" && head --bytes "$1" -- "$0"'
        done = self.run(["sh", "-c", line, path, str(min(limit, self.limits.output_bytes // 2))], wall_s=30, cwd="/")
        return done.stdout if done.ok else None

    def clear(self, *directories: str) -> None:
        """Empty writable directories, whatever lies there."""
        line = 'find "$@" -mindepth 1 -type d -exec chmod u+rwx {} + 2>/dev/null; find "$@" -mindepth 1 -delete'
        done = self.run(["sh", "-c", line, "sh", *directories], cwd="/")
        if not done.ok:
            raise SandboxError(f"cannot empty {directories}: {done.text.strip()[-300:]}", "Make another sandbox")

    # ----------------------------------------------------------------------- making
    def _start(
        self,
        command: Sequence[str],
        status_fd: int | None,
        variables: Mapping[str, str],
        shown: Sequence[str],
        read_only: Sequence[str],
        cwd: str | None,
        pass_fds: Sequence[int] = (),
    ) -> subprocess.Popen[bytes]:
        if self._closed:
            raise SandboxError("the sandbox is closed", "Make another one")
        with tempfile.TemporaryFile() as filter_file:
            filter_file.write(seccomp.program() or b"")
            filter_file.seek(0)
            line = self._line(variables, shown, read_only, cwd or self.cwd, filter_file.fileno(), status_fd)
            try:
                process = subprocess.Popen(
                    [*line, *command],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    pass_fds=(filter_file.fileno(), *([] if status_fd is None else [status_fd]), *pass_fds),
                    env={"PATH": search_path()},
                    start_new_session=True,
                )
            except (OSError, ValueError) as e:  # a NUL in the command, or a line too long
                raise SandboxError(f"the command cannot be started: {e}", "Pass long texts through stdin") from None
        self._started.add(process)
        if self._closed:  # meanwhile
            process.kill()
        return process

    def _keep(self) -> subprocess.Popen[bytes]:
        """Start the keeper and wait until the tmpfs is there."""
        limits = self.limits
        size = f"size={limits.disk_bytes},nr_inodes={limits.files},mode=755"
        files = "".join(f' && printf %s "${i + 1}" > {_HOLD}/etc{i}' for i in range(len(_FILES)))
        script = f"mount -t tmpfs -o {size} tmpfs {_HOLD}"
        if self.apart:
            own = f"size={RESERVE},nr_inodes={limits.files},mode=755"
            script += f" && mkdir {_HOLD}/apart && mount -t tmpfs -o {own} tmpfs {_HOLD}/apart"
        script += f" && mkdir {' '.join(self._places.values())}{files} && echo ready && exec cat"
        line = [*self._join(), *unprivileged(), "unshare", "--user", "--map-root-user", "--mount"]
        line += ["sh", "-c", script, "sh", *_FILES.values()]
        keeper = subprocess.Popen(
            line,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={"PATH": search_path()},
            start_new_session=True,
        )
        assert keeper.stdout is not None
        assert keeper.stderr is not None
        timer = threading.Timer(30, keeper.kill)
        timer.start()
        ready = keeper.stdout.readline() == b"ready\n"
        timer.cancel()
        if not ready:
            keeper.kill()
            reason = keeper.stderr.read().decode(errors="replace").strip()
            keeper.wait()
            raise SandboxError(f"no sandbox: {reason or 'its directories could not be made'}", "See glm5 doctor")
        return keeper

    def _join(self) -> list[str]:
        """Words before a command that put it into the control group, if there is one."""
        if self._group is None:
            return []
        places = [f"{directory}/cgroup.procs" for directory in self._group.directories]
        script = 'n=$1; shift; while [ "$n" -gt 0 ]; do echo $$ > "$1" || exit 125; shift; n=$((n-1)); done; exec "$@"'
        return ["sh", "-c", script, "sh", str(len(places)), *places]

    def _line(
        self,
        variables: Mapping[str, str],
        shown: Sequence[str],
        read_only: Sequence[str],
        cwd: str,
        filter_fd: int,
        status_fd: int | None,
    ) -> list[str]:
        limits = self.limits
        line = [*self._join(), *unprivileged(), "nsenter", f"--target={self._keeper.pid}", "--user", "--mount"]
        line += ["--preserve-credentials", "--", "bwrap", "--unshare-all", "--unshare-user", "--disable-userns"]
        line += ["--uid", "1000", "--gid", "1000", "--cap-drop", "ALL", "--hostname", "sandbox", "--new-session"]
        line += ["--die-with-parent", "--seccomp", str(filter_fd), "--clearenv"]
        line += [] if status_fd is None else ["--json-status-fd", str(status_fd)]
        for name, value in variables.items():
            line += ["--setenv", name, value]
        for path in _SYSTEM:
            line += ["--ro-bind", path, path]
        for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32"):
            if Path("/", name).is_symlink():
                line += ["--symlink", os.readlink(f"/{name}"), f"/{name}"]
            elif Path("/", name).is_dir():
                line += ["--ro-bind", f"/{name}", f"/{name}"]
        for i, path in enumerate(_FILES):
            line += ["--ro-bind", f"{_HOLD}/etc{i}", path]
        for name in _ETC:
            line += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
        line += ["--proc", "/proc", "--dev", "/dev", "--dir", "/root", "--dir", "/run"]
        for source, path in self.readable.items():
            line += ["--ro-bind", source, path]
        for path, place in self._places.items():
            if path in ALWAYS or path in shown:
                line += ["--ro-bind" if path in read_only else "--bind", place, path]
        line += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", cwd, "--"]
        line += ["prlimit", f"--cpu={limits.cpu_s}:{limits.cpu_s + 1}", f"--fsize={limits.file_bytes}", "--core=0"]
        line += [] if limits.control_group else [f"--as={limits.memory_bytes}"]
        return [*line, f"--nofile={limits.open_files}", f"--nproc={limits.processes}", "--"]


def _status(data: bytes) -> tuple[int | None, int | None]:
    """What bubblewrap wrote: the number of its first process, if there was one, and the command's exit status."""
    said: dict[str, int] = {}
    for line in data.splitlines():
        said.update(json.loads(line))
    return said.get("child-pid"), said.get("exit-code")


def _wait_for_end(child: int | None) -> None:
    """Until the first process of the namespace is dead, and with it, before it, all others: the kernel kills them."""
    for _ in range(1000):
        try:
            state = Path(f"/proc/{child}/stat").read_text().rpartition(") ")[2][:1]
        except OSError:
            return
        if state in "ZX":  # dead, and not yet collected
            return
        time.sleep(0.005)


def _check_path(field: str, path: str) -> None:
    if not path.startswith("/") or posixpath.normpath(path) != path or "\0" in path:
        raise ConfigError(field, path, "must be an absolute path without . and ..")
    top = "/" + path.split("/")[1]
    if path == "/" or top in ("/proc", "/sys", "/dev", "/etc", "/usr", "/bin", "/sbin", "/lib", "/lib64"):
        raise ConfigError(field, path, "must lie outside the system's directories")


def _check_source(source: str) -> None:
    if not Path(source).exists():
        raise ConfigError("readable", source, "is not there")
    if Path(source).resolve() == Path(_HOLD) or Path(_HOLD) in Path(source).resolve().parents:
        raise ConfigError("readable", source, f"must lie outside {_HOLD}")
