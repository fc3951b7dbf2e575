"""Terminal tasks in Harbor's directory format, run in the sandbox or in containers.

A task is a directory: `instruction.md` for the agent, `task.toml` with limits, `environment/` with a Dockerfile,
`solution/solve.sh`, `tests/test.sh`, which writes the reward. Some of our own lie in `examples/tasks`.
Source: the report's section 4.2; the format is Harbor's. Read next: `harbor`, `places`, `trial`.
"""

from glm5.agents.tasks.contained import InContainer
from glm5.agents.tasks.harbor import Task, TaskError, read_task, read_tasks
from glm5.agents.tasks.places import InSandbox
from glm5.agents.tasks.trial import AgentTimeout, Judged, Trial, attempt, prove, solve

__all__ = ["AgentTimeout", "InContainer", "InSandbox", "Judged", "Task", "TaskError", "Trial", "attempt"]
__all__ += ["prove", "read_task", "read_tasks", "solve"]
