"""A container of Docker or Podman, for tasks that need an image: chosen by name, never in place of something else.

It is driven through the engine's command, which both have in common. Its first process reads from a pipe that this
process holds, so the container ends, and is removed, when this process does, whatever kills it. No network unless it is
asked for; memory, processors and processes are bounded; privileges cannot be gained. It is a weaker wall than
`bubblewrap`: commands are the container's root, and the size of its disk is not bounded (engines can do so on few file
systems only), a file's is. Read next: `limits`, `pipes`.
"""

from __future__ import annotations

import secrets
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Literal

from glm5.agents.sandbox.files import pack, read_tree, unpack
from glm5.agents.sandbox.host import SandboxError
from glm5.agents.sandbox.limits import MIB, Finished, Limits, readable
from glm5.agents.sandbox.pipes import converse
from glm5.utils.errors import ConfigError

ENGINES = ("docker", "podman")
# Rights that a container's root has by default, and that no task needs.
_DROPPED = ("NET_RAW", "MKNOD", "AUDIT_WRITE")
_CALL_S = 120.0  # for calls of the engine that run nothing of a task's


@dataclass(frozen=True)
class Engine:
    """Which engine runs containers, and what they may do.

    Args:
        name: `docker` or `podman`.
        network: whether a container that asks for a network gets one.

    Raises:
        ConfigError: the name is another.
    """

    name: Literal["docker", "podman"]
    network: bool = False

    def __post_init__(self) -> None:
        if self.name not in ENGINES:
            raise ConfigError("name", self.name, f"must be one of {', '.join(ENGINES)}")

    def require(self) -> None:
        """Find out, once, whether containers can be had.

        Raises:
            SandboxError: they cannot: there is no such command, or its service does not answer.
        """
        _require(self.name)

    def call(self, *words: str, stdin: bytes = b"", seconds: float = _CALL_S) -> bytes:
        """Run the engine's command. Returns what it wrote to its standard output.

        Raises:
            SandboxError: it failed, or took too long.
        """
        try:
            done = subprocess.run([self.name, *words], input=stdin, capture_output=True, timeout=seconds, check=False)
        except subprocess.TimeoutExpired:
            raise EngineTimeout(f"{self.name} {words[0]} took over {seconds:g} s", "See what the host does") from None
        except OSError as e:
            raise SandboxError(f"{self.name} cannot be run: {e}", f"Install {self.name}") from None
        if done.returncode:
            said = readable(done.stderr or done.stdout).strip()[-300:]
            raise SandboxError(f"{self.name} {words[0]} failed ({done.returncode}): {said}", f"See {self.name} info")
        return done.stdout

    def build(self, context: Path, tag: str, seconds: float) -> None:
        """Make an image from a directory with a Dockerfile; what the engine remembers of an equal one is reused.

        Raises:
            SandboxError: a line of the Dockerfile failed, or all of it took too long.
        """
        self.call("build", "--quiet", "--tag", tag, str(context), seconds=seconds)


class EngineTimeout(SandboxError):
    """The engine did not answer in time."""


class Spoiled(SandboxError):
    """What ran in a container has made it unusable: it is its own doing, and no fault of the engine's."""


@cache
def _require(name: Literal["docker", "podman"]) -> None:
    Engine(name).call("info", "--format", "{{.}}", seconds=30)


class Container:
    """A running container. A context manager: it is gone at its end. Any thread may call.

    Args:
        image: a name that the engine knows, or can fetch.
        limits: `disk_bytes`, `files` and `cpu_s` are not bounded by engines; see the module's text.
        cpus: processors' worth of time; None: not bounded.
        network: whether it has one, if the engine allows it.
        environment: variables of all commands.

    Raises:
        SandboxError: the engine is not there, or the container does not start.
    """

    def __init__(
        self,
        engine: Engine,
        image: str,
        limits: Limits | None = None,
        *,
        cpus: float | None = None,
        network: bool = False,
        environment: Mapping[str, str] | None = None,
        start_s: float = _CALL_S,
    ) -> None:
        self.engine, self.image, self.limits = engine, image, limits or Limits()
        self.name = f"glm5-{secrets.token_hex(8)}"
        engine.require()
        with_network = network and engine.network
        self._closed = False
        self._keeper = self._keep(cpus, with_network, environment or {}, start_s)

    def __enter__(self) -> Container:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End the container and all that runs in it. Twice is once."""
        if self._closed:
            return
        self._closed = True
        assert self._keeper.stdin is not None
        assert self._keeper.stdout is not None
        assert self._keeper.stderr is not None
        self._keeper.stdin.close()
        try:
            self._keeper.wait(20)
        except subprocess.TimeoutExpired:
            self._keeper.kill()
            self._keeper.wait()
            with suppress(SandboxError):  # it may have gone meanwhile
                self.engine.call("rm", "--force", self.name)
        finally:
            self._keeper.stdout.close()
            self._keeper.stderr.close()

    def run(
        self,
        command: Sequence[str],
        *,
        stdin: bytes = b"",
        wall_s: float | None = None,
        cwd: str | None = None,
        environment: Mapping[str, str] | None = None,
        user: str | None = None,
    ) -> Finished:
        """Run a command until it ends or a limit ends it; then all that runs in the container ends with it.

        What a command leaves running when it ends by itself goes on: a server, for one. A command that the kernel
        killed because the memory was used up has ended with status 137.

        Raises:
            SandboxError: the container is gone; the command may not have run.
        """
        seconds = self.limits.wall_s if wall_s is None else wall_s
        line = [self.engine.name, "exec", "--interactive"]
        line += [] if cwd is None else ["--workdir", cwd]
        line += [] if user is None else ["--user", user]
        for name, value in (environment or {}).items():
            line += ["--env", f"{name}={value}"]
        start = time.monotonic()
        try:
            process = subprocess.Popen(
                [*line, self.name, *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except (OSError, ValueError) as e:
            raise SandboxError(f"the command cannot be started: {e}", "Pass long texts through stdin") from None
        ending, out, err = converse(process, stdin, start + seconds, self.limits.output_bytes)
        took = time.monotonic() - start
        if self._keeper.poll() is not None or self._closed:
            raise SandboxError(f"the container ended: {readable(err.bytes).strip()[-300:]}", "Make another")
        if ending != "exited":
            self.end_processes()
        code = process.returncode if ending == "exited" else None
        return Finished(ending, code, out.bytes, err.bytes, out.lost + err.lost, took)

    def end_processes(self) -> None:
        """Kill all in the container but its first process, which does nothing. Raises Spoiled, SandboxError."""
        self._call("exec", "--user", "0", self.name, "sh", "-c", "kill -9 -1 2> /dev/null; exit 0")

    # ----------------------------------------------------------------------- files
    def put_tree(self, files: Mapping[str, tuple[bytes, int]] | Path, directory: str) -> None:
        """Write files, by relative name, below a directory that is there: names to bytes and mode, or a directory here.

        Raises:
            SandboxError: they cannot be written.
        """
        content = read_tree(files) if isinstance(files, Path) else files
        if content:  # podman takes an empty archive for none
            self._call("cp", "-", f"{self.name}:{directory}", stdin=pack(content))

    def get(self, path: str, limit: int = MIB) -> bytes | None:
        """The first bytes of a file; None where it is no file, or a link to one."""
        line = 'test -f "$0" && ! test -L "$0" && head -c "$1" "$0"'
        size = str(min(limit, self.limits.output_bytes // 2))
        done = self.run(["sh", "-c", line, path, size], wall_s=30, cwd="/", user="0")
        return done.stdout if done.ok else None

    def take(self, path: str, limit: int = 256 * MIB) -> dict[str, tuple[bytes, int]] | None:
        """A file, or the files below a directory, named from its parent; None where there is nothing.

        Links and all that is no file are left out, as are rights beyond reading, writing and running.

        Raises:
            Spoiled: there are more bytes than `limit`.
        """
        words = [self.engine.name, "cp", f"{self.name}:{path}", "-"]
        try:
            process = subprocess.Popen(
                words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
            )
        except (OSError, ValueError) as e:
            raise SandboxError(f"{self.engine.name} cannot be run: {e}", f"Install {self.engine.name}") from None
        ending, out, _ = converse(process, b"", time.monotonic() + _CALL_S, 2 * limit, most=limit)
        if ending == "wall_time":
            raise EngineTimeout(f"{self.engine.name} cp took over {_CALL_S:g} s", "See what the host does")
        if ending == "output":
            raise Spoiled(f"{path} has more than {limit} bytes", "Keep artifacts small")
        return unpack(out.bytes) if process.returncode == 0 else None

    def renew(self, *directories: str) -> None:
        """Make directories at the root anew, empty, whatever lies there, links too. Raises Spoiled, SandboxError."""
        line = 'rm -rf "$@" && mkdir -m 755 "$@"'
        self._call("exec", "--user", "0", "--workdir", "/", self.name, "sh", "-c", line, "sh", *directories)

    def remove(self, *directories: str) -> None:
        """Take directories away. Raises Spoiled, SandboxError."""
        self._call("exec", "--user", "0", "--workdir", "/", self.name, "rm", "-rf", *directories)

    def _call(self, *words: str, stdin: bytes = b"") -> None:
        """A call that works in a container that is in order: if it fails while the container lives, that is spoiled."""
        try:
            self.engine.call(*words, stdin=stdin)
        except EngineTimeout:
            raise
        except SandboxError as e:
            if self._keeper.poll() is not None or self._closed:
                raise
            raise Spoiled(e.what, "Make another container") from None

    # ----------------------------------------------------------------------- making
    def line(self, cpus: float | None, network: bool, environment: Mapping[str, str]) -> list[str]:
        """The words that start the container."""
        limits = self.limits
        line = [self.engine.name, "run", "--rm", "--interactive", "--name", self.name, "--hostname", "task"]
        line += [] if network else ["--network", "none"]
        line += ["--memory", str(limits.memory_bytes), "--memory-swap", str(limits.memory_bytes)]
        line += [] if cpus is None else ["--cpus", f"{cpus:g}"]
        line += ["--pids-limit", str(limits.processes), "--security-opt", "no-new-privileges"]
        line += [f"--cap-drop={name}" for name in _DROPPED]
        # The last is named because engines' own default may be above what a host without all rights can set.
        bounds = {"core": 0, "nofile": limits.open_files, "fsize": limits.file_bytes, "nproc": 4096}
        line += [f"--ulimit={name}={value}:{value}" for name, value in bounds.items()]
        for name, value in environment.items():
            line += ["--env", f"{name}={value}"]
        # With the signal ignored, the kernel itself removes what ends: the dead would count among the processes.
        first = "trap '' CHLD; echo ready; exec cat > /dev/null"
        return [*line, "--entrypoint", "bash", "--user", "0", self.image, "-c", first]

    def _keep(
        self, cpus: float | None, network: bool, environment: Mapping[str, str], start_s: float
    ) -> subprocess.Popen[bytes]:
        keeper = subprocess.Popen(
            self.line(cpus, network, environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        assert keeper.stdout is not None
        assert keeper.stderr is not None
        timer = threading.Timer(start_s, keeper.kill)
        timer.start()
        ready = keeper.stdout.readline() == b"ready\n"
        timer.cancel()
        if not ready:
            keeper.kill()
            reason = readable(keeper.stderr.read()).strip()[-300:]
            keeper.wait()
            raise SandboxError(f"{self.engine.name}: no container: {reason}", f"See {self.engine.name} info")
        return keeper
