"""What the sampler knows of one answer: how far it is, how it ended, and where it stands between GLM's marks.

Read next: `sampler`, which makes these and moves them on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from glm5.serve.grammar import Matcher
from glm5.serve.request import Finish, Request, SamplingParams
from glm5.serve.stops import StopMatcher

ROLES = frozenset({"<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|endoftext|>"})


class Marks:
    """Ids of the special tokens that matter here; None where the tokenizer lacks one."""

    def __init__(self, special: Mapping[str, int]) -> None:
        self.think, self.end_think = special.get("<think>"), special.get("</think>")
        self.tool_call = special.get("<tool_call>")
        self.roles = {id for token, id in special.items() if token in ROLES}

    def open_thinking(self, ids: Sequence[int]) -> bool:
        """Whether a prompt leaves a thinking block open: its last mark is `<think>`."""
        marks = self.roles | {self.think, self.end_think}
        return self.think is not None and next((id for id in reversed(ids) if id in marks), None) == self.think


@dataclass(frozen=True)
class Phase:
    """Where an answer is between its marks. `waiting`: its constraint begins after this thinking block."""

    thinking: bool
    waiting: bool = False
    spent: int = 0

    def after(self, id: int, marks: Marks) -> Phase:
        if self.thinking:
            # A call ends the thinking too, as the parser of answers has it.
            return Phase(False) if id in (marks.end_think, marks.tool_call) else replace(self, spent=self.spent + 1)
        return replace(self, thinking=True, spent=0) if id == marks.think else self


@dataclass(eq=False)
class SamplerState:
    """What the sampler knows of one answer. Make it with `Sampler.state`; preemption leaves it as it is.

    `count` is how many ids the answer has, `finish` how it ended. `histories`: counts of the answer's ids fp32 [V] and
    whether an id is in the prompt bool [V], made when a penalty first needs them.
    """

    request: Request
    index: int
    limit: int
    stop_ids: frozenset[int]
    seed: int
    phase: Phase
    matcher: Matcher | None
    stops: StopMatcher | None
    count: int = 0
    finish: Finish | None = None
    histories: tuple[Tensor, Tensor] | None = field(default=None, repr=False)

    @property
    def params(self) -> SamplingParams:
        return self.request.params

    @property
    def constrained(self) -> bool:
        return self.matcher is not None and not self.phase.waiting

    @property
    def form(self) -> str:
        """How errors call the constraint."""
        constraint = self.params.constraint
        return constraint.name if constraint is not None else ""

    @property
    def penalised(self) -> bool:
        p = self.params
        return bool(p.frequency_penalty or p.presence_penalty or p.repetition_penalty != 1)

    @property
    def unbounded(self) -> bool:
        """Any id may come next."""
        p = self.params
        return self.matcher is None and p.thinking_budget is None and self.count >= p.min_new_tokens

    @property
    def plain(self) -> bool:
        """The next id is that of the largest logit, and nobody asks more."""
        p = self.params
        asked = p.logprobs is not None or p.kept_set
        return p.temperature == 0 and not asked and not p.logit_bias and not self.penalised and self.unbounded
