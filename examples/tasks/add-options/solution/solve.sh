#!/bin/bash
set -euo pipefail
cat > /app/rows.py <<'END'
"""Print the lines of standard input, sorted."""

import argparse
import sys


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--reverse", action="store_true")
    parser.add_argument("--limit", type=int)
    options = parser.parse_args()
    if options.limit is not None and options.limit < 0:
        parser.error("--limit must not be below 0")
    lines = sys.stdin.read().splitlines()
    for line in sorted(lines, reverse=options.reverse)[: options.limit]:
        print(line)


main()
END
