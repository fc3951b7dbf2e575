#!/bin/bash
set -euo pipefail
cd /app/photos
for f in IMG_*.JPG; do
  n=${f#IMG_}; n=${n%.JPG}
  if [[ $n =~ ^[0-9]+$ ]]; then mv "$f" "$(printf 'img_%04d.jpg' "$((10#$n))")"; fi
done
