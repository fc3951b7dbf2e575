"""The noise of a draw: a hash of a seed, an answer's number and a position, so that it needs no state.

Whoever draws at one position with one seed, with drafts or without, alone or in a batch, draws with the same noise.
Read next: `sampling`, and `glm5.serve.race` for a batch.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import blake2b

import torch
from torch import Tensor


def noise_key(seed: int, index: int, position: int) -> tuple[int, int]:
    """64 bits of a hash that name the noise of one draw, as two signed words."""
    return struct.unpack("<ii", blake2b(struct.pack("<qqq", seed, index, position), digest_size=8).digest())


def exponentials(keys: Sequence[tuple[int, int]], width: int, device: torch.device) -> Tensor:
    """Noise of the exponential distribution, one row a key, fp32 [len(keys), width]: a hash of key and column.

    Two rounds of the 32-bit finalizer of MurmurHash3, each on one word of the key; 31 bits make a uniform number.
    """
    words = torch.tensor(keys, dtype=torch.int32, device=device)
    h = torch.arange(width, dtype=torch.int32, device=device) ^ words[:, :1]
    _mix(h)
    h += words[:, 1:]
    _mix(h)
    # Small numbers decide a race, and float32 is fine near 0, so it is 1 that is cut off.
    uniform = ((h & 0x7FFFFFFF).float() + 0.5).mul_(2.0**-31).clamp_(max=1 - 2.0**-24)
    return uniform.neg_().log1p_().neg_()


def _mix(h: Tensor) -> None:
    """MurmurHash3's finalizer, in place on int32: shifts are made logical, products wrap."""
    h ^= (h >> 16) & 0xFFFF
    h *= 0x85EBCA6B - 2**32
    h ^= (h >> 13) & 0x7FFFF
    h *= 0xC2B2AE35 - 2**32
    h ^= (h >> 16) & 0xFFFF
