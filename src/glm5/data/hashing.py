"""One fixed hash for everything that must come out alike on every machine and with every numpy.

numpy's own generators may change their streams between versions, and Python salts `hash`. Read next: `filters`,
which draws its hash functions from here, and `loader`, which orders its samples so.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

U64 = NDArray[np.uint64]


def mix64(x: U64) -> U64:
    """A bijection of 64-bit words that spreads every input bit over all output bits.

    Source: Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (2014), SplitMix64.
    """
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def permutation(size: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """An order of `range(size)` that depends on the three numbers alone. Distinct seeds give unrelated orders.

    Args:
        size: how many.
        seed: any integer; taken modulo 2^64.
        epoch: which pass, from 0.
    """
    key = mix64(np.array([seed % 2**64], dtype=np.uint64))
    key = mix64(key ^ np.array([epoch], dtype=np.uint64))
    # `mix64` is a bijection, so no two keys are equal and the sort has one answer.
    return np.argsort(mix64(np.arange(size, dtype=np.uint64) ^ key), kind="stable")
