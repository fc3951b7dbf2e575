"""Prompts with a Python tool as a task service: `glm5.agents.services.maths`, judged by verifiers in their pool.

Read next: `pool`, `glm5.agents.services.maths`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from glm5.agents.services.maths import Problem, PythonToolService
from glm5.posttrain.prompts import Prompt
from glm5.posttrain.verify.pool import Task, VerifierPool
from glm5.utils.errors import DataError


def with_python(
    name: str, prompts: Sequence[Prompt], pool: VerifierPool, turns: int = 8, sampling: Mapping[str, Any] | None = None
) -> PythonToolService:
    """A service of prompts whose answers may be worked out in Python.

    Args:
        prompts: as `glm5.posttrain.prompts.read_prompts` gives them; of each the last message is asked.
        pool: stays open as long as the service runs; its counts say what came of all answers.

    Raises:
        UserError: a verifier cannot be had.
    """
    pool.require(sorted({prompt.verifier for prompt in prompts}))
    problems = [Problem(_question(p), p.answer, p.verifier, p.info) for p in prompts]

    def judge(problem: Problem, response: str) -> tuple[float | None, str]:
        verdict = pool.check(Task(problem.verifier, response, problem.answer, problem.info))
        return verdict.reward, verdict.detail if verdict.known else f"{verdict.cause}: {verdict.detail}"

    return PythonToolService(name, problems, judge, turns=turns, sampling=sampling)


def _question(prompt: Prompt) -> str:
    content = prompt.messages[-1].content
    if len(prompt.messages) != 1 or not isinstance(content, str):
        raise DataError(f"prompt {prompt.id} is more than one question", "Give a text as its prompt")
    return content
