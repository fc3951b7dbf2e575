"""An environment of the package `verifiers` (0.4, its module v1) as a task service.

The environment keeps its own tasks, agents, tools and rewards; its model is the rollout's session at the gateway, to
which its agents' requests go. What verifiers calls an error says whose it is, so that no failure of an environment
becomes a reward. The package is asked for when the service starts; it and its wishes for other packages' versions may
need a Python environment of their own, which is no matter to a service. Source: the report, section 4.1.
Read next: `glm5.agents.service`.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any

from glm5.agents.service import Policy, Result, Rollout, TaskService, judged
from glm5.utils.errors import ConfigError, UserError
from glm5.utils.outcome import Outcome


class VerifiersService(TaskService):
    """One environment. Each group attempts one of its tasks, in their order, again and again.

    Args:
        name: of the task, for the ledger.
        config: the environment's, as verifiers takes it: {"taskset": {"id": "MODULE", ...}, ...}.
        model: the name that is sent to the gateway.
        sampling: fields of verifiers' SamplingConfig; the gateway may overrule them.
        api_key_var: the environment variable that holds the gateway's key, if that asks for one.
        limit: how many tasks are taken; needed where the environment's never end.
        solved_at: rewards from here on count as solved. A reward may be any finite number.
    """

    def __init__(
        self,
        name: str,
        config: Mapping[str, Any],
        *,
        model: str = "policy",
        sampling: Mapping[str, Any] | None = None,
        api_key_var: str = "GLM5_GATEWAY_KEY",
        limit: int | None = None,
        solved_at: float = 1.0,
    ) -> None:
        self.name, self.config, self.model = name, dict(config), model
        self.api_key_var, self.sampling, self.limit, self.solved_at = (
            api_key_var,
            dict(sampling or {}),
            limit,
            solved_at,
        )
        self._held = AsyncExitStack()

    async def start(self) -> None:
        """Load the environment and its tasks.

        Raises:
            UserError: verifiers is not there, the environment cannot be loaded, or it holds no task.
        """
        try:
            from verifiers.v1.utils.loaders import load_environment, resolve_env_config
        except ImportError as e:
            raise UserError(
                f"environments of verifiers need that package: {e}", "pip install 'verifiers>=0.4,<0.5'"
            ) from None
        try:
            self._env = load_environment(resolve_env_config(self.config))
        except (ImportError, AttributeError, TypeError, ValueError) as e:
            raise UserError(f"environment {self.config}: {e}", "Name an installed taskset in taskset.id") from e
        if not self._env.taskset.bounded and self.limit is None:
            raise ConfigError("limit", None, "must be given: the environment's tasks never end")
        self._tasks = list(itertools.islice(self._env.taskset, self.limit))
        if not self._tasks:
            raise UserError(f"environment {self.name} holds no task", "Look at its taskset's configuration")
        await self._held.enter_async_context(self._env.serving())

    async def stop(self) -> None:
        await self._held.aclose()

    async def rollout(self, asked: Rollout, policy: Policy) -> Result:
        from verifiers.v1.clients import ModelContext
        from verifiers.v1.configs.client import EvalClientConfig
        from verifiers.v1.types import SamplingConfig

        if asked.api_key not in (None, os.environ.get(self.api_key_var)):
            raise UserError("the gateway asks for another key", f"Put it into the variable {self.api_key_var}")
        client = EvalClientConfig(base_url=asked.base_url, api_key_var=self.api_key_var)
        context = ModelContext(model=self.model, client=client, sampling=SamplingConfig(**self.sampling))
        (slot,) = self._env.slots(self._tasks[asked.index % len(self._tasks)])
        return result_of(await self._env.run_slot(slot, context), self.solved_at)


# By the class of verifiers' error; of any other, the environment crashed.
_CAUSES = {"ProviderError": Outcome.ENGINE_LOST, "TaskError": Outcome.VERIFIER_NO_VERDICT}


def result_of(episode: Any, solved_at: float = 1.0) -> Result:
    """What became of an episode: the reward of its one trainable trace, or whose fault it is that there is none."""
    traces = [trace for trace in episode.traces if trace.agent.trainable]
    if episode.is_timeout or any(trace.is_timeout for trace in traces):
        return Result(Outcome.TIMEOUT, detail="the environment's own time limit")
    errors = [error for trace in traces for error in trace.errors] + list(episode.errors)
    if errors and not episode.ok:
        first = errors[0]
        detail = f"{first.type}: {first.message}"
        if "context_length_exceeded" in first.message:
            return judged(0.0, f"the context is full: {detail}")
        return Result(_CAUSES.get(first.type, Outcome.ENV_CRASH), detail=detail)
    if len(traces) != 1:
        detail = f"{len(traces)} trainable traces in an episode: a rollout has one reward"
        return Result(Outcome.ENV_CRASH, detail=detail)
    (trace,) = traces
    if not trace.rewards or None in trace.rewards.values():
        return Result(Outcome.VERIFIER_NO_VERDICT, detail=f"rewards: {dict(trace.rewards)}")
    metrics = {name: value for name, value in trace.metrics.items() if value is not None}
    return judged(trace.reward, f"{trace.stop_condition}", solved_at=solved_at, turns=trace.num_turns, **metrics)
