"""A Python tool inside a trajectory: what a model calls runs in the sandbox, while the engine goes on with others.

Each answer that calls gets an interpreter of its own at its first call (`glm5.agents.session`), in which variables last
to its end. What a model does wrong, a tool that is not there or arguments of another kind, is told to it as the call's
result. Where the sandbox fails the answer has no verdict: it is no fault of the policy's. Source: report, section 3.2
(tool-integrated reasoning). Read next: `drawing`, which asks; `glm5.agents.services.maths`, the same as a task service.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Hashable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace

from glm5.agents.sandbox import SandboxError, require
from glm5.agents.services.tools import Tool
from glm5.agents.session import LIMITS, PythonSession
from glm5.text.events import ParsedCall
from glm5.text.messages import Tool as Offered
from glm5.text.messages import tools_from_openai

CODE = {"code": ("string", "what to run")}
DESCRIPTION = "Run Python code. What it prints, and the value of its last line, comes back; variables last."


@dataclass
class Results:
    """Of the calls of one turn, in their order; or why there are none."""

    texts: list[str] = field(default_factory=list)
    failure: str = ""


class PythonTool:
    """Runs calls beside whoever asks. Not to be used by several threads.

    Args:
        wall_s: seconds of each call. sessions: interpreters at a time; the next answer that calls waits for one.

    Raises:
        SandboxError: this host cannot isolate the model's code.
    """

    def __init__(self, wall_s: float, sessions: int) -> None:
        require()
        self.limits, self.most = replace(LIMITS, wall_s=wall_s), sessions
        self.offered: Offered = tools_from_openai([self._tool(None).told])[0]
        self._open: dict[Hashable, PythonSession] = {}
        self._asked: deque[tuple[Hashable, Sequence[ParsedCall]]] = deque()
        self._running: dict[Future[Results], Hashable] = {}
        self._threads = ThreadPoolExecutor(min(self.most, os.cpu_count() or 1), thread_name_prefix="python-tool")

    def _tool(self, session: PythonSession | None) -> Tool:
        def run(code: str) -> str:
            assert session is not None
            return session.call(code).shown

        return Tool("python", DESCRIPTION, CODE, run)

    # ------------------------------------------------------------------ calls
    @property
    def busy(self) -> bool:
        """Whether results are still to come."""
        return bool(self._asked or self._running)

    def ask(self, answer: Hashable, calls: Sequence[ParsedCall]) -> None:
        """Run an answer's calls, one after the other."""
        self._asked.append((answer, calls))
        self._begin()

    def done(self, *, patient: bool) -> list[tuple[Hashable, Results]]:
        """What came back since; `patient` waits until something has."""
        ready, _ = wait(self._running, None if patient else 0, FIRST_COMPLETED)
        return [(self._running.pop(one), one.result()) for one in ready]

    def end(self, answer: Hashable) -> None:
        """The answer calls nothing more."""
        session = self._open.pop(answer, None)
        if session is not None:
            session.close()
            self._begin()

    def close(self) -> None:
        """End everything."""
        self._asked.clear()
        wait(self._running)
        for session in self._open.values():
            session.close()
        self._open.clear()
        self._threads.shutdown()

    def _begin(self) -> None:
        """Start what may start: answers with an interpreter first, the others as there is room."""
        held = deque[tuple[Hashable, Sequence[ParsedCall]]]()
        while self._asked:
            answer, calls = self._asked.popleft()
            if answer not in self._open:
                if len(self._open) >= self.most:
                    held.append((answer, calls))
                    continue
                try:
                    self._open[answer] = PythonSession(self.limits)
                except SandboxError as e:
                    self._running[self._threads.submit(Results, [], str(e))] = answer
                    continue
            self._running[self._threads.submit(self._run, self._open[answer], calls)] = answer
        self._asked = held

    def _run(self, session: PythonSession, calls: Sequence[ParsedCall]) -> Results:
        tool, found = self._tool(session), Results()
        for call in calls:
            if call.name != tool.name:
                found.texts.append(f"Error: there is no tool {call.name!r}, but {tool.name}")
                continue
            try:
                found.texts.append(tool.answer(call.arguments))
            except SandboxError as e:
                return Results([], str(e))
        return found
