"""The page of sampled rollouts: each token's figures as they are, and text that is never markup."""

from __future__ import annotations

import math
import re
from html import unescape
from pathlib import Path

import pytest
import torch
from test_rollouts import model, numbered, rollouts

from glm5.posttrain.page import write_page
from glm5.posttrain.rollouts import figures
from glm5.posttrain.rows import Trajectory, pack
from support.conversations import tokenizer

FIGURE = r"-?\d+\.\d+"
TIP = re.compile(
    rf'<span style="background:hsla\((\d+),70%,60%,({FIGURE})\)" title="log-probability ({FIGURE}), engine ({FIGURE}), '
    rf'ratio ({FIGURE}), entropy ({FIGURE}), advantage ({FIGURE}), reward (\S+), mask 1">(.*?)</span>',
    re.DOTALL,
)


def test_figures_stand_on_their_tokens(tmp_path: Path) -> None:
    policy = model()
    drawn = rollouts(policy, drafts=2)
    groups = drawn.draw(numbered(2))
    shown = figures(groups)
    assert 1 <= shown["spec_accept_length"] <= 3
    batch: list[Trajectory] = []
    for group in groups:
        group.advantages = {i: i - 1.5 for i in range(4)}
        group.copies = dict.fromkeys(range(4), 1)
        batch += group.trajectories(len(batch), 1.0)
    rewards = [float(i % 2) for i in range(8)]
    rows = pack(batch, 64, vocab_size=drawn.engine.vocab_size)
    write_page(tmp_path / "page.html", "Step <1>", rows, policy, tokenizer(), rewards)
    page = (tmp_path / "page.html").read_text()
    assert "<h1>Step &lt;1&gt;</h1>" in page

    parts = page.split("<h2>Rollout ")[1:]
    assert len(parts) == 8
    for number, (part, t) in enumerate(zip(parts, batch, strict=True)):
        assert part.startswith(f"{number}, reward {rewards[number]:g}</h2>")
        found = TIP.findall(part)
        assert len(found) == sum(t.drawn)
        with torch.no_grad():
            logits = policy(torch.tensor([list(t.ids)])).logits[0, :, : drawn.engine.vocab_size].log_softmax(-1)
        for at, (hue, _, trainer, engine, ratio, entropy, advantage, reward, text) in zip(
            [i for i, d in enumerate(t.drawn) if d], found, strict=True
        ):
            own = logits[at - 1]
            assert float(trainer) == pytest.approx(float(own[t.ids[at]]), abs=2e-3)
            assert float(engine) == pytest.approx(t.logprobs[at], abs=1e-4)
            assert float(ratio) == pytest.approx(math.exp(float(trainer) - float(engine)), abs=2e-3)
            assert float(entropy) == pytest.approx(float(-(own.exp() * own).sum()), abs=2e-3)
            assert (float(advantage), float(reward)) == (t.advantages, rewards[number])
            assert (hue == "120") == (float(advantage) > 0)
            assert unescape(text) in (tokenizer().decode([t.ids[at]]), "\N{EMPTY SET}")
        # What was given stands there, too, in its order, as text and not as markup.
        given = re.findall(r"<span class=given>(.*?)</span>", part, re.DOTALL)
        assert len(given) == len(t.ids) - sum(t.drawn) - 1  # nothing predicts the first
        assert "".join(map(unescape, given)) == tokenizer().decode(list(t.ids[1 : len(given) + 1]))
        assert "&lt;|user|&gt;" in "".join(given)
