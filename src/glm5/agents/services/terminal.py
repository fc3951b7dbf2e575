"""Tasks in Harbor's format as a service: an agent with a shell, in the sandbox or in containers.

Read next: `tools`, `glm5.agents.tasks`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from glm5.agents.protocol import Result, Rollout
from glm5.agents.sandbox import Finished
from glm5.agents.service import Policy, TaskService
from glm5.agents.services.tools import Talk, Tool, talk
from glm5.agents.tasks import InContainer, InSandbox, Task, Trial, attempt
from glm5.utils.errors import DataError
from glm5.utils.outcome import Outcome

SYSTEM = (
    "You work in a terminal. Run commands with the tool `bash`; each runs by itself, in the task's directory. "
    "When the task is done, say so without calling a tool."
)
SHOWN = 8_000  # characters of a command's output


class TerminalService(TaskService):
    """Each group attempts one task, in their order, again and again.

    Args:
        name: of the task, for the ledger. tasks: at least one. where: sandbox or containers.
        turns: messages of the model at most; what is there by then is judged. wall_s: seconds of one command at most.
        sampling: fields of each request, as max_tokens.
    """

    def __init__(
        self,
        name: str,
        tasks: Sequence[Task],
        where: InSandbox | InContainer,
        *,
        turns: int = 20,
        wall_s: float = 60.0,
        sampling: Mapping[str, Any] | None = None,
    ) -> None:
        if not tasks:
            raise DataError(f"task {name} has no task", "Give at least one")
        self.name, self.tasks, self.where = name, list(tasks), where
        self.turns, self.wall_s, self.sampling = turns, wall_s, dict(sampling or {})

    async def start(self) -> None:
        """Raises SandboxError where nothing can be isolated here."""
        self.where.require()

    def task(self, asked: Rollout) -> Task:
        """Which task a rollout attempts."""
        return self.tasks[asked.index % len(self.tasks)]

    def rollout(self, asked: Rollout, policy: Policy) -> Result:
        task = self.task(asked)
        went = Talk()

        def agent(trial: Trial) -> None:
            nonlocal went
            messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": task.instruction}]
            tool = Tool(
                "bash",
                "Run a line of bash.",
                {"command": ("string", "what to run")},
                lambda command: see(trial.act(command, wall_s=self.wall_s)),
            )
            went = talk(asked, policy, messages, [tool], self.turns, self.sampling)

        found = attempt(task, agent, self.where)
        reward = None if found.outcome.leaves_group else found.reward
        return Result(Outcome(found.outcome), reward, found.detail, went.metrics)


def see(done: Finished) -> str:
    """What a model sees of a command: its output, the middle of a long one left out, and how it ended if not well."""
    text = done.text
    if len(text) > SHOWN:
        text = f"{text[: SHOWN // 2]}\n[{len(text) - SHOWN} characters left out]\n{text[-SHOWN // 2 :]}"
    ended = "" if done.ok else f"[status {done.code}]" if done.ending == "exited" else f"[ended: {done.ending}]"
    return "\n".join(part for part in (text.rstrip("\n"), ended) if part) or "[no output]"
