"""An outcome reward model: GLM-5's trunk with a head of one number, and the score that it gives an answer.

The value of an answer is read at the tag that ends its turn, from the hidden state behind the final norm. Pairwise
heads learn Bradley and Terry's P(a before b) = sigmoid(v(a) - v(b)); pointwise ones learn sigmoid(v) = score. The
values of pairs have no zero and no unit of their own: both are taken from the training data, so that a score is
sigmoid((v - centre) / scale), in [0, 1] like every reward. Files: the trunk in the public layout,
`reward_head.safetensors`, `reward.json`.
Source: report, section 3.4 (outcome reward models: efficient, and open to hacking). Read next: `train`, `hybrid`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, nn

from glm5.model.glm5 import GLM5
from glm5.model.layers import Linear
from glm5.model.weights import load_model, save_model
from glm5.posttrain.reward.data import ANSWERS, Kind, answered
from glm5.posttrain.rows import Trajectory, micro_batches, pack
from glm5.text import Message, Tokenizer, Tool, load_tokenizer
from glm5.utils.errors import CheckpointError, DataError
from glm5.utils.files import read_json, sha256_file, write_bytes, write_json

HEAD, ABOUT = "reward_head.safetensors", "reward.json"


class RewardModel(nn.Module):
    """See the module.

    Args:
        trunk: its embedding, blocks and norm are used, its head and its MTP block are not. seed: of the new head.
        kind: what it learned from, or will. centre, scale: of its values, for scores.
    """

    def __init__(self, trunk: GLM5, kind: Kind, *, seed: int = 0, centre: float = 0.0, scale: float = 1.0) -> None:
        super().__init__()
        self.trunk, self.kind, self.centre, self.scale = trunk, kind, centre, scale
        width = trunk.config.hidden_size
        self.head = Linear(width, 1, device=trunk.device, dtype=torch.float32)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():  # so that the first values differ by about 1
            self.head.weight.copy_(torch.randn(1, width, generator=generator) / math.sqrt(width))
            self.head.bias.zero_()

    @property
    def longest(self) -> int:
        """Tokens that a conversation may have."""
        return self.trunk.config.max_position_embeddings

    def values(self, texts: Sequence[Sequence[int]]) -> Tensor:
        """v of each conversation, fp32 [N]: one packed pass, with gradients where they are on.

        Args:
            texts: ids, each of an answer with its prompt (`data.answered`).
        """
        # A row's mark stands at the query that would predict what comes after the last token, as in a policy's rows.
        ends = [
            Trajectory([*ids, 0], [False] * len(ids) + [True], [0.0] * (len(ids) + 1), n) for n, ids in enumerate(texts)
        ]
        rows = pack(ends, max(map(len, texts))).to(self.trunk.device)
        hidden_BTD = self.trunk.hidden(rows.input_BT, documents=rows.first_BT)
        values_N = self.head(hidden_BTD[rows.mask_BT].float()).squeeze(1)
        return values_N[torch.argsort(rows.rollout_BT[rows.mask_BT])]

    @torch.no_grad()
    def all_values(
        self, texts: Sequence[Sequence[int]], at_once: int = 8, beat: Callable[[], None] = lambda: None
    ) -> Tensor:
        """The same of many, without gradients, in passes of so many, each with a `beat` for whoever watches."""
        parts = []
        for (numbers,) in _passes(len(texts), at_once):
            parts.append(self.values([texts[n] for n in numbers if n >= 0]))
            beat()
        return torch.cat(parts) if parts else torch.zeros(0, device=self.trunk.device)

    def scores(self, values: Tensor) -> Tensor:
        """Values as scores in [0, 1]."""
        return torch.sigmoid((values - self.centre) / self.scale)

    # ------------------------------------------------------------------ files
    def save(self, path: Path, tokenizer: Tokenizer) -> Path:
        """Write the model; replaces one that is there."""
        save_model(self.trunk, path, tokenizer=tokenizer, overwrite=True)
        write_bytes(
            path / HEAD, save({name: t.detach().cpu().contiguous() for name, t in self.head.state_dict().items()})
        )
        write_json(path / ABOUT, {"kind": self.kind, "centre": self.centre, "scale": self.scale})
        return path

    @classmethod
    def load(cls, path: str | Path, device: str = "cpu") -> RewardModel:
        """A saved one, in eval mode and fp32.

        Raises:
            CheckpointError: it is no reward model, or is damaged.
        """
        path = require_reward_model(path)
        about = read_json(path / ABOUT)
        try:
            made = cls(
                load_model(path, device=device, dtype="float32"),
                about["kind"],
                centre=float(about["centre"]),
                scale=float(about["scale"]),
            )
            made.head.load_state_dict(load_file(path / HEAD))
            if about["kind"] not in ANSWERS or not 0 < made.scale < math.inf or not math.isfinite(made.centre):
                raise ValueError(f"{ABOUT} says {about}")
        except (KeyError, TypeError, ValueError, RuntimeError, SafetensorError) as e:
            raise CheckpointError(f"{path} holds a damaged reward model: {' '.join(str(e).split())[:200]}") from None
        return made.eval()


def require_reward_model(path: str | Path) -> Path:
    """The directory, if a reward model lies there.

    Raises:
        CheckpointError: none does.
    """
    path = Path(path)
    if not (path / HEAD).is_file() or not (path / ABOUT).is_file():
        inner = path / "model"
        mend = f"Give its model, {inner}" if (inner / HEAD).is_file() else "Train one with `glm5 reward-model`"
        raise CheckpointError(f"{path} is no reward model", mend)
    return path


def fingerprint(path: str | Path) -> dict[str, str]:
    """Checksums of a saved one's files: what its scores depend on."""
    files = sorted(f for f in Path(path).iterdir() if f.suffix in (".safetensors", ".json"))
    return {file.name: sha256_file(file) for file in files}


def _passes(count: int, at_once: int) -> Any:
    return zip(*micro_batches(count, at_once), strict=True) if count else ()


class Scorer:
    """A reward model with its tokenizer: the scoring API.

    Scorer.load("runs/reward/model").score([(messages, "an answer"), …])  ->  [0.83, …]
    """

    def __init__(self, model: RewardModel, tokenizer: Tokenizer, at_once: int = 8) -> None:
        self.model, self.tokenizer, self.at_once = model.eval().requires_grad_(False), tokenizer, at_once

    @classmethod
    def load(cls, path: str | Path, device: str = "cpu", at_once: int = 8) -> Scorer:
        """Of a directory. Errors as `RewardModel.load`."""
        return cls(RewardModel.load(path, device), load_tokenizer(path), at_once)

    def score(
        self, answers: Sequence[tuple[Sequence[Message], str]], tools: Sequence[Sequence[Tool]] | None = None
    ) -> list[float]:
        """Scores in [0, 1] of answers, each with its conversation and, where it has some, its tools.

        Raises:
            DataError: one is longer than the model's context.
        """
        told = tools or [()] * len(answers)
        texts = [
            answered(self.tokenizer, messages, response, of)
            for (messages, response), of in zip(answers, told, strict=True)
        ]
        longest = max(map(len, texts), default=0)
        if longest > self.model.longest:
            what = (
                f"an answer has {longest:,} tokens with its prompt, and the reward model reads {self.model.longest:,}"
            )
            raise DataError(what, "Use a reward model with a longer context, or shorter answers")
        return [float(s) for s in self.model.scores(self.model.all_values(texts, self.at_once))]
