"""Prompts with a Python tool, judged by verifiers in their pool."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from glm5.agents.protocol import Result
from glm5.agents.sandbox import SandboxError, require
from glm5.agents.service import Hosted
from glm5.posttrain.prompts import prompts_from_rows
from glm5.posttrain.verify.pool import VerifierPool
from glm5.posttrain.verify.service import with_python
from glm5.utils.errors import DataError, UserError
from glm5.utils.outcome import Outcome
from support.scripted_chat import call, rollout, say, scripted


def row(**others: Any) -> dict[str, Any]:
    return {"prompt": "1/2 + 1/3?", "answer": "5/6", "verifier": "maths", "domain": "maths", **others}


def test_a_problem_is_worked_out_and_judged() -> None:
    try:
        require()
    except SandboxError as e:
        pytest.skip(str(e))
    prompts = prompts_from_rows([row(), row(verifier="number", answer="no number")])

    def says(history: list[dict[str, Any]]) -> dict[str, Any]:
        seen = [m["content"] for m in history if m["role"] == "tool"]
        if not seen:
            return call("python", code="from fractions import Fraction as F\nF(1, 2) + F(1, 3)")
        assert seen == ["Fraction(5, 6)"]
        return say(r"So it is \boxed{\frac56}.")

    async def main(url: str, pool: VerifierPool) -> list[Result]:
        hosted = Hosted(with_python("maths", prompts, pool))
        await hosted.start()
        try:
            return [await hosted.ask(rollout(url, index=i)) for i in (0, 1)]
        finally:
            await hosted.stop()

    with VerifierPool(workers=1, timeout_s=60) as pool, scripted(says) as (url, requests):
        right, unknown = asyncio.run(main(url, pool))
        assert pool.counts == {"right": 1, "error": 1}
    assert (right.outcome, right.reward) == (Outcome.OK, 1.0), right
    assert (unknown.outcome, unknown.reward) == (Outcome.VERIFIER_NO_VERDICT, None)
    assert unknown.detail.startswith("error: ")
    assert requests[0]["messages"][1]["content"] == "1/2 + 1/3?"


def test_what_cannot_be_asked_is_refused() -> None:
    with VerifierPool(workers=1, timeout_s=60) as pool:
        with pytest.raises(UserError, match="is not known"):
            with_python("x", prompts_from_rows([row(verifier="no-such")]), pool)
        several = row(prompt=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1?"}])
        with pytest.raises(DataError, match="more than one question"):
            with_python("x", prompts_from_rows([several]), pool)
        with pytest.raises(DataError, match="has no problem"):
            with_python("x", [], pool)
