"""An HTML page of sampled rollouts, token by token: what was given, what was drawn, and what the update makes of it.

Read next: `reason`, which writes one now and then.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from pathlib import Path

import torch
from torch import Tensor

from glm5.model.glm5 import GLM5
from glm5.posttrain.rows import PolicyRows
from glm5.posttrain.update import free
from glm5.text.tokenizer import Tokenizer
from glm5.train.ranks import Ranks
from glm5.utils.files import write_text

_STYLE = "body{font-family:sans-serif;margin:2em}pre{white-space:pre-wrap}.given{color:#888}"
_LEGEND = (
    "Grey: given, mask 0. Green and red: drawn, mask 1, with an advantage above and below 0; the stronger, "
    "the higher the entropy. A token's figures stand on its tooltip; its reward is its rollout's."
)


@torch.no_grad()
def write_page(
    path: Path,
    title: str,
    rows: PolicyRows,
    model: GLM5,
    tokenizer: Tokenizer,
    rewards: Sequence[float | None],
    ranks: Ranks | None = None,
) -> None:
    """Write the page.

    Args:
        rows: of rollouts that are numbered from 0. model: the weights that drew them. rewards: of each rollout, None
            where nobody judged.
        ranks: over which the model lies; all call this, and the main one writes.
    """
    ranks = ranks or Ranks()
    found = rows.logprobs(model, with_entropy=True)
    free(model, ranks)
    assert found.entropy_N is not None
    trainer_BT, entropy_BT = _spread(rows, found.logprobs_N), _spread(rows, found.entropy_N)
    tokens: dict[int, list[str]] = {n: [] for n in range(len(rewards))}
    for at in (rows.rollout_BT >= 0).nonzero().tolist():
        place = tuple(at)
        # The page may be read by anyone, and the text is a model's: it is never markup.
        text = escape(tokenizer.decode([int(rows.target_BT[place])])) or "\N{EMPTY SET}"
        if rows.mask_BT[place]:
            engine, trainer = float(rows.logprobs_BT[place]), float(trainer_BT[place])
            advantage, entropy = float(rows.advantages_BT[place]), float(entropy_BT[place])
            reward = _shown(rewards[int(rows.rollout_BT[place])])
            tip = (
                f"log-probability {trainer:.4f}, engine {engine:.4f}, ratio {math.exp(trainer - engine):.4f}, "
                f"entropy {entropy:.3f}, advantage {advantage:.3f}, reward {reward}, mask 1"
            )
            colour = f"hsla({120 if advantage > 0 else 0},70%,60%,{0.15 + 0.6 * min(1.0, entropy):.2f})"
            shown = f'<span style="background:{colour}" title="{tip}">{text}</span>'
        else:
            shown = f"<span class=given>{text}</span>"
        tokens[int(rows.rollout_BT[place])].append(shown)
    body = "\n".join(
        f"<h2>Rollout {n}, reward {_shown(rewards[n])}</h2><pre>{''.join(shown)}</pre>" for n, shown in tokens.items()
    )
    head = f"<!doctype html><meta charset=utf-8><title>{escape(title)}</title><style>{_STYLE}</style>"
    ranks.on_main(lambda: write_text(path, f"{head}<h1>{escape(title)}</h1><p>{_LEGEND}</p>\n{body}\n"))


def _shown(reward: float | None) -> str:
    return "none" if reward is None else f"{reward:g}"


def _spread(rows: PolicyRows, values_A: Tensor) -> Tensor:
    """Figures of the actions at their places, [B, T]."""
    out_BT = torch.zeros_like(rows.logprobs_BT)
    out_BT[rows.mask_BT] = values_A.to(out_BT.dtype)
    return out_BT
