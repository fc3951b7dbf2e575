"""The hybrid reward: weights and gates by hand, no missing verdict that is a 0, anchors that nobody learns."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from glm5.posttrain.advantage import repaired_advantages
from glm5.posttrain.general import general_row, part_figures, read_general
from glm5.posttrain.outcome import State
from glm5.posttrain.reward.endpoint import Failure
from glm5.posttrain.reward.hybrid import Hybrid, Parts, RewardConfig
from glm5.posttrain.reward.judge import Case, JudgeConfig, Judgement
from glm5.posttrain.rollouts import Group, Sample, settle
from glm5.posttrain.verify.pool import Task
from glm5.posttrain.verify.verdict import Verdict, find
from glm5.utils.errors import ConfigError, DataError

DOWN = Judgement(None, Failure("timeout", "3 of 3 votes failed: no reply after 60 s"))


class InlinePool:
    """Verifiers in this process."""

    def __init__(self) -> None:
        self.asked: list[Task] = []

    def check_all(self, tasks: Sequence[Task]) -> list[Verdict]:
        self.asked += tasks
        return [find(task.verifier)(task.response, task.answer, task.info) for task in tasks]


class FixedScorer:
    """A reward model that likes long answers."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def score(self, answers: Sequence[tuple[Any, str]], tools: Any = None) -> list[float]:
        self.asked += [text for _, text in answers]
        return [min(1.0, len(text) / 10) for _, text in answers]


class FixedJudge:
    """A judge that says the same of every answer, or what it is told of some."""

    def __init__(self, **said: Judgement) -> None:
        self.said, self.asked = said, list[Case]()

    def judge(self, cases: Sequence[Case]) -> list[Judgement]:
        self.asked += cases
        return [self.said.get(case.answer, Judgement(0.5)) for case in cases]

    def criteria(self, more: tuple[str, ...]) -> Any:
        if more == ("unknown",):
            raise DataError("rubric 'unknown' is not known")
        return more


def group(*texts: str, number: int = 0, **row: Any) -> Group:
    prompt = general_row({"prompt": "Say it.", "domain": "d", **row}, 1)
    return Group(number, prompt, [1], [Sample(ids=[1, 2], text=text) for text in texts])


def hybrid(scorer: bool = True, judge: FixedJudge | None = None, **config: Any) -> Any:
    given = FixedScorer() if scorer else None
    return Hybrid(RewardConfig(**config), InlinePool(), given, judge)  # type: ignore[arg-type]


def weights(**values: float) -> Parts:
    return Parts(**{"verifier": 1.0, "rules": 1.0, "model": 1.0, "judge": 1.0, **values})


def gates(**values: float) -> Parts:
    return Parts(**{"verifier": 0.0, "rules": 0.0, "model": 0.0, "judge": 0.0, **values})


def test_the_reward_is_the_weighted_mean_of_the_parts_that_there_are() -> None:
    both = {"max_words": 1, "finished": True}
    made = group("four", "ends here.", rules=both, verifier="short", answer="four")
    reward = hybrid(judge=FixedJudge(four=Judgement(0.9)), weights=weights(model=2.0, judge=3.0))
    found = reward([made])
    assert [v.reward for v in found] == [
        pytest.approx((1 * 1 + 1 * 0.5 + 2 * 0.4 + 3 * 0.9) / 7),
        pytest.approx((1 * 0 + 1 * 0.5 + 2 * 1.0 + 3 * 0.5) / 7),
    ]
    assert found[0].detail == "verifier 1, rules 0.5, model 0.4, judge 0.9"
    assert made.parts == {"verifier": [1.0, 0.0], "rules": [0.5, 0.5], "model": [0.4, 1.0], "judge": [0.9, 0.5]}
    assert part_figures([made])["parts/judge"] == pytest.approx(0.7)
    alone = group("four.")
    assert hybrid(rules='{"max_words": 2, "min_words": 2}', scorer=False)([alone])[0].reward == 0.5
    assert list(alone.parts) == ["rules"]
    # A prompt's rule takes the place of the run's.
    assert hybrid(rules='{"max_words": 0}', scorer=False)([group("a b", rules={"max_words": 2})])[0].reward == 1.0


def test_what_fails_a_gate_is_worth_nothing_and_is_not_asked_further() -> None:
    made = group("short.", "this is far too long.", "no", rules={"max_words": 2, "finished": True})
    judge = FixedJudge()
    reward = hybrid(judge=judge, gates=gates(rules=1.0, model=0.5))
    found = reward([made])
    assert [v.reward for v in found] == [pytest.approx((1 + 0.6 + 0.5) / 3), 0.0, 0.0]
    assert found[1].detail == "rules 0.5 is below its gate, 1"
    assert reward.scorer.asked == ["short."]
    assert [case.answer for case in judge.asked] == ["short."]
    assert made.parts["judge"] == [0.5, None, None]
    assert (
        hybrid(gates=gates(rules=0.5), weights=weights(rules=0.0))([group("a b c", rules={"max_words": 3})])[0].reward
        == 0.5
    )


def test_a_part_of_weight_0_is_not_asked_and_gates_alone_pass_all_or_nothing() -> None:
    judge = FixedJudge()
    reward = hybrid(judge=judge, weights=weights(judge=0.0, model=0.0, rules=0.0), gates=gates(rules=1.0))
    found = reward([group("a", "a b", rules={"max_words": 1})])
    assert [v.reward for v in found] == [1.0, 0.0]
    assert judge.asked == []
    assert reward.scorer.asked == []


def test_no_verdict_of_a_part_is_no_verdict_at_all_and_never_0() -> None:
    made = group("fine", "down", "", rules={"max_words": 1})
    found = hybrid(judge=FixedJudge(down=DOWN))([made])
    assert [v.reward for v in found] == [pytest.approx((1 + 0.4 + 0.5) / 3), None, 0.0]
    assert (found[1].cause, found[1].detail) == ("timeout", f"judge: {DOWN.failure.detail}")  # type: ignore[union-attr]
    assert found[2].detail == "empty"
    assert made.parts["judge"] == [0.5, None, None]
    # What a gate before it rejects is 0 all the same: a policy cannot escape by breaking its judge.
    gated = hybrid(judge=FixedJudge(down=DOWN), gates=gates(rules=1.0))([group("down", rules={"min_words": 2})])
    assert gated[0].reward == 0.0
    unreadable = hybrid()([group("1", verifier="number", answer="no number")])
    assert (unreadable[0].reward, unreadable[0].cause) == (None, "error")


def test_the_group_of_an_answer_without_verdict_goes_on_without_it() -> None:
    made = group("a", "aaaa", "aaaaaaaa", "down", rules={"max_words": 1})
    verdicts = hybrid(judge=FixedJudge(down=DOWN))([made])
    for sample, verdict in zip(made.samples, verdicts, strict=True):
        sample.verdict, sample.reward = verdict, verdict.reward
    settle(made, "mean")
    assert made.state is State.TRAINED
    assert 3 not in made.advantages
    assert made.copies == {0: 2, 1: 1, 2: 1}
    assert made.record()["no_verdict"] == {"timeout": 1}
    assert made.record()["rewards"][3] is None


# --------------------------------------------------------------------------------------------------- anchors
def judged(made: Group, **config: Any) -> Group:
    judge = FixedJudge()
    reward = hybrid(judge=judge, weights=weights(judge=0.0), gates=gates(judge=0.01), **config)
    for sample, verdict in zip(made.samples, reward([made]), strict=True):
        sample.verdict, sample.reward = verdict, verdict.reward
    settle(made, "std")
    made.prompt.info["asked"] = judge.asked  # type: ignore[index]
    return made


def test_an_anchor_counts_in_the_baseline_and_is_not_learned() -> None:
    made = judged(group("aa", "aaaa", anchors=["aaaaaaaa"]))
    assert made.beside == [0.8]
    assert part_figures([made])["parts/anchor"] == 0.8
    mean, std = (0.2 + 0.4 + 0.8) / 3, ((0.2**2 + 0.4**2 + 0.8**2) / 3 - (1.4 / 3) ** 2) ** 0.5
    assert made.advantages == {0: pytest.approx((0.2 - mean) / std, 1e-4), 1: pytest.approx((0.4 - mean) / std, 1e-4)}
    assert max(made.advantages.values()) < 0  # both are below the person
    assert len(made.learned) == 2
    assert made.record()["beside"] == [0.8]
    cases = made.prompt.info["asked"]
    assert {case.reference for case in cases} == {"aaaaaaaa"}
    assert [case.answer for case in cases] == ["aa", "aaaa", "aaaaaaaa"]

    alone = judged(group("aa", "aaaa", anchors=["aaaaaaaa"]), anchors="reference")
    assert alone.beside == []
    assert alone.advantages[1] == pytest.approx(1.0, abs=1e-4)
    assert alone.prompt.info["asked"][0].reference == "aaaaaaaa"
    off = judged(group("aa", "aaaa", anchors=["aaaaaaaa"]), anchors="off")
    assert off.advantages == alone.advantages
    assert off.prompt.info["asked"][0].reference is None


def test_anchors_take_turns_and_equal_answers_teach_nothing_whatever_the_anchor() -> None:
    reward = hybrid(anchors="group")
    assert [reward.anchor(group("x", number=n, anchors=["a", "b"])) for n in range(3)] == ["a", "b", "a"]
    same = judged(group("aa", "aa", anchors=["aaaaaaaa"]))
    assert same.beside == [0.8]
    assert same.state is State.ZERO_VARIANCE
    empty = group("aa", "aaaa")
    assert judged(empty).beside == []


def test_rewards_beside_a_group_move_its_baseline_alone() -> None:
    made = repaired_advantages([1.0, None, 0.0, 0.5], "mean", [0.9])
    assert made is not None
    assert made[0] == {0: pytest.approx(0.4), 2: pytest.approx(-0.6), 3: pytest.approx(-0.1)}
    assert made[1] == {0: 2, 2: 1, 3: 1}
    assert repaired_advantages([1.0, None], "mean", [0.9]) is None  # it fills no place


# --------------------------------------------------------------------------------------------------- configuration
def test_prompts_that_nothing_judges_are_refused() -> None:
    prompt = group("x").prompt
    with pytest.raises(DataError, match="nothing judges answers to prompt"):
        hybrid(scorer=False).require([prompt])
    with pytest.raises(DataError, match="nothing judges"):
        hybrid(weights=weights(model=0.0)).require([prompt])
    hybrid(scorer=False, rules='{"max_words": 9}').require([prompt])
    reward = hybrid(judge=FixedJudge())
    bad = group("x").prompt
    bad.info["general"]["rubrics"] = ["unknown"]
    with pytest.raises(DataError, match="rubric 'unknown'"):
        reward.require([bad])


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        (dict(rules='{"max_word": 3}'), "Did you mean max_words"),
        (dict(rules="max_words=3"), "must be an object of JSON"),
        (dict(gates=gates(rules=1.5)), r"gates\.rules=1\.5"),
    ],
)
def test_what_cannot_be_is_said_at_once(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        RewardConfig(**changes)
    with pytest.raises(ConfigError, match="judge=-1"):
        weights(judge=-1.0)
    assert RewardConfig(judge=JudgeConfig()).judge.url == ""


def test_bad_rows_are_listed_by_their_lines(tmp_path: Path) -> None:
    good = {"prompt": "a", "domain": "d"}
    rows: list[Any] = [
        {**good, "rules": {"max_words": 3}, "rubrics": ["writing"], "anchors": ["b"], "info": {"x": 1}},
        {**good, "rules": {"max_word": 3}},
        {**good, "anchors": "b"},
        {**good, "anchors": [" "]},
        {**good, "rubrics": ["kindness"]},
        {**good, "verifier": "short"},
        {**good, "answer": "x"},
        {**good, "info": {"general": {}}},
        {"prompt": "a"},
        {**good, "colour": "red"},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DataError) as e:
        read_general(str(path))
    text = str(e.value)
    assert "9 of 10 rows cannot be used" in text
    expected = ["rules.max_word", "anchors", "anchors", "rubric 'kindness'", "verifier, answer", "verifier, answer"]
    for line, said in enumerate([*expected, "info", "domain", "colour: no such field"], 2):
        assert f"line {line}: {said}" in text
    path.write_text(json.dumps(rows[0]) + "\n")
    (prompt,) = read_general(str(path))
    assert prompt.info == {"x": 1, "general": {"rules": {"max_words": 3}, "rubrics": ["writing"], "anchors": ["b"]}}
