"""Pass rates of a policy: counted from verdicts, written into the rows, gone on with after a kill, read by a run."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_reason import SUPPORT, checkpoint, write_prompts

from glm5.cli.main import main
from glm5.posttrain.prompts import Difficulty
from glm5.posttrain.rate import RateConfig, rate
from glm5.posttrain.reason import PromptConfig, prepare_prompts
from glm5.posttrain.rollouts import RolloutConfig, Rollouts
from glm5.utils.errors import ConfigError, DataError, FileError, UserError


@pytest.fixture(autouse=True)
def _verifiers_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", SUPPORT, prepend=os.pathsep)


def config(directory: Path, **changes: Any) -> RateConfig:
    rollout = RolloutConfig(prompts=4, group=5, max_new_tokens=2, thinking=False, memory_gib=0.02, verifiers=1)
    given: dict[str, Any] = dict(
        checkpoint=checkpoint(directory / "base"),
        data=(write_prompts(directory / "train.jsonl", 10),),
        out=str(directory / "rated.jsonl"),
        rollout=rollout,
        device="cpu",
    )
    return RateConfig(**{**given, **changes})


def test_rates_are_those_of_the_verdicts_and_choose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = config(tmp_path)
    seen: dict[str, list[float | None]] = {}
    judge = Rollouts.judge

    def watched(self: Rollouts, groups: Any) -> None:
        judge(self, groups)
        seen.update({g.prompt.id: g.rewards for g in groups})

    monkeypatch.setattr(Rollouts, "judge", watched)
    found = rate(given, lambda _: None)
    rows = [json.loads(line) for line in Path(given.out).read_text().splitlines()]
    assert [row["id"] for row in rows] == [f"train-{i}" for i in range(10)]
    for row in rows:
        rewards = [r for r in seen[row["id"]] if r is not None]
        assert row["pass_rate"] == {"weak": sum(rewards) / len(rewards)}
    assert len({row["pass_rate"]["weak"] for row in rows}) > 1
    assert sorted(found) == ["a", "b"]
    # The strong policy's rates come beside the weak one's, and a run reads both.
    rate(replace(given, data=(given.out,), out=str(tmp_path / "both.jsonl"), policy="strong", seed=1), lambda _: None)
    both = [json.loads(line) for line in (tmp_path / "both.jsonl").read_text().splitlines()]
    assert all(b["pass_rate"].keys() == {"weak", "strong"} for b in both)
    limit = sorted(row["pass_rate"]["weak"] for row in rows)[4]
    chosen = prepare_prompts(
        PromptConfig(data=(str(tmp_path / "both.jsonl"),), difficulty=Difficulty(weak_at_most=limit)), 0
    )
    assert [p.id for p in chosen.train] == [r["id"] for r in rows if r["pass_rate"]["weak"] <= limit]
    assert chosen.left_out == {"too easy": 10 - len(chosen.train)}


def test_an_interrupted_one_goes_on_with_the_same_rates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = config(tmp_path)
    rate(given, lambda _: None)
    whole = Path(given.out).read_bytes()
    first = b"".join(whole.splitlines(keepends=True)[:4])
    Path(given.out).write_bytes(first + whole[len(first) : len(first) + 20])  # torn by a kill
    drawn: list[int] = []
    draw = Rollouts.draw
    monkeypatch.setattr(
        Rollouts, "draw", lambda self, wanted, **how: drawn.extend(n for n, _ in wanted) or draw(self, wanted, **how)
    )
    rate(given, lambda _: None)
    assert Path(given.out).read_bytes() == whole
    assert drawn == [4, 5, 6, 7, 8, 9]
    with pytest.raises(DataError, match="holds other prompts than these"):
        rate(replace(given, data=(write_prompts(tmp_path / "other.jsonl", 10),)), lambda _: None)
    another = checkpoint(tmp_path / "another", seed=9)
    for told, said in (
        (dict(policy="strong"), r"policy='strong': .* was begun with 'weak'; give that, or name another file"),
        (dict(seed=1), "seed=1: .* was begun with 0"),
        (dict(rollout=replace(given.rollout, group=6)), r"rollout\.group=6: .* was begun with 5"),
        (dict(checkpoint=another), "its weights are not those that .* was begun with"),
    ):
        with pytest.raises(ConfigError, match=said):
            rate(replace(given, **told), lambda _: None)
    # Where things lie, and how fast they are done, may change.
    Path(given.checkpoint).rename(tmp_path / "moved")
    moved = replace(given, checkpoint=str(tmp_path / "moved"), rollout=replace(given.rollout, prompts=3, verifiers=2))
    rate(moved, lambda _: None)
    (tmp_path / "rated.jsonl.json").unlink()
    with pytest.raises(FileError, match=r"rated\.jsonl\.json, which says how its rates were made, is not"):
        rate(moved, lambda _: None)
    assert Path(given.out).read_bytes() == whole


def test_no_verdict_is_no_rate(tmp_path: Path) -> None:
    """Nor is an earlier one of this policy."""
    path = Path(write_prompts(tmp_path / "x.jsonl", 2, verifier="verifiers:die"))
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[1]["pass_rate"] = {"weak": 0.5, "strong": 0.75}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = config(tmp_path, data=(str(path),))
    assert rate(given, lambda _: None) == {}
    found = [json.loads(line).get("pass_rate") for line in Path(given.out).read_text().splitlines()]
    assert found == [None, {"strong": 0.75}]


def test_what_cannot_be_rated_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = config(tmp_path)
    with pytest.raises(ConfigError, match="must name the file to write"):
        rate(replace(given, out=""), lambda _: None)
    with pytest.raises(ConfigError, match="must name generators"):
        replace(given, data=(), tasks=())
    with pytest.raises(ConfigError, match="is one of the files that are read"):
        rate(replace(given, out=given.data[0]), lambda _: None)
    (tmp_path / "bad.jsonl").write_text('{"prompt": 3}\n')
    with pytest.raises(UserError, match=r"1 of 1 rows cannot be used:\n  line 1"):
        rate(replace(given, data=(str(tmp_path / "bad.jsonl"),)), lambda _: None)
    small = ["--rollout.group", "2", "--rollout.max-new-tokens", "2", "--rollout.memory-gib", "0.02"]
    assert main(["rl", "rate", given.checkpoint, "--data", given.data[0], "--out", given.out, *small]) == 0
    said = capsys.readouterr().out
    assert "weak      a: passes" in said
    assert f"written   {given.out}" in said
    assert f"--prompts.data {given.out} --prompts.difficulty.weak-at-most" in said
