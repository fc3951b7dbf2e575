#!/bin/bash
set -euo pipefail
cat > /app/order.py <<'END'
import heapq, sys
after, waits = {}, {}
for line in sys.stdin:
    names = line.split()
    for name in names:
        after.setdefault(name, set())
        waits.setdefault(name, 0)
    if len(names) == 2 and names[1] not in after[names[0]]:
        after[names[0]].add(names[1])
        waits[names[1]] += 1
ready = [name for name, n in waits.items() if not n]
heapq.heapify(ready)
order = []
while ready:
    order.append(heapq.heappop(ready))
    for name in after[order[-1]]:
        waits[name] -= 1
        if not waits[name]:
            heapq.heappush(ready, name)
for name in order if len(order) == len(waits) else ["cycle"]:
    print(name)
END
