#!/bin/bash
set -euo pipefail
cat > /app/life.py <<'END'
import sys
lines = sys.stdin.read().split()
steps, grid = int(lines[0]), lines[1:]
h, w = len(grid), len(grid[0])
for _ in range(steps):
    def near(y, x):
        return sum(grid[(y + i) % h][(x + j) % w] == "#" for i in (-1, 0, 1) for j in (-1, 0, 1) if i or j)
    grid = ["".join("#" if near(y, x) == 3 or (near(y, x) == 2 and grid[y][x] == "#") else "." for x in range(w))
            for y in range(h)]
print("\n".join(grid))
END
