#!/bin/bash
set -euo pipefail
cat > /app/brackets.py <<'END'
import sys

PAIRS = {")": "(", "]": "[", "}": "{"}

def judge(line):
    stack, quoted, skip = [], False, False
    for at, c in enumerate(line, 1):
        if skip:
            skip = False
        elif quoted:
            skip, quoted = c == "\\", c != '"'
        elif c == '"':
            quoted = True
        elif c in "([{":
            stack.append(c)
        elif c in PAIRS and (not stack or stack.pop() != PAIRS[c]):
            return at
    return len(line) + 1 if stack or quoted else "ok"

for line in sys.stdin:
    print(judge(line.rstrip("\n")))
END
