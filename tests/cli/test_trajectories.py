"""`glm5 trajectories`: lists, filters, shows and exports a store."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from glm5.cli.main import main
from glm5.posttrain.outcome import Outcome, State
from glm5.posttrain.record import Record, records_of_session
from glm5.posttrain.store import Store
from glm5.utils.errors import DataError
from support.scripted import chat_tokenizer

RECORD = Record(
    [50, 51, 60, 61], [False, False, True, True], [0, 0, -0.25, -1.5], [-1, -1, 7, 8], [None, None, [60, 9], None], 1.0,
    [{"turn": 0, "finish": "stop"}],
)  # fmt: skip


@pytest.fixture
def path(tmp_path: Path) -> str:
    file = tmp_path / "runs" / "t.sqlite"
    with Store(file, clock=lambda: 1.5) as store:
        store.start("g1", "sums", ["a", "b", "c"])
        store.start("g2", "shell", ["d"])
        store.deliver("a", Outcome.OK, 1.0, [RECORD, RECORD])
        store.deliver("b", Outcome.TASK_FAILED, 0.25, [RECORD])
        store.deliver("c", Outcome.ENV_CRASH, None, [], detail="no space")
        store.close_samples({"a": State.TRAINED, "c": State.ENVIRONMENT_FAILED}, step=3)
    return str(file)


def told(capsys: pytest.CaptureFixture[str], *argv: str, status: int = 0) -> Any:
    assert main(["trajectories", *argv]) == status
    got = capsys.readouterr()
    text = got.out if status == 0 else got.err
    return json.loads(text) if "--json" in argv else text


def test_lists_and_filters(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = told(capsys, path)
    assert text.splitlines()[0] == "4 started = 1 running + 1 delivered + 1 trained + 1 environment_failed"
    assert [line.split()[0] for line in text.splitlines()[2:]] == ["a", "b", "c", "d"]
    for options, expected in (
        (["--status", "trained"], "a"),
        (["--status", "running"], "d"),
        (["--task", "sums"], "abc"),
        (["--group", "g2"], "d"),
        (["--outcome", "env_crash"], "c"),
        (["--min-reward", "0.5"], "a"),
        (["--max-reward", "0.5"], "b"),
        (["--limit", "2"], "ab"),
    ):
        found = told(capsys, path, "--json", *options)
        assert [sample["id"] for sample in found["samples"]] == list(expected)
        assert found["counts"]["started"] == sum(v for k, v in found["counts"].items() if k != "started")


def test_shows_every_token(path: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    chat_tokenizer().save(tmp_path)
    text = told(capsys, path, "b", "--tokenizer", str(tmp_path))
    lines = text.splitlines()
    assert "outcome    task_failed" in lines
    (drawn,) = [line.split() for line in lines if line.strip().startswith("2 ")]
    assert drawn[:6] == ["2", "*", "60", "-0.2500", "7", "2"]
    assert repr(chat_tokenizer().decode([60])) in text
    shown = told(capsys, path, "a", "--json")
    assert shown["reward"] == 1.0
    assert shown["trajectories"] == [RECORD.to_json()] * 2


def test_exports(path: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "out" / "x.jsonl"
    told(capsys, path, "--export", str(file))
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(row["id"], row["part"]) for row in rows] == [("a", 0), ("a", 1), ("b", 0), ("c", None), ("d", None)]
    assert Record.from_json(rows[0]).to_json() == RECORD.to_json()
    assert told(capsys, path, "--export", str(file), "--status", "trained", "--json")["rows"] == 2
    parquet = pytest.importorskip("pyarrow.parquet")
    told(capsys, path, "--export", str(tmp_path / "x.parquet"))
    read = parquet.read_table(tmp_path / "x.parquet").to_pylist()
    for mine, other in zip(read, rows, strict=True):
        assert mine.pop("turns") == (json.dumps(other["turns"]) if "turns" in other else None)
        assert mine == {name: other.get(name) for name in mine}


def test_mistakes(path: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for argv, said in (
        ([], "no store is named"),
        ([str(tmp_path / "none")], "no such file"),
        ([str(tmp_path)], "is a directory"),
        ([path, "x"], "no sample 'x'"),
        ([path, "--status", "lost"], "not known"),
        ([path, "--outcome", "lost"], "not known"),
        ([path, "--export", "x.csv"], ".jsonl or .parquet"),
        ([path, "--limit", "-1"], "at least 0"),
    ):
        assert said in told(capsys, *argv, status=2)


def test_records_of_a_session() -> None:
    turn = {"turn": 0, "temperature": 0.7, "finish": "stop"}
    given = {"ids": [1, 2], "drawn": [False, True], "logprobs": [0, -1.0], "versions": ["", "12"], "kept": None}
    session = {"turns": [turn, {**turn, "turn": 1, "temperature": 1.0}], "trajectories": [{**given, "turns": [0]}]}
    (record,) = records_of_session(session)
    assert (record.oldest, record.temperature, record.turns) == (12, 0.7, [turn])
    for change, said in (({"versions": ["", "new"]}, "is no number"), ({"turns": [0, 1]}, "temperature=None")):
        with pytest.raises(DataError, match=said):
            records_of_session({**session, "trajectories": [{**given, "turns": [0], **change}]})
    assert records_of_session({**session, "trajectories": [{**given, "drawn": [False] * 2, "turns": [0]}]}) == []


def test_shows_messages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = chat_tokenizer()
    tokenizer.save(tmp_path)
    prompt = [*tokenizer.prefix_ids, *tokenizer.encode("<|user|>the path<|assistant|><think>", allow_special=True)]
    answer = tokenizer.encode("hm</think>ping<|user|>", allow_special=True)
    drawn = [False] * len(prompt) + [True] * len(answer)
    file = str(tmp_path / "t.sqlite")
    with Store(file) as store:
        store.start("g", "t", ["a"])
        record = Record([*prompt, *answer], drawn, [-1.0] * len(drawn), [1] * len(drawn))
        store.deliver("a", Outcome.OK, 1.0, [record])
    lines = told(capsys, file, "a", "--messages", "--tokenizer", str(tmp_path)).splitlines()
    assert [json.loads(line) for line in lines] == [
        {"trajectory": 0, "role": "user", "content": "the path"},
        {"trajectory": 0, "role": "assistant", "content": "ping", "reasoning_content": "hm"},
    ]
    assert "--tokenizer DIR" in told(capsys, file, "a", "--messages", status=2)
