"""Runs small enough for a test: a tokenizer that needs no training, documents of any length, a model of two layers.

dataset(directory, [40, 7, 100]) -> TokenDataset        tiny(index_topk=4) -> GLM5
trainer(directory, dataset, steps=3) -> Trainer         tensors(trainer) -> {name: tensor}, copied
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from glm5.data.corpus import Document
from glm5.data.loader import Loader, TokenDataset
from glm5.model.glm5 import GLM5
from glm5.model.presets import nano
from glm5.train.config import TrainConfig
from glm5.train.loop import Trainer
from glm5.train.schedule import BatchWarmup, LearningRate

SEQ_LEN = 32
VOCAB = 64


class LetterTokenizer:
    """One id for each of some characters, after three special ones: `<|endoftext|>`, `[gMASK]`, `<sop>`."""

    vocab_size = VOCAB
    prefix_ids = (1, 2)
    end_of_text_id = 0
    fingerprint = "letters"

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [[3 + ord(c) % (VOCAB - 3) for c in text] for text in texts]

    def text_bytes_per_id(self) -> list[int]:
        return [0, 0, 0] + [1] * (VOCAB - 3)


def documents(lengths: Sequence[int], seed: int = 0) -> list[Document]:
    """Random letters, so many of them for each length."""
    rng = random.Random(seed)  # noqa: S311
    return [Document(f"{i:03}", "".join(rng.choices("abcdefgh \n", k=n))) for i, n in enumerate(lengths)]


def dataset(
    directory: Path, lengths: Sequence[int] = (150, 20, 9, 61, 33, 5, 80, 47), *, ahead: int = 4
) -> TokenDataset:
    """Documents of these lengths in characters, in rows of `SEQ_LEN` queries: full, shared, and padded ones."""
    return TokenDataset.build(documents(lengths), LetterTokenizer(), directory / "tokens", SEQ_LEN, ahead)


def tiny(**changes: Any) -> GLM5:
    """Two layers (one dense) and the MTP block, four experts; top-k of 8."""
    sizes: dict[str, Any] = dict(
        vocab_size=VOCAB,
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        q_lora_rank=16,
        kv_lora_rank=12,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=8,
        index_topk=8,
        index_n_heads=2,
        index_head_dim=8,
        intermediate_size=32,
        moe_intermediate_size=12,
        n_routed_experts=4,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
        initializer_range=0.1,  # large enough for attention, router and indexer to differ between tokens
    )
    return GLM5(nano(**{**sizes, **changes}), seed=1)


def trainer(
    directory: Path, data: TokenDataset, *, model: GLM5 | None = None, rows: int = 4, lr: float = 1e-2, **changes: Any
) -> Trainer:
    """A stage of a few steps of `rows` rows each; `changes` are fields of `TrainConfig`."""
    defaults: dict[str, Any] = dict(
        steps=4,
        batch=BatchWarmup(rows, rows, 0),
        micro_batch=rows,
        lr=LearningRate(lr, lr / 10),
        measure_every=2,
        save_every=2,
    )
    config = TrainConfig(**{**defaults, **changes})
    return Trainer(config, tiny() if model is None else model, Loader(data, config.seed), directory / "run")


def tensors(of: Trainer) -> dict[str, Tensor]:
    """Copies of all that the model holds."""
    return {name: t.clone() for name, t in of.model.state_dict().items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    """Names of the tensors that are bit for bit the same in both."""
    assert a.keys() == b.keys()
    return [name for name in a if torch.equal(a[name], b[name])]
