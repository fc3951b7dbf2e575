"""Programs against tests: the last fenced program of a response, in the sandbox, judged by `glm5.agents.code`.

A program has less time than the check (`info["check_s"]`, from the pool), so that one which hangs is wrong and never
without a verdict: a policy must not escape a bad reward by being slow. Where the host cannot isolate programs the
verifier is refused when it is loaded, before anything was drawn. Source: the report's section 3.2.
Read next: `glm5.agents.code`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from glm5.agents import code
from glm5.agents.sandbox import require
from glm5.posttrain.verify.verdict import Verdict, judged, no_verdict

__all__ = ["check", "require"]
_SHARE = 0.8  # of the check's time is the program's; the rest is for starting and ending what it runs in


def check(response: str, answer: Any, info: Mapping[str, Any]) -> Verdict:
    """Right if every case passes. `answer`: cases, see `glm5.agents.code.cases_of`.

    info: `wall_s`, seconds that a case may take; `partial: true`, the share of the cases that passed before the first
    that did not, in place of 0.
    """
    seconds = info.get("check_s")
    found = code.judge_response(response, answer, info, None if seconds is None else _SHARE * float(seconds))
    if found.verdict == "no_verdict":
        return no_verdict(found.detail)
    if info.get("partial") is True:
        return Verdict(found.passed / found.total, detail=found.detail)
    return judged(found.verdict == "correct", found.detail)
