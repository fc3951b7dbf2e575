"""`pretrain` and what it stands on: the data of a run, the estimate, and the checkpoint that others can load."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from glm5.model.config import ModelConfig
from glm5.model.glm5 import GLM5
from glm5.model.presets import nano
from glm5.model.trace import Aux
from glm5.model.weights import load_model, save_model
from glm5.text.tokenizer import Tokenizer, load_tokenizer
from glm5.train import evaluate
from glm5.train.config import TrainConfig
from glm5.train.estimate import _kept_elements, count_parameters, estimate
from glm5.train.loop import Trainer
from glm5.train.prepare import Prepared, TextConfig, prepare
from glm5.train.pretrain import PretrainConfig, pretrain, resolve
from glm5.train.schedule import BatchWarmup, LearningRate
from glm5.utils.errors import ConfigError, DataError, FileError

WORDS = "def return import class self if else for while not None True False print len range open path with as".split()
TINY: dict[str, Any] = dict(
    vocab_size=320,
    hidden_size=32,
    num_hidden_layers=2,
    q_lora_rank=16,
    kv_lora_rank=16,
    num_attention_heads=2,
    num_key_value_heads=2,
    index_n_heads=2,
    index_head_dim=16,
    index_topk=16,
    intermediate_size=48,
    moe_intermediate_size=16,
    n_routed_experts=4,
)


def write_corpus(directory: Path, files: int = 30, words: int = 60, seed: int = 0) -> Path:
    """Files of words in random order: text of which no two files repeat each other."""
    rng = random.Random(seed)  # noqa: S311
    directory.mkdir(parents=True, exist_ok=True)
    for i in range(files):
        (directory / f"{i:02}.py").write_text(" ".join(rng.choices(WORDS, k=words)) + "\n")
    return directory


def config(directory: Path, **changes: Any) -> PretrainConfig:
    """A run of a few steps on `directory`/corpus; a dict for `train` changes its fields."""
    training: dict[str, Any] = dict(
        steps=4, batch=BatchWarmup(4, 4, 0), micro_batch=4, lr=LearningRate(2e-2, 2e-3), save_every=2, measure_every=3
    )
    training |= changes.pop("train", {})
    defaults: dict[str, Any] = dict(
        corpus=str(directory / "corpus"),
        run=str(directory / "run"),
        seq_len=32,
        held_out=0.2,
        model=nano(**TINY),
        train=TrainConfig(**training),
    )
    return PretrainConfig(**{**defaults, **changes})


# --------------------------------------------------------------------------- the whole command
def test_from_text_to_a_checkpoint_and_its_figure(tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus")
    said: list[str] = []
    found = pretrain(config(tmp_path, train=dict(steps=40)), said.append)

    model, tokenizer = load_model(found.model), load_tokenizer(found.model)
    assert tokenizer.vocab_size == model.config.vocab_size == 320
    assert model.config.eos_token_id == (tokenizer.end_of_text_id,)
    assert model.config.extra["glm5_attention"] == "dense"
    assert found.parameters == count_parameters(model)
    # The exported model is the one that was measured, and it has learned: 8 bits is what bytes alone cost.
    data = open_data(tmp_path)
    assert data.held_out is not None
    again = evaluate.held_out(model, data.held_out, sparse=False)
    assert again.bits_per_byte == pytest.approx(found.bits_per_byte, rel=1e-5)
    assert found.bits_per_byte is not None
    untrained = evaluate.held_out(GLM5(model.config, seed=0), data.held_out, sparse=False)
    assert found.bits_per_byte < 0.75 * untrained.bits_per_byte
    result = json.loads((found.run / "result.json").read_text())
    assert result == found.result
    assert result["held_out"]["bytes"] == result["corpus"]["held_out_bytes"]
    assert any("30 documents" in line for line in said)


def open_data(directory: Path) -> Prepared:
    c, given = resolve(config(directory))
    return prepare(
        c, directory / "run" / "data", ahead=4, vocab_size=320, tokenizer=given, begun=True, say=lambda _: None
    )


def test_the_same_command_resumes_and_ends_in_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("whole", "broken"):
        write_corpus(tmp_path / name / "corpus")
    whole = pretrain(config(tmp_path / "whole"), lambda _: None)
    step = Trainer.step

    def stop(self: Trainer) -> dict[str, Any]:
        if self.finished_steps == 3:
            raise KeyboardInterrupt
        return step(self)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", stop)
        with pytest.raises(KeyboardInterrupt):
            pretrain(config(tmp_path / "broken"), lambda _: None)
    tokens = (tmp_path / "broken" / "run" / "data" / "training" / "tokens-00000.bin").stat().st_mtime_ns
    broken = pretrain(config(tmp_path / "broken"), lambda _: None)
    assert (tmp_path / "broken" / "run" / "data" / "training" / "tokens-00000.bin").stat().st_mtime_ns == tokens
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (whole.model / name).read_bytes() == (broken.model / name).read_bytes(), name
    assert whole.result == broken.result
    # Once more: nothing is left to train, and a model that was deleted is exported again.
    (broken.model / "model.safetensors").unlink()
    third = pretrain(config(tmp_path / "broken"), lambda _: None)
    assert (third.model / "model.safetensors").read_bytes() == (whole.model / "model.safetensors").read_bytes()


def test_a_given_tokenizer_decides_the_vocabulary(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus")
    texts = [path.read_text() for path in sorted(corpus.iterdir())]
    Tokenizer.train(texts, 330).save(tmp_path / "tokenizer")
    found = pretrain(config(tmp_path, tokenizer=str(tmp_path / "tokenizer"), train=dict(steps=1)), lambda _: None)
    model = load_model(found.model)
    assert model.config.vocab_size == 384  # 330 to the next multiple of 64
    assert (found.model / "tokenizer.json").read_bytes() == (tmp_path / "tokenizer" / "tokenizer.json").read_bytes()


def test_transformers_loads_what_pretraining_wrote(tmp_path: Path) -> None:
    """And gives the same logits: nothing that was added to config.json disturbs another engine."""
    transformers = pytest.importorskip("transformers")
    write_corpus(tmp_path / "corpus")
    found = pretrain(config(tmp_path), lambda _: None)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(found.model, dtype=torch.float32)
    ids = torch.randint(0, 320, (1, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = theirs(ids).logits
        ours = load_model(found.model)(ids).logits
    assert (ours - expected).abs().max() < 5e-5


def test_without_held_out_text_nothing_is_measured(tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus", files=1, words=300)
    found = pretrain(config(tmp_path, held_out=0.0, train=dict(steps=1)), lambda _: None)
    assert found.bits_per_byte is None
    assert found.result["held_out"] is None


# --------------------------------------------------------------------------- corpora that cannot be used
def test_corpora_that_cannot_be_used(tmp_path: Path) -> None:
    def refused(corpus: Path, match: str, **changes: Any) -> None:
        with pytest.raises((DataError, FileError), match=match) as found:
            pretrain(config(tmp_path, corpus=str(corpus), run=str(tmp_path / "refused"), **changes), lambda _: None)
        assert found.value.mend

    refused(tmp_path / "missing", "cannot read the corpus .*missing")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "no text found: 0 documents")
    (tmp_path / "binary").mkdir()
    (tmp_path / "binary" / "a.bin").write_bytes(b"\0\1\2" * 100)
    refused(tmp_path / "binary", r"no text found: .*1 binary \(a.bin\)")
    short = write_corpus(tmp_path / "short", files=12, words=40)
    refused(short, r"tokens to predict, fewer than one sequence of 9,000.*seq_len=\d+ or less", seq_len=9000)
    refused(short, "the corpus gives only .* tokens of the 5000 asked for", vocab_size=5000)
    one = write_corpus(tmp_path / "one", files=1)
    refused(one, r"holding out 0.2 of 1 documents.*or hold out nothing with --held-out 0")
    lines = tmp_path / "lines.jsonl"
    lines.write_text('{"body": "x"}\n[1]\nnot json\n')
    refused(lines, "no text found: .*1 no text under 'text'")
    assert not (tmp_path / "refused" / "checkpoints").exists()


def test_a_jsonl_corpus_and_copies_of_held_out_text(tmp_path: Path) -> None:
    """A near copy of a held-out document does not stay among those to learn from."""
    rng = random.Random(1)  # noqa: S311
    texts = [" ".join(rng.choices(WORDS, k=80)) for _ in range(40)]
    lines = [{"id": f"d{i}", "text": t} for i, t in enumerate(texts)]
    lines += [{"id": f"copy{i}", "text": t + " again"} for i, t in enumerate(texts)]
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    path.open("a").write(json.dumps({"id": "twin", "text": texts[0]}))
    said: list[str] = []
    found = pretrain(config(tmp_path, corpus=str(path), train=dict(steps=1)), said.append)
    counts = found.result["corpus"]
    assert counts["documents"] == 81
    assert counts["copies_of_held_out"] > 0
    assert any(f"removed: 1 exact copies, {counts['copies_of_held_out']} that repeat" in line for line in said)
    names = {
        part: set(json.loads((tmp_path / "run" / "data" / part / "names.json").read_text()))
        for part in ("training", "held-out")
    }
    assert not any(name.replace("copy", "d") in names["held-out"] for name in names["training"] if "copy" in name)


# --------------------------------------------------------------------------- data that is there
def test_data_is_made_once_and_follows_the_corpus_until_the_run_begins(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus")
    said: list[str] = []

    def make(begun: bool = False, **changes: Any) -> Prepared:
        said.clear()
        text = TextConfig(corpus=str(corpus), seq_len=32, held_out=0.2)
        return prepare(
            replace(text, **changes), tmp_path / "data", ahead=4, vocab_size=320, tokenizer=None, begun=begun,
            say=said.append,
        )  # fmt: skip

    first = make()
    again = make(begun=True, seq_len=16)  # the length of rows is no property of the tokens
    assert again.training.store.fingerprint == first.training.store.fingerprint
    assert again.training.rows > first.training.rows
    (corpus / "00.py").write_text("other text " * 30)
    with pytest.raises(DataError, match=r"is not the corpus that the run in .* began with"):
        make(begun=True)
    assert make().training.store.fingerprint != first.training.store.fingerprint
    before = make().training.store.fingerprint
    with pytest.raises(DataError, match="is not the corpus"):
        make(begun=True, held_out=0.3)
    # Damage is noticed and mended, since the corpus is at hand.
    shard = tmp_path / "data" / "training" / "tokens-00000.bin"
    shard.write_bytes(shard.read_bytes()[:-2])
    assert make(begun=True).training.store.fingerprint == before
    assert any(line.startswith("warning") and "damaged" in line for line in said)


def test_bytes_per_token_turns_loss_into_bits_per_byte(tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus")
    pretrain(config(tmp_path, train=dict(steps=1)), lambda _: None)
    data = open_data(tmp_path)
    predicted = sum(int(data.training.batch([row]).targets(1)[1].sum()) for row in range(data.training.rows))
    assert data.training.bytes_per_token == data.training.text_bytes / predicted


def test_few_held_out_tokens_are_measured_in_shorter_rows(tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus", files=30, words=30)
    found = pretrain(config(tmp_path, seq_len=600, held_out=0.1, train=dict(steps=1)), lambda _: None)
    assert found.result["held_out"]["bytes"] == found.result["corpus"]["held_out_bytes"]


# --------------------------------------------------------------------------- options
def test_options_that_contradict_each_other(tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus")
    with pytest.raises(ConfigError, match=r"train\.stage='sparse': must be 'pretrain'"):
        config(tmp_path, train=dict(stage="sparse"))
    with pytest.raises(ConfigError, match="vocab_size=400: contradicts --tokenizer"):
        config(tmp_path, tokenizer="x", vocab_size=400)
    with pytest.raises(ConfigError, match=r"held_out=1\.0: must lie in"):
        config(tmp_path, held_out=1.0)
    with pytest.raises(ConfigError, match="device='gpu': must be auto"):
        resolve(config(tmp_path, device="gpu"))
    with pytest.raises(ConfigError, match="device='cuda:99': there are"):
        resolve(config(tmp_path, device="cuda:99"))
    with pytest.raises(ConfigError, match=r"train\.mtp_depths=3: this model has no MTP block"):
        config(tmp_path, model=nano(**TINY, num_nextn_predict_layers=0))
    with pytest.raises(ConfigError, match="seq_len=70000: must be at most max_position_embeddings=65536"):
        config(tmp_path, seq_len=70_000)
    pretrain(config(tmp_path, model=nano(**TINY, num_nextn_predict_layers=0), train=dict(mtp_depths=0)), lambda _: None)


def test_training_goes_on_from_a_model(tmp_path: Path) -> None:
    """Weights, shape and tokenizer are the model's; the run is one of its own."""
    write_corpus(tmp_path / "corpus")
    first = pretrain(config(tmp_path), lambda _: None)
    shape = ModelConfig.load(first.model)
    further = config(tmp_path, run=str(tmp_path / "further"), model=shape, checkpoint=str(first.model))
    still = replace(further, run=str(tmp_path / "still"), train=replace(further.train, lr=LearningRate(0.0, 0.0)))
    found = pretrain(still, lambda _: None)
    before, after = load_model(first.model).state_dict(), load_model(found.model).state_dict()
    assert all(torch.equal(t, after[n]) for n, t in before.items() if not n.endswith("e_score_correction_bias"))
    assert found.bits_per_byte == pytest.approx(first.bits_per_byte, rel=1e-3)
    moved = pretrain(further, lambda _: None)
    after = load_model(moved.model).state_dict()
    assert not any(torch.equal(t, after[n]) for n, t in before.items() if n.endswith("o_proj.weight"))
    assert load_tokenizer(moved.model).fingerprint == load_tokenizer(first.model).fingerprint

    other = further.model.replace(hidden_size=64)
    with pytest.raises(ConfigError, match=r"model\.hidden_size=64: the model in .* has 32, and keeps it"):
        resolve(replace(further, model=other))
    save_model(GLM5(shape, seed=5), first.model, tokenizer=load_tokenizer(first.model), overwrite=True)
    with pytest.raises(ConfigError, match="its weights are not those that this run began with"):
        pretrain(further, lambda _: None)


def test_what_fails_before_the_first_step_leaves_nothing(tmp_path: Path) -> None:
    shown: list[str] = []
    lost = config(tmp_path, corpus=str(tmp_path / "nowhere"), run=str(tmp_path / "runs" / "deep" / "a"))
    with pytest.raises(FileError, match="nowhere"):
        pretrain(lost, lambda _: None, lambda: shown.append("configuration"))
    assert not (tmp_path / "runs").exists()
    write_corpus(tmp_path / "corpus", files=3, words=5)
    with pytest.raises(DataError):
        pretrain(config(tmp_path, seq_len=2000), lambda _: None, lambda: shown.append("configuration"))
    assert shown == []
    write_corpus(tmp_path / "corpus")
    (tmp_path / "mine").mkdir()  # a directory that was there stays
    with pytest.raises(FileError, match="nowhere"):
        pretrain(replace(lost, run=str(tmp_path / "mine")), lambda _: None)
    assert (tmp_path / "mine").is_dir()
    pretrain(config(tmp_path), lambda _: None, lambda: shown.append("configuration"))
    assert shown == ["configuration"]
    # A contradiction with a run that has begun is known before its text is read again.
    with pytest.raises(ConfigError, match=r"train\.seed=1: this run began with 0"):
        pretrain(config(tmp_path, corpus=str(tmp_path / "nowhere"), train=dict(seed=1)), lambda _: None)


def test_deterministic_mode_holds_for_the_run_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_corpus(tmp_path / "corpus")
    asked: list[bool] = []
    step = Trainer.step

    def watched(self: Trainer) -> dict[str, Any]:
        asked.append(torch.are_deterministic_algorithms_enabled())
        return step(self)

    monkeypatch.setattr(Trainer, "step", watched)
    for on in (False, True):
        run = str(tmp_path / f"run-{on}")
        pretrain(config(tmp_path, run=run, deterministic=on, held_out=0.0, train=dict(steps=1)), lambda _: None)
    assert asked == [False, True]
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_read_only_run_directory(tmp_path: Path, read_only: Callable[[Path], AbstractContextManager[None]]) -> None:
    write_corpus(tmp_path / "corpus")
    (tmp_path / "run").mkdir()
    with read_only(tmp_path / "run"), pytest.raises(FileError, match=r"cannot write to .*run"):
        pretrain(config(tmp_path), lambda _: None)


# --------------------------------------------------------------------------- the estimate
def kept_by_autograd(model: GLM5, stage: Any, depths: int, rows: int, seq_len: int) -> int:
    """Elements that autograd saves in one forward pass, each storage once, parameters not counted."""
    sparse, trains_model = stage == "sparse", stage != "warmup"
    for name, p in model.named_parameters():
        p.requires_grad_(stage != "pretrain" if ".indexer." in name else trains_model)
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    found: dict[int, int] = {}
    alive: list[Tensor] = []

    def pack(t: Tensor) -> Tensor:
        if t.untyped_storage().data_ptr() not in own:
            found[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes() // 4
        alive.append(t)
        return t

    ids = torch.randint(
        0, model.config.vocab_size, (rows, seq_len + depths), generator=torch.Generator().manual_seed(0)
    )
    aux = Aux(indexer=stage != "pretrain", balance=trains_model)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        hidden = model.hidden(ids[:, :seq_len], sparse=sparse, aux=aux)
        list(model.mtp_hidden(hidden, ids, depths, sparse=sparse, aux=aux))
    return sum(found.values())


@pytest.mark.parametrize(
    ("stage", "changes", "tolerance"),
    [
        ("pretrain", {}, 0.1),
        ("pretrain", dict(num_attention_heads=8, num_key_value_heads=8, num_experts_per_tok=4), 0.1),
        ("pretrain", dict(hidden_size=64, intermediate_size=1024, n_routed_experts=8), 0.1),
        ("pretrain", dict(attention="gqa", head_dim=32), 0.1),
        ("sparse", {}, 0.1),
        ("warmup", {}, 0.4),
    ],
)
def test_activations_are_what_autograd_keeps(stage: Any, changes: dict[str, Any], tolerance: float) -> None:
    c = nano(**changes)
    kept = kept_by_autograd(GLM5(c), stage, 3, 2, 160)
    estimated = 2 * 160 * sum(_kept_elements(c, TrainConfig(stage=stage, mtp_depths=3), 160))
    assert estimated == pytest.approx(kept, rel=tolerance)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", ["pretrain", "warmup", "sparse"])
def test_states_are_those_of_the_optimizer(stage: Any, precision: Any, tmp_path: Path) -> None:
    from support.training import dataset, tiny, trainer

    of = trainer(tmp_path, dataset(tmp_path), stage=stage, precision=precision)
    of.step()
    e = estimate(tiny().config, of.config, 32, device="cpu")
    assert e.weights == sum(p.numel() * p.element_size() for p in of.model.parameters())
    assert e.gradients == sum(
        p.grad.numel() * p.grad.element_size() for p in of.model.parameters() if p.grad is not None
    )
    states = of.optimizer.named_state()
    assert e.optimizer == sum(t.nbytes for t in states.values())
    assert e.parameters == count_parameters(of.model)


def test_the_estimate_of_the_published_model() -> None:
    """753,864,139,008 elements; bf16 states of 16 bytes where Muon trains: more than any one device holds."""
    from glm5.model.presets import glm5

    e = estimate(glm5(), TrainConfig(precision="bf16", micro_batch=1), 4096, device="cuda")
    assert e.parameters == 753_864_139_008
    assert 38e9 < e.active_parameters < 44e9
    assert e.weights == pytest.approx(2 * e.parameters, rel=1e-3)
    assert e.tokens == 1000 * 8 * 4096
