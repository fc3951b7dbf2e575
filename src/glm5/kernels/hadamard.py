"""The Hadamard rotation: it spreads an outlier over its whole row, so that a row of 8-bit numbers loses less.

H is symmetric and orthogonal: it is its own inverse, and (H q) . (H k) = q . k, so that index queries and keys may both
be turned before they are rounded. Source: QuaRot (Ashkboos et al., 2024); DeepSeek-V3.2 turns its index queries and
keys so. Read next: `indexer_fp8`.
"""

from __future__ import annotations

import torch
from torch import Tensor


def hadamard(x: Tensor, normalise: bool = True) -> Tensor:
    """x H along the last dimension in fp32, H[i, j] = (-1)^popcount(i & j) / sqrt(n), by log2(n) rounds of sums.

    Args:
        x: [..., n], n a power of two.
        normalise: without it, H has entries 1 and -1, whole numbers stay whole, and H H = n.

    Raises:
        ValueError: n is not a power of two.
    """
    n = x.shape[-1]
    if n & (n - 1) or n == 0:
        raise ValueError(f"hadamard takes widths that are powers of two, not {n}")
    y, step = x.float(), 1
    while step < n:
        a, b = y.unflatten(-1, (-1, 2, step)).unbind(-2)
        y = torch.stack((a + b, a - b), -2).flatten(-3)
        step *= 2
    return y * n**-0.5 if normalise else y
