"""Verifiers: what is right, wrong, or cannot be judged; and the false positives of the libraries behind them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from math_verify import parse, verify

from glm5.posttrain.verify import gym
from glm5.posttrain.verify.extract import final_answer
from glm5.posttrain.verify.maths import check
from glm5.posttrain.verify.short import choice, number, read_number, short
from glm5.posttrain.verify.verdict import VERIFIERS, Verdict, find
from glm5.utils.errors import ConfigError, DataError, UserError


# ------------------------------------------------------------------------------------------------ extraction
@pytest.mark.parametrize(
    ("response", "expected"),
    [
        (r"so \boxed{12}.", "12"),
        (r"\boxed{11}, no, \boxed{\frac{1}{\sqrt{2}}}", r"\frac{1}{\sqrt{2}}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{12", r"\boxed{12"),  # an open box is a short text like any other
        ("<think>\\boxed{3}</think>The answer is 4", "4"),
        ("<|begin_of_box|>7<|end_of_box|>", "7"),
        (r"\boxed{1} <|begin_of_box|>2<|end_of_box|>", "2"),
        (r"<|begin_of_box|>2<|end_of_box|> \boxed{1}", "1"),
        ("The answer is 3.5. Done.", "3.5"),
        ("answer: 1\nFinal answer: **2**\n", "2"),
        ("12", "12"),
        ("first 5\nthen 12", None),
        ("", None),
        ("The answer is", None),
        ("x" * 401, None),
    ],
)
def test_final_answers(response: str, expected: str | None) -> None:
    assert final_answer(response) == expected


# ------------------------------------------------------------------------------------------------ maths
RIGHT = [
    ("4", "4"),
    ("$4$", "4"),
    (r"4\sqrt{2}", r"\boxed{4\sqrt(2)}"),
    ("1331 and 1728", "1728 and 1331"),
    ("1331 and 1728", "$1331$, $1728$"),
    ("1331 and 1728", r"\boxed{1331 \text{ and } 1728}"),
    (r"$1-\frac{1}{\mathrm{e}}$", r"$1-\frac1e$"),
    ("1-1/e", r"1-1/\mathrm{e}"),
    ("x=5", "5"),
    ("5", "x=5"),
    (r"\frac12", "0.5"),
    ("1/3", "0.333333"),
    (r"\{1,2\}", "2, 1"),
    ("12", "The answer is 12."),
    ("12", "So the final answer is: $12$."),
    ("1,000", "1000"),
    ("x+1", "1+x"),
    (r"\sqrt2", "1.41421356"),
    ("4", r"4\text{ cm}"),
    (r"4\text{ cm}", "4"),
    ("$12$ apples", "12"),
    (r"\$5", "5"),
    ("5 dollars", "5"),
    ("(1,2)", "(1, 2)"),
    ("50%", r"50\%"),
    (r"2\sqrt{3}+1", r"1+\sqrt{12}"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
    ("x^2+2x+1", "(x+1)^2"),
    ("2^{10}", "1024"),
    ("1e3", "1000"),
    ("3 or -3", r"\pm 3"),
    (r"90^\circ", "90"),
    ("x>3", r"(3,\infty)"),
    (r"1.5 \times 10^3", "1500"),
    ("1500", r"1.5 \times 10^3"),
    ("1024", "2^{10}"),
    ("3/2", r"1\frac{1}{2}"),
    ("6", r"\frac{12}{2}"),
    ("-7", "-7"),
    ("4", "2+2=4"),
    (r"\sum_{i=1}^{n} i", r"\sum_{i=1}^{n} i"),
    (12, "12"),
    ("12", "12=12"),
    ("101_2", "101"),
    ("12000", "12 000"),
    ("even", "Even"),
    (r"\emptyset", r"\{\}"),
    (r"\boxed{7}", "<think>8</think>**7**"),
]
WRONG = [
    ("4", r"4\sqrt(2)"),
    ("4", r"\boxed{4\sqrt{2}}"),
    (r"4\sqrt(2)", "4"),
    ("1331 and 1728", "1728"),
    ("1728", "1331 and 1728"),
    (r"1-1/\mathrm{e}", r"1+1/\mathrm{e}"),
    (r"$1-\frac{1}{\mathrm{e}}$", r"$1+\frac{1}{\mathrm{e}}$"),
    ("12", "First 5 then\n12"),
    ("12", "12 or 13"),
    ("12", "12, 13"),
    ("12", r"\boxed{12} or rather \boxed{13}"),
    ("3", "3.0001"),
    ("10^{30}", "10^{30}+1"),
    ("0.0000001", "0"),
    ("0.0000001", "0.0000003"),
    (r"4\text{ cm}", r"4\text{ m}"),
    ("-4", "4"),
    ("n", "N"),
    ("(1,2)", "(2,1)"),
    ("[0,1)", "[0,1]"),
    ("12", "I don't know."),
    ("1/3", "0.3333"),
    ("12", r"\boxed{"),
    ("5", "5x"),
    ("5", "5+y"),
    ("4", "4!"),
    ("2", "2 3"),
    ("1", "1}"),
    ("9", "3^2)"),
    ("1", "0.9999"),
    ("3", "3i"),
    ("391", r"17 \times 23"),
    ("391", r"\boxed{400-9}"),
    ("4", "2+2"),
    ("5050", r"\sum_{i=1}^{100} i"),
    ("12", r"\int_0^{12} 1 dx"),
    ("12", "13=12"),
    ("4", "2+2=5=4"),
    ("12", "12=13"),
    ("12", "1 2"),
    ("7", r"8\mod x"),
    ("12", r"\frac{0}{0}"),
    ("12", "x=12, y=13"),
    ("x=5", "x"),
    ("x=5", "y=5"),
    ("1,2,3", "1,2"),
    ("AB", "BA"),
    ("even", "odd"),
    ("101_2", "101_3"),
    ("x>3", r"x\ge3"),
]


@pytest.mark.parametrize(("gold", "said"), RIGHT)
def test_right_answers_of_maths(gold: Any, said: str) -> None:
    found = check(said, gold, {})
    assert found.reward == 1, found


@pytest.mark.parametrize(("gold", "said"), WRONG)
def test_wrong_answers_of_maths(gold: Any, said: str) -> None:
    found = check(said, gold, {})
    assert found.reward == 0, found


@pytest.mark.parametrize(
    ("gold", "said"),
    [("$4$", r"$4\sqrt(2)$"), ("1331 and 1728", "1728"), (r"$1-\frac{1}{\mathrm{e}}$", r"$1+\frac{1}{\mathrm{e}}$")],
)
def test_the_library_alone_takes_these(gold: str, said: str) -> None:
    """Why maths.py is more than a call. When this fails, look whether the wrapper is still needed."""
    expected, found = (parse(text, parsing_timeout=None) for text in (gold, said))
    assert verify(expected, found, timeout_seconds=None)
    assert check(said, gold, {}).reward == 0


def test_an_expected_answer_that_cannot_be_read_is_no_verdict() -> None:
    found = check("5", r"\frac{1}{", {})
    assert (found.reward, found.cause) == (None, "error")
    assert check(r"\boxed{\alpha(}", r"\alpha(", {}).reward == 1  # the same text is right all the same


# ------------------------------------------------------------------------------------------------ letters and words
@pytest.mark.parametrize(
    ("said", "reward"),
    [
        ("B", 1),
        ("The answer is (B).", 1),
        (r"\boxed{\text{B}}", 1),
        ("b", 1),
        ("B: the mitochondrion", 1),
        ("the mitochondrion", 1),
        ("A", 0),
        ("A or B", 0),
        ("A, B", 0),
        ("B and C", 0),
        ("Beta decay", 0),
        ("A dog", 0),
        ("I think\nit is B", 0),
        ("", 0),
    ],
)
def test_multiple_choice(said: str, reward: int) -> None:
    info = {"choices": {"A": "the nucleus", "B": "The mitochondrion", "C": "both"}}
    assert choice(said, "B", info).reward == reward


def test_multiple_choice_with_several_right() -> None:
    assert choice("A and C", ["C", "A"], {}).reward == 1
    assert choice("A, B, C", ["C", "A"], {}).reward == 0
    assert choice("A", ["C", "A"], {}).reward == 0
    assert choice("A", "AB", {}).cause == "error"
    assert choice("A", [], {}).cause == "error"


@pytest.mark.parametrize(
    ("answer", "said", "reward"),
    [
        ("Paris", "The answer is Paris.", 1),
        ("the Nile", "nile", 1),
        (["NaCl", "sodium chloride"], "Sodium  Chloride", 1),
        ("Ohm", "Ω", 0),
        ("Paris", "Paris or London", 0),
        ("Paris", "Not Paris", 0),
        (["x"], "\n\n", 0),
    ],
)
def test_short_answers(answer: Any, said: str, reward: int) -> None:
    assert short(said, answer, {}).reward == reward
    assert short(said, {}, {}).cause == "error"


def test_numbers() -> None:
    for text, value in (("1,234.5", 1234.5), ("-3/4", -0.75), ("12%", 0.12), ("1e-3", 0.001), ("$7$.", 7), ("−2", -2)):
        found = read_number(text)
        assert found is not None
        assert float(found) == pytest.approx(value)
    for text in ("", "abc", "1/0", "1e99999", "1 2", "0x10", "nan", "inf", "1/2/3", "1,23"):
        assert read_number(text) is None
    assert number("The answer is 0.5", "1/2", {}).reward == 1
    assert number("0.51", "1/2", {}).reward == 0
    assert number("0.51", "1/2", {"tolerance": 0.02}).reward == 1
    assert number("about half", "1/2", {}).reward == 0
    assert number("1", "one", {}).cause == "error"


# ------------------------------------------------------------------------------------------------ reasoning-gym
def test_tasks_come_from_the_seed_and_their_answers_are_right() -> None:
    for name in ("chain_sum", "leg_counting", "basic_arithmetic"):
        made = gym.rows(name, 4, seed=5)
        assert made == gym.rows(name, 4, seed=5)
        assert made != gym.rows(name, 4, seed=6)
        for row in json.loads(json.dumps(made)):
            assert gym.check(rf"\boxed{{{row['answer']}}}", row["answer"], row["info"]).reward == 1
            assert gym.check(r"\boxed{-123456}", row["answer"], row["info"]).reward == 0
            assert gym.check("", row["answer"], row["info"]).reward == 0


@pytest.mark.parametrize("name", sorted(gym.NO_ANSWER))
def test_generators_that_do_not_take_their_own_answer(name: str) -> None:
    """They are left out; when one is mended, this fails and it may come back."""
    import reasoning_gym

    entry = reasoning_gym.create_dataset(name, size=1, seed=3)[0]
    assert reasoning_gym.get_score_answer_fn(name)(entry["answer"], entry) < 1
    with pytest.raises(ConfigError, match="cannot be trusted"):
        gym.rows(name, 1, seed=3)
    assert gym.check("x", entry["answer"], {"dataset": name, "metadata": {}}).cause == "error"


def test_generators_that_take_answers_of_other_tasks_are_left_out() -> None:
    import reasoning_gym

    for name, answer in (("game_of_life_halting", "banana"), ("puzzle24", "6 * 1 * 4 * 1")):
        tasks = reasoning_gym.create_dataset(name, size=3, seed=3)
        assert all(reasoning_gym.get_score_answer_fn(name)(answer, entry) == 1 for entry in tasks)
        with pytest.raises(ConfigError, match="cannot be trusted"):
            gym.rows(name, 1, seed=3)
        assert name in gym.ANY_ANSWER


@pytest.mark.parametrize("name", sorted(gym.NO_JSON))
def test_generators_whose_tasks_do_not_survive_a_file(name: str) -> None:
    import reasoning_gym

    entry = reasoning_gym.create_dataset(name, size=1, seed=3)[0]
    assert reasoning_gym.get_score_answer_fn(name)(entry["answer"], json.loads(json.dumps(entry))) < 1
    assert name in gym.EXCLUDED


def test_an_answer_that_breaks_its_verifier_is_wrong_not_lost() -> None:
    row = gym.rows("prime_factorization", 1, seed=1)[0]
    found = gym.check("banana", row["answer"], row["info"])
    assert found.reward == 0
    assert "cannot be read" in found.detail
    broken = gym.check("banana", None, row["info"])  # where the stored answer fails too, nothing was learned
    assert broken.cause == "error"


@pytest.mark.parametrize("name", sorted([*gym.EVAL, *gym.PARSE]))
def test_answers_are_never_run(name: str, tmp_path: Path) -> None:
    """Their verifiers run the answer as Python. Ours keep it from them, and still take what is right."""
    import reasoning_gym

    for row in gym.rows(name, 2, seed=4):
        right = rf"\boxed{{{row['answer']}}}" if "\n" not in row["answer"] else row["answer"]
        assert gym.check(right, row["answer"], row["info"]).reward == 1
        file = tmp_path / "made"
        code = f"__import__('pathlib').Path({str(file)!r}).write_text('x')"
        for answer in (
            code,
            f"[{code}]",
            f"  {code}",
            f"sqrt({code})",
            f"1 if {code} else 2",
            f"[{code} for x in '1']",
        ):
            found = gym.check(f"<|begin_of_box|>{answer}<|end_of_box|>", row["answer"], row["info"])
            assert found.reward == 0
            assert not file.exists()
        reasoning_gym.get_score_answer_fn(name)(f"[{code}]", {**row["info"], "answer": row["answer"]})
        assert file.exists()  # the library alone does: when this fails, look whether the guard is still needed
        file.unlink()


def test_long_answers_in_a_box() -> None:
    row = gym.rows("tower_of_hanoi", 1, seed=11, min_disks=5, max_disks=5)[0]
    said = "\n".join(row["answer"]) if isinstance(row["answer"], list) else str(row["answer"])
    assert len(said) > 400
    assert gym.check(f"<think>x</think><|begin_of_box|>{said}<|end_of_box|>", row["answer"], row["info"]).reward == 1


def test_an_integral_is_no_answer_to_an_integral() -> None:
    """The library takes the question itself, unevaluated, for an answer; and stores such answers."""
    import reasoning_gym

    row = gym.rows("intermediate_integration", 3, seed=4)[1]
    metadata = row["info"]["metadata"]
    question = f"Integral({metadata['integrand']}, {metadata['variable']})"
    stored = {"answer": row["answer"], "metadata": metadata}
    assert reasoning_gym.get_score_answer_fn("intermediate_integration")(question, stored) == 1
    assert gym.check(rf"\boxed{{{question}}}", row["answer"], row["info"]).reward == 0
    assert "Integral" not in row["answer"]


def test_numbers_cannot_be_made_from_others() -> None:
    row = next(r for r in gym.rows("countdown", 20, seed=1))
    target, numbers = row["info"]["metadata"]["target"], row["info"]["metadata"]["numbers"]
    first, *others = numbers
    tricks = "-~" * (target - first) + str(first) if target > first else "~-" * (first - target) + str(first)
    zeros = "".join(f" * {n} ** 0" for n in others)
    assert gym.check(rf"\boxed{{{tricks}{zeros}}}", row["answer"], row["info"]).reward == 0
    assert not gym.is_plain("countdown", "3! * 4")


def test_no_other_generator_runs_answers() -> None:
    """Where the library evaluates text: a new place in a new version must be looked at."""
    import re

    import reasoning_gym

    root = Path(reasoning_gym.__file__).parent
    found = set()
    for path in root.rglob("*.py"):
        if re.search(r"(?<!\.)\b(?:eval|exec)\(|parse_expr\(|sympify\(", path.read_text()):
            found.add(path.stem)
    makers = {"codeio", "generators_00_49", "generators_50_99", "bitwise_arithmetic", "basic_arithmetic"}
    makers |= {"number_sorting", "propositional_logic", "puzzle24"}  # of their own texts, or left out
    assert found == makers | gym.EVAL | set(gym.PARSE)


def test_generators_must_be_there() -> None:
    with pytest.raises(ConfigError, match="no such generator"):
        gym.rows("no_such", 1, seed=0)
    assert gym.check("1", "1", {"dataset": "no_such", "metadata": {}}).cause == "error"
    assert gym.check("1", "1", {}).cause == "error"


# ------------------------------------------------------------------------------------------------ registry
def test_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("glm5.posttrain.verify.code.require", lambda: None)  # whatever this host can isolate
    for name in VERIFIERS:
        assert callable(find(name))
    assert find("glm5.posttrain.verify.short:short") is short
    with pytest.raises(UserError, match="Did you mean 'maths'"):
        find("math")
    with pytest.raises(UserError, match="no_such_module"):
        find("no_such_module:check")
    with pytest.raises(UserError, match="has no nothing"):
        find("glm5.posttrain.verify.short:nothing")
    with pytest.raises(UserError, match="is no function"):
        find("glm5.posttrain.verify.short:__name__")


def test_a_verdict_is_a_reward_or_a_cause() -> None:
    assert Verdict(0.0).known
    assert not Verdict(None, "timeout").known
    for reward, cause in ((None, ""), (1.0, "crash"), (1.5, "")):
        with pytest.raises(ValueError, match="reward"):
            Verdict(reward, cause)  # type: ignore[arg-type]


def test_a_broken_task_of_a_generator_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gym, "_score", lambda name: lambda answer, entry: 0.0)
    with pytest.raises(DataError, match="task 0 of chain_sum: its verifier does not take its own answer"):
        gym.rows("chain_sum", 1, seed=0)
