#!/bin/bash
set -euo pipefail
cat > /app/rpn.py <<'END'
import re, sys
from fractions import Fraction

def result(line):
    stack = []
    for word in line.split():
        if re.fullmatch(r"-?[0-9]+", word):
            stack.append(Fraction(int(word)))
            continue
        if word not in ("+", "-", "*", "/") or len(stack) < 2:
            return "error"
        b, a = stack.pop(), stack.pop()
        if word == "/" and not b:
            return "error"
        stack.append({"+": lambda: a + b, "-": lambda: a - b, "*": lambda: a * b, "/": lambda: a / b}[word]())
    return str(stack[0]) if len(stack) == 1 else "error"

for line in sys.stdin:
    print(result(line))
END
