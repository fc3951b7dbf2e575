"""The counts against the model itself, built without memory on the meta device, and against transformers' model."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings

from glm5.ledger import params
from glm5.ledger.devices import device
from glm5.ledger.memory import Layout
from glm5.ledger.plan import Work, plan
from glm5.model.cache import Cache
from glm5.model.config import ModelConfig
from glm5.model.glm5 import GLM5
from glm5.model.presets import PRESETS, VARIANTS, glm5, mini, nano
from support.ledger import configs


def tensors_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """What a checkpoint stores: parameters (a tied one once) and the router's correction biases."""
    biases = {n: b for n, b in model.named_buffers() if n.endswith("e_score_correction_bias")}
    return {**dict(model.named_parameters()), **biases}


def on_meta(config: ModelConfig) -> GLM5:
    with torch.device("meta"):
        return GLM5(config)


def elements(config: ModelConfig) -> int:
    return sum(t.numel() for t in tensors_of(on_meta(config)).values())


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_presets_have_the_counted_elements(name: str, variant: str) -> None:
    config = VARIANTS[variant](PRESETS[name]())
    assert elements(config) == params.parameters(config).total


def test_glm5_has_its_published_elements() -> None:
    assert elements(glm5()) == 753_864_139_008


@settings(max_examples=40, deadline=None)
@given(configs())
def test_any_configuration_has_the_counted_elements(config: ModelConfig) -> None:
    model = on_meta(config)
    assert sum(t.numel() for t in tensors_of(model).values()) == params.parameters(config).total
    mtp = f"model.layers.{config.num_hidden_layers}."
    held = sum(t.numel() for n, t in tensors_of(model).items() if n.startswith(mtp))
    assert held == params.parameters(config).mtp


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize(("precision", "dtype"), [("bf16", torch.bfloat16), ("fp32", torch.float32)])
def test_a_plan_holds_the_models_bytes(name: str, precision, dtype: torch.dtype) -> None:  # type: ignore[no-untyped-def]
    config = PRESETS[name]()
    held = sum(t.numel() * t.element_size() for t in tensors_of(on_meta(config).to(dtype)).values())
    found = plan(config, Layout(), Work(1, 64, precision), device("cpu:100"), search=False)
    assert found.stages[0].of("weights") == held


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("precision", "dtype"), [("bf16", torch.bfloat16), ("fp32", torch.float32)])
def test_a_plan_holds_the_caches_bytes(variant: str, precision, dtype: torch.dtype) -> None:  # type: ignore[no-untyped-def]
    config = VARIANTS[variant](mini())
    cache = Cache(config, batch=3, capacity=1000, device="meta", dtype=dtype)
    held = sum(t.numel() * t.element_size() for layer in cache.layers for t in layer)
    found = plan(config, Layout(), Work(3, 1000, precision, precision), device("cpu:100"), search=False)
    assert found.stages[0].of("cache") == held


def test_transformers_model_has_the_counted_elements() -> None:
    """The public implementation, which has no MTP block."""
    import transformers

    for config in (nano(num_nextn_predict_layers=0), glm5(num_nextn_predict_layers=0)):
        public = transformers.AutoConfig.for_model(**config.to_dict())
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(public)
        assert sum(t.numel() for t in tensors_of(model).values()) == params.parameters(config).total
