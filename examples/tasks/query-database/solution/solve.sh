#!/bin/bash
set -euo pipefail
python3 - <<'END'
import sqlite3
rows = sqlite3.connect("/app/shop.db").execute(
    "SELECT name, SUM(cents) FROM orders JOIN customers ON customers.id = customer WHERE state = 'paid' "
    "GROUP BY customers.id ORDER BY SUM(cents) DESC, name LIMIT 3")
open("/app/best.txt", "w").write("".join(f"{name},{cents}\n" for name, cents in rows))
END
