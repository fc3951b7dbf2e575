"""Engines and task services of an agent run on the nodes of a Ray cluster: `glm5 rl agent --cluster ray`.

    driver: learner, orchestrator, gateway, desk
      |- actor engine-0 -> leash -> glm5 serve CHECKPOINT --host NODE ...       (its GPUs and cores by Ray)
      `- actor task-0   -> leash -> glm5.agents.loading FILE.py:Class DESK ...

Ray only places processes by resource: each actor runs one of our own commands on its node, tells its address, and ends
it. All else is the path of one machine: HTTP between the parts, weights by files in the run's directory, which all
nodes must see. A process that ends, or whose node dies, is placed anew; meanwhile the pool does without the engine, and
lets the new one in when it has confirmed the current weights. Source: report, sections 3.6 and 4.1. Read next:
`engines`, `agent_run`, `glm5.utils.leash`.
"""

from __future__ import annotations

import importlib
import logging
import os
import re
import secrets
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from glm5.agents.protocol import KEY
from glm5.serve.config import EngineConfig
from glm5.utils.errors import ConfigError, UserError

LISTENING = re.compile(r"listening on (http://\S+)")
HOST = "{host}"  # in a command: the address of the node that it runs on
KEPT_LINES = 40
END_S = 20.0  # for a process to end when it is told to
PAUSE_S = 0.5  # before a process is placed anew; grows while it cannot be


@dataclass(frozen=True)
class ClusterConfig:
    """Where engines and task services run, and what each asks of a node."""

    kind: Literal["", "ray"] = ""
    """Empty is this machine alone; ray places engines and tasks on a Ray cluster."""
    address: str = "auto"
    """Of the cluster: HOST:PORT, auto for the one that this machine belongs to, local to begin one."""
    engines: int = 1
    """Engines to place."""
    engine_cpus: float = 1.0
    engine_gpus: float = 0.0
    """Of one engine; without any it runs on its cores."""
    engine_memory_gib: float = 0.0
    """That an engine reserves; 0 reserves none."""
    engine_mesh: str = ""
    """Of one engine over several GPUs of its node, as `glm5 serve --mesh` has it, such as tp=2."""
    service_cpus: float = 1.0
    """Of one task service."""
    service_gpus: float = 0.0
    service_memory_gib: float = 0.0
    place_s: float = 120.0
    """In which a node with room must be found. A cluster that grows by itself may need longer."""
    start_s: float = 600.0
    """In which an engine must have loaded its model, or a service have begun to listen."""

    def __post_init__(self) -> None:
        if self.engines < 1:
            raise ConfigError("engines", self.engines, "must be at least 1")
        for name in ("engine_cpus", "engine_gpus", "engine_memory_gib", "service_cpus", "service_gpus",
                     "service_memory_gib"):  # fmt: skip
            if getattr(self, name) < 0:
                raise ConfigError(name, getattr(self, name), "must be at least 0")
        for name in ("place_s", "start_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(name, getattr(self, name), "must be above 0")

    @property
    def needs(self) -> dict[str, dict[str, float]]:
        """By what is placed, in Ray's words."""
        return {
            of: {
                "CPU": getattr(self, f"{of}_cpus"),
                "GPU": getattr(self, f"{of}_gpus"),
                "memory": getattr(self, f"{of}_memory_gib") * 2**30,
            }
            for of in ("engine", "service")
        }


class Tended:
    """The actor: one command on this node, `python -m ...`. Its methods are called one after another."""

    def begin(self, command: Sequence[str], environment: dict[str, str], directory: str) -> str:
        """Start the command. Returns which node this is."""
        ray = _ray()
        host, python = str(ray.util.get_node_ip_address()), sys.executable
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._url, self._over = "", threading.Event()
        self._process = subprocess.Popen(
            [python, "-m", "glm5.utils.leash", python, "-m", *(part.replace(HOST, host) for part in command)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
            env={**os.environ, **environment}, cwd=directory if Path(directory).is_dir() else None,
        )  # fmt: skip
        threading.Thread(target=self._read, daemon=True).start()
        return str(ray.get_runtime_context().get_node_id())

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            print(line, end="", flush=True)  # which Ray brings to the driver
            self._lines.append(line)
            if found := LISTENING.search(line):
                self._url = found[1]
        self._over.set()

    def look(self, seconds: float) -> tuple[str, bool, str]:
        """After at most so long: where the command listens, whether it has ended, and what it said last."""
        deadline = time.monotonic() + seconds
        known = self._url
        while time.monotonic() < deadline and not self._over.wait(0.05) and self._url == known:
            pass
        return self._url, self._over.is_set(), "".join(self._lines)

    def end(self) -> None:
        """End the command and wait for it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._over.wait(END_S)


class Placed:
    """One of our commands somewhere in the cluster, placed anew whenever it is lost; a thread of the driver.

    Args:
        needs: of its node, in Ray's words. moved: told its address, or None when it is lost.

    Attributes:
        url: where it listens, "" while it does not. node: the last one that it was placed on, by Ray's name.
        failure: why it could not be placed.
    """

    def __init__(
        self, name: str, needs: dict[str, float], command: Sequence[str], environment: dict[str, str],
        config: ClusterConfig, moved: Callable[[str, str | None], None],
    ) -> None:  # fmt: skip
        self.name, self.url, self.node = name, "", ""
        self.failure: UserError | None = None
        self.settled = threading.Event()  # it listens, or has failed
        self._needs, self._command, self._environment = needs, list(command), environment
        self._config, self._moved = config, moved
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._tend, name=f"placed-{name}", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Begin to end it; `join` waits."""
        self._ending.set()

    def join(self) -> None:
        self._thread.join(2 * END_S)

    def _tend(self) -> None:
        pause_s = PAUSE_S
        while not self._ending.is_set():
            try:
                self._once()
                pause_s = PAUSE_S
            except Exception as error:  # of whatever Ray is made of
                if not isinstance(error, UserError):
                    error = UserError(f"{self.name}: {type(error).__name__}: {error}", "Look at the cluster")
                self.failure, pause_s = error, min(30.0, 2 * pause_s)
                self.settled.set()
            self._ending.wait(pause_s)
        self.settled.set()

    def _once(self) -> None:
        """Place it and stay beside it until it is lost."""
        ray = _ray()
        cpus, gpus, memory = (self._needs[of] for of in ("CPU", "GPU", "memory"))
        made = ray.remote(Tended).options(num_cpus=cpus, num_gpus=gpus, memory=memory or None, name=None)
        actor = made.remote()
        try:
            began = actor.begin.remote(self._command, self._environment, os.getcwd())
            node = self._wait(began, self._config.place_s)
            if node is None:
                if not self._ending.is_set():
                    raise _no_place(self.name, self._needs, self._config.place_s)
                return
            self.node = node
            deadline = time.monotonic() + self._config.start_s
            while not self._ending.is_set():
                told = self._wait(actor.look.remote(1.0), self._config.start_s)
                url, over, said = told or ("", True, "nothing: it does not answer\n")
                if self._ending.is_set():
                    return
                if over and not self.url:
                    raise UserError(f"{self.name} ended before it listened. It said:\n{said[-2000:]}", "Mend that")
                if over:
                    return
                if url and not self.url:
                    self.url, self.failure = url, None
                    self._moved(self.name, url)
                    self.settled.set()
                if not self.url and time.monotonic() > deadline:
                    what = f"{self.name} does not listen after {self._config.start_s:g} s. It said:\n{said[-2000:]}"
                    raise UserError(what, "Mend that, or set cluster.start_s higher")
        except ray.exceptions.RayError as error:
            if not self.url and not self._ending.is_set():
                raise UserError(f"{self.name} was lost: {str(error)[:1000]}", "Look at the node") from None
        finally:
            if self.url and not self._ending.is_set():
                self._moved(self.name, None)
            self.url = ""
            with suppress(ray.exceptions.RayError):
                if self._ending.is_set():
                    ray.get(actor.end.remote(), timeout=END_S)
            with suppress(ray.exceptions.RayError):
                ray.kill(actor)

    def _wait(self, asked: Any, seconds: float) -> Any:
        """What comes of a call; None if nothing does in this time, or the end comes first."""
        ray = _ray()
        deadline = time.monotonic() + seconds
        while not self._ending.is_set() and time.monotonic() < deadline:
            if ray.wait([asked], timeout=0.2)[0]:
                return ray.get(asked)
        return None


class Cluster:
    """What a run has placed. Use it in a `with` block.

    Raises:
        UserError: Ray is not installed, or the cluster cannot be reached.
    """

    def __init__(self, config: ClusterConfig) -> None:
        self.config, self.key = config, os.environ.get(KEY) or secrets.token_hex(24)
        self.engines: dict[str, Placed] = {}
        self.services: dict[str, Placed] = {}
        self._listener: Callable[[str, str | None], object] | None = None
        self._lock = threading.Lock()

    def __enter__(self) -> Cluster:
        try:
            ray = _ray()
        except ModuleNotFoundError as error:
            raise UserError(
                f"--cluster ray needs {error.name}", "Install the extra: pip install 'glm5[cluster]'"
            ) from None
        self._ours = not ray.is_initialized()
        if self._ours:
            try:
                ray.init(address=self.config.address, logging_level=logging.WARNING)
            except (ConnectionError, ValueError, RuntimeError) as error:
                what = f"no Ray cluster at {self.config.address}: {str(error)[:300]}"
                raise UserError(what, "Begin one (`ray start --head`), or set cluster.address") from None
        self.host = str(ray.util.get_node_ip_address())
        return self

    def __exit__(self, *_: object) -> None:
        ray = _ray()
        self.attach(None)
        placed = [*self.services.values(), *self.engines.values()]
        for one in placed:
            one.end()
        for one in placed:
            one.join()
        if self._ours:
            ray.shutdown()

    # ------------------------------------------------------------------ placing
    def place_engines(self, checkpoint: str, engine: EngineConfig, dtype: str = "float32") -> dict[str, str]:
        """Engines, whose weights have this dtype, with their addresses, by name.

        Raises:
            UserError: one cannot be placed, or does not start.
        """
        config = self.config
        command = [
            *("glm5", "serve", str(Path(checkpoint).absolute())),
            *("--host", HOST, "--port", "0", "--name", "policy", "--dtype", dtype, "--log-level", "warning"),
            *("--device", "cuda" if config.engine_gpus else "cpu"),
            *(("--mesh", config.engine_mesh) if config.engine_mesh else ()),
            *_options(engine),
        ]
        environment = {KEY: self.key}
        for number in range(config.engines):
            name = f"engine-{number}"
            self.engines[name] = Placed(name, config.needs["engine"], command, environment, config, self._tell)
        self._settle(self.engines)
        return {name: placed.url for name, placed in self.engines.items()}

    def place_services(self, tasks: Sequence[str], desk: str) -> None:
        """Task services, FILE.py:Class or module:Class, that register at `desk`.

        Raises:
            UserError: one cannot be placed, or does not start.
        """
        config = self.config
        environment = {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ} | {KEY: self.key}
        for number, task in enumerate(tasks):
            place, _, of = task.rpartition(":")
            where = f"{Path(place).absolute()}:{of}" if place.endswith(".py") else task
            command = ["glm5.agents.loading", where, desk, "--host", HOST]
            name = f"task-{number} ({task})"
            self.services[name] = Placed(name, config.needs["service"], command, environment, config, self._tell)
        self._settle(self.services)

    def _settle(self, placed: dict[str, Placed]) -> None:
        for one in placed.values():
            one.settled.wait()
            if one.failure is not None:
                raise one.failure

    # ------------------------------------------------------------------ while the run goes on
    def attach(self, listener: Callable[[str, str | None], object] | None) -> None:
        """Who is told of engines that were lost (None) or have another address; at once where they are."""
        with self._lock:
            self._listener = listener
            if listener is not None:
                for name, placed in self.engines.items():
                    listener(name, placed.url or None)

    def _tell(self, name: str, url: str | None) -> None:
        with self._lock:
            if self._listener is not None and name in self.engines:
                self._listener(name, url)

    def check(self) -> None:
        """Raises UserError if no engine, or no task service, is left, and none can be placed."""
        for placed in (self.engines, self.services):
            failures = [one.failure for one in placed.values() if one.failure is not None]
            if placed and len(failures) == len(placed):
                raise failures[0]


def _ray() -> Any:
    """Ray, which is an extra, and which nothing but a cluster imports."""
    return importlib.import_module("ray")


def _options(engine: EngineConfig) -> list[str]:
    """What `glm5 serve` has to be told of an engine."""
    found: list[str] = []
    for field in fields(engine):
        name, value = field.name.replace("_", "-"), getattr(engine, field.name)
        if value != field.default:
            found += (
                [f"--{name}" if value else f"--no-{name}"] if isinstance(value, bool) else [f"--{name}", str(value)]
            )
    return found


def _no_place(name: str, needs: dict[str, float], seconds: float) -> UserError:
    """The error of what no node has, or has free."""
    ray = _ray()
    asked = {of: amount for of, amount in needs.items() if amount}
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    fit = any(all(node.get(of, 0) >= amount for of, amount in asked.items()) for node in nodes)
    have = "; ".join(_words({of: node.get(of, 0) for of in needs}) for node in nodes) or "there is none"
    what = f"{name} found no place in {seconds:g} s: it asks for {_words(asked)}, which "
    what += "only nodes have that are full" if fit else "no node has"
    return UserError(f"{what} (nodes: {have})", "Ask for less (cluster.engine_*, cluster.service_*), or add a node")


def _words(resources: dict[str, float]) -> str:
    return ", ".join(f"{v / 2**30:.1f} GiB memory" if of == "memory" else f"{v:g} {of}" for of, v in resources.items())
