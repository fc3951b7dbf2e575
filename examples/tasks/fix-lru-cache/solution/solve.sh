#!/bin/bash
set -euo pipefail
cat > /app/cache.py <<'END'
"""A cache of bounded size."""


class Cache:
    """Keeps the entries that were used last."""

    def __init__(self, size):
        if size < 1:
            raise ValueError("size must be at least 1")
        self.size = size
        self.entries = {}

    def get(self, key, default=None):
        if key not in self.entries:
            return default
        self.entries[key] = self.entries.pop(key)
        return self.entries[key]

    def put(self, key, value):
        self.entries.pop(key, None)
        self.entries[key] = value
        if len(self.entries) > self.size:
            del self.entries[next(iter(self.entries))]

    def __len__(self):
        return len(self.entries)
END
