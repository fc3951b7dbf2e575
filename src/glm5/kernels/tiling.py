"""How large a tile of queries is: few enough elements to stay near the core, many enough to keep products efficient.

Every operator whose temporaries grow like queries x keys works in tiles of queries, so that no tensor of
length x length exists. Read next: `indexer`, `attention`.
"""

from __future__ import annotations

import torch

# Elements of a tile's largest temporary on a CPU: 4 MiB in fp32, about a core's second-level cache. Larger tiles were
# slower (prefill of 4,096 tokens on one thread: 1.30 s at 8 times this size, 1.01 s at this one).
TILE_ELEMENTS = 2**20
# A GPU wants many more in flight.
CUDA_FACTOR = 64


def tile_of(per_query: int, device: torch.device) -> int:
    """Queries per tile, at least 1, when each takes `per_query` elements of the largest temporary."""
    elements = TILE_ELEMENTS * (CUDA_FACTOR if device.type == "cuda" else 1)
    return max(1, elements // max(1, per_query))
