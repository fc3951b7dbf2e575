"""Several sources at stated ratios: which of them, and which of its samples, is sample i of a run. Next: `prompts`."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from glm5.data.hashing import permutation
from glm5.utils.errors import ConfigError


class Mixture:
    """A function of the sample's number alone, so that a resumed run goes on with the same samples.

    Sample j of a source is due at time (j + 1/2) / share; samples come in the order of their times, and where these are
    equal in the order of the sources. Of any first n samples each source thus has its share to within half the number
    of sources, and no chance is involved.

    Args:
        ratios: weight of each source, above 0; only their proportion counts.

    Raises:
        ConfigError: there is no source, or a ratio that is not above 0.
    """

    def __init__(self, ratios: Mapping[str, float]) -> None:
        if not ratios:
            raise ConfigError("ratios", {}, "must name at least one source")
        for name, ratio in ratios.items():
            if not 0 < ratio < float("inf"):
                raise ConfigError(f"ratios[{name}]", ratio, "must be above 0")
        total = math.fsum(ratios.values())
        self.shares = {name: ratio / total for name, ratio in ratios.items()}

    def samples(self, index: int, count: int) -> list[tuple[str, int]]:
        """(source, number within the source) of samples `index` to `index + count - 1`.

        Raises:
            ConfigError: `index` is negative.
        """
        if index < 0:
            raise ConfigError("index", index, "must be 0 or more")
        # Up to this time at most `index` samples were due; from here on they are put in order.
        start = max(0.0, index - len(self.shares))
        taken = {name: max(0, math.ceil(share * start - 0.5)) for name, share in self.shares.items()}
        found: list[tuple[str, int]] = []
        at = sum(taken.values())
        while at < index + count:
            name = min(taken, key=lambda n: (taken[n] + 0.5) / self.shares[n])  # of equals the first
            if at >= index:
                found.append((name, taken[name]))
            taken[name] += 1
            at += 1
        return found


def order_of(source: str, size: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """In what order a source's samples come in an epoch: sources of one size do not go together."""
    own = int.from_bytes(hashlib.sha256(source.encode()).digest()[:4], "little")
    return permutation(size, seed ^ own, epoch)
