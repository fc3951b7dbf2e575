"""What users mistype or lack, at the level of the command: one line, status 2, nothing lost."""

from __future__ import annotations

import io
from types import SimpleNamespace

import pytest

from glm5.cli import chat, watch
from glm5.cli import main as cli
from glm5.cli.pretrain import choose
from glm5.utils.errors import UserError
from support.tiny import tiny_config, tiny_model


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
        RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes"),
    ],
)
def test_a_full_memory_is_one_line(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(_argv: list[str]) -> int:
        raise error

    monkeypatch.setattr(watch, "main", fails)
    assert cli.main(["watch"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: out of memory")
    assert said.count("\n") == 1
    assert "mend: Use a smaller model" in said


def test_another_error_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_argv: list[str]) -> int:
        raise RuntimeError("a bug")

    monkeypatch.setattr(watch, "main", fails)
    with pytest.raises(RuntimeError, match="a bug"):
        cli.main(["watch"])


def test_a_model_with_a_short_context_and_no_mtp_is_a_choice(tmp_path: object) -> None:
    """Its defaults must fit it, or no option could be given at all."""
    path = f"{tmp_path}/config.json"
    tiny_config(max_position_embeddings=100, num_nextn_predict_layers=0).save(path)
    chosen = choose(None, path, [])
    assert chosen.seq_len == 100
    assert chosen.train.mtp_depths == 0


@pytest.mark.parametrize("size", ["0", "-1", "nan"])
def test_convert_refuses_shards_without_size(size: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["convert", "a", "b", f"--max-shard-gb={size}"]) == 2
    assert "error: max_shard_gb=" in capsys.readouterr().err


def test_a_terminal_that_is_not_utf_8_shows_what_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", out)
    assert cli.main(["ledger", "--config", "nano", "--fit", "cpu:64"]) == 0
    assert b"?" in out.buffer.getvalue()  # type: ignore[attr-defined]


def test_a_chat_refuses_another_models_tokenizer() -> None:
    tokenizer = SimpleNamespace(vocab_size=tiny_config().vocab_size + 1)
    with pytest.raises(UserError, match="the tokenizer has 321 ids, the model 320"):
        chat.Conversation(tiny_model(), tokenizer, chat.Settings())  # type: ignore[arg-type]


def test_a_seed_has_64_bits() -> None:
    tokenizer = SimpleNamespace(vocab_size=10)
    with pytest.raises(UserError, match="seed=18446744073709551616"):
        chat.Conversation(tiny_model(), tokenizer, chat.Settings(seed=2**64))  # type: ignore[arg-type]


def test_bytes_that_are_not_utf_8_reach_the_tokenizer_as_bytes() -> None:
    assert chat._as_read("é") == "é"
    assert chat._as_read(b"a\xff\xfe".decode("utf-8", "surrogateescape")) == b"a\xff\xfe"
    assert chat._as_read("\ud800") == "\ud800"
