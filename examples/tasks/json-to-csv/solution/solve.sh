#!/bin/bash
set -euo pipefail
cat > /app/flatten.py <<'END'
import csv, json, sys

def flatten(value, prefix=""):
    flat = {}
    for key, item in value.items():
        if isinstance(item, dict):
            flat.update(flatten(item, f"{prefix}{key}."))
        else:
            flat[prefix + key] = item
    return flat

def show(value):
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    return json.dumps(value, separators=(",", ":")) if isinstance(value, list) else str(value)

rows = [flatten(json.loads(line)) for line in sys.stdin if line.strip()]
header = sorted({key for row in rows for key in row})
out = csv.writer(sys.stdout, lineterminator="\n")
out.writerow(header)
out.writerows([[show(row.get(key)) for key in header] for row in rows])
END
