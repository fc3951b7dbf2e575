"""Unions of half-open intervals."""


def merge(intervals):
    """The union of (start, end) pairs as a sorted list of disjoint pairs."""
    intervals.sort()
    merged = []
    for start, end in intervals:
        if merged and start < merged[-1][1]:
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((start, end))
    return merged
