#!/bin/bash
set -euo pipefail
cat > /app/merge.py <<'END'
import configparser, sys

def load(path):
    parser = configparser.ConfigParser(interpolation=None)
    parser.optionxform = str
    parser.read(path)
    return {name: dict(parser[name]) for name in parser.sections()}

merged = load(sys.argv[1])
for name, keys in load(sys.argv[2]).items():
    merged.setdefault(name, {}).update(keys)
blocks = []
for name in sorted(merged):
    lines = [f"{k} = {v}" for k, v in sorted(merged[name].items()) if v != "unset"]
    if lines:
        blocks.append("\n".join([f"[{name}]", *lines]) + "\n")
print("\n".join(blocks), end="")
END
