"""A text that repeats itself is drafted without a fault: what is accepted tells whether drafts see the right ids."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from glm5.serve.config import EngineConfig
from glm5.serve.engine import Engine
from glm5.serve.request import Request, SamplingParams
from support.drafting import agreeable, prompt

CONFIG = EngineConfig(pages=40, context=400, drafts=3, overlap=False)


@pytest.mark.parametrize("changes", [{}, {"overlap": True}, {"chunk": 7}, {"pages": 8, "max_running": 4}])
def test_every_draft_of_a_text_that_repeats_itself_is_right(changes: dict[str, int]) -> None:
    model = agreeable(
        0, scale=0.0
    ).eval()  # the next id follows from the last one alone, so every answer ends in a ring
    with torch.no_grad():
        model.mtp.eh_proj.weight[:, model.config.hidden_size :] = 0
    engine = Engine(model, replace(CONFIG, **changes))
    params = SamplingParams(max_new_tokens=150, temperature=0, ignore_eos=True)
    for seed in range(4):
        engine.add(Request(prompt(70 + seed, seed).tolist(), params))
    ids: list[int] = []
    while engine.has_work:
        for delta in engine.advance(lambda: None) if engine.overlap else engine.step():
            ids += delta.ids
    engine.close()
    assert len(ids) == 600
    assert len(set(ids)) < 60
    assert engine.speculation.acceptance == [1.0, 1.0, 1.0]
    assert engine.scheduler.preemptions > 0 or "pages" not in changes
