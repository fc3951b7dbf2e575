"""The general stage as a command runs it: the hybrid reward rises, a planted hack is seen, a lost judge costs no 0s."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from glm5.cli.main import main
from glm5.model.config import ModelConfig
from glm5.model.glm5 import GLM5
from glm5.model.weights import load_model, save_model
from glm5.posttrain.general import GeneralConfig, Generalist, general, read_general
from glm5.posttrain.learner import LearnConfig
from glm5.posttrain.reason import PromptConfig
from glm5.posttrain.reward.hybrid import Parts, RewardConfig
from glm5.posttrain.reward.judge import JudgeConfig
from glm5.posttrain.reward.model import RewardModel
from glm5.posttrain.reward.monitors import MonitorConfig
from glm5.posttrain.reward.train import RewardModelConfig, train_reward_model
from glm5.posttrain.rollouts import RolloutConfig, Rollouts
from glm5.posttrain.samples import read_samples
from glm5.train.schedule import LearningRate
from glm5.utils.config_io import save
from glm5.utils.errors import CheckpointError, ConfigError, DataError, UserError
from glm5.utils.runlog import read_metrics
from support.conversations import tokenizer
from support.judges import Asked, JudgeServer, Said, ratings_of
from support.training import tiny

EVEN = "".join(chr(c) for c in range(33, 127) if c % 2 == 0)
RULE = {"matches": "^[" + "".join(f"\\{c}" if not c.isalnum() else c for c in EVEN) + "]"}


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)


def even(text: str) -> bool:
    """What is wanted: a first sign with an even code, about half of what an untrained model says."""
    return text.strip()[:1] in EVEN and bool(text.strip())


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    sizes = {**tiny().config.to_dict(), "vocab_size": 384, "hidden_size": 48}
    path = tmp_path_factory.mktemp("base")
    save_model(GLM5(ModelConfig.from_dict(sizes), seed=2), path, tokenizer=tokenizer())
    return str(path)


@pytest.fixture(scope="module")
def reward_model(base: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """One that prefers what `even` does, learned from pairs of answers that are one token each."""
    directory, draw = tmp_path_factory.mktemp("reward"), random.Random(0)  # noqa: S311
    texts = [tokenizer().decode([i]) for i in range(tokenizer().vocab_size)]
    texts = [t for t in texts if t.strip() and "\ufffd" not in t]
    good, bad = [t for t in texts if even(t)], [t for t in texts if not even(t)]

    def pair() -> dict[str, str]:
        return {"prompt": f"word {draw.randint(0, 99)}", "chosen": draw.choice(good), "rejected": draw.choice(bad)}

    rows = {"train": [pair() for _ in range(400)], "held": [pair() for _ in range(60)]}
    for name, some in rows.items():
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
    found = train_reward_model(
        RewardModelConfig(
            checkpoint=base,
            data=(str(directory / "train.jsonl"),),
            held_out=(str(directory / "held.jsonl"),),
            run=str(directory / "run"),
            seq_len=64,
            steps=30,
            batch=16,
            micro_batch=16,
            lr=LearningRate(2e-2, 2e-3),
            device="cpu",
            eval_every=0,
        ),
        lambda _: None,
    )
    assert found.held_out["before"]["accuracy"] < 0.7
    assert found.held_out["after"]["accuracy"] > 0.9
    return str(found.model)


def write(path: Path, count: int, **fields: Any) -> str:
    rows = [{"prompt": f"word {i}", "domain": "ab"[i % 2], "id": f"{path.stem}-{i}", **fields} for i in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def config(directory: Path, base: str, **changes: Any) -> GeneralConfig:
    learn: dict[str, Any] = dict(steps=4, lr=LearningRate(1e-2, 1e-2), save_every=2, row_tokens=128)
    rollout: dict[str, Any] = dict(
        **dict(prompts=4, group=6, max_new_tokens=2, thinking=False, memory_gib=0.02, invariant="off"),
        **dict(verifiers=1, verifier_timeout=60.0),
    )
    learn |= changes.pop("learn", {})
    rollout |= changes.pop("rollout", {})
    fields = changes.pop("fields", {"rules": RULE})
    data, held = write(directory / "train.jsonl", 12, **fields), write(directory / "held.jsonl", 8, **fields)
    defaults: dict[str, Any] = dict(
        checkpoint=base,
        run=str(directory / "run"),
        prompts=PromptConfig(data=(data,), held_out=(held,), tasks=()),
        learn=LearnConfig(**learn),
        rollout=RolloutConfig(**rollout),
        monitors=MonitorConfig(window=3),
        device="cpu",
        eval_every=0,
        page_every=0,
    )
    return GeneralConfig(**{**defaults, **changes})


def judged(directory: Path, server: JudgeServer, **changes: Any) -> JudgeConfig:
    path = directory / "taste.toml"
    path.write_text('aim = "a test"\n[[criteria]]\nname = "taste"\nquestion = "Is it even?"\n')
    defaults: dict[str, Any] = dict(url=server.url, model="judge", rubrics=(str(path),), votes=2, backoff_s=0.0)
    return JudgeConfig(**{**defaults, **changes})


def honest(asked: Asked) -> Said:
    """Likes what is wanted, and its votes differ by one."""
    return ratings_of(asked, lambda text: (8 if even(text) else 2) + asked.body["seed"])


def hacked(asked: Asked) -> Said:
    """Likes what the rules reject."""
    return ratings_of(asked, lambda text: 2 if even(text) else 10)


# --------------------------------------------------------------------------------------------------- learning
def test_rule_reward_model_and_judge_together_lift_the_reward(tmp_path: Path, base: str, reward_model: str) -> None:
    with JudgeServer(honest) as server:
        reward = RewardConfig(model=reward_model, judge=judged(tmp_path, server))
        found = general(config(tmp_path, base, reward=reward, learn=dict(steps=24, save_every=24)), lambda _: None)
    records = [r for r in read_metrics(found.run) if r["step"]]
    first, last = records[:2], records[-3:]

    def mean(some: list[dict[str, Any]], name: str) -> float:
        return sum(r[name] for r in some) / len(some)

    assert mean(first, "reward") < 0.65
    for name in ("reward", "parts/rules", "parts/model", "parts/judge"):
        assert mean(last, name) > mean(first, name) + 0.1, name
    assert mean(last, "parts/rules") > 0.75
    for domain in "ab":
        assert found.held_out["after"][domain] > found.held_out["before"][domain]
    assert sum(r["alerts"] for r in records) == 0
    assert all(r["no_verdict"] == 0 for r in records)
    assert records[0]["judge/spread"] == pytest.approx(0.05)  # votes of 8 and 9, or of 2 and 3
    assert records[-1]["judge/calls"] == len(server.seen)
    samples = read_samples(found.run / "samples.jsonl")
    assert set(samples[0]["parts"]) == {"rules", "model", "judge"}
    keys = [(asked.body["messages"][1]["content"], asked.body["seed"]) for asked in server.seen]
    assert len(set(keys)) == len(keys)  # nothing was asked twice


def test_a_planted_hack_is_seen(tmp_path: Path, base: str, capsys: pytest.CaptureFixture[str]) -> None:
    weights = Parts(verifier=1.0, rules=1.0, model=1.0, judge=4.0)
    with JudgeServer(hacked) as server:
        reward = RewardConfig(judge=judged(tmp_path, server, votes=1), weights=weights)
        # The bound on praise for what is rejected is out of the way: half of a beginner's answers are.
        given = config(
            tmp_path,
            base,
            reward=reward,
            monitors=MonitorConfig(window=3, overrated=1.1),
            learn=dict(steps=16, save_every=16),
        )
        found = general(given, lambda _: None)
    records = [r for r in read_metrics(found.run) if r["step"]]
    assert records[-1]["reward"] > records[0]["reward"]  # by the number alone all is well
    assert records[-1]["parts/rules"] < records[0]["parts/rules"] - 0.1
    assert [r["alerts"] for r in records[:5]] == [0] * 5
    assert records[-1]["alert"][0].startswith("disagreement: model and judge rose from")
    assert main(["watch", str(found.run), "--once"]) == 0
    out = capsys.readouterr().out
    assert "alert  step 16  disagreement: model and judge rose from" in out


def test_a_gate_keeps_the_hack_from_paying(tmp_path: Path, base: str) -> None:
    weights, gates = (
        Parts(verifier=1.0, rules=1.0, model=1.0, judge=4.0),
        Parts(verifier=0.0, rules=1.0, model=0.0, judge=0.0),
    )
    with JudgeServer(hacked) as server:
        reward = RewardConfig(judge=judged(tmp_path, server, votes=1), weights=weights, gates=gates)
        found = general(config(tmp_path, base, reward=reward, learn=dict(steps=16, save_every=16)), lambda _: None)
    records = [r for r in read_metrics(found.run) if r["step"]]
    assert records[-1]["parts/rules"] > 0.75 > 0.65 > records[0]["parts/rules"]
    assert all(even(asked.section("answer")) for asked in server.seen)


# --------------------------------------------------------------------------------------------------- a bad judge
def test_a_judge_that_is_down_for_a_while_costs_groups_and_no_zeros(
    tmp_path: Path, base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def script(asked: Asked) -> Said:
        return Said(status=503) if 30 <= asked.number < 90 else honest(asked)

    rewarded: list[tuple[str, float | None]] = []
    draw = Generalist.draw

    def watched(self: Generalist) -> Any:
        metrics, groups = draw(self)
        rewarded.extend((s.text, s.reward) for g in groups for s in g.samples)
        return metrics, groups

    monkeypatch.setattr(Generalist, "draw", watched)
    with JudgeServer(script) as server:
        reward = RewardConfig(judge=judged(tmp_path, server, votes=1, retries=0, patience=0, concurrency=1))
        given = config(tmp_path, base, reward=reward, fields={}, learn=dict(steps=5, save_every=5))
        given = replace(given, prompts=replace(given.prompts, held_out=()))
        found = general(given, lambda _: None)
    samples = read_samples(found.run / "samples.jsonl")
    lost = [s for s in samples if s["no_verdict"]]
    assert {"group_dropped"} <= {s["state"] for s in lost}
    for sample in samples:
        unknown = [r for r in sample["rewards"] if r is None]
        assert len(unknown) == sum(sample["no_verdict"].values())
        assert sample["no_verdict"].keys() <= {"error"}
    assert samples[0]["state"] == "trained"
    assert any(reward is None for _, reward in rewarded)
    # 2 of 10 is the least that the judge says, and an empty answer is the one thing that is worth 0.
    assert all(reward is None or reward >= 0.2 or not text.strip() for text, reward in rewarded)
    records = [r for r in read_metrics(found.run) if r["step"]]
    assert any("no verdict" in text for r in records for text in r.get("alert", []))

    with JudgeServer(lambda asked: Said("?")) as server:
        reward = RewardConfig(judge=judged(tmp_path, server, votes=1, retries=0, patience=9))
        given = replace(given, run=str(tmp_path / "never"), reward=reward)
        with pytest.raises(UserError, match=r"the last 9 questions .* have failed"):
            general(given, lambda _: None)


class Killed(BaseException):
    """As a kill: nothing of the loop runs after it."""


def test_a_run_that_ran_out_of_money_and_was_killed_ends_in_the_same_bytes_and_asks_nothing_twice(
    tmp_path: Path, base: str, reward_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = {"rules": RULE, "anchors": ["yes, do", "no, never"]}
    with JudgeServer(honest) as server:
        judge = judged(tmp_path, server, votes=1)
        reward = RewardConfig(model=reward_model, judge=judge)
        whole = config(tmp_path, base, reward=reward, fields=fields, learn=dict(steps=5, save_every=2))
        expected = general(whole, lambda _: None)
        calls = len(server.seen)
        cut = replace(whole, run=str(tmp_path / "cut"))
        dear = replace(cut, reward=replace(reward, judge=replace(judge, max_calls=calls // 2)))
        with pytest.raises(ConfigError, match=rf"reward\.judge\.max_calls={calls // 2}: {calls // 2} calls"):
            general(dear, lambda _: None)
        assert len(server.seen) == calls + calls // 2
        push = Rollouts.push
        with monkeypatch.context() as patched:
            patched.setattr(Rollouts, "push", lambda *a: push(*a) if a[2] < 4 else (_ for _ in ()).throw(Killed()))
            with pytest.raises(Killed):  # the fourth step's prompts stand in the ledger, and its checkpoint does not
                general(cut, lambda _: None)
        assert max(s["step"] for s in read_samples(tmp_path / "cut" / "samples.jsonl")) == 4
        found = general(cut, lambda _: None)
        assert len(server.seen) == 2 * calls
    samples = [(f.run / "samples.jsonl").read_bytes() for f in (expected, found)]
    assert samples[0] == samples[1]
    assert b'"beside":[0.' in samples[0]
    assert (found.model / "model.safetensors").read_bytes() == (expected.model / "model.safetensors").read_bytes()
    spent = ("judge/calls", "judge/tokens")  # is spent, whatever becomes of the step
    timeless = [
        [{k: v for k, v in r.items() if "time" not in k and k not in spent} for r in read_metrics(f.run)]
        for f in (expected, found)
    ]
    assert timeless[0] == timeless[1]

    # What a judgement depends on must stay; where the judge lies may change.
    with JudgeServer(honest) as server:
        moved = replace(cut, reward=replace(reward, judge=replace(judge, url=server.url, max_calls=7)))
        assert general(moved, lambda _: None).held_out == found.held_out
        assert server.seen == []
        with pytest.raises(ConfigError, match=r"reward\.judge\.votes"):
            general(replace(cut, reward=replace(reward, judge=replace(judge, votes=2))), lambda _: None)
        (tmp_path / "taste.toml").write_text('aim = "a"\n[[criteria]]\nname = "taste"\nquestion = "Is it odd?"\n')
        with pytest.raises(ConfigError, match="reward='rubrics': not as this run began"):
            general(moved, lambda _: None)


# --------------------------------------------------------------------------------------------------- the command
def test_the_command_says_what_a_run_would_be_and_runs_it(
    tmp_path: Path, base: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = config(tmp_path, base, learn=dict(steps=2), reward=RewardConfig(rules='{"max_words": 3}'))
    save(tmp_path / "config.json", given)
    assert main(["rl", "general", "--config", str(tmp_path / "config.json"), "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "a: 6, 50% of the mixture; 4 held out" in out
    assert "its verdict: rules" in out
    assert "learns from up to 48 answers" in out
    assert not (tmp_path / "run").exists()
    assert main(["rl", "general", "--config", str(tmp_path / "config.json")]) == 0
    out = capsys.readouterr().out
    assert "learned   2 steps from" in out
    assert main(["watch", str(tmp_path / "run"), "--once"]) == 0
    assert "alert " not in capsys.readouterr().out

    assert main(["rl", "generl"]) == 2
    assert "There are: reason, general" in capsys.readouterr().err
    assert main(["rl", "general", base]) == 2
    assert "prompts.data" in capsys.readouterr().err
    write(tmp_path / "train.jsonl", 12)
    assert main(["rl", "general", "--config", str(tmp_path / "config.json"), "--reward.rules", "{}", "--dry-run"]) == 2
    assert "nothing judges answers to prompt" in capsys.readouterr().err
    assert len(read_general(str(tmp_path / "train.jsonl"))) == 12


def test_a_reward_model_that_may_not_read_an_answer_is_refused_before_any_is_drawn(tmp_path: Path, base: str) -> None:
    short = load_model(base).config.replace(max_position_embeddings=8)
    path = RewardModel(GLM5(short), "pairwise").save(tmp_path / "short", tokenizer())
    with pytest.raises(DataError, match=r"prompt 'train-0' with an answer of 2 tokens may not fit the reward model"):
        general(config(tmp_path, base, reward=RewardConfig(model=str(path))), lambda _: None)
    assert not (tmp_path / "run" / "samples.jsonl").exists()


@pytest.mark.parametrize("wrong", ["nowhere", "base"])
def test_what_is_no_reward_model_is_refused_before_a_run_is_made(wrong: str, tmp_path: Path, base: str) -> None:
    where = base if wrong == "base" else str(tmp_path / wrong)
    with pytest.raises(CheckpointError, match="is no reward model"):
        general(config(tmp_path, base, reward=RewardConfig(model=where)), lambda _: None)
    assert not (tmp_path / "run").exists()
