"""Rows of JSON that make a parser give up are rows that are not JSON."""

from __future__ import annotations

from pathlib import Path

from glm5.data.corpus import read_jsonl


def test_rows_that_break_the_parser_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(['{"text": "good"}', "[" * 100_000, '{"id": ' + "9" * 5000 + ', "text": "x"}', "NaN"]))
    corpus = read_jsonl(path)
    assert [document.text for document in corpus.documents] == ["good"]
    assert corpus.dropped == {"not JSON": 2, "not a JSON object": 1}
