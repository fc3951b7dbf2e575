#!/bin/bash
set -euo pipefail
python3 - <<'END'
import csv, json
from collections import defaultdict
from decimal import Decimal
totals = defaultdict(Decimal)
with open("/app/sales.csv", newline="") as f:
    for row in csv.DictReader(f):
        if row["units"]:
            totals[row["region"]] += int(row["units"]) * Decimal(row["price"])
json.dump({region: round(float(total), 2) for region, total in totals.items()}, open("/app/totals.json", "w"))
END
