"""Checkpoints: what is published loads, what is saved loads elsewhere and here, and every misfit is named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import GlmMoeDsaForCausalLM

from glm5.model import weights
from glm5.model.glm5 import GLM5
from glm5.model.presets import glm5
from glm5.model.weights import load_model, save_model
from glm5.utils.errors import CheckpointError, ConfigError, FileError, UserError
from support.tiny import fuse_experts, tiny_config, tiny_model, tiny_tensors, write_public_checkpoint

INDEX = "model.safetensors.index.json"
# For these ids no top-k or router choice of seed 1 is near a tie.
IDS = torch.randint(6, 320, (2, 96), generator=torch.Generator().manual_seed(4))


def assert_same(a: GLM5, b: GLM5) -> None:
    """Bit-equal tensors under equal names, dtypes included."""
    ours, theirs = a.state_dict(), b.state_dict()
    assert list(ours) == list(theirs)
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype, name
        assert torch.equal(tensor, theirs[name]), name


def rewrite(file: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(str(file))
    change(tensors)
    save_file(tensors, str(file), metadata={"format": "pt"})


def error_of(path: Path, **options: object) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_model(path, **options)  # type: ignore[arg-type]
    return str(caught.value)


# --------------------------------------------------------------------------- what loads
@pytest.mark.parametrize("shards", [1, 2, 5])
def test_loads_the_public_layout(tmp_path: Path, shards: int) -> None:
    write_public_checkpoint(tmp_path, seed=1, shards=shards)
    model = load_model(tmp_path)
    assert_same(model, tiny_model(1))
    assert not model.training
    assert all(not p.is_meta for p in model.parameters())


def test_loads_experts_that_are_already_fused(tmp_path: Path) -> None:
    write_public_checkpoint(tmp_path, seed=1, shards=1)
    save_file(fuse_experts(tiny_tensors(1)), str(tmp_path / "model.safetensors"))
    assert_same(load_model(tmp_path), tiny_model(1))


@pytest.mark.parametrize("changes", [{"attention_bias": True}, {"tie_word_embeddings": True}, {"n_shared_experts": 0}])
def test_loads_the_other_shapes(tmp_path: Path, changes: dict[str, object]) -> None:
    write_public_checkpoint(tmp_path, seed=1, **changes)
    model = load_model(tmp_path)
    assert_same(model, tiny_model(1, **changes))
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == model.config.tie_word_embeddings


def test_router_stays_fp32_in_memory_and_takes_its_values_from_disk(tmp_path: Path) -> None:
    written = write_public_checkpoint(tmp_path, seed=1, dtype=torch.bfloat16)
    model = load_model(tmp_path)
    gate = model.blocks[1].mlp.gate
    assert model.dtype == torch.bfloat16
    assert gate.weight.dtype == gate.e_score_correction_bias.dtype == torch.float32
    assert torch.equal(gate.weight, written["model.layers.1.mlp.gate.weight"].float())
    assert torch.equal(gate.e_score_correction_bias, written["model.layers.1.mlp.gate.e_score_correction_bias"])
    others = [p.dtype for name, p in model.named_parameters() if not name.endswith("mlp.gate.weight")]
    assert set(others) == {torch.bfloat16}


@pytest.mark.parametrize("dtype", [torch.float32, "float32", torch.float16])
def test_dtype_of_the_memory_can_be_chosen(tmp_path: Path, dtype: torch.dtype | str) -> None:
    written = write_public_checkpoint(tmp_path, seed=1, dtype=torch.bfloat16)
    model = load_model(tmp_path, dtype=dtype)
    expected = torch.float16 if dtype is torch.float16 else torch.float32
    assert torch.equal(model.model.norm.weight, written["model.norm.weight"].to(expected))
    assert model.config.dtype == str(expected).removeprefix("torch.")


def test_config_fields_can_be_overridden(tmp_path: Path) -> None:
    write_public_checkpoint(tmp_path, seed=1)
    model = load_model(tmp_path, latent_norm_eps=1e-5, index_topk=7)
    assert model.blocks[0].self_attn.q_a_layernorm.eps == 1e-5
    assert model.blocks[0].self_attn.indexer.topk == 7
    with pytest.raises(ConfigError, match="topk_index"):
        load_model(tmp_path, topk_index=7)


def test_mtp_can_be_left_out_or_be_absent(tmp_path: Path) -> None:
    write_public_checkpoint(tmp_path / "with", seed=1, shards=1)
    bare = load_model(tmp_path / "with", num_nextn_predict_layers=0)
    assert len(bare.model.layers) == 3
    assert torch.equal(bare(IDS).logits, tiny_model(1)(IDS).logits)

    write_public_checkpoint(tmp_path / "without", seed=1, shards=1)
    rewrite(
        tmp_path / "without" / "model.safetensors",
        lambda t: [t.pop(name) for name in list(t) if name.startswith("model.layers.3.")] and None,
    )
    message = error_of(tmp_path / "without")
    assert "num_nextn_predict_layers=0" in message
    assert "missing: model.layers.3.eh_proj.weight" in message
    assert_same(load_model(tmp_path / "without", num_nextn_predict_layers=0), bare)


def test_memory_stays_near_the_model(tmp_path: Path) -> None:
    """Peak above the start: the model, what is mapped at a time and one tensor, though a file holds it all."""
    save_model(GLM5(tiny_config(vocab_size=100_000, hidden_size=128, n_routed_experts=64), seed=0), tmp_path)
    program = """
import sys
from pathlib import Path
import torch
from glm5.model import weights

def status(key):
    return int(Path("/proc/self/status").read_text().split(key + ":")[1].split()[0]) * 1024

torch.set_num_threads(1)
weights.MAPPED_BYTES = 4 * 2**20
weights.load_model(sys.argv[2])  # a small one first, so that what is made once is not counted
before = status("VmRSS")
model = weights.load_model(sys.argv[1])
size = sum(t.nbytes for t in model.state_dict().values())
print(status("VmHWM") - before, size, max(t.nbytes for t in model.state_dict().values()))
"""
    write_public_checkpoint(tmp_path / "small")
    command = [sys.executable, "-c", program, str(tmp_path), str(tmp_path / "small")]
    out = subprocess.run(command, capture_output=True, text=True, check=True)
    grown, size, largest = map(int, out.stdout.split())
    assert size > 100e6
    # Twice the model, or the whole file mapped, would be 2 * size.
    assert grown < size + largest + 4 * 2**20 + 16 * 2**20


def test_names_of_the_published_checkpoint() -> None:
    """Its tensors, elements and bytes, as published (the router biases, 19,456 elements, are fp32)."""
    with torch.device("meta"):
        model = GLM5(glm5(), seed=None)
    state = model.state_dict()
    found = {name: view for owner, t in state.items() for name, view in weights.public_tensors(owner, t)}
    biases = [name for name in found if name.endswith("e_score_correction_bias")]
    elements = sum(t.numel() for t in found.values())
    precise = sum(found[name].numel() for name in biases)
    assert (len(found), elements, precise) == (59_870, 753_864_139_008, 19_456)
    assert 2 * (elements - precise) + 4 * precise == 1_507_728_316_928


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="loading onto CUDA goes untested here: no device")
def test_loads_onto_a_cuda_device(tmp_path: Path) -> None:
    write_public_checkpoint(tmp_path, seed=1, dtype=torch.bfloat16)
    model = load_model(tmp_path, device="cuda")
    assert all(t.is_cuda for t in model.state_dict().values())
    assert_same(model.cpu(), load_model(tmp_path))


# --------------------------------------------------------------------------- what does not load
def test_one_error_lists_every_misfit(tmp_path: Path) -> None:
    write_public_checkpoint(tmp_path, seed=1, shards=1)

    def damage(t: dict[str, torch.Tensor]) -> None:
        del t["model.norm.weight"], t["model.layers.1.mlp.experts.7.up_proj.weight"]
        t["model.layers.0.rotary.inv_freq"] = torch.zeros(3)
        t["model.layers.2.mlp.experts.10.up_proj.weight"] = torch.zeros(36, 48)
        t["model.layers.2.self_attn.o_proj.weight"] = torch.zeros(48, 73)
        t["model.layers.3.eh_proj.weight"] = torch.zeros(48, 96).to(torch.float8_e4m3fn)
        bias = "model.layers.3.mlp.gate.e_score_correction_bias"
        t[bias] = t[bias].bfloat16()

    rewrite(tmp_path / "model.safetensors", damage)
    lines = error_of(tmp_path).split("\n")
    assert "7 problem(s)" in lines[0]
    assert [line.strip().split(",")[0].split(" is")[0].split(". ")[0] for line in sorted(lines[1:])] == [
        "extra: model.layers.0.rotary.inv_freq",
        "extra: model.layers.2.mlp.experts.10.up_proj.weight",
        "imprecise: model.layers.3.mlp.gate.e_score_correction_bias",
        "misshapen: model.layers.2.self_attn.o_proj.weight",
        "missing: model.layers.1.mlp.experts.7.up_proj.weight",
        "missing: model.norm.weight",
        "unreadable: model.layers.3.eh_proj.weight",
    ]
    assert "[48, 73], must be [48, 72]" in "\n".join(lines)


def test_index_and_files_that_disagree(tmp_path: Path) -> None:
    write_public_checkpoint(tmp_path, seed=1)
    index = json.loads((tmp_path / INDEX).read_text())
    first, second = (f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
    rewrite(tmp_path / first, lambda t: t.pop("lm_head.weight") is None or None)
    rewrite(tmp_path / second, lambda t: t.update(stray=torch.zeros(1)))
    assert index["weight_map"]["lm_head.weight"] == first
    message = error_of(tmp_path)
    assert f"missing: lm_head.weight (the index says it is in {first})" in message
    assert f"extra: stray (in {second}, where the index has no such tensor)" in message
    assert "2 problem(s)" in message


def test_interrupted_download_names_the_missing_shards(tmp_path: Path) -> None:
    write_public_checkpoint(tmp_path, shards=4)
    for i in (2, 4):
        (tmp_path / f"model-0000{i}-of-00004.safetensors").unlink()
    message = error_of(tmp_path)
    assert "2 of 4" in message
    assert "model-00002-of-00004.safetensors, model-00004-of-00004.safetensors" in message
    assert "download" in message


@pytest.mark.parametrize("keep", [0, 5, 300, -1])
def test_truncated_file_is_named(tmp_path: Path, keep: int) -> None:
    write_public_checkpoint(tmp_path)
    file = tmp_path / "model-00002-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    message = error_of(tmp_path)
    assert str(file) in message
    assert "again" in message


def test_corrupt_header_and_lfs_pointer(tmp_path: Path) -> None:
    write_public_checkpoint(tmp_path, shards=1)
    file = tmp_path / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[8:20] = b"not a header"
    file.write_bytes(data)
    assert str(file) in error_of(tmp_path)
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n")
    assert "git lfs pull" in error_of(tmp_path)


@pytest.mark.parametrize(
    "file", ["../up.safetensors", "/etc/x.safetensors", "a/b.safetensors", "x.bin", 7, ".x.safetensors"]
)
def test_index_cannot_leave_its_directory(tmp_path: Path, file: object) -> None:
    write_public_checkpoint(tmp_path / "inner")
    tensors = tiny_tensors(0)
    save_file(tensors, str(tmp_path / "up.safetensors"))
    index = {"weight_map": dict.fromkeys(tensors, file)}
    (tmp_path / "inner" / INDEX).write_text(json.dumps(index))
    assert repr(file) in error_of(tmp_path / "inner")


@pytest.mark.parametrize("content", ["[]", "{}", '{"weight_map": {}}', '{"weight_map": [1]}'])
def test_index_without_a_map(tmp_path: Path, content: str) -> None:
    write_public_checkpoint(tmp_path)
    (tmp_path / INDEX).write_text(content)
    assert "weight_map" in error_of(tmp_path)


def test_metadata_is_not_trusted(tmp_path: Path) -> None:
    write_public_checkpoint(tmp_path, seed=1)
    index = json.loads((tmp_path / INDEX).read_text())
    index["metadata"] = {"total_size": -1, "format": "pickle"}
    (tmp_path / INDEX).write_text(json.dumps(index))
    assert_same(load_model(tmp_path), tiny_model(1))


def test_pickles_and_wrong_paths_are_refused(tmp_path: Path) -> None:
    write_public_checkpoint(tmp_path, shards=2)
    (tmp_path / INDEX).unlink()
    assert INDEX in error_of(tmp_path)
    for file in tmp_path.glob("*.safetensors"):
        file.unlink()
    assert "no safetensors file" in error_of(tmp_path)
    torch.save({}, tmp_path / "pytorch_model.bin")
    assert "pickles" in error_of(tmp_path)
    assert "pytorch_model.bin" in error_of(tmp_path)
    assert "pickle" in error_of(tmp_path / "pytorch_model.bin")
    assert "no such directory" in error_of(tmp_path / "nowhere")


def test_bad_options(tmp_path: Path) -> None:
    write_public_checkpoint(tmp_path)
    with pytest.raises(UserError, match="int8"):
        load_model(tmp_path, dtype="int8")
    with pytest.raises(UserError, match="device"):
        load_model(tmp_path, device="abacus")


# --------------------------------------------------------------------------- save
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("max_shard_bytes", [5e9, 200_000])
def test_round_trip_is_bit_equal(tmp_path: Path, dtype: torch.dtype, max_shard_bytes: float) -> None:
    written = write_public_checkpoint(tmp_path / "in", seed=1, dtype=dtype)
    model = load_model(tmp_path / "in")
    save_model(model, tmp_path / "out", max_shard_bytes=max_shard_bytes)
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert (len(files) > 3) == (max_shard_bytes < 5e9)
    found: dict[str, torch.Tensor] = {}
    for file in files:
        found.update(load_file(str(file)))
        with safe_open(str(file), "pt") as f:
            assert f.metadata() == {"format": "pt"}
    assert found.keys() == written.keys()
    for name, tensor in written.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name
    assert_same(load_model(tmp_path / "out"), model)
    assert load_model(tmp_path / "out").config == model.config


def test_index_of_what_is_saved(tmp_path: Path) -> None:
    model = tiny_model(1)
    save_model(model, tmp_path, max_shard_bytes=200_000)
    index = json.loads((tmp_path / INDEX).read_text())
    sizes = {p.name: sum(t.nbytes for t in load_file(str(p)).values()) for p in tmp_path.glob("*.safetensors")}
    assert max(sizes.values()) <= 200_000
    assert index["metadata"]["total_size"] == sum(sizes.values())
    assert set(index["weight_map"].values()) == set(sizes)
    assert sorted(sizes) == [f"model-{i + 1:05d}-of-{len(sizes):05d}.safetensors" for i in range(len(sizes))]


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True, "attention_bias": True}])
def test_transformers_loads_what_is_saved(tmp_path: Path, changes: dict[str, object]) -> None:
    model = tiny_model(1, **changes)
    save_model(model, tmp_path, max_shard_bytes=200_000)
    theirs, info = GlmMoeDsaForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["mismatched_keys"]
    assert all(key.startswith("model.layers.3.") for key in info["unexpected_keys"])  # it has no MTP
    # With these changes other ids come near a tie: there, only what the top-k cannot touch.
    ids = IDS if not changes else IDS[:, :24]
    with torch.no_grad():
        difference = (theirs.eval()(ids).logits - model(ids).logits).abs().max()
    assert difference < 5e-5


def test_we_load_what_transformers_saves(tmp_path: Path) -> None:
    write_public_checkpoint(tmp_path / "in", seed=1)
    theirs = GlmMoeDsaForCausalLM.from_pretrained(tmp_path / "in", dtype=torch.float32)
    theirs.save_pretrained(tmp_path / "out", max_shard_size="300KB")
    ours = load_model(tmp_path / "out", num_nextn_predict_layers=0)
    assert_same(ours, load_model(tmp_path / "in", num_nextn_predict_layers=0))


def test_saving_does_not_replace_unless_asked(tmp_path: Path) -> None:
    save_model(tiny_model(1), tmp_path, max_shard_bytes=200_000)
    with pytest.raises(CheckpointError, match=r"already holds config\.json"):
        save_model(tiny_model(2), tmp_path)
    assert_same(load_model(tmp_path), tiny_model(1))
    save_model(tiny_model(2), tmp_path, overwrite=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    assert_same(load_model(tmp_path), tiny_model(2))


def test_full_disk_leaves_no_checkpoint_and_no_litter(
    tmp_path: Path, file_size_limit: Callable[[int], AbstractContextManager[None]]
) -> None:
    with pytest.raises(FileError, match=r"model\.safetensors"), file_size_limit(100_000):
        save_model(tiny_model(1), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_killed_between_files_keeps_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model(tiny_model(1), tmp_path)
    calls = []

    def die(file: Path, *rest: object) -> None:
        calls.append(file)
        if len(calls) == 2:
            raise KeyboardInterrupt
        original(file, *rest)  # type: ignore[arg-type]

    original = weights._save_shard
    monkeypatch.setattr(weights, "_save_shard", die)
    with pytest.raises(KeyboardInterrupt):
        save_model(tiny_model(2), tmp_path, max_shard_bytes=200_000, overwrite=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    assert_same(load_model(tmp_path), tiny_model(1))


def test_a_full_disk_keeps_what_was_there(
    tmp_path: Path, file_size_limit: Callable[[int], AbstractContextManager[None]]
) -> None:
    save_model(tiny_model(1), tmp_path)
    with pytest.raises(FileError, match="larger than allowed"), file_size_limit(100_000):
        save_model(tiny_model(2), tmp_path, overwrite=True)
    assert_same(load_model(tmp_path), tiny_model(1))


def test_what_a_killed_save_left_goes_with_the_next(tmp_path: Path) -> None:
    (tmp_path / ".saving").mkdir()
    (tmp_path / ".saving" / "model-00001-of-00009.safetensors").write_bytes(b"half")
    save_model(tiny_model(2), tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize("size", [0, -1, float("nan")])
def test_a_shard_has_a_size(size: float, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="max_shard_bytes"):
        save_model(tiny_model(1), tmp_path, max_shard_bytes=size)


@pytest.mark.parametrize("device", ["meta", "mps", "xpu", "cuda:99", "nowhere"])
def test_a_device_that_is_not_here_is_refused(device: str, tmp_path: Path) -> None:
    write_public_checkpoint(tmp_path)
    with pytest.raises(UserError, match="device="):
        load_model(tmp_path, device=device)


def test_tokenizer_and_meta_model(tmp_path: Path) -> None:
    class FakeTokenizer:
        def save(self, directory: str | os.PathLike[str]) -> None:
            (Path(directory) / "tokenizer.json").write_text("{}")

    save_model(tiny_model(1), tmp_path / "a", tokenizer=FakeTokenizer())
    assert (tmp_path / "a" / "tokenizer.json").exists()
    with torch.device("meta"):
        empty = GLM5(tiny_config(), seed=None)
    with pytest.raises(CheckpointError, match="meta"):
        save_model(empty, tmp_path / "b")
    assert not list((tmp_path / "b").iterdir())


def test_a_model_of_more_elements_than_there_are_numbers_is_refused(tmp_path: Path) -> None:
    write_public_checkpoint(tmp_path)
    tiny_config(vocab_size=2**31 - 1, hidden_size=2**31 - 1).save(tmp_path)
    with pytest.raises(CheckpointError, match="no such model can be"):
        load_model(tmp_path)


def test_a_run_given_for_its_model_is_told_apart(tmp_path: Path) -> None:
    save_model(tiny_model(0), tmp_path / "run" / "model")
    (tmp_path / "run" / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"run is a run, not a model.*run/model"):
        load_model(tmp_path / "run")
