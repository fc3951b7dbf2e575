#!/bin/bash
set -euo pipefail
f=$(grep -rlx 'state: active' /app/archive)
sed -n 's/^token: //p' "$f" > /app/answer.txt
