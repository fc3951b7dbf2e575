"""How an engine uses its machine. Needs no torch. Read next: `engine`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class EngineConfig:
    """How an engine uses its machine."""

    pages: int = 0
    """Pages of 64 tokens on the device; 0 is as many as `memory_gib` holds."""
    memory_gib: float = 1.0
    """Of pages on the device, where `pages` is 0."""
    host_pages: int = 0
    """Pages in host memory, to which unused prefixes move before they are forgotten."""
    eviction: Literal["lru", "frequency"] = "lru"
    """Which unused prefix goes first: the one that was used longest ago, or least often."""
    kv_cache_dtype: Literal["auto", "fp8_e4m3"] = "auto"
    """What pages hold: auto is the model's dtype; fp8_e4m3 takes little more than half of bfloat16's bytes, with a
    scale for every row, and is not exact."""
    context: int = 0
    """Tokens of prompt and answer together; 0 is the model's maximum. Where the pages hold fewer, that counts."""
    drafts: int = 0
    """Ids that the MTP block drafts per step, which changes no answer; 0 decodes plainly."""
    max_running: int = 64
    """Sequences at a time."""
    max_batched_tokens: int = 4096
    """Tokens of one step."""
    chunk: int = 2048
    """Tokens of one prompt in a step."""
    overlap: bool = True
    """While the model runs, tell what the last step gave, take new requests and find pages for the next step, which
    changes no token."""
    invariant: bool = False
    """Log-probabilities that do not depend on what runs beside a request, nor on chunks or cached prefixes, to the last
    bit, more slowly: on a GPU, or on a CPU in float32."""
    cuda_graphs: bool = True
    """Record decode steps as CUDA graphs, and replay them: on a GPU. It changes no answer in the invariant mode, and
    otherwise only what rounding decides, since texts up to the indexer's k are then attended to in another form."""
