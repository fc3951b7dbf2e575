"""Tasks for tests: our own, and small ones made on the spot."""

from __future__ import annotations

from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "tasks"


def make(directory: Path, toml: str = "", docker: str = "FROM python\nWORKDIR /app\n") -> Path:
    for name, text in {
        "task.toml": toml,
        "instruction.md": "Do it.\n",
        "tests/test.sh": "echo 1 > /logs/verifier/reward.txt\n",
        "environment/Dockerfile": docker,
        "solution/solve.sh": "true\n",
    }.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return directory
