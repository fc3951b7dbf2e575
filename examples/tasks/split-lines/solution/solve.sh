#!/bin/bash
set -euo pipefail
cat > /app/split.py <<'END'
import hashlib, sys
from pathlib import Path
source, limit, directory = Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
directory.mkdir(parents=True, exist_ok=True)
parts = []
for line in source.read_bytes().splitlines(keepends=True):
    if parts and len(parts[-1]) + len(line) <= limit:
        parts[-1] += line
    else:
        parts.append(line)
manifest = ""
for i, part in enumerate(parts):
    (directory / f"part-{i:03d}").write_bytes(part)
    manifest += f"part-{i:03d} {len(part)} {hashlib.sha256(part).hexdigest()}\n"
(directory / "MANIFEST").write_text(manifest)
END
