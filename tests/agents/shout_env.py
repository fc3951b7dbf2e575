"""A small environment of the package verifiers: say a word in capitals, in two turns. For tests of its adapter."""

from __future__ import annotations

from typing import Any

import httpx
import verifiers.v1 as vf
from verifiers.v1.runtimes import ProgramResult

__all__ = ["ShoutHarness", "ShoutTaskset"]


class ShoutData(vf.TaskData):
    word: str


class ShoutTask(vf.Task[ShoutData]):
    @vf.reward
    async def loud(self, trace: vf.Trace) -> float:
        said = str(trace.nodes[-1].message.content)
        if said == "BREAK THE JUDGE":
            raise ZeroDivisionError("the judge's own fault")
        return float(said == self.data.word.upper())

    @vf.metric
    async def letters(self, trace: vf.Trace) -> float:
        return float(len(str(trace.nodes[-1].message.content)))


class ShoutTaskset(vf.Taskset[ShoutTask, vf.TasksetConfig]):
    def load(self) -> list[ShoutTask]:
        words = ("fjord", "ox")
        return [ShoutTask(ShoutData(prompt=f"Shout {w}", word=w), self.config.task) for w in words]


class ShoutHarness(vf.Harness[vf.HarnessConfig]):
    """Asks in this process: the first answer is told to be too quiet, the second one counts."""

    NEEDS_CONTAINER = False
    EXECUTES_CODE = False

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: vf.TaskData
    ) -> ProgramResult:
        history: list[dict[str, Any]] = [{"role": "user", "content": data.prompt}]
        async with httpx.AsyncClient(timeout=60) as http:
            for _ in range(2):
                answer = await http.post(
                    f"{endpoint}/chat/completions",
                    json={"model": ctx.model, "messages": history},
                    headers={"Authorization": f"Bearer {secret}"},
                )
                if answer.status_code != 200:
                    return ProgramResult(exit_code=1, stdout="", stderr=answer.text)
                history += [answer.json()["choices"][0]["message"], {"role": "user", "content": "Louder!"}]
        return ProgramResult(exit_code=0, stdout="", stderr="")
