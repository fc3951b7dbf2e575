"""One answer, folded from its deltas: what the terminal, a program and every HTTP interface keep of it. Needs no torch.

Read next: `llm`, `http.answers`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from glm5.serve.request import Delta, Finish, TokenInfo


@dataclass
class Folded:
    """What is known of an answer so far.

    Args:
        ids: of the answer, a stop id included. info: one entry an id where log-probabilities were asked for.
        prompt_info: one entry an id of the prompt where asked for, the first None. finish: why it ended.
        trim: as the last delta has it. prompt_tokens, cached_tokens: of the prompt.
        steps: of the engine that gave ids. drafted, accepted: drafts tried and right. verifications: steps with drafts.
        weight_version: the oldest that an id came from. versions: of each id. routed: as `Delta` has it, of all tokens.
    """

    ids: list[int] = field(default_factory=list)
    info: list[TokenInfo] = field(default_factory=list)
    prompt_info: list[TokenInfo | None] = field(default_factory=list)
    finish: Finish | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    verifications: int = 0
    weight_version: str = ""
    versions: list[str] = field(default_factory=list)
    trim: int = field(default=0, repr=False)
    routed: bytes = field(default=b"", repr=False)

    @property
    def logprobs(self) -> list[float]:
        """Of every id."""
        return [info.logprob for info in self.info]

    def add(self, delta: Delta) -> None:
        """Take in what one step gave."""
        self.ids += delta.ids
        self.info += delta.info
        self.prompt_info += delta.prompt_info
        self.finish, self.trim = delta.finish, delta.trim
        self.prompt_tokens = delta.prompt_tokens
        self.cached_tokens = max(self.cached_tokens, delta.cached_tokens)
        self.steps += bool(delta.ids)
        self.drafted += delta.drafted
        self.accepted += delta.accepted
        self.verifications += delta.drafted > 0
        self.weight_version = delta.weight_version
        self.versions += [delta.version or delta.weight_version] * len(delta.ids)
        self.routed += delta.routed
