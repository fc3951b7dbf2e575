"""Verifiers: whether an answer is right. Each is a function that is called by name, in a process that can be killed.

Needs no torch. Read next: `verdict`, `pool`; then `maths`, `short`, `gym`.
"""

from glm5.posttrain.verify.pool import VerifierPool
from glm5.posttrain.verify.verdict import VERIFIERS, Verdict

__all__ = ["VERIFIERS", "Verdict", "VerifierPool"]
