"""A task of several turns with a tool, for a model that is very small: which of some hidden cards is the highest?

    glm5 rl agent CHECKPOINT --tasks examples/services/cards.py:Cards

The agent may look at one card a turn ("look b", answered by its number), then names one ("b"). Its words are plain
text, since descriptions of tools would be ten times as long as all else. `script` gives the conversation of an agent
that does it right, to fine-tune a model on before; `benchmarks/agent_learning.py` does both.
"""

from __future__ import annotations

import random
import sys
from typing import Any

from glm5.agents.service import Policy, Result, Rollout, TaskService, judged, serve

NAMES = "ab"
MOST_TURNS, MOST_TOKENS = 6, 8


def deal(seed: int) -> dict[str, int]:
    """Cards by name, no two alike."""
    return dict(zip(NAMES, random.Random(seed).sample(range(10), len(NAMES)), strict=True))  # noqa: S311


def opening() -> list[dict[str, Any]]:
    return [{"role": "user", "content": f"highest of {' '.join(NAMES)} ?"}]


def script(seed: int) -> list[dict[str, Any]]:
    """All turns of an agent that looks at each card and names the highest, without thinking."""
    cards, messages = deal(seed), opening()
    for card in NAMES:
        messages.append({"role": "assistant", "content": f"look {card}", "thinking": False})
        messages.append({"role": "user", "content": str(cards[card])})
    return [*messages, {"role": "assistant", "content": max(cards, key=cards.__getitem__), "thinking": False}]


class Cards(TaskService):
    """1 for the highest card, 0 for anything else."""

    name = "cards"
    timeout_s = 120.0
    concurrency = 64

    async def rollout(self, asked: Rollout, policy: Policy) -> Result:
        cards, history = deal(asked.seed), opening()
        best = max(cards, key=cards.__getitem__)
        for turn in range(1, MOST_TURNS + 1):
            told = await policy.chat(history, max_tokens=MOST_TOKENS, thinking={"type": "disabled"})
            said = (told["content"] or "").strip()
            if not said.startswith("look "):
                return judged(float(said == best), f"{said!r} of {cards}", turns=turn)
            shown = cards.get(said.removeprefix("look "), "no such card")
            history += [told, {"role": "user", "content": str(shown)}]
        return judged(0.0, "no answer", turns=turn)


if __name__ == "__main__":
    serve(Cards(), sys.argv[1])
