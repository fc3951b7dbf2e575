"""Tasks of reasoning-gym, judged by their own verifiers, without the generators whose verdicts can't be trusted.

Tasks are made from a seed on the spot: data that needs no download. A reward is 1 where the task's verifier gives its
full mark and 0 otherwise; with `info["partial"]` its own figure. Left out, as of 0.1.25: generators that store no
answer, so that nothing can be held against their verifier; two that take answers to other tasks; and those whose
tasks do not survive JSON. Some of the others run the answer as Python: such an answer must be plain arithmetic, or is
wrong unread. Source: reasoning-gym (arXiv:2505.24760). Read next: `glm5.posttrain.prompts`.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from functools import cache
from typing import Any

from glm5.posttrain.verify.extract import final_answer, last_box, without_thinking
from glm5.posttrain.verify.verdict import Verdict, judged, no_verdict
from glm5.utils.errors import ConfigError, DataError

# Their stored answer is None, which their own verifier scores 0.
NO_ANSWER = frozenset({"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"})
# bool("False") is True: whatever is written counts as the answer. And whatever makes 24 counts, of any four numbers.
ANY_ANSWER = frozenset({"game_of_life_halting", "puzzle24"})
# Their tasks hold tuples and grids that come back from a file as something else.
NO_JSON = frozenset({"arc_agi", "rearc"})
EXCLUDED = NO_ANSWER | ANY_ANSWER | NO_JSON
# They call `eval` on an answer that is not right as it stands, for lists of Python.
EVAL = frozenset({"string_insertion", "spiral_matrix", "binary_matrix", "n_queens"})
# They call sympy's `parse_expr`, which runs Python as well, on every answer; and the functions that answers may call.
PARSE = {
    "countdown": frozenset[str](),
    "polynomial_multiplication": frozenset[str](),
    "simple_integration": frozenset[str](),
    "intermediate_integration": frozenset(
        "sin cos tan sec csc cot asin acos atan sinh cosh tanh exp log ln sqrt Abs".split()
    ),
}
_PLAIN = (
    *(ast.Expression, ast.BinOp, ast.UnaryOp, ast.Constant, ast.Name, ast.Load, ast.List, ast.Tuple, ast.Call),
    *(ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Pow, ast.USub, ast.UAdd),
)


def check(response: str, answer: Any, info: Mapping[str, Any]) -> Verdict:
    """The generator's verdict on the final answer. info: `dataset`, its name, and `metadata`, of the task.

    An answer that makes the verifier fail is wrong if the verifier works on the stored answer: nobody leaves a group by
    writing nonsense.
    """
    name, metadata = info.get("dataset"), info.get("metadata")
    if not isinstance(name, str) or not isinstance(metadata, Mapping) or name in EXCLUDED or name not in names():
        return no_verdict(f"info.dataset={name!r} is no generator that is used here, or info.metadata is missing")
    entry = {"question": info.get("question", ""), "answer": answer, "metadata": dict(metadata)}
    said = final_answer(response)
    if said is None:  # an answer of many lines, as grids are, or a long one
        text = without_thinking(response)
        said = (last_box(text) or text).strip()
    if not said:
        return judged(False, "no final answer")
    if not is_plain(name, said):
        return judged(False, f"{said[:80]!r} is no plain expression")
    try:
        score = float(_score(name)(said, entry))
    except Exception as e:  # whatever the library's code raises on what a model wrote
        if not _stored_is_right(name, answer, entry):
            return no_verdict(f"{name} fails on its own answer: {type(e).__name__}: {e}")
        return judged(False, f"{said[:80]!r} cannot be read: {type(e).__name__}")
    if info.get("partial"):
        return Verdict(min(max(score, 0.0), 1.0), detail=f"{name}: {said[:80]!r}")
    return judged(score >= 1, f"{name}: {said[:80]!r} for {answer!r}")


def is_plain(name: str, answer: str) -> bool:
    """Whether a generator's verifier may be given this answer.

    For those that would run it: numbers, names, strings, lists and + - * / ** of them, and calls of a few functions. No
    other operator either, for `-~24` makes 25 of 24; nor `Integral`, whose derivative is any integrand there is.
    """
    if name not in EVAL and name not in PARSE:
        return True
    try:
        tree = ast.parse(answer.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return name in EVAL  # `eval` refuses it too; sympy would first make Python of it, of `3!` for example
    allowed = PARSE.get(name, frozenset())
    for node in ast.walk(tree):
        if not isinstance(node, _PLAIN):
            return False
        if isinstance(node, ast.Call) and not (isinstance(node.func, ast.Name) and node.func.id in allowed):
            return False
    return True


def _stored_is_right(name: str, answer: Any, entry: dict[str, Any]) -> bool:
    try:
        return float(_score(name)(answer, entry)) >= 1
    except Exception:
        return False


@cache
def names() -> frozenset[str]:
    """The generators that are there, all of them."""
    import reasoning_gym  # noqa: F401  # fills the table
    from reasoning_gym.factory import DATASETS

    return frozenset(DATASETS) - {"composite"}


@cache
def _score(name: str) -> Any:
    from reasoning_gym.factory import get_score_answer_fn

    return get_score_answer_fn(name)


def rows(name: str, count: int, seed: int, **config: Any) -> list[dict[str, Any]]:
    """Tasks of one generator in the form of `glm5.posttrain.prompts`: a function of its name, seed and configuration.

    Tasks whose stored answer is blank, or not plain (`is_plain`), are passed over.

    Raises:
        ConfigError: there is no such generator, or it is one of those left out.
        DataError: a task's stored answer is not what its verifier takes, or the task is no JSON.
    """
    import reasoning_gym

    if name in EXCLUDED:
        raise ConfigError("dataset", name, "its verifier cannot be trusted (see glm5.posttrain.verify.gym)")
    if name not in names():
        raise ConfigError("dataset", name, "reasoning-gym has no such generator")
    made: list[dict[str, Any]] = []
    # Some of these generators' tasks are passed over; what task i is does not depend on how many there are.
    size = 4 * count if name in PARSE or name == "ab" else count
    for index, entry in enumerate(reasoning_gym.create_dataset(name, size=size, seed=seed, **config)):
        if len(made) == count:
            break
        if not is_plain(name, str(entry["answer"])) or not str(entry["answer"]).strip():
            continue
        info = {"dataset": name, "metadata": entry["metadata"]}
        try:
            info = json.loads(json.dumps(info, allow_nan=False))
        except (TypeError, ValueError) as e:
            raise DataError(f"task {index} of {name} is no JSON: {e}", "Use another generator") from None
        stored = {"question": entry["question"], "answer": entry["answer"], "metadata": info["metadata"]}
        if not _stored_is_right(name, entry["answer"], stored):
            raise DataError(f"task {index} of {name}: its verifier does not take its own answer", "Use another one")
        row = {"prompt": entry["question"], "answer": entry["answer"], "verifier": "reasoning-gym", "domain": name}
        made.append({**row, "id": f"{name}-{seed}-{index}", "info": info})
    if len(made) < count:
        raise DataError(
            f"{name} gives {len(made)} tasks of {count} with a plain answer", "Ask for fewer, or another seed"
        )
    return made
