"""A task service as a process: found by its name, and a wrong name is told as a mistake."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

from glm5.agents.loading import load_tasks, main

ROLLOUT = "    async def rollout(self, asked, policy): ...\n"
FILES = {
    "plain.py": "class Sums: ...\n",
    "spelled.py": "def (:\n",
    "raises.py": "\n1 / 0\n",
    "bare.py": f"from glm5.agents.service import TaskService\nclass Sums(TaskService):\n{ROLLOUT}",
    "empty.py": 'from glm5.agents.service import TaskService\nclass Sums(TaskService):\n    name = "sums"\n',
}


@pytest.mark.parametrize(
    ("task", "said"),
    [
        ("nowhere.py:Sums", "must be importable"),
        ("plain.py:Sums", "must be a TaskService"),
        ("spelled.py:Sums", "must be importable: SyntaxError: invalid syntax (spelled.py, line 1)"),
        ("raises.py:Sums", "must be importable: ZeroDivisionError: division by zero ("),
        ("bare.py:Sums", "must have a name"),
        ("empty.py:Sums", "must be made without arguments: TypeError"),
    ],
)
def test_a_wrong_name_is_a_mistake_of_the_user(
    task: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        Path(name).write_text(text)
    assert main([task, "http://127.0.0.1:9"]) == 2
    assert said in capsys.readouterr().err


def test_a_file_may_have_dataclasses_and_the_name_of_a_module(tmp_path: Path) -> None:
    """Dataclasses with postponed annotations ask `sys.modules` for their module; a file may be called random.py."""
    (tmp_path / "random.py").write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "from glm5.agents.service import TaskService\n@dataclass\nclass Deal:\n    card: int\n"
        f'class Cards(TaskService):\n    name = "cards"\n{ROLLOUT}'
    )
    (service,) = load_tasks([f"{tmp_path / 'random.py'}:Cards"])
    assert service.name == "cards"
    assert sys.modules["random"] is random
