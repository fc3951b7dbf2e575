"""The verifier of this task. See grade.py."""

import json

from grade import begin, finish, read

begin()
try:
    found = json.loads(read("/app/totals.json") or "null")
except ValueError:
    found = None
finish({"the totals": found == {"north": 62.47, "south": 12.4, "east": 22.81}})
