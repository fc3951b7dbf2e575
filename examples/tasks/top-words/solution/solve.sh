#!/bin/bash
set -euo pipefail
cat > /app/top_words.sh <<'END'
tr 'A-Z' 'a-z' < "$1" | tr -cs 'a-z' '\n' | grep . | sort | uniq -c | sort -k1,1nr -k2,2 | head -n "$2" | awk '{ print $1, $2 }'
END
