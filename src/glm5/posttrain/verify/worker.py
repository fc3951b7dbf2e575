"""A process that verifies: one JSON object a line in, one out, until its input ends. Started by `pool`.

It limits itself: memory, and a clock that does not need Python to run, so that a check that hangs in C ends even when
nobody is left to kill this process. Read next: `pool`.
"""

from __future__ import annotations

import faulthandler
import json
import os
import resource
import sys
from typing import Any

from glm5.posttrain.verify.verdict import Verdict, find
from glm5.utils.errors import UserError


def answer(task: dict[str, Any]) -> dict[str, Any]:
    """What becomes of one line. With "load" alone: whether the verifier can be had."""
    try:
        check = find(task.get("load") or task["verifier"])
        if "load" in task:
            return {"reward": 0.0, "cause": "", "detail": "loaded"}
        verdict = check(task["response"], task["answer"], task["info"])
    except UserError as e:
        verdict = Verdict(None, "error", str(e))
    except MemoryError:
        verdict = Verdict(None, "error", "MemoryError: the check wants more memory than it may have")
    except Exception as e:  # a verifier's own fault, whatever it is, must not end the process
        verdict = Verdict(None, "error", f"{type(e).__name__}: {e}")
    return {"reward": verdict.reward, "cause": verdict.cause, "detail": verdict.detail[:2000]}


def main() -> None:
    """Arguments: bytes of memory that may be used, seconds that one check may take at the very most."""
    memory, seconds = int(sys.argv[1]), float(sys.argv[2])
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    # What a verifier prints goes where it harms nobody.
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for line in sys.stdin:
        faulthandler.dump_traceback_later(seconds, exit=True)
        found = answer(json.loads(line))
        faulthandler.cancel_dump_traceback_later()
        out.write(json.dumps(found) + "\n")
        out.flush()


if __name__ == "__main__":
    main()
