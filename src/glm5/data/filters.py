"""Removing copies: exact ones by hash, near ones by MinHash, and training text that repeats held-out text.

Documents are compared as sets of shingles, runs of five words or signs. Inside a corpus two are near duplicates if
the Jaccard similarity of their sets reaches a threshold: MinHash signatures, cut into bands, propose pairs, and the
exact similarity decides each, so that a pair can be missed (2 in 10,000 at similarity 0.7) but none is wrong. Against
held-out documents, which are few, every overlap is counted exactly; there a training document goes also when it
contains most of a much shorter held-out one, which similarity would not show. Held-out texts too short to tell a
copy from a common licence header are compared by similarity alone.

Hash functions are fixed, and of a set of copies the smallest id survives, so results do not depend on the order of
documents, on shards, or on the machine. Sources: Broder, "On the resemblance and containment of documents" (1997);
report section 2.2, which deduplicates likewise. Read next: `packing`.
"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from glm5.data.corpus import Document
from glm5.data.hashing import U64, mix64

SHINGLE_WORDS = 5
BANDS, ROWS = 32, 4  # finds a pair of similarity s with probability 1 - (1 - s^4)^32: 0.9998 at 0.7, 0.05 at 0.2
CONTAINMENT_FLOOR = 100  # shingles that a held-out text must have before containing it counts
_WORD = re.compile(r"\w+|[^\w\s]")


@dataclass(frozen=True)
class Copy:
    """A document that was removed, because it resembles one that stayed (or a held-out one)."""

    id: str
    of: str
    similarity: float


def drop_exact_copies(documents: Iterable[Document]) -> tuple[list[Document], list[Copy]]:
    """Of documents with the same text, keep the one with the smallest id. Both results are sorted by id."""
    first: dict[bytes, str] = {}
    kept, copies = [], []
    for document in sorted(documents, key=lambda document: document.id):
        digest = hashlib.sha256(document.text.encode()).digest()
        original = first.setdefault(digest, document.id)
        if original == document.id:
            kept.append(document)
        else:
            copies.append(Copy(document.id, original, 1.0))
    return kept, copies


def drop_near_copies(documents: Iterable[Document], threshold: float = 0.7) -> tuple[list[Document], list[Copy]]:
    """Keep one document, the one with the smallest id, of every set that near duplicates connect.

    Args:
        documents: with unique ids.
        threshold: the Jaccard similarity from which two documents count as copies, above 0 and at most 1.

    Returns:
        The documents kept and what was dropped, sorted by id. `Copy.similarity` is that to the nearest copy.
    """
    ordered = sorted(documents, key=lambda document: document.id)
    shingles = [shingle_set(document.text) for document in ordered]
    parent = list(range(len(ordered)))
    nearest = [0.0] * len(ordered)
    for a, b in _candidates([signature(s) for s in shingles]):
        similarity = jaccard(shingles[a], shingles[b])
        if similarity >= threshold:
            low, high = sorted((_root(parent, a), _root(parent, b)))
            parent[high] = low
            nearest[a], nearest[b] = max(nearest[a], similarity), max(nearest[b], similarity)
    kept = [document for n, document in enumerate(ordered) if parent[n] == n]
    copies = [
        Copy(document.id, ordered[_root(parent, n)].id, nearest[n])
        for n, document in enumerate(ordered)
        if parent[n] != n
    ]
    return kept, copies


def drop_copies_of(
    held_out: Sequence[Document], documents: Iterable[Document], threshold: float = 0.5
) -> tuple[list[Document], list[Copy]]:
    """Drop the training documents that resemble or contain a held-out one, so that evaluation means something.

    Args:
        held_out: the documents to protect.
        documents: those to choose from.
        threshold: drop from this Jaccard similarity, or from this share of the held-out document's shingles if it
            has `CONTAINMENT_FLOOR` or more.

    Returns:
        The documents kept, in their order, and what was dropped, each with the held-out id that it repeats most;
        `Copy.similarity` is the larger of the two measures.
    """
    sets = [shingle_set(document.text) for document in held_out]
    sizes = np.array([len(s) for s in sets], dtype=np.int64)
    shingles = np.concatenate([np.zeros(0, np.uint64), *sets])
    order = np.argsort(shingles, kind="stable")
    owners = np.repeat(np.arange(len(sets)), sizes)[order]
    values, starts = np.unique(shingles[order], return_index=True)
    counts = np.diff(starts, append=len(shingles))

    kept, copies = [], []
    for document in documents:
        own = shingle_set(document.text)
        met = np.flatnonzero(np.isin(values, own, assume_unique=True))
        # The owners of every shingle met, run after run: one run of `counts` entries from `starts` each.
        runs = np.repeat(starts[met] - np.cumsum(counts[met]) + counts[met], counts[met])
        common = np.bincount(owners[runs + np.arange(len(runs))], minlength=len(sets))
        similarity = common / np.maximum(sizes + len(own) - common, 1)
        contained = np.where(sizes >= CONTAINMENT_FLOOR, common / np.maximum(sizes, 1), 0.0)
        share = np.maximum(similarity, contained)
        worst = int(share.argmax()) if len(sets) else -1
        if worst >= 0 and share[worst] >= threshold:
            copies.append(Copy(document.id, held_out[worst].id, float(share[worst])))
        else:
            kept.append(document)
    return kept, copies


def shingle_set(text: str) -> U64:
    """Sorted distinct 64-bit hashes of the text's runs of `SHINGLE_WORDS` words or signs; blanks do not count.

    A shorter text is one shingle, and a text without words has none.
    """
    words = _WORD.findall(text)
    codes = {word: int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest(), "big") for word in set(words)}
    hashes = np.array([codes[word] for word in words], dtype=np.uint64)
    count = min(len(words), SHINGLE_WORDS)
    if count == 0:
        return hashes
    mixed = np.zeros(len(words) - count + 1, dtype=np.uint64)
    for offset in range(count):
        mixed = mix64(mixed + hashes[offset : offset + len(mixed)])
    return np.unique(mixed)


def signature(shingles: U64) -> U64:
    """MinHash: for each of `BANDS * ROWS` hash functions the least value over the shingles; empty for an empty set.

    Two sets agree at a place with a probability equal to their Jaccard similarity.
    """
    if not len(shingles):
        return shingles
    seeds = mix64(np.arange(1, BANDS * ROWS + 1, dtype=np.uint64))
    return np.array([mix64(shingles ^ seed).min() for seed in seeds], dtype=np.uint64)


def jaccard(a: U64, b: U64) -> float:
    """Size of the intersection over size of the union of two sorted sets; 0 if both are empty."""
    common = len(np.intersect1d(a, b, assume_unique=True))
    union = len(a) + len(b) - common
    return common / union if union else 0.0


def _candidates(signatures: Sequence[U64]) -> Iterator[tuple[int, int]]:
    """Every pair (a, b), a < b, whose signatures agree in all rows of at least one band; each once."""
    seen: set[tuple[int, int]] = set()
    for band in range(BANDS):
        buckets: dict[bytes, list[int]] = defaultdict(list)
        for n, values in enumerate(signatures):
            if len(values):
                buckets[values[band * ROWS : (band + 1) * ROWS].tobytes()].append(n)
        for members in buckets.values():
            for i, a in enumerate(members):
                for b in members[i + 1 :]:
                    if (a, b) not in seen:
                        seen.add((a, b))
                        yield a, b


def _root(parent: list[int], n: int) -> int:
    while parent[n] != n:
        parent[n] = parent[parent[n]]
        n = parent[n]
    return n
