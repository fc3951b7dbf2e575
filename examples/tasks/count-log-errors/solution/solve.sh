#!/bin/bash
set -euo pipefail
awk '$2 == "ERROR" { sub(":", "", $3); n[$3]++ } END { for (s in n) print s, n[s] }' /app/server.log |
  sort -k2,2nr -k1,1 > /app/report.txt
