#!/bin/bash
set -euo pipefail
cat > /app/retry.py <<'END'
"""Call again what may fail."""


def retry(function, attempts, on=(Exception,)):
    if attempts < 1:
        raise ValueError("attempts must be at least 1")
    for left in reversed(range(attempts)):
        try:
            return function()
        except tuple(on):
            if not left:
                raise
END
