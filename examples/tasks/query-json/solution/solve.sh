#!/bin/bash
set -euo pipefail
cat > /app/query.py <<'END'
import re

STEP = re.compile(r'\.?(?P<key>[^.\[\]"]+)|\[(?P<index>-?\d+)\]|\["(?P<quoted>[^"]*)"\]')


def get(value, path, default=None):
    at, steps = 0, []
    while at < len(path):
        found = STEP.match(path, at)
        dot = found and found["key"] is not None and found.group().startswith(".")
        if not found or (found["key"] is not None and dot == (at == 0)):
            raise ValueError(path)
        index = found["index"]
        steps.append(int(index) if index is not None else found["key"] if found["quoted"] is None else found["quoted"])
        at = found.end()
    for step in steps:
        if isinstance(step, int):
            if not isinstance(value, list) or not -len(value) <= step < len(value):
                return default
        elif not isinstance(value, dict) or step not in value:
            return default
        value = value[step]
    return value
END
