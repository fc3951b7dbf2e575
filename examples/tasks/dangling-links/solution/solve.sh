#!/bin/bash
set -euo pipefail
cd /app/links
find . -xtype l -printf '%f\n' | LC_ALL=C sort > /app/dangling.txt
find . -xtype l -delete
