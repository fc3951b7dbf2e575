"""The Python API used wrongly: one error that names what and how to mend it, or the right answer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from glm5.model.cache import Cache
from glm5.model.generate import generate
from glm5.model.weights import load_model
from glm5.utils.errors import UserError
from support.tiny import tiny_model, write_public_checkpoint

MODEL = tiny_model()
IDS = torch.arange(12)[None]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8])
@torch.no_grad()
def test_ids_of_any_integer_type_are_read(dtype: torch.dtype) -> None:
    assert torch.equal(MODEL(IDS.to(dtype)).logits, MODEL(IDS).logits)


@pytest.mark.parametrize(
    "ids",
    [[[1, 2]], IDS.numpy(), IDS[0], IDS.bool(), IDS.float(), IDS.to(torch.complex64), IDS[:0], IDS[:, :0],
     IDS.to("meta"), IDS + 400, -IDS],
)  # fmt: skip
def test_ids_that_cannot_be_read_are_refused(ids: Any) -> None:
    with pytest.raises(UserError, match="input_ids"):
        MODEL(ids)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(logits_to_keep=-3), "logits_to_keep=-3"),
        (dict(attention_mask=[[1] * 12]), "attention_mask: a list"),
        (dict(documents=torch.zeros(1, 5, dtype=torch.int64)), "documents: shape"),
        (dict(documents=torch.zeros(2, 12, dtype=torch.int64)), "documents: shape"),
        (dict(documents=torch.zeros(1, 12)), "documents"),
        (dict(documents=torch.tensor([[0] * 6 + [1] * 6])), "documents: 1 in row 0, slot 6"),
        (dict(documents=torch.tensor([[0] * 6 + [6] * 3 + [0] * 3])), "documents: 0 in row 0, slot 9"),
        (dict(documents=torch.full((1, 12), -1)), "documents: -1"),
        (dict(cache=tiny_model(num_hidden_layers=2).new_cache(1)), "cache: 3 layers"),
        (dict(cache=tiny_model(kv_lora_rank=20).new_cache(1)), "another model's"),
        (dict(cache=Cache(MODEL.config, 1, dtype=torch.float16)), r"cache: torch\.float16"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        MODEL(IDS, **options)


@torch.no_grad()
def test_documents_may_begin_and_end_with_padding() -> None:
    padded = torch.tensor([[1, 2, 2, 2, 2, 5, 5, 5, 9, 10, 11, 12]])
    logits = MODEL(IDS, documents=padded).logits
    torch.testing.assert_close(logits[:, 2:5], MODEL(IDS[:, 2:5]).logits)
    torch.testing.assert_close(logits[:, 5:8], MODEL(IDS[:, 5:8]).logits)


@pytest.mark.parametrize("length", [-1, 2.5, torch.tensor([-5, 3]), torch.tensor([1, 2, 3])])
def test_a_cache_is_cropped_to_whole_lengths(length: int | Tensor) -> None:
    cache = MODEL.new_cache(2)
    with pytest.raises(ValueError, match="length="):
        cache.crop(length)


@pytest.mark.parametrize(
    "options",
    [dict(seed=2**64), dict(seed=1.5), dict(stop_ids=5), dict(stop_ids=[-1]), dict(stop_ids=["a"]),
     dict(speculate=1.5), dict(max_new_tokens=2.5), dict(top_k=2.5), dict(temperature="hot"), dict(temperature=None),
     dict(input_ids="abc"), dict(input_ids=None), dict(input_ids=[10**30]), dict(input_ids=[[1], [2, 3]])],
)  # fmt: skip
def test_generate_refuses_what_is_of_another_kind(options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(UserError, match=name):
        generate(MODEL, **{"input_ids": [1, 2], **options})


@pytest.mark.parametrize("temperature", [1e-30, 1e-46, 5e-324])
def test_the_smallest_temperatures_are_greedy(temperature: float) -> None:
    greedy = list(MODEL.generate([1, 2, 3], max_new_tokens=6, stop_ids=()))
    assert list(MODEL.generate([1, 2, 3], max_new_tokens=6, stop_ids=(), temperature=temperature)) == greedy


def test_a_model_loaded_in_inference_mode_can_train(tmp_path: Any) -> None:
    write_public_checkpoint(tmp_path)
    with torch.inference_mode():
        model = load_model(tmp_path)
    model(IDS).logits.mean().backward()
    assert model.lm_head.weight.grad is not None
