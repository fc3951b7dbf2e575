"""Fine-tuning for true: a model learns eight conversations by heart and says them again, and is resumed in the same
bytes; a sparse one trains its indexers where rows are longer than what they select."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from glm5.kernels.formats import unpack
from glm5.model.config import ModelConfig
from glm5.model.glm5 import GLM5
from glm5.model.moe import Experts
from glm5.model.weights import load_model, save_model
from glm5.posttrain.chat_data import prepare_chat
from glm5.posttrain.sft import SftConfig, conversations, resolve, sft, staged
from glm5.quant.int4 import MARK, pack_experts, train_at_int4
from glm5.text import load_tokenizer, messages_from_openai, parse, render
from glm5.train.config import TrainConfig
from glm5.train.evaluate import held_out
from glm5.train.loop import Trainer
from glm5.train.schedule import BatchWarmup, LearningRate
from glm5.utils.errors import CheckpointError, ConfigError, DataError
from support.conversations import tokenizer
from support.training import tiny

CAPITALS = {
    "Oslo": "Norway",
    "Paris": "France",
    "Rome": "Italy",
    "Bern": "Swiss",
    "Kiev": "Ukraine",
    "Riga": "Latvia",
    "Lima": "Peru",
    "Baku": "Azeri",
}


def conversation(city: str, country: str) -> dict[str, Any]:
    return {
        "messages": [
            {"role": "user", "content": f"{city}?"},
            {"role": "assistant", "content": country, "reasoning_content": f"{city} is in"},
        ]
    }


def write(path: Path, cities: dict[str, str] = CAPITALS) -> str:
    path.write_text("".join(json.dumps(conversation(*item)) + "\n" for item in cities.items()))
    return str(path)


def checkpoint(directory: Path, **changes: Any) -> str:
    t = tokenizer()
    sizes = {**tiny().config.to_dict(), "vocab_size": -(-t.vocab_size // 64) * 64, "hidden_size": 48}
    model = GLM5(ModelConfig.from_dict({**sizes, **changes}), seed=2)
    save_model(model, directory / "base", tokenizer=t)
    return str(directory / "base")


def config(directory: Path, **changes: Any) -> SftConfig:
    training: dict[str, Any] = dict(
        steps=4,
        batch=BatchWarmup(2, 2, 0),
        micro_batch=2,
        lr=LearningRate(2e-2, 2e-3),
        bias_rate=0.0,
        mtp_weight=0.1,
        save_every=2,
        measure_every=3,
    )
    training |= changes.pop("train", {})
    defaults: dict[str, Any] = dict(
        checkpoint=checkpoint(directory) if "checkpoint" not in changes else "",
        data=(write(directory / "data.jsonl"),),
        run=str(directory / "run"),
        seq_len=64,
        device="cpu",
        train=TrainConfig(**training),
    )
    return SftConfig(**{**defaults, **changes})


def test_eight_conversations_are_learned_and_said_again(tmp_path: Path) -> None:
    said: list[str] = []
    held = write(tmp_path / "held.jsonl")  # the same, to see them learned
    found = sft(
        config(tmp_path, held_out=(held,), train=dict(steps=110, mtp_depths=1, save_every=110, measure_every=110)),
        said.append,
    )
    assert found.held_out["before"] > 4
    assert found.held_out["after"] < 0.05
    assert any("8 conversations in" in line and "100% of the mixture" in line for line in said)
    model, t = load_model(found.model), load_tokenizer(found.model)
    for city, country in CAPITALS.items():
        prompt = render(t, messages_from_openai([{"role": "user", "content": f"{city}?"}]), add_generation_prompt=True)
        ids = list(model.generate(list(prompt.ids), max_new_tokens=40, stop_ids=(t.user_id, t.observation_id)))
        assert ids[-1] == t.user_id  # the turn is ended by the model
        answer = parse(t, ids, prompt_ids=prompt.ids)
        assert (answer.reasoning, answer.content) == (f"{city} is in", country)
    stored = json.loads((found.run / "result.json").read_text())
    assert stored["conversations"][str(tmp_path / "data.jsonl")]["renderings"] == 8
    assert stored["held_out"] == found.held_out


@pytest.mark.parametrize("qat", [dict(), dict(qat="int4", qat_group=4)])
def test_a_resumed_run_ends_in_the_same_bytes(
    qat: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = checkpoint(tmp_path)
    data = (write(tmp_path / "a.jsonl") + "=3", write(tmp_path / "b.jsonl", {"Cairo": "Egypt", "Minsk": "Belarus"}))
    held = (write(tmp_path / "held.jsonl"),)
    whole = config(tmp_path, checkpoint=base, data=data, held_out=held, run=str(tmp_path / "whole"), **qat)
    expected = sft(whole, lambda _: None)

    step = Trainer.step
    monkeypatch.setattr(
        Trainer, "step", lambda self: step(self) if self.finished_steps < 3 else (_ for _ in ()).throw(Killed())
    )
    cut = replace(whole, run=str(tmp_path / "cut"))
    with pytest.raises(Killed):
        sft(cut, lambda _: None)
    monkeypatch.undo()
    found = sft(cut, lambda _: None)
    name = "model.safetensors"
    assert (found.model / name).read_bytes() == (expected.model / name).read_bytes()
    assert found.result == expected.result

    with pytest.raises(ConfigError, match="seq_len"):
        sft(replace(cut, seq_len=48), lambda _: None)
    write(tmp_path / "a.jsonl", {"Oslo": "Sweden"})
    with pytest.raises(DataError, match="not those that"):
        sft(cut, lambda _: None)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_at_int4_the_saved_weights_pack_to_what_training_saw(precision: str, tmp_path: Path) -> None:
    seen: list[dict[str, torch.Tensor]] = []
    export = Trainer.export

    def look(self: Trainer, *args: Any, **options: Any) -> None:
        experts = {n: m for n, m in self.model.named_modules() if isinstance(m, Experts)}
        seen.append({f"{n}/{i}": t.detach().clone() for n, m in experts.items() for i, t in enumerate(m.read())})
        export(self, *args, **options)

    options: dict[str, Any] = dict(qat="int4", qat_group=12, held_out=(write(tmp_path / "held.jsonl"),))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "export", look)
        found = sft(config(tmp_path, train=dict(steps=2, precision=precision), **options), lambda _: None)
    model = load_model(found.model, dtype="float32")
    assert model.config.extra[MARK] == {"format": "int4", "group": 12, "weights": "experts"}
    experts = {n: m for n, m in model.named_modules() if isinstance(m, Experts)}
    packed = {f"{n}/{i}": unpack(p) for n, m in experts.items() for i, p in enumerate(pack_experts(m, 12))}
    assert packed.keys() == seen[0].keys()
    for name, t in seen[0].items():
        assert torch.equal(packed[name].to(t.dtype), t), name
        assert not torch.equal(packed[name], model.get_submodule(name[:-2]).held()[int(name[-1])]), "masters are kept"
    # What is measured is the rounded model, and a later stage that does not round takes the mark away.
    train_at_int4(model, 12)
    held = prepare_chat(
        [options["held_out"][0]],
        tokenizer(),
        tmp_path / "again",
        seq_len=64,
        clear_thinking=False,
        too_long="refuse",
        begun=False,
    )
    loss = held_out(model, held.dataset(64, 1), sparse=True).loss
    assert found.held_out["after"] == pytest.approx(loss, rel=1e-6 if precision == "fp32" else 2e-2)
    plain = sft(config(tmp_path, checkpoint=str(found.model), run=str(tmp_path / "on"), train=dict(steps=1)), str)
    assert MARK not in load_model(plain.model).config.extra


def test_int4_without_its_switch_or_with_a_wrong_group_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="qat_group=12: belongs to qat=int4"):
        config(tmp_path, checkpoint="", qat_group=12)
    with pytest.raises(ConfigError, match="qat_group=128: must be even and divide"):
        sft(config(tmp_path, qat="int4"), str)
    assert not (tmp_path / "run").exists()


class Killed(BaseException):
    """As a kill: nothing of the trainer runs after it."""


def test_a_sparse_model_trains_its_indexers_where_rows_are_long(tmp_path: Path) -> None:
    base = checkpoint(tmp_path, glm5_attention="sparse")
    given, shape = resolve(config(tmp_path, checkpoint=base))
    data = conversations(given, load_tokenizer(base), tmp_path / "looked", begun=False)
    stages = {n: staged(given, shape, data.dataset(n, 2)).train.stage for n in (8, 9)}
    assert stages == {8: "pretrain", 9: "sparse"}  # index_topk is 8
    found = sft(config(tmp_path, checkpoint=base, train=dict(steps=1)), lambda _: None)
    before, after = load_model(base), load_model(found.model)
    assert after.config.sparse
    moved = {
        n
        for (n, p), (_, q) in zip(before.named_parameters(), after.named_parameters(), strict=True)
        if not torch.equal(p, q)
    }
    assert any(".indexer." in name for name in moved)
    assert any(".o_proj." in name for name in moved)


def test_a_model_without_mtp_trains_without(tmp_path: Path) -> None:
    found, _ = resolve(config(tmp_path, checkpoint=checkpoint(tmp_path, num_nextn_predict_layers=0)))
    assert found.train.mtp_depths == 0


def test_rows_are_no_longer_than_all_that_there_is(tmp_path: Path) -> None:
    """One short conversation in rows of thousands of tokens would cost as much as thousands of tokens."""
    said: list[str] = []
    base = checkpoint(tmp_path, max_position_embeddings=8192)
    data = (write(tmp_path / "one.jsonl", {"Oslo": "Norway"}),)
    found = sft(config(tmp_path, checkpoint=base, data=data, seq_len=8000, train=dict(steps=1)), said.append)
    (line,) = [line for line in said if "1 conversations in 1 rows of " in line]
    (store,) = (tmp_path / "run" / "data").glob("tokens/manifest.json")
    assert f"rows of {json.loads(store.read_text())['tokens'] - 1};" in line
    assert found.tokens > 0


def test_a_run_is_no_checkpoint(tmp_path: Path) -> None:
    base = Path(checkpoint(tmp_path))
    (tmp_path / "a-run").mkdir()
    base.rename(tmp_path / "a-run" / "model")
    with pytest.raises(CheckpointError, match="is a run, not a model"):
        resolve(config(tmp_path, checkpoint=str(tmp_path / "a-run")))


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        (dict(data=()), "data=.*must name at least one"),
        (dict(seq_len=10_000_000), "seq_len=10000000: must be at most"),
        (dict(checkpoint=""), "must name the model's directory"),
    ],
)
def test_what_cannot_be_run_is_said_at_once(tmp_path: Path, changes: dict[str, Any], match: str) -> None:
    made = replace(config(tmp_path), **changes)
    with pytest.raises(ConfigError, match=match):
        resolve(made)


def test_contradictions_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"a\.jsonl.*is there twice"):
        SftConfig(data=("a.jsonl", "a.jsonl=2"))
    with pytest.raises(ConfigError, match="held_out_rows=0: must be at least 1"):
        SftConfig(held_out_rows=0)
    with pytest.raises(ConfigError, match="warmup"):
        SftConfig(data=("a",), train=TrainConfig(stage="warmup"))
