"""What a verifier says, and which verifiers there are.

A verifier is a function `check(response, answer, info) -> Verdict`: the text that the model gave, the expected answer,
and whatever else its data has. "Wrong" and "no verdict" are two things: a wrong answer has a reward of 0 and is learned
from; where a verifier hung, crashed or could not judge there is no reward at all, and the answer leaves its group
(`glm5.posttrain.advantage.repair`). An answer that nobody can read is wrong. Read next: `pool`.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from glm5.utils.errors import UserError

Cause = Literal["", "timeout", "crash", "error"]


@dataclass(frozen=True)
class Verdict:
    """Args:
    reward: in [0, 1], or None: there is no verdict.
    cause: why there is none. timeout: it took too long; crash: its process died; error: it failed, or cannot judge
        such a task.
    detail: for a reader: what was compared, or the last words of what failed.
    """

    reward: float | None
    cause: Cause = ""
    detail: str = ""

    def __post_init__(self) -> None:
        if (self.reward is None) != bool(self.cause):
            raise ValueError(f"reward={self.reward}, cause={self.cause!r}: exactly one of them")
        if self.reward is not None and not 0 <= self.reward <= 1:
            raise ValueError(f"reward={self.reward}: must lie in [0, 1]")

    @property
    def known(self) -> bool:
        return self.reward is not None


def judged(right: bool, detail: str = "") -> Verdict:
    """Right or wrong."""
    return Verdict(1.0 if right else 0.0, detail=detail)


def no_verdict(detail: str) -> Verdict:
    """The verifier cannot judge this task, whatever the answer is."""
    return Verdict(None, "error", detail)


Check = Callable[[str, Any, Mapping[str, Any]], Verdict]

# Names in data, and where the function is. Users name their own as "module:function".
VERIFIERS = {
    "maths": "glm5.posttrain.verify.maths:check",
    "choice": "glm5.posttrain.verify.short:choice",
    "short": "glm5.posttrain.verify.short:short",
    "number": "glm5.posttrain.verify.short:number",
    "reasoning-gym": "glm5.posttrain.verify.gym:check",
    "code": "glm5.posttrain.verify.code:check",
    "rules": "glm5.posttrain.reward.rules:check",
}


def find(name: str) -> Check:
    """The verifier of this name. Its module may have a function `require()`, which raises where checks cannot run.

    Raises:
        UserError: there is none, it cannot be imported, or it cannot run here.
    """
    place = VERIFIERS.get(name, name)
    module, colon, function = place.partition(":")
    if not colon:
        near = difflib.get_close_matches(name, VERIFIERS, n=1)
        hint = f"Did you mean {near[0]!r}?" if near else f"There are {', '.join(VERIFIERS)}; yours is module:function"
        raise UserError(f"verifier {name!r} is not known", hint)
    try:
        found = importlib.import_module(module)
        check = getattr(found, function)
    except ImportError as e:
        mend = "Install glm5[rl]" if name in VERIFIERS else "Check its name, and put its directory on PYTHONPATH"
        raise UserError(f"verifier {name!r} cannot be imported: {e}", mend) from None
    except AttributeError:
        raise UserError(f"verifier {name!r}: {module} has no {function}", "Check its name") from None
    if not callable(check):
        raise UserError(f"verifier {name!r} is no function", "Name one that takes (response, answer, info)")
    getattr(found, "require", lambda: None)()
    return check
