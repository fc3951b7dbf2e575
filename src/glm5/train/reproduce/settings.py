"""How large each comparison is: `tiny` for tests, `nano` for a CPU and an hour, `small` and `mini` for a GPU.

A table at a size is one frozen `Settings`, which every cell keeps in its configuration. The seeds are not part of it:
more of them can be added to what is there. Needs no torch. Read next: `cells`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from glm5.model.config import ModelConfig
from glm5.model.presets import mini, nano
from glm5.train.schedule import LearningRate
from glm5.utils.errors import ConfigError

Table = Literal["table1", "table2", "table6"]
Size = Literal["tiny", "nano", "small", "mini"]


@dataclass(frozen=True)
class Settings:
    """One comparison at one size. Counts of rows are of `seq_len` tokens."""

    model: ModelConfig
    """MLA-256, GLM-5's own geometry; variants are made from it."""
    seq_len: int
    """Tokens in a row, in training and measurement."""
    steps: int
    """Updates of pretraining."""
    rows: int
    """Rows in an update."""
    micro_batch: int
    """Rows that go through the model at once."""
    lr: LearningRate
    """Of pretraining."""
    held_out_rows: int
    """Held-out rows that are measured, the longest documents first."""
    measure_every: int = 10
    """Table 1: steps between measurements of the attention logits."""
    prompts: int = 8
    """Table 2: held-out prompts, of half a row each."""
    new_tokens: int = 96
    """Table 2: tokens decoded after each prompt."""
    warmup_steps: int = 0
    """Table 6: steps in which only the indexers train."""
    warmup_lr: LearningRate = field(default_factory=lambda: LearningRate(peak=2e-2, final=1e-3, shape="linear"))
    """Table 6: of the indexers' warm-up."""
    adapt_steps: int = 0
    """Table 6: steps of sparse adaptation, and of the dense control."""

    def with_steps(self, steps: int) -> Settings:
        """The same with another length of pretraining; the stages after it keep their share.

        Raises:
            ConfigError: `steps` is not positive.
        """
        if steps < 1:
            raise ConfigError("steps", steps, "must be at least 1")

        def share(later: int) -> int:
            return max(1, round(later * steps / self.steps)) if later else 0

        return replace(self, steps=steps, warmup_steps=share(self.warmup_steps), adapt_steps=share(self.adapt_steps))


def settings(table: Table, size: Size) -> Settings:
    """The comparison `table` at `size`."""
    made = {"tiny": _tiny, "nano": _nano, "small": _small, "mini": _mini}[size](table)
    # Only Table 2 is about MTP; the others spend its time on more tokens.
    return made if table == "table2" else replace(made, model=made.model.replace(num_nextn_predict_layers=0))


def _tiny(table: Table) -> Settings:
    model = nano(
        vocab_size=512, hidden_size=64, num_hidden_layers=2, q_lora_rank=48, kv_lora_rank=24, qk_nope_head_dim=24,
        qk_rope_head_dim=8, v_head_dim=32, index_topk=16, index_n_heads=2, index_head_dim=16, intermediate_size=128,
        moe_intermediate_size=32, n_routed_experts=8,
    )  # fmt: skip
    base = Settings(
        model,
        seq_len=128,
        steps=20,
        rows=4,
        micro_batch=4,
        lr=LearningRate(0.02, 0.002, warmup_steps=4),
        held_out_rows=16,
        measure_every=5,
        prompts=2,
        new_tokens=16,
    )
    return replace(base, seq_len=256, warmup_steps=6, adapt_steps=6) if table == "table6" else base


def _nano(table: Table) -> Settings:
    """Each table in less than an hour on one thread of a server's core, with three seeds."""
    base = Settings(
        nano(),
        seq_len=512,
        steps=300,
        rows=4,
        micro_batch=4,
        lr=LearningRate(0.02, 0.001, warmup_steps=20),
        held_out_rows=96,
    )
    if table == "table1":
        return base
    if table == "table2":
        return replace(base, steps=350, prompts=16, new_tokens=64)
    # Top-k a thirty-second of the context, near the report's 2,048 of 128K.
    model = nano(index_topk=32)
    return replace(base, model=model, seq_len=1024, steps=320, held_out_rows=64, warmup_steps=50, adapt_steps=60)


def _small(table: Table) -> Settings:
    """Tens of millions of parameters on a few million tokens: a few cells at a time fill one large GPU, for minutes.

    Sixteen heads, so that GQA-8 has its eight groups.
    """
    shape: dict[str, Any] = dict(
        vocab_size=8192, hidden_size=512, num_hidden_layers=6, num_attention_heads=16, num_key_value_heads=16,
        q_lora_rank=256, kv_lora_rank=128, intermediate_size=1024, moe_intermediate_size=256, n_routed_experts=32,
        num_experts_per_tok=4, dtype="bfloat16",
    )  # fmt: skip
    base = Settings(
        nano(**shape),
        seq_len=1024,
        steps=200,
        rows=16,
        micro_batch=16,
        lr=LearningRate(0.01, 0.0005, warmup_steps=20),
        held_out_rows=96,
    )
    if table == "table1":
        return base
    if table == "table2":
        return replace(base, prompts=16, new_tokens=64)
    model = nano(**shape, index_topk=64)
    return replace(base, model=model, seq_len=2048, rows=8, micro_batch=8, warmup_steps=40, adapt_steps=50)


def _mini(table: Table) -> Settings:
    """About a billion parameters: for one large GPU. The standard library has few tokens for it, so steps are few."""
    base = Settings(
        mini(dtype="bfloat16"),
        seq_len=2048,
        steps=200,
        rows=16,
        micro_batch=4,
        lr=LearningRate(0.004, 0.0004, warmup_steps=20),
        held_out_rows=64,
    )
    if table != "table6":
        return base
    model = mini(dtype="bfloat16", index_topk=128)
    return replace(
        base, model=model, seq_len=4096, rows=8, micro_batch=2, held_out_rows=24, warmup_steps=40, adapt_steps=50
    )
