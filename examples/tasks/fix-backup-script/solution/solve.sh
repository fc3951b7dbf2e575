#!/bin/bash
set -euo pipefail
cat > /app/backup.sh <<'END'
#!/bin/bash
# Usage: backup.sh SOURCE TARGET
set -euo pipefail
mkdir -p "$2"
source=$(cd "$1" && pwd)
target=$(cd "$2" && pwd)
count=0
while IFS= read -r -d '' f; do
  relative=${f#"$source"/}
  mkdir -p "$target/$(dirname "$relative")"
  cp "$f" "$target/$relative.bak"
  count=$((count + 1))
done < <(find "$source" -type f -name '*.txt' -print0)
echo "$count"
END
