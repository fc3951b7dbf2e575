"""A task service as a process: found by its name, and a wrong name is told as a mistake."""

from __future__ import annotations

from pathlib import Path

import pytest

from glm5.agents.loading import main


@pytest.mark.parametrize(
    ("task", "said"), [("nowhere.py:Sums", "must be importable"), ("plain.py:Sums", "must be a TaskService")]
)
def test_a_wrong_name_is_a_mistake_of_the_user(
    task: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("plain.py").write_text("class Sums: ...\n")
    assert main([task, "http://127.0.0.1:9"]) == 2
    assert said in capsys.readouterr().err
