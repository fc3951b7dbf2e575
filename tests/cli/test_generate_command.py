"""`glm5 generate` and `glm5 convert`, on a tiny checkpoint with a tokenizer of its own."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch

from glm5.cli.main import main
from glm5.model.weights import load_model, save_model
from glm5.text.tokenizer import Tokenizer, load_tokenizer
from support.tiny import tiny_model

TEXT = "def add(a, b):\n    return a + b\n\n\ndef twice(a):\n    return add(a, a)\n" * 4


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint")
    tokenizer = Tokenizer.train([TEXT], 310)
    model = tiny_model(1, eos_token_id=())
    assert tokenizer.vocab_size < model.config.vocab_size  # padded, as published
    save_model(model, directory, tokenizer=tokenizer)
    return directory


def test_text_streams_to_stdout_and_its_cost_to_stderr(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["generate", str(checkpoint), "--prompt", "def add", "--max-new-tokens", "12"]
    assert main(argv) == 0
    out, err = capsys.readouterr()
    assert main([*argv, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert out == result["text"] + "\n"
    assert f"{result['prompt_tokens']} tokens read, 12 written" in err

    model, tokenizer = load_model(checkpoint), load_tokenizer(checkpoint)
    ids = [*tokenizer.prefix_ids, *tokenizer.encode("def add")]
    assert result["prompt_tokens"] == len(ids)
    assert result["ids"] == list(model.generate(ids, max_new_tokens=12, vocab_size=tokenizer.vocab_size))
    assert result["text"] == tokenizer.decode(result["ids"], skip_control=True)
    assert len(result["logprobs"]) == 12
    assert max(result["logprobs"]) < 0
    assert result["speculation"] is None


def test_drafts_change_the_report_and_not_the_text(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["generate", str(checkpoint), "--prompt", "def add", "--max-new-tokens", "12", "--json"]
    main(argv)
    plain = json.loads(capsys.readouterr().out)
    main([*argv, "--speculate", "2"])
    drafted = json.loads(capsys.readouterr().out)
    assert drafted["ids"] == plain["ids"]
    assert drafted["speculation"]["drafts"] == 2
    assert 1 <= drafted["speculation"]["accept_length"] <= 3
    assert len(drafted["speculation"]["acceptance"]) == 2


def test_prompt_from_standard_input_and_sampling_by_seed(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = []
    for prompt, seed in (("def add", "1"), ("-", "1"), ("def add", "2")):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"def add")))
        argv = ["generate", str(checkpoint), "--prompt", prompt, "--max-new-tokens", "20", "--temperature", "1.0"]
        assert main([*argv, "--top-p", "0.9", "--seed", seed]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]


def test_mistakes_are_named(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for argv, message in (
        ([str(tmp_path / "nowhere"), "--prompt", "x"], "nowhere"),
        ([str(checkpoint)], "--prompt"),
        ([str(checkpoint), "--prompt", "x", "--temperature", "-1"], "temperature"),
        ([str(checkpoint), "--prompt", "x" * 5000], "1024"),
        ([str(checkpoint), "--prompt", "x", "--dtype", "int8"], "int8"),
    ):
        assert main(["generate", *argv]) == 2
        assert message in capsys.readouterr().err


def test_tokenizer_of_another_model_is_refused(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_model(tiny_model(1, vocab_size=305), tmp_path, tokenizer=load_tokenizer(checkpoint))
    assert main(["generate", str(tmp_path), "--prompt", "x"]) == 2
    assert "310 ids, the model 305" in capsys.readouterr().err


def test_convert_changes_dtype_shards_and_mtp(checkpoint: Path, tmp_path: Path) -> None:
    argv = ["convert", str(checkpoint), str(tmp_path), "--dtype", "bfloat16", "--max-shard-gb", "0.0002", "--drop-mtp"]
    assert main(argv) == 0
    before, after = load_model(checkpoint, dtype="bfloat16", num_nextn_predict_layers=0), load_model(tmp_path)
    assert after.dtype == torch.bfloat16
    assert after.config.num_nextn_predict_layers == 0
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    for (name, a), b in zip(before.state_dict().items(), after.state_dict().values(), strict=True):
        # The router's weight, fp32 in memory, is stored in the model's dtype.
        expected = a.bfloat16().float() if name.endswith("gate.weight") else a
        assert torch.equal(expected, b), name
    assert load_tokenizer(tmp_path).encode(TEXT) == load_tokenizer(checkpoint).encode(TEXT)


def test_convert_replaces_only_when_asked_and_never_itself(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["convert", str(checkpoint), str(tmp_path)]) == 0
    assert main(["convert", str(checkpoint), str(tmp_path)]) == 2
    assert "already holds" in capsys.readouterr().err
    assert main(["convert", str(checkpoint), str(tmp_path), "--overwrite"]) == 0
    assert main(["convert", str(checkpoint), str(checkpoint), "--overwrite"]) == 2
    assert "both source and target" in capsys.readouterr().err
    assert len(load_model(checkpoint).model.layers) == 4
