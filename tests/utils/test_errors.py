"""What a user is told: every mend that stands in the source is an instruction as CONTRIBUTING.md has it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import glm5
from glm5.utils.errors import ConfigError, UserError

SOURCE = Path(glm5.__file__).parent
KINDS = {"UserError", "CheckpointError", "DataError", "NumericalError", "FileError", "LayoutError"}


def mends() -> Iterator[tuple[str, ast.expr]]:
    """Where each error is made, and its second argument."""
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.Call(func=ast.Name(id=kind), args=[_, mend]) if kind in KINDS:
                    yield f"{path.relative_to(SOURCE)}:{node.lineno}", mend


def literal(mend: ast.expr, end: int) -> str:
    """The text that stands at the beginning (0) or the end (-1); empty where it is computed."""
    part = mend.values[end] if isinstance(mend, ast.JoinedStr) else mend
    return str(part.value) if isinstance(part, ast.Constant) else ""


def test_mends_begin_with_a_capital_and_end_without_a_full_stop() -> None:
    found = [*mends()]
    assert len(found) > 300
    lower = [place for place, m in found if (text := literal(m, 0))[:1].islower() and not text.startswith("pip ")]
    stopped = [place for place, m in found if (text := literal(m, -1)).endswith(".") and not text.endswith("..")]
    assert (lower, stopped) == ([], [])


def test_an_error_says_what_and_how_to_mend_it() -> None:
    assert str(UserError("the file is empty", "Give another")) == "the file is empty. Give another"
    error = ConfigError("top_p", 2, "must lie in (0, 1]")
    assert (str(error), error.field, error.mend) == ("top_p=2: must lie in (0, 1]", "top_p", "")
