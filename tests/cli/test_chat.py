"""`glm5 chat`: turns share one cache, an interrupt stops the answer alone, and a pipe is as good as a person."""

from __future__ import annotations

import io
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from glm5.cli import main as cli
from glm5.cli.chat import Conversation, Settings, change, command, read_message, show
from glm5.model.glm5 import GLM5
from glm5.model.weights import save_model
from glm5.text.stream import StreamDecoder
from glm5.text.tokenizer import Tokenizer
from glm5.utils.errors import UserError
from support.tiny import tiny_config

VOCAB = 320


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(["def f(x):\n    return x + 1\n", "import os\nimport sys\n", "für é 語 ★"] * 8, VOCAB - 8)


def model(**changes: Any) -> GLM5:
    """Random weights large enough that the text depends on its context; never an end of text."""
    config = tiny_config(vocab_size=VOCAB, eos_token_id=(0,), pad_token_id=0, initializer_range=0.3, **changes)
    m = GLM5(config, seed=3).eval()
    with torch.no_grad():
        m.lm_head.weight[:36] = 0.0  # special tokens
        m.lm_head.weight[:36, 0] = -9.0
        m.model.norm.weight[0] = 0.0
    return m


def greedy(**changes: Any) -> Settings:
    return Settings(**{**dict(max_new_tokens=12, temperature=0.0), **changes})


def alone(tokenizer: Tokenizer, ids: list[int]) -> list[int]:
    """The twelve tokens behind `ids`, from a model that has read nothing before."""
    return list(model().generate(ids, max_new_tokens=12, vocab_size=tokenizer.vocab_size))


@pytest.fixture(scope="module")
def checkpoint(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(model(), tmp_path_factory.mktemp("chat") / "model", tokenizer=tokenizer)


# --------------------------------------------------------------------------- the conversation
def test_turns_are_one_text(tokenizer: Tokenizer) -> None:
    """Two turns give what one prompt of all their tokens gives, and the second reads its own tokens alone."""
    chat = Conversation(model(), tokenizer, greedy())
    first = "".join(chat.answer("def f("))
    read: list[int] = []
    hidden = GLM5.hidden

    def count(self: GLM5, ids: Tensor, **options: Any) -> Tensor:
        read.append(ids.shape[1])
        return hidden(self, ids, **options)

    before = len(chat.ids)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GLM5, "hidden", count)
        second = "".join(chat.answer("return x"))
    own = tokenizer.encode("return x")
    assert read[0] == 1 + len(own)  # the last token of the answer before was not in the cache yet
    assert sum(read) == 1 + len(own) + 11
    prompt = [*tokenizer.prefix_ids, *tokenizer.encode("def f(")]
    assert chat.ids[: len(prompt)] == prompt
    assert alone(tokenizer, chat.ids[: before + len(own)]) == chat.ids[before + len(own) :]
    assert chat.text() == "def f(" + first + "return x" + second
    assert chat.last.tokens == 12
    assert chat.last.ended == "Enter goes on"


def test_an_empty_line_goes_on(tokenizer: Tokenizer) -> None:
    whole = Conversation(model(), tokenizer, greedy(max_new_tokens=24))
    expected = "".join(whole.answer("import "))
    parts = Conversation(model(), tokenizer, greedy())
    pieces = "".join(parts.answer("import ")) + "".join(parts.answer(""))
    assert parts.ids == whole.ids
    assert pieces == expected


@pytest.mark.parametrize("speculate", [0, 2])
@pytest.mark.parametrize("taken", [1, 5])
def test_a_stopped_answer_keeps_what_was_shown(tokenizer: Tokenizer, speculate: int, taken: int) -> None:
    chat = Conversation(model(), tokenizer, greedy(speculate=speculate))
    pieces = chat.answer("def f(")
    shown = [next(pieces) for _ in range(taken)]
    pieces.close()
    assert chat.last.ended == "stopped"
    assert chat.text() == "def f(" + "".join(shown)
    before = list(chat.ids)
    "".join(chat.answer("x"))
    own = tokenizer.encode("x")
    assert alone(tokenizer, before + own) == chat.ids[len(before) + len(own) :]


@pytest.mark.parametrize("call", [1, 2, 4])
def test_an_interrupt_inside_the_model_leaves_a_usable_text(
    tokenizer: Tokenizer, call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C arrives anywhere: in reading the prompt (call 1), or in a later token."""
    chat = Conversation(model(), tokenizer, greedy())
    calls = 0
    hidden = GLM5.hidden

    def interrupted(self: GLM5, ids: Tensor, **options: Any) -> Tensor:
        nonlocal calls
        calls += 1
        out = hidden(self, ids, **options)
        if calls == call:
            raise KeyboardInterrupt
        return out

    with monkeypatch.context() as patch:
        patch.setattr(GLM5, "hidden", interrupted)
        with pytest.raises(KeyboardInterrupt):
            list(chat.answer("def f("))
    assert chat.last.tokens == call - 1
    before = list(chat.ids)
    "".join(chat.answer(""))
    assert alone(tokenizer, before) == chat.ids[len(before) :]


def test_an_interrupt_between_token_and_text_loses_that_token(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache then holds as much as the text, and something must be left to read."""
    chat = Conversation(model(), tokenizer, greedy())
    pushed = 0
    push = StreamDecoder.push

    def interrupted(self: StreamDecoder, ids: list[int]) -> str:
        nonlocal pushed
        pushed += 1
        if pushed == 3:
            raise KeyboardInterrupt
        return push(self, ids)

    with monkeypatch.context() as patch:
        patch.setattr(StreamDecoder, "push", interrupted)
        with pytest.raises(KeyboardInterrupt):
            list(chat.answer("def f("))
    before = list(chat.ids)
    assert chat.cache.uniform == len(before)
    "".join(chat.answer(""))
    assert alone(tokenizer, before) == chat.ids[len(before) :]


def test_the_end_of_text_ends_a_document(tokenizer: Tokenizer) -> None:
    m = model()
    chat = Conversation(m, tokenizer, greedy())
    "".join(chat.answer("def f("))
    m.config = m.config.replace(eos_token_id=(chat.ids[-3],))
    chat.reset()
    "".join(chat.answer("def f("))
    assert chat.last.ended == "end of text"
    "".join(chat.answer("import os"))
    assert chat.ids[: 2 + len(tokenizer.encode("import os"))] == [*tokenizer.prefix_ids, *tokenizer.encode("import os")]


def test_attention_follows_what_the_checkpoint_learned(tokenizer: Tokenizer) -> None:
    m = model()
    assert Conversation(m, tokenizer, greedy()).sparse
    m.config = m.config.replace(extra={"glm5_attention": "dense"})
    assert not Conversation(m, tokenizer, greedy()).sparse
    assert Conversation(m, tokenizer, greedy(attention="sparse")).sparse
    assert not Conversation(m, tokenizer, greedy(attention="dense")).sparse


def test_drafts_change_the_speed_alone(tokenizer: Tokenizer) -> None:
    plain = Conversation(model(), tokenizer, greedy(max_new_tokens=40))
    drafted = Conversation(model(), tokenizer, greedy(max_new_tokens=40, speculate=3))
    for text in ("def f(", "\n\nimport ", ""):
        assert "".join(plain.answer(text)) == "".join(drafted.answer(text))
    assert plain.last.accept_length is None
    assert drafted.last.accept_length is not None
    assert drafted.last.accept_length >= 1
    assert "accept length" in drafted.last.line()


def test_a_full_context_is_said_and_loses_nothing(tokenizer: Tokenizer) -> None:
    chat = Conversation(model(max_position_embeddings=40), tokenizer, greedy(max_new_tokens=100))
    "".join(chat.answer("def f("))
    assert chat.last.ended == "the context is full"
    assert len(chat.ids) == 40
    before = list(chat.ids)
    with pytest.raises(UserError, match=r"leaves no room.*/reset"):
        list(chat.answer("more"))
    assert chat.ids == before
    chat.reset()
    assert "".join(chat.answer("def f("))


# --------------------------------------------------------------------------- commands
def test_commands(tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]) -> None:
    chat = Conversation(model(), tokenizer, greedy())
    for line in ("/usr/bin/env", "// comment", "/* comment */", "text /help", "/Help", "/", ""):
        assert command(chat, line) is None, line
    assert command(chat, "/quit") is False
    assert command(chat, "/set temperature 0.25") is True
    assert chat.settings.temperature == 0.25
    assert command(chat, "/set attention dense") is True
    assert not chat.sparse
    assert command(chat, "/help") is True
    assert "Ctrl-C stops an answer" in capsys.readouterr().out
    assert command(chat, "/set") is True
    assert "temperature 0.25" in capsys.readouterr().out
    "".join(chat.answer("def"))
    assert command(chat, "/reset") is True
    assert chat.text() == ""
    with pytest.raises(UserError, match=r"no command /restart.*There are /help, /set"):
        command(chat, "/restart")


@pytest.mark.parametrize(
    ("argument", "match"),
    [
        ("heat 1", "no setting 'heat'.*temperature"),
        ("temperature", "temperature"),
        ("temperature warm", "temperature"),
        ("temperature -1", "temperature=-1"),
        ("top_p 2", r"top_p=2\.0"),
        ("max_new_tokens 0", "max_new_tokens=0"),
        ("speculate -1", "speculate=-1"),
        ("attention some", "attention"),
    ],
)
def test_a_bad_setting_changes_nothing(tokenizer: Tokenizer, argument: str, match: str) -> None:
    chat = Conversation(model(), tokenizer, greedy())
    with pytest.raises(UserError, match=match):
        change(chat, argument)
    assert chat.settings == greedy()


def test_drafting_needs_an_mtp_block(tokenizer: Tokenizer) -> None:
    chat = Conversation(model(num_nextn_predict_layers=0), tokenizer, greedy())
    with pytest.raises(UserError, match="speculate=2: this model has no MTP block"):
        change(chat, "speculate 2")


# --------------------------------------------------------------------------- reading
def reader(lines: list[str]) -> tuple[Any, Any]:
    left = iter(lines)

    def read(_: str) -> str:
        try:
            return next(left)
        except StopIteration:
            raise EOFError from None

    return read, left


def test_messages_of_several_lines() -> None:
    def message(*lines: str, pasted: int = 0) -> str:
        read, _ = reader(list(lines))
        waiting = iter([True] * pasted + [False])
        return read_message(read, lambda: next(waiting))

    assert message("one", "two") == "one"
    assert message("one", "two", "three", pasted=2) == "one\ntwo\nthree"
    assert message('"""a', "", 'b"""', "c") == "a\n\nb"
    assert message('"""', "a", "b", '"""') == "\na\nb\n"
    assert message('"""a', "b") == "a\nb"
    assert message("one", pasted=5) == "one"
    assert message("/set top_k 3", "one", pasted=1) == "/set top_k 3"
    with pytest.raises(EOFError):
        message()


# --------------------------------------------------------------------------- the program
def run(checkpoint: Path, text: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "glm5.cli.main", "chat", str(checkpoint), *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, input=text, env=environment, capture_output=True, text=True, timeout=120)


def test_a_pipe_gives_the_text_alone(checkpoint: Path, tokenizer: Tokenizer) -> None:
    """Lines up to a command are one message; the figures go to standard error."""
    text = "def f(x):\n    return\n/set max_new_tokens 5\nimport os\n/quit\nnever\n"
    found = run(checkpoint, text, "--temperature", "0", "--max-new-tokens", "8")
    assert found.returncode == 0, found.stderr
    chat = Conversation(model(), tokenizer, greedy(max_new_tokens=8))
    first = "".join(chat.answer("def f(x):\n    return"))
    chat.settings = greedy(max_new_tokens=5)
    second = "".join(chat.answer("import os"))
    assert found.stdout == f"{first}\n  max_new_tokens 5\n{second}\n"
    assert len(re.findall(r"^\[\d+ tokens, ", found.stderr, re.MULTILINE)) == 2


def test_one_prompt(checkpoint: Path, tokenizer: Tokenizer) -> None:
    found = run(
        checkpoint, "", "--prompt", "import ", "--temperature", "0", "--max-new-tokens", "8", "--speculate", "2"
    )
    chat = Conversation(model(), tokenizer, greedy(max_new_tokens=8))
    assert found.stdout == "".join(chat.answer("import ")) + "\n"
    assert "accept length" in found.stderr


@pytest.mark.parametrize(
    ("where", "text", "options", "said"),
    [
        ("", "/sett\n", (), "no command /sett"),
        ("nowhere", "", (), "no such directory"),
        ("", "", ("--temperature", "-1", "--prompt", "x"), "temperature=-1"),
    ],
)
def test_mistakes(
    where: str,
    text: str,
    options: tuple[str, ...],
    said: str,
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    assert cli.main(["chat", str(checkpoint / where), *options]) == 2
    assert said in capsys.readouterr().err


def test_a_terminal_shows_control_characters_and_does_not_obey_them(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = Conversation(model(), tokenizer, greedy())
    monkeypatch.setattr(chat, "answer", lambda _: (piece for piece in ("a\x1b[2J\r\n", "\tb\x07\x7f\x9b")))
    show(chat, "")
    assert capsys.readouterr().out == "a\x1b[2J\r\n\tb\x07\x7f\x9b\n"  # a pipe gets the text itself
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    show(chat, "")
    assert capsys.readouterr().out == "a\u241b[2J\u240d\n\tb\u2407\u2421\ufffd\n"


class Person:
    """A program on a terminal of its own, and what it has shown."""

    def __init__(self, *argv: str) -> None:
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "TERM": "dumb", "COLUMNS": "100"}
            os.execve(sys.executable, [sys.executable, "-m", "glm5.cli.main", *argv], environment)  # noqa: S606
        self.shown = ""

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def wait_for(self, pattern: str, seconds: float = 90.0) -> re.Match[str]:
        """What was shown since the last match, up to this one."""
        deadline = time.monotonic() + seconds
        while not (found := re.search(pattern, self.shown)):
            assert time.monotonic() < deadline, f"no {pattern!r} in {self.shown!r}"
            if select.select([self.fd], [], [], 0.1)[0]:
                try:
                    self.shown += os.read(self.fd, 65536).decode("utf-8", "replace")
                except OSError:  # the program has ended
                    assert re.search(pattern, self.shown), f"ended without {pattern!r}: {self.shown!r}"
        self.shown = self.shown[found.end() :]
        return found

    def prompt(self) -> None:
        """Wait until it waits for input, which is a moment after the prompt is shown."""
        self.wait_for("> ")
        time.sleep(0.5)

    def end(self) -> int:
        """The exit status."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.pid = 0
                return os.waitstatus_to_exitcode(status)
            if select.select([self.fd], [], [], 0.05)[0]:
                try:
                    self.shown += os.read(self.fd, 65536).decode("utf-8", "replace")
                except OSError:
                    time.sleep(0.05)
        raise AssertionError(f"still running: {self.shown!r}")

    def close(self) -> None:
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self.fd)


@pytest.fixture
def person(checkpoint: Path) -> Iterator[Person]:
    someone = Person("chat", str(checkpoint), "--temperature", "0", "--max-new-tokens", "3000")
    yield someone
    someone.close()


def test_a_person_stops_an_answer_and_goes_on(person: Person) -> None:
    person.wait_for(r"A base model of [\d.]+M parameters, sparse attention, float32 on cpu")
    person.prompt()
    person.type("def f(\n")
    person.wait_for(r"def f\(\r\n[^\r]+")
    time.sleep(0.3)
    person.type("\x03")
    stopped = person.wait_for(r"\[(\d+) tokens, .*stopped\]")
    assert 1 <= int(stopped[1]) < 3000
    person.prompt()
    person.type("\x03")  # at the prompt it says how to leave
    person.wait_for(r"\(/quit or Ctrl-D ends\)")
    person.type("/set max_new_tokens 3\n")
    person.wait_for("max_new_tokens 3")
    person.type("/nothing\n")
    person.wait_for("error: no command /nothing / mend: There are ")
    person.type("x\n")
    person.wait_for(r"\[3 tokens, .*Enter goes on\]")
    person.prompt()
    person.type("\x04")
    assert person.end() == 0


def test_pasted_lines_are_one_message(person: Person) -> None:
    person.prompt()
    person.type("/set max_new_tokens 3\n")
    person.wait_for("  max_new_tokens 3")
    person.prompt()
    person.type("import os\nimport sys\nx = 1\n")
    person.wait_for(r"\[3 tokens, .*Enter goes on\]")
    person.prompt()
    person.type("/text\n")
    person.wait_for(r"import os\r\nimport sys\r\nx = 1")
    person.type("/quit\n")
    assert person.end() == 0
