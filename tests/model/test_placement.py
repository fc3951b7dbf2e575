"""Where tokens go: masks that don't fit are refused, a cropped or reordered cache continues as a fresh one would."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from glm5.model.glm5 import GLM5
from glm5.utils.errors import UserError
from support.tiny import tiny_model


@pytest.fixture(scope="module")
def model() -> GLM5:
    return tiny_model(2)


def ids(rows: int, tokens: int) -> Tensor:
    return torch.randint(6, 320, (rows, tokens), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("shape", [(1, 30), (3, 30), (2, 29), (30,)])
@pytest.mark.parametrize("value", [0, 1])
def test_a_mask_of_another_shape_is_refused(model: GLM5, shape: tuple[int, ...], value: int) -> None:
    with pytest.raises(UserError, match="attention_mask: shape"):
        model(ids(2, 30), attention_mask=torch.full(shape, value))


@pytest.mark.parametrize("row", [[1, 0, 1, 1], [0, 1, 0, 1]])
def test_a_mask_with_holes_is_refused(model: GLM5, row: list[int]) -> None:
    with pytest.raises(UserError, match="contiguous"):
        model(ids(1, 4), attention_mask=torch.tensor([row]))


@torch.no_grad()
def test_padding_before_new_tokens_of_a_started_row_is_refused(model: GLM5) -> None:
    cache = model.new_cache(1)
    model(ids(1, 5), cache=cache)
    with pytest.raises(UserError, match="already holds tokens"):
        model(ids(1, 3), cache=cache, attention_mask=torch.tensor([[0, 1, 1]]))


def test_ids_must_have_the_caches_rows(model: GLM5) -> None:
    with pytest.raises(UserError, match="1 rows for a cache of 2"):
        model(ids(1, 3), cache=model.new_cache(2))


@torch.no_grad()
@pytest.mark.parametrize("length", [0, 4, 10, 25])
def test_crop_after_left_padding(model: GLM5, length: int) -> None:
    """Cut to inside the padding, to its end, and to inside the tokens: each row continues from what it still has."""
    x = ids(2, 70)
    mask = torch.ones(2, 40, dtype=torch.int64)
    mask[0, :10] = 0
    cache = model.new_cache(2)
    model(x[:, :40], attention_mask=mask, cache=cache)
    cache.crop(length)
    logits = model(x[:, 40:], cache=cache).logits
    for row, kept in enumerate((x[:1, 10:length], x[1:, :length])):
        whole = model(torch.cat((kept, x[row : row + 1, 40:]), dim=1)).logits[:, -30:]
        torch.testing.assert_close(logits[row : row + 1], whole, rtol=1e-4, atol=5e-5)


@torch.no_grad()
def test_rows_cropped_to_their_own_lengths_and_reordered(model: GLM5) -> None:
    x = ids(3, 45)
    cache = model.new_cache(3)
    model(x[:, :35], cache=cache)
    cache.crop(torch.tensor([35, 20, 31]))
    cache.reorder(torch.tensor([2, 2, 1]))
    assert cache.batch == 3
    assert cache.length_B.tolist() == [31, 31, 20]
    more = x[:, 35:]
    logits = model(more, cache=cache).logits
    for row, (source, length) in enumerate(((2, 31), (2, 31), (1, 20))):
        whole = model(torch.cat((x[source : source + 1, :length], more[row : row + 1]), dim=1)).logits[:, -10:]
        torch.testing.assert_close(logits[row : row + 1], whole, rtol=1e-4, atol=5e-5)


def test_a_cache_reordered_in_inference_mode_can_be_written_to_in_any(model: GLM5) -> None:
    x = ids(2, 40)
    cache = model.new_cache(2)
    with torch.inference_mode():
        model(x[:, :30], cache=cache)
        cache.reorder(torch.tensor([1, 0]))
    with torch.no_grad():
        logits = model(x.flip(0)[:, 30:], cache=cache).logits
        torch.testing.assert_close(logits, model(x.flip(0)).logits[:, 30:], rtol=1e-4, atol=5e-5)


def test_crop_to_less_than_nothing_is_refused(model: GLM5) -> None:
    with pytest.raises(ValueError, match="length=-1"):
        model.new_cache(1).crop(-1)


@torch.no_grad()
def test_growth_keeps_what_is_held(model: GLM5) -> None:
    x = ids(1, 200)
    cache, outs = model.new_cache(1, capacity=3), []
    for at in range(0, 200, 40):
        outs.append(model(x[:, at : at + 40], cache=cache).logits)
    assert cache.capacity >= 200
    torch.testing.assert_close(torch.cat(outs, dim=1), model(x).logits, rtol=1e-4, atol=1e-3)


def test_attention_defaults_to_what_the_model_was_trained_for() -> None:
    model = tiny_model(0).eval()
    ids = torch.randint(6, 320, (1, 3 * model.config.index_topk), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        sparse, dense = model(ids, sparse=True).logits, model(ids, sparse=False).logits
        assert not torch.equal(sparse, dense)
        assert torch.equal(model(ids).logits, sparse)
        model.config = model.config.replace(extra={"glm5_attention": "dense"})
        assert torch.equal(model(ids).logits, dense)
