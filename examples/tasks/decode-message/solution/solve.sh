#!/bin/bash
set -euo pipefail
python3 - <<'END'
import base64, codecs
text = bytes.fromhex(base64.b64decode(open("/app/message.txt").read()).decode()).decode()
open("/app/plain.txt", "w").write(codecs.decode(text, "rot13")[::-1] + "\n")
END
