"""JSON that a parser gives up on is the file's fault, and is said to be."""

from __future__ import annotations

from pathlib import Path

import pytest

from glm5.utils.errors import FileError
from glm5.utils.files import read_json, write_json


@pytest.mark.parametrize("text", ["[" * 100_000, "9" * 5000, "\ufeff{}"], ids=["nested", "long number", "mark"])
def test_json_that_cannot_be_parsed_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(FileError, match=r"a\.json is not valid JSON"):
        read_json(tmp_path / "a.json")


def test_a_lone_surrogate_is_written_as_an_escape(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"x": "\ud800 ä"})
    assert read_json(tmp_path / "a.json") == {"x": "\ud800 ä"}
