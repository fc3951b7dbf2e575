"""docs/walks.md stays true: its modules exist, each is imported by one before it, none imports one before it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def walks() -> dict[str, list[str]]:
    parts = re.split(r"^## (.+)$", (ROOT / "docs/walks.md").read_text(encoding="utf-8"), flags=re.M)
    return {
        title: re.findall(r"^\d+\. `([\w.]+)`", text, flags=re.M)
        for title, text in zip(parts[1::2], parts[2::2], strict=True)
    }


def path_of(module: str) -> Path:
    return ROOT / "src" / (module.replace(".", "/") + ".py")


def imports(module: str, *, late: bool = True) -> set[str]:
    """Modules of glm5 that this one imports at its head and, with `late`, inside its functions."""
    found: set[str] = set()
    tree = ast.parse(path_of(module).read_text(encoding="utf-8"))
    for node in ast.walk(tree) if late else tree.body:
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("glm5"):
            found |= {node.module, *(f"{node.module}.{name.name}" for name in node.names)}
        elif isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
    return found


def test_both_walks_are_there() -> None:
    assert len(walks()) == 2
    assert all(len(modules) >= 10 for modules in walks().values())


@pytest.mark.parametrize("title", walks())
def test_walk(title: str) -> None:
    modules = walks()[title]
    for place, module in enumerate(modules):
        assert path_of(module).exists(), f"{module} is not there"
        before = modules[:place]
        backwards = imports(module, late=False) & set(before)
        assert not backwards, f"{module} imports {backwards}, before it"
        assert not before or any(module in imports(b) for b in before), f"nothing before {module} imports it"
