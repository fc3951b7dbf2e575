#!/bin/bash
set -euo pipefail
python3 - <<'END'
import hashlib
from pathlib import Path
store, seen, removed = Path("/app/store"), set(), []
for path in sorted((p for p in store.rglob("*") if p.is_file()), key=lambda p: str(p).encode()):
    digest = hashlib.sha256(path.read_bytes()).digest()
    if digest in seen:
        removed.append(path.relative_to(store).as_posix())
        path.unlink()
    seen.add(digest)
Path("/app/removed.txt").write_text("".join(r + "\n" for r in removed))
END
