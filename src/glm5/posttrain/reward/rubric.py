"""Rubrics: what a judge is asked about an answer, as TOML files that people can read and change.

    aim = "foundational correctness"
    weight = 1.0
    [[criteria]]
    name = "instructions"
    question = "Does the answer do all that was asked, …?"
    weight = 2.0

The report's section 3.4 names three aims: foundational correctness (failures to follow instructions, inconsistent
logic, hallucination), emotional intelligence (empathy, a natural tone), and quality at a task (writing, answering
questions and others). It shows no rubric: the files in `rubrics/`, their questions and weights are ours. Read next:
`judge`.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from glm5.utils.errors import DataError
from glm5.utils.files import file_errors

BUILT_IN = Path(__file__).parent / "rubrics"
LOWEST, HIGHEST = 0, 10  # of a rating


@dataclass(frozen=True)
class Criterion:
    """One question, rated from 0 to 10. weight: among all criteria of a judgement, already times the rubric's."""

    name: str
    question: str
    weight: float


@dataclass(frozen=True)
class Rubric:
    """Criteria of one aim."""

    name: str
    aim: str
    criteria: tuple[Criterion, ...]


def load_rubric(name: str) -> Rubric:
    """One of our own by its name, or a file that ends in `.toml`.

    Raises:
        DataError: there is none, or it is no rubric; it names file, field and mend.
        FileError: the file cannot be read.
    """
    path = Path(name) if name.endswith(".toml") else BUILT_IN / f"{name}.toml"
    if path.parent == BUILT_IN and not path.is_file():
        there = ", ".join(sorted(p.stem for p in BUILT_IN.glob("*.toml")))
        raise DataError(f"rubric {name!r} is not known", f"There are {there}; yours is a path that ends in .toml")
    with file_errors(path, "read"):
        data = path.read_bytes()
    try:
        return _rubric(path.stem, tomllib.loads(data.decode()))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise DataError(f"{path} is no TOML in UTF-8 ({e})", "Correct it") from None
    except DataError as e:
        raise DataError(f"{path}: {e.what}", e.mend) from None


def _rubric(name: str, given: dict[str, Any]) -> Rubric:
    _only(given, ("aim", "weight", "criteria"), "")
    aim, rows = given.get("aim"), given.get("criteria")
    if not isinstance(aim, str) or not aim.strip():
        raise DataError(f"aim: {aim!r}", "It must say what the rubric is about")
    if not isinstance(rows, list) or not rows:
        raise DataError("criteria: none", "Give at least one [[criteria]]")
    weight, criteria = _weight(given, "weight"), []
    for place, row in enumerate(rows):
        where = f"criteria[{place}]."
        if not isinstance(row, dict):
            raise DataError(f"{where[:-1]}: {row!r}", "It must be a table: [[criteria]]")
        _only(row, ("name", "question", "weight"), where)
        for field in ("name", "question"):
            if not isinstance(row.get(field), str) or not row[field].strip():
                raise DataError(f"{where}{field}: {row.get(field)!r}", "It must be a text")
        criteria.append(
            Criterion(row["name"], " ".join(row["question"].split()), weight * _weight(row, where + "weight"))
        )
    return Rubric(name, aim, require_criteria(criteria))


def _only(given: dict[str, Any], fields: Sequence[str], where: str) -> None:
    for field in given:
        if field not in fields:
            raise DataError(f"{where}{field}: no such field", f"The fields are {', '.join(fields)}")


def _weight(given: dict[str, Any], where: str) -> float:
    weight = given.get("weight", 1.0)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < float("inf"):
        raise DataError(f"{where}: {weight!r}", "It must be above 0")
    return float(weight)


def require_criteria(criteria: Sequence[Criterion]) -> tuple[Criterion, ...]:
    """The criteria of one judgement, whose names are the keys of a judge's reply.

    Raises:
        DataError: a name is there twice.
    """
    names = [c.name for c in criteria]
    twice = next((n for i, n in enumerate(names) if n in names[:i]), None)
    if twice is not None:
        raise DataError(f"criterion {twice!r} is there twice", "Give each a name of its own")
    return tuple(criteria)
