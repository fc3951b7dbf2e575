"""Each id is told with the weights that drew it, across updates in the middle of an answer."""

from __future__ import annotations

import pytest
from safetensors.torch import save

from glm5.model.weights import disk_tensors
from glm5.serve.client import WeightUpdate
from glm5.serve.config import EngineConfig
from glm5.serve.engine import Engine
from glm5.serve.request import Request, SamplingParams
from support.drafting import agreeable


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("drafts", [0, 3])
def test_an_answer_across_updates(overlap: bool, drafts: int) -> None:
    engine = Engine(agreeable(0).eval(), EngineConfig(pages=40, context=256, overlap=overlap, drafts=drafts))
    weights = save({name: tensor.contiguous() for name, tensor in disk_tensors(agreeable(0))})
    engine.add(Request([5, 6, 7], SamplingParams(max_new_tokens=24, temperature=0.0, ignore_eos=True)))
    versions: list[str] = []
    oldest: list[str] = []
    updates = {6: "1", 15: "2"}
    while engine.has_work:
        for delta in engine.step():
            versions += [delta.version] * len(delta.ids)
            oldest.append(delta.weight_version)
        due = next((at for at in updates if len(versions) >= at), None)
        if due is not None:
            number = updates.pop(due)
            engine.pause("retract")
            for delta in engine.settle():
                assert delta.version != number, "what ran before the update is of the weights before it"
                versions += [delta.version] * len(delta.ids)
            engine.update_weights(WeightUpdate("tensor", tensors=(weights,), weight_version=number))
    assert len(versions) == 24
    assert sorted(versions) == versions
    assert set(versions) == {"0", "1", "2"}
    assert versions[:6] == ["0"] * 6
    assert versions[-1] == "2"
    assert set(oldest) == {"0"}
