#!/bin/bash
set -euo pipefail
cat > /app/intervals.py <<'END'
"""Unions of half-open intervals."""


def merge(intervals):
    """The union of (start, end) pairs as a sorted list of disjoint pairs."""
    merged = []
    for start, end in sorted(i for i in intervals if i[0] < i[1]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged
END
