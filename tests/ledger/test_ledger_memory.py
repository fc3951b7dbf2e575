"""Bytes of tensors and caches, and layouts: conservation over ranks, and errors that name the number."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm5.ledger import params
from glm5.ledger.memory import (
    Layout,
    LayoutError,
    cache_bytes,
    layer_buffers,
    shards,
    tensor_bytes,
    weight_bytes,
    weight_elements,
)
from glm5.model.presets import glm5, gqa_8, mini, nano
from support.ledger import configs


# --------------------------------------------------------------------------- tensors and caches
def test_bf16_bytes_of_the_checkpoint_are_the_index_total() -> None:
    assert sum(tensor_bytes(t, "bf16") for t in params.checkpoint_tensors(glm5())) == 1_507_728_316_928


def test_bytes_of_one_matrix_in_each_precision() -> None:
    rows, columns = 300, 200
    matrix = params.Tensor("m", (rows, columns), "routed_experts", copies=5, quantized=True)
    assert tensor_bytes(matrix, "fp32") == 5 * 4 * rows * columns
    assert tensor_bytes(matrix, "bf16") == 5 * 2 * rows * columns
    assert tensor_bytes(matrix, "fp8") == 5 * (rows * columns + 4 * 3 * 2)  # 3 x 2 blocks of 128
    assert tensor_bytes(matrix, "w4a8") == 5 * (rows * columns // 2 + 2 * rows * 2)
    dense = params.Tensor("d", (rows, columns), "dense_ffn", quantized=True)
    assert tensor_bytes(dense, "w4a8") == rows * columns + 4 * rows
    norm = params.Tensor("n", (columns,), "norms")
    assert [tensor_bytes(norm, p) for p in ("fp32", "bf16", "fp8", "w4a8")] == [800, 400, 400, 400]
    bias = params.Tensor("b", (columns,), "router", fp32=True)
    assert tensor_bytes(bias, "w4a8") == 800


def test_cache_rows_of_glm5() -> None:
    bf16, fp8 = cache_bytes(glm5()), cache_bytes(glm5(), "fp8")
    assert (bf16.content, bf16.index) == (2 * 576, 2 * 128)
    assert (fp8.content, fp8.index) == (512 + 4 * 4 + 2 * 64, 128 + 4) == (656, 132)
    assert cache_bytes(glm5(), "bf16", tp=8) == bf16  # one latent serves all heads: tensor parallelism cuts nothing


def test_cache_rows_of_gqa_shrink_with_tensor_parallelism_down_to_one_head() -> None:
    gqa = gqa_8(glm5())
    assert cache_bytes(gqa).total == 2 * 2048
    assert [cache_bytes(gqa, "bf16", tp).total for tp in (2, 8, 16)] == [2048, 512, 512]
    assert cache_bytes(gqa, "fp8").total == 2 * 8 * (128 + 4)
    assert cache_bytes(gqa).index == 0


# --------------------------------------------------------------------------- layouts
LAYOUTS = [
    Layout(),
    Layout(tp=8, ep=8),
    Layout(tp=8, ep=2),
    Layout(tp=2, ep=64, dp=32),
    Layout(ep=64, dp=64),
    Layout(tp=4, ep=32, pp=4, cp=2, dp=4),
    Layout(pp=78),
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_ranks_together_hold_every_element(layout: Layout) -> None:
    """Each stage's ranks hold whole copies of its tensors: a shard on every rank, so many times as it is replicated."""
    config = glm5()
    layout.check(config)
    ranks = layout.tp * layout.cp * layout.dp
    for stage in layout.stages(config):
        tensors = stage.tensors(config)
        held = weight_elements(tensors, layout) * ranks
        expected = sum(t.numel * ranks // shards(t, layout) for t in tensors)
        assert held == expected
        for t in tensors:
            assert t.numel % shards(t, layout) == 0
            assert ranks % shards(t, layout) == 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_stages_partition_the_layers(layout: Layout) -> None:
    config = glm5()
    stages = layout.stages(config)
    assert len(stages) == layout.pp
    assert [i for s in stages for i in s.layers if i < 78] == list(range(78))
    assert [s.index for s in stages if 78 in s.layers] == [max(0, layout.pp - 2)]
    assert [s.index for s in stages if s.head] == [layout.pp - 1]
    embedding = {0, max(0, layout.pp - 2)}  # the MTP block looks tokens up, too
    assert {s.index for s in stages if s.embedding} == embedding
    sizes = [sum(i < 78 for i in s.layers) for s in stages]
    assert max(sizes) - min(sizes) <= 1


def test_a_tied_head_needs_the_embedding_on_the_last_stage() -> None:
    config = nano(tie_word_embeddings=True, num_nextn_predict_layers=0)
    assert [s.embedding for s in Layout(pp=3).stages(config)] == [True, False, True]


@settings(max_examples=40, deadline=None)
@given(configs(), st.sampled_from(["fp32", "bf16", "fp8", "w4a8"]))
def test_one_device_holds_the_checkpoint(config, precision) -> None:  # type: ignore[no-untyped-def]
    (stage,) = Layout().stages(config)
    tensors = stage.tensors(config)
    assert weight_elements(tensors, Layout()) == params.parameters(config).total
    router = [t for t in tensors if t.group == "router" and not t.fp32]
    held_wider = sum(4 * t.numel - tensor_bytes(t, precision) for t in router)
    stored = sum(tensor_bytes(t, precision) for t in params.checkpoint_tensors(config))
    assert weight_bytes(tensors, Layout(), precision) == stored + held_wider


@pytest.mark.parametrize(
    ("layout", "config", "names"),
    [
        (Layout(tp=3), glm5(), ["tp=3", "num_attention_heads=64", "1, 2, 4"]),
        (Layout(tp=4), nano(vocab_size=2046), ["tp=4", "vocab_size=2046", "1, 2"]),
        (Layout(ep=3, dp=3), glm5(), ["ep=3", "n_routed_experts=256"]),
        (Layout(ep=8), glm5(), ["ep=8", "tp x cp x dp = 1", "--ep from 1"]),
        (
            Layout(tp=6, ep=4, dp=2),
            mini(vocab_size=6, intermediate_size=18, moe_intermediate_size=12),
            ["ep=4", "multiple of tp"],
        ),
        (Layout(pp=5), nano(), ["pp=5", "num_hidden_layers=4"]),
        (Layout(dp=0), nano(), ["dp=0"]),
        (Layout(tp=4), gqa_8(nano()), ["tp=4", "num_attention_heads=6"]),
        (Layout(tp=3), gqa_8(nano(vocab_size=2046, intermediate_size=510, moe_intermediate_size=126)), ["tp=3"]),
        (
            Layout(ep=2, dp=2),
            nano(first_k_dense_replace=4, num_nextn_predict_layers=0),
            ["ep=2", "no MoE layer"],
        ),
        (Layout(tp=4, ep=2), nano(moe_intermediate_size=129, n_shared_experts=0), ["tp / ep = 2", "129"]),
    ],
)
def test_layouts_that_do_not_divide_say_so(layout: Layout, config, names) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(LayoutError) as caught:
        layout.check(config)
    for name in names:
        assert name in str(caught.value)


@given(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2]), st.sampled_from([1, 2, 4]))
def test_expert_shards_and_replicas_make_up_a_stage(tp: int, ep: int, cp: int, dp: int) -> None:
    layout = Layout(tp=tp, ep=ep, cp=cp, dp=dp)
    try:
        layout.check(nano())
    except LayoutError:
        return
    assert layout.expert_shards * layout.expert_replicas == tp * cp * dp
    assert layout.expert_shards == ep * layout.expert_tp


def test_buffers_of_one_layer_by_hand() -> None:
    c, n, keys = nano(), 10, 50
    dense = layer_buffers(c, Layout(), n, keys, (0,))
    assert dense.residual == 2 * n * 256
    assert dense.attention == n * (128 + 4 * ((64 + 16) + 64 + 64) + 4 * 32)
    assert dense.attention_bytes == 4 * n * 50 + 4 * n * keys  # fewer keys than k, fewer queries than a tile
    assert dense.ffn == 3 * n * 512
    moe = layer_buffers(c, Layout(), n, keys, (1,))
    assert moe.ffn == 2 * n * (2 * 256 + 3 * 128) + 3 * n * 128
    assert dense.peak_bytes(4) == 4 * dense.residual + max(4 * dense.attention + dense.attention_bytes, 4 * dense.ffn)
