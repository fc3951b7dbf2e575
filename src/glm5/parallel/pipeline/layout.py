"""Which stage of a pipeline holds which part of the model: text, checked against a model, or balanced by cost.

    E D M*2 | M*3 | M*2 N P | H        four stages, the last of them with the heads alone

E embedding, D dense layer, M MoE layer, N final norm, P the multi-token-prediction block, H the heads; `*n` repeats,
`|` begins a stage. The parts stand in the order in which a token passes them. P reads the trunk's last hidden state and
embeds tokens, so it carries a copy of the embedding where E is elsewhere; its head is the main head, H. The report
(section 2.4.1) puts P on the stage before H's: `mtp="before"`. Read next: `stage`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, groupby, pairwise
from typing import Literal

from glm5.model.config import ModelConfig
from glm5.utils.errors import ConfigError

Placement = Literal["before", "last"]
FIELD = "pipeline.layout"


@dataclass(frozen=True)
class Parts:
    """What one stage holds: a run of trunk layers, and some of embedding, final norm, MTP block and heads."""

    layers: tuple[int, ...] = ()
    embedding: bool = False
    norm: bool = False
    mtp: bool = False
    head: bool = False

    @property
    def copies_embedding(self) -> bool:
        """Whether it needs an embedding that is another stage's."""
        return self.mtp and not self.embedding


@dataclass(frozen=True)
class PipelineLayout:
    """Parts of every stage, first to last. With several stages a rank, these are the virtual ones."""

    stages: tuple[Parts, ...]
    kinds: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.stages)

    def __str__(self) -> str:
        return " | ".join(self._text(parts) for parts in self.stages)

    def _text(self, parts: Parts) -> str:
        letters = ["E"] * parts.embedding + ["M" if self.kinds[i] == "sparse" else "D" for i in parts.layers]
        letters += ["N"] * parts.norm + ["P"] * parts.mtp + ["H"] * parts.head
        runs = [(letter, len(list(run))) for letter, run in groupby(letters)]
        return " ".join(letter if count == 1 else f"{letter}*{count}" for letter, count in runs)

    def holder(self, part: Literal["embedding", "norm", "mtp", "head"]) -> int | None:
        """The stage that holds a part; None if the model has no such part."""
        return next((i for i, parts in enumerate(self.stages) if getattr(parts, part)), None)

    @classmethod
    def parse(cls, text: str, config: ModelConfig) -> PipelineLayout:
        """The layout that `text` writes, of this model.

        Raises:
            ConfigError: an unknown part, an empty stage, or parts that are not the model's in their order.
        """
        stages = [_letters(text, stage) for stage in text.split("|")]
        given = [letter for stage in stages for letter in stage]
        expected = _sequence(config)
        for i, (have, want) in enumerate(zip(given, expected, strict=False)):
            if have != want:
                rule = f"part {i + 1} is {have}, and the model's is {want} ({_NAMES[want]}): its parts are "
                raise ConfigError(FIELD, text, rule + _compact(expected))
        if len(given) != len(expected):
            rule = f"has {len(given)} parts, and the model {len(expected)}: {_compact(expected)}"
            raise ConfigError(FIELD, text, rule)
        return cls._of(stages, config)

    @classmethod
    def _of(cls, stages: Sequence[Sequence[str]], config: ModelConfig) -> PipelineLayout:
        out, done = [], 0
        for letters in stages:
            count = sum(letter in "DM" for letter in letters)
            out.append(
                Parts(
                    tuple(range(done, done + count)),
                    embedding="E" in letters,
                    norm="N" in letters,
                    mtp="P" in letters,
                    head="H" in letters,
                )
            )
            done += count
        return cls(tuple(out), config.layer_types)

    @classmethod
    def balanced(
        cls,
        config: ModelConfig,
        stages: int,
        costs: Costs | None = None,
        mtp: Placement = "before",
        rank_of_stage: Sequence[int] = (),
    ) -> PipelineLayout:
        """The layout whose costliest stage costs least, and whose other stages are as even as that allows.

        Where ranks run several stages, it is from there changed step by step while the costliest rank gets cheaper.

        Args:
            stages: how many, all ranks' virtual ones together.
            costs: of the parts; by default `Costs.count(config)`.
            mtp: "before" puts the MTP block on the stage before the heads' (with two stages or more), "last" with them.
            rank_of_stage: which rank runs each stage; empty is one stage a rank.

        Raises:
            ConfigError: there are more stages than parts to put on them.
        """
        costs = costs or Costs.count(config)
        letters = _sequence(config)
        norm = letters.index("N")
        # Units that stand together: the embedding with the first layer, the norm with the last.
        units = [["E", *letters[1:2]], *([x] for x in letters[2:norm])]
        units[-1] = [*units[-1], "N"]
        apart = mtp == "before" and stages > 1 and "P" in letters
        units += [["P"], ["H"]] if apart else [letters[norm + 1 :]]
        if not 1 <= stages <= len(units):
            rule = f"must be from 1 to {len(units)}, the parts of this model that can stand alone"
            raise ConfigError("pipeline stages", stages, rule)
        weights = [sum(costs.of(letter) for letter in unit) for unit in units]
        if apart:
            cuts = [*_partition(weights[:-1], stages - 1), len(units)]
        else:
            cuts = _partition(weights, stages)
        if len(set(rank_of_stage)) < len(rank_of_stage):
            cuts = _even_ranks(weights, cuts, rank_of_stage, movable=stages - 1 - apart)
        return cls._of([list(chain(*units[a:b])) for a, b in pairwise(cuts)], config)


_NAMES = {
    "E": "the embedding",
    "D": "a dense layer",
    "M": "a MoE layer",
    "N": "the final norm",
    "P": "the MTP block",
    "H": "the heads",
}


def _sequence(config: ModelConfig) -> list[str]:
    """The model's parts in order."""
    layers = ["M" if kind == "sparse" else "D" for kind in config.layer_types]
    return ["E", *layers, "N", *["P"] * config.num_nextn_predict_layers, "H"]


def _compact(letters: Sequence[str]) -> str:
    runs = [(letter, len(list(run))) for letter, run in groupby(letters)]
    return " ".join(letter if count == 1 else f"{letter}*{count}" for letter, count in runs)


def _letters(text: str, stage: str) -> list[str]:
    out: list[str] = []
    for token in stage.split():
        found = re.fullmatch(r"([EDMNPH])(?:\*([1-9]\d{0,4}))?", token)
        if found is None:
            known = ", ".join(f"{letter} {name}" for letter, name in _NAMES.items())
            raise ConfigError(FIELD, text, f"{token!r} is no part; there are {known}; repeat one as M*3")
        out += [found[1]] * int(found[2] or 1)
    if not out:
        raise ConfigError(FIELD, text, "a stage is empty: write parts on both sides of each |")
    return out


def _partition(weights: Sequence[float], parts: int) -> list[int]:
    """Cuts [0, …, len] into contiguous runs whose largest sum is least, and of such cuts those most even elsewhere."""
    count = len(weights)
    total = [0.0, *accumulate(weights)]

    def best(score: Callable[[float, float], float], limit: float) -> tuple[float, list[int]]:
        """The cuts of the least score, which combines a run's sum with the score of the runs after it."""
        found: list[tuple[float, list[int]] | None] = [None] * count + [(0.0, [count])]
        for _ in range(parts):
            longer: list[tuple[float, list[int]] | None] = [None] * (count + 1)
            for i in range(count):
                for j in range(i + 1, count + 1):
                    rest, run = found[j], total[j] - total[i]
                    if rest is None or run > limit:
                        continue
                    value = score(run, rest[0])
                    held = longer[i]
                    if held is None or value < held[0]:
                        longer[i] = (value, [i, *rest[1]])
            found = longer
        assert found[0] is not None
        return found[0]

    least, _ = best(max, float("inf"))
    return best(lambda run, rest: run**2 + rest, least)[1]


def _even_ranks(weights: Sequence[float], cuts: list[int], rank_of_stage: Sequence[int], movable: int) -> list[int]:
    """Cuts from which no one or two of the first `movable` inner ones can be moved by one unit for a better result.

    Better: the costliest rank costs less, then the ranks are more even, then the stages.
    """
    total = [0.0, *accumulate(weights)]

    def score(cuts: Sequence[int]) -> tuple[float, float, float]:
        loads = dict.fromkeys(rank_of_stage, 0.0)
        sums = [total[b] - total[a] for a, b in pairwise(cuts)]
        for rank, cost in zip(rank_of_stage, sums, strict=True):
            loads[rank] += cost
        return max(loads.values()), sum(x * x for x in loads.values()), sum(x * x for x in sums)

    best = score(cuts)
    steps = [(i, by) for i in range(1, movable + 1) for by in (-1, 1)]
    moves = [[step] for step in steps] + [[a, b] for a in steps for b in steps if a[0] < b[0]]
    while True:
        tried = []
        for move in moves:
            moved = list(cuts)
            for i, by in move:
                moved[i] += by
            if all(a < b for a, b in pairwise(moved)):
                tried.append((score(moved), moved))
        found = min(tried, default=(best, cuts))
        if found[0] >= best:
            return cuts
        best, cuts = found


@dataclass(frozen=True)
class Costs:
    """What a part costs for one token, forward, in any one unit. An embedding's look-up and the norm cost nothing.

    Attributes:
        dense, moe: a trunk layer. mtp: the MTP block, all depths together. head: the heads, all depths together.
    """

    dense: float
    moe: float
    mtp: float
    head: float

    def of(self, part: str) -> float:
        return {"D": self.dense, "M": self.moe, "P": self.mtp, "H": self.head}.get(part, 0.0)

    def stage(self, parts: Parts, kinds: Sequence[str]) -> float:
        """The cost of all that a stage holds."""
        layers = sum(self.moe if kinds[i] == "sparse" else self.dense for i in parts.layers)
        return layers + self.mtp * parts.mtp + self.head * parts.head

    @classmethod
    def count(cls, config: ModelConfig, *, depths: int = 3, context: int = 0) -> Costs:
        """Multiply-adds of one token, counted from the model's own matrices.

        Args:
            depths: at which the MTP block trains. context: keys that a query sees on average (half the row's length
                in dense attention, about `index_topk` in sparse); 0 leaves attention's own products out.
        """
        import torch

        from glm5.model.block import Block
        from glm5.model.moe import MoE
        from glm5.model.mtp import MTPBlock

        pairs = context * config.num_attention_heads * (config.qk_head_dim + config.v_head_dim)

        def macs(block: Block) -> float:
            whole = float(sum(p.numel() for p in block.parameters() if p.ndim >= 2))
            if isinstance(block.mlp, MoE):  # of the routed experts only the chosen ones work
                routed = sum(p.numel() for p in block.mlp.experts.parameters())
                whole -= routed - routed * config.num_experts_per_tok / config.n_routed_experts
            return whole + pairs

        kinds = config.layer_types
        with torch.device("meta"):
            each = {kind: macs(Block(config, kinds.index(kind))) for kind in set(kinds)}
            deep = depths if config.num_nextn_predict_layers else 0
            mtp = deep * macs(MTPBlock(config, config.num_hidden_layers)) if deep else 0.0
        head = (1 + deep) * config.vocab_size * config.hidden_size
        return cls(each.get("dense", 0.0), each.get("sparse", 0.0), mtp, float(head))
