"""A cache of bounded size."""


class Cache:
    """Keeps the entries that were used last."""

    def __init__(self, size):
        self.size = size
        self.entries = {}

    def get(self, key, default=None):
        return self.entries.get(key) or default

    def put(self, key, value):
        if len(self.entries) >= self.size:
            del self.entries[next(iter(self.entries))]
        self.entries[key] = value

    def __len__(self):
        return len(self.entries)
