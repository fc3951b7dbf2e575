"""The last part of `glm5 demo`: its model is fine-tuned on a few solved tasks, then learns from verified answers.

A task is `max(3, 7, 5)`; its answer is one digit. All 720 orders of three digits are dealt into tasks to learn from and
a hundred held-out ones, which nothing trains on. Small as it is, it is the whole way of the report's sections 3.1 and
3.2, with its loss and its engine. Read next: `demo`, `glm5.posttrain.sft`, `glm5.posttrain.reason`.
"""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from glm5.utils.files import make_directory, write_text

if TYPE_CHECKING:
    from glm5.posttrain.reason import ReasonConfig
    from glm5.posttrain.sft import SftConfig

HELD_OUT = 100
DOMAIN = "max"


@dataclass(frozen=True)
class Answers:
    """The two stages, in one directory."""

    sft: SftConfig
    reason: ReasonConfig


def answers(directory: Path, checkpoint: str, *, quick: bool = False) -> Answers:
    """Both stages as the demo runs them, or (quick) the same path for tests, and not for its figures."""
    from glm5.posttrain.learner import LearnConfig
    from glm5.posttrain.reason import PromptConfig, ReasonConfig
    from glm5.posttrain.rollouts import RolloutConfig
    from glm5.posttrain.sft import SftConfig
    from glm5.train.config import TrainConfig
    from glm5.train.schedule import BatchWarmup, LearningRate

    steps, updates = (2, 2) if quick else (25, 20)
    tune = TrainConfig(
        steps=steps,
        batch=BatchWarmup(4, 4, 0),
        micro_batch=4,
        lr=LearningRate(peak=3e-3, final=3e-4, warmup_steps=3),
        bias_rate=0.0,
        mtp_share=0.25,
        save_every=steps,
    )
    return Answers(
        SftConfig(
            checkpoint=checkpoint,
            run=str(directory / "sft"),
            data=(str(directory / "solved.jsonl"),),
            seq_len=128,
            train=tune,
            device="cpu",
        ),
        ReasonConfig(
            checkpoint=str(directory / "sft" / "model"),
            run=str(directory / "rl"),
            prompts=PromptConfig(
                data=(str(directory / "tasks.jsonl"),),
                held_out=(str(directory / "held-out.jsonl"),),
                held_out_count=10 if quick else HELD_OUT,
            ),
            rollout=RolloutConfig(
                prompts=8,
                group=8,
                max_new_tokens=3,
                thinking=False,
                rounds=1,
                memory_gib=0.05,
                verifiers=1,
                invariant="off",  # faster
            ),
            learn=LearnConfig(
                steps=updates,
                lr=LearningRate(peak=2e-3, final=4e-4, warmup_steps=2),
                row_tokens=256,
                micro_batch=8,
                save_every=updates,
            ),
            eval_every=0,
            page_every=updates - 1,  # the first step's and the last one's
            device="cpu",
        ),
    )


def write_tasks(directory: Path) -> None:
    """The conversations and prompts of both stages."""
    triples = list(itertools.permutations(range(10), 3))
    random.Random(0).shuffle(triples)  # noqa: S311
    held, learned = triples[:HELD_OUT], triples[HELD_OUT:]

    def asked(triple: tuple[int, ...]) -> str:
        return f"max{triple}"

    def prompt(triple: tuple[int, ...]) -> dict[str, Any]:
        return {"prompt": asked(triple), "answer": str(max(triple)), "verifier": "short", "domain": DOMAIN}

    def talk(triple: tuple[int, ...]) -> dict[str, Any]:
        said = {"role": "assistant", "content": str(max(triple)), "thinking": False}
        return {"messages": [{"role": "user", "content": asked(triple)}, said]}

    make_directory(directory)
    for name, rows in (
        ("solved", map(talk, learned)),
        ("tasks", map(prompt, learned)),
        ("held-out", map(prompt, held)),
    ):
        write_text(directory / f"{name}.jsonl", "".join(json.dumps(row) + "\n" for row in rows))


def learned_answers(given: Answers, directory: Path) -> dict[str, Any]:
    """Run both stages; success on the held-out tasks after each, and what reinforcement learning took."""
    from glm5.posttrain.reason import reason
    from glm5.posttrain.sft import sft

    write_tasks(directory)
    sft(given.sft, lambda _: None)
    found = reason(given.reason, lambda _: None)
    rollout = given.reason.rollout
    return {
        "held_out": given.reason.prompts.held_out_count,
        "fine_tuned": found.held_out["before"][DOMAIN],
        "learned": found.held_out["after"][DOMAIN],
        "steps": found.steps,
        "answers": found.prompts * rollout.group,
    }
