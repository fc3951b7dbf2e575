"""What the HTTP layer asks of whatever makes the tokens: one `Backend`, in this process or another. Needs no torch.

`glm5.serve.runner` is the backend that runs an engine in a thread of its own; the tests have a scripted one. Read next:
`runner`, `http.app`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from glm5.serve.request import Delta, Request
from glm5.text.tokenizer import Tokenizer

# abort: end all requests. keep: stop between two steps, go on from there. retract: as keep, but the pages are given
# back and made again, so that weights may change. wait: let running requests end, hold new ones back.
PauseMode = Literal["abort", "keep", "retract", "wait"]
MEMORY_TAGS = ("weights", "kv_cache", "cuda_graph")


class Unavailable(Exception):
    """The backend cannot work now: starting, failed or gone. The message says which."""


@dataclass(frozen=True)
class WeightUpdate:
    """New weights, MTP block included.

    Args:
        source: disk reads the checkpoint `path`. tensor holds `tensors`, each the bytes of a safetensors file, one a
            tensor-parallel rank. distributed receives `names` (with `dtypes`, `shapes`) over the group `group_name`.
        load_format: how the sender packed the tensors; None is plain.
        flush_cache: drop every cached prefix; otherwise old prefixes stay and are no longer matched.
        weight_version: the name of these weights from now on; None keeps the old name.
    """

    source: Literal["disk", "tensor", "distributed"]
    path: str = ""
    tensors: tuple[bytes, ...] = ()
    names: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()
    group_name: str = ""
    load_format: str | None = None
    flush_cache: bool = True
    weight_version: str | None = None


@dataclass(frozen=True)
class WeightGroup:
    """The process group over which weights come: torch.distributed's terms, `rank_offset` being this engine's rank."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str = "weight_update_group"
    backend: str = "nccl"


@dataclass(frozen=True)
class Stats:
    """A snapshot. Gauges first, then counters since the start.

    Args:
        running, waiting: requests. cache_usage: share of the pages in use, 0 to 1. free_tokens: room in free pages.
        steps: of the engine. preemptions: of sequences. prefix_queries, prefix_hits: tokens looked up and found.
    """

    running: int = 0
    waiting: int = 0
    cache_usage: float = 0.0
    free_tokens: int = 0
    steps: int = 0
    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0


class Stream(Protocol):
    """What comes of a request. `aclose`, also before the first delta, ends the request and frees its pages."""

    def __aiter__(self) -> AsyncIterator[Delta]: ...
    async def __anext__(self) -> Delta: ...
    async def aclose(self) -> None: ...


class Backend(Protocol):
    """Makes tokens. All methods are called from one event loop.

    Attributes:
        tokenizer, model_name: of the model. context: tokens of prompt and answer together. vocab_size: ids below it.
        weight_version: the name of the weights that run now. paused: no step is made.
        failure: why the backend will never answer again, or None.
    """

    tokenizer: Tokenizer
    model_name: str
    context: int
    vocab_size: int

    @property
    def weight_version(self) -> str: ...

    @property
    def paused(self) -> bool: ...

    @property
    def failure(self) -> str | None: ...

    async def generate(self, request: Request) -> Stream:
        """Accept a request, and return what will come of it: each of its `n` answers ends with a `finish`.

        Raises:
            UserError: the request cannot be served. Unavailable: nothing can.
        """
        ...

    async def abort(self, rid: str | None) -> None:
        """End one request (None: all); its answers finish with `abort`. An unknown one is no error."""
        ...

    async def pause(self, mode: PauseMode) -> None:
        """Make no step after this returns, until `resume`. Requests are still accepted, and wait."""
        ...

    async def resume(self) -> None: ...

    async def flush(self) -> bool:
        """Forget every cached prefix; False if running requests prevent it."""
        ...

    async def update_weights(self, update: WeightUpdate) -> None:
        """Raises UserError if the new weights do not fit; the old ones then stay."""
        ...

    async def join_group(self, group: WeightGroup) -> None: ...

    async def leave_group(self, group_name: str) -> None: ...

    async def checksum(self) -> dict[str, str]:
        """SHA-256 of every parameter by its public name, MTP block included."""
        ...

    async def release_memory(self, tags: tuple[str, ...]) -> None:
        """Give memory back: of all engines, or, with a UserError, of none."""
        ...

    async def resume_memory(self, tags: tuple[str, ...]) -> None:
        """Take memory again: all engines of one server, or none."""
        ...

    async def probe(self, timeout_s: float) -> bool:
        """Whether a step ran within the time (while paused: whether the engine's thread still listens)."""
        ...

    def stats(self) -> Stats: ...

    async def info(self) -> dict[str, Any]:
        """The engine's own settings and figures, JSON values by name."""
        ...
