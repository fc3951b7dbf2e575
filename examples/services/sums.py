"""A task as a service of its own: sums of two numbers. Known to an orchestrator, it is asked for rollouts.

python examples/services/sums.py http://127.0.0.1:9100
"""

from __future__ import annotations

import random
import sys

from glm5.agents.service import Policy, Result, Rollout, TaskService, judged, serve


class Sums(TaskService):
    """Add two numbers; one more try after a wrong answer, for half of the reward."""

    name = "sums"
    timeout_s = 60.0

    async def rollout(self, asked: Rollout, policy: Policy) -> Result:
        a, b = random.Random(asked.seed).sample(range(100), 2)  # noqa: S311
        history = [{"role": "user", "content": f"{a} + {b} = ?"}]
        for reward in (1.0, 0.5):
            told = await policy.chat(history, max_tokens=256)
            if told["content"].strip() == str(a + b):
                return judged(reward, solved_at=0.5, turns=len(history) // 2 + 1)
            history += [told, {"role": "user", "content": "That is wrong. Try again."}]
        return judged(0.0, f"{a} + {b} is not {told['content'][:80]!r}", turns=2)


if __name__ == "__main__":
    serve(Sums(), sys.argv[1])
