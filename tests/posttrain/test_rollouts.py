"""Groups of answers: log-probabilities that the trainer repeats, weights that arrive whole, verdicts and their absence,
groups that teach nothing."""

from __future__ import annotations

import gc
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from glm5.model.config import ModelConfig
from glm5.model.glm5 import GLM5
from glm5.posttrain.outcome import State
from glm5.posttrain.prompts import Prompt, prompts_from_rows
from glm5.posttrain.rollouts import Group, RolloutConfig, Rollouts, Sample, figures, settle
from glm5.posttrain.rows import Trajectory, pack
from glm5.posttrain.verify.pool import VerifierPool
from glm5.posttrain.verify.verdict import Verdict, judged, no_verdict
from glm5.serve.client import WeightUpdate
from glm5.serve.request import Finish, Request, TokenInfo
from glm5.utils.errors import CheckpointError, ConfigError, DataError, UserError
from support.conversations import tokenizer
from support.training import tiny


def model(seed: int = 2, **changes: Any) -> GLM5:
    sizes = {**tiny().config.to_dict(), "vocab_size": 384}
    return GLM5(ModelConfig.from_dict({**sizes, **changes}), seed=seed)


def prompts(count: int, verifier: str = "short") -> list[Prompt]:
    rows = [{"prompt": f"word {i}", "answer": "x", "verifier": verifier, "domain": "ab"[i % 2]} for i in range(count)]
    return prompts_from_rows(rows)


def rollouts(policy: GLM5, pool: VerifierPool | None = None, **changes: Any) -> Rollouts:
    config: dict[str, Any] = dict(prompts=2, group=4, max_new_tokens=6, thinking=False, memory_gib=0.05)
    return Rollouts(policy, tokenizer(), RolloutConfig(**{**config, **changes}), pool, seed=5)


def numbered(count: int, verifier: str = "short") -> list[tuple[int, Prompt]]:
    return list(enumerate(prompts(count, verifier)))


def both(found: Rollouts, policy: GLM5, groups: list[Group]) -> tuple[Tensor, Tensor]:
    """Log-probabilities of all drawn tokens, the trainer's and the engine's, temperature and kept sets repeated."""
    batch: list[Trajectory] = []
    for group in groups:
        group.advantages, group.copies = dict.fromkeys(range(4), 1.0), dict.fromkeys(range(4), 1)
        batch += group.trajectories(len(batch), found.config.temperature)
    assert len(batch) == 4 * len(groups)
    rows = pack(batch, 64, vocab_size=found.engine.vocab_size)
    return rows.logprobs(policy).logprobs_N.detach(), rows.logprobs_BT[rows.mask_BT]


@pytest.mark.parametrize("attention", ["dense", "sparse"])
@pytest.mark.parametrize(
    "settings",
    [{}, {"temperature": 0.7, "top_p": 0.8}, {"temperature": 1.3, "top_k": 20, "drafts": 2}, {"invariant": "off"}],
    ids=["plain", "top-p", "drafts", "not invariant"],
)
def test_the_trainer_repeats_the_engines_log_probabilities(settings: dict[str, Any], attention: str) -> None:
    """Also where the indexer selects: prompts are longer than the 8 positions that a token may read."""
    policy = model(glm5_attention=attention)
    assert policy.config.sparse == (attention == "sparse")
    found = rollouts(policy, **settings)
    groups = found.draw(numbered(3))
    assert all(len(g.prompt_ids) > policy.config.index_topk for g in groups)
    trainer, engine = both(found, policy, groups)
    assert len(engine) == sum(len(s.ids) for g in groups for s in g.samples) > 30
    torch.testing.assert_close(trainer, engine, rtol=0, atol=1e-4)
    assert all(s.finish in ("stop", "length") for g in groups for s in g.samples)


def test_a_prompts_answers_do_not_depend_on_what_else_is_drawn() -> None:
    policy = model()
    alone = rollouts(policy).draw(numbered(3)[2:])[0]
    beside = rollouts(policy).draw(numbered(3))[2]
    assert [s.ids for s in alone.samples] == [s.ids for s in beside.samples]
    told = [[[x.logprob for x in s.info] for s in g.samples] for g in (alone, beside)]
    assert told[0] == told[1]  # to the bit: the batch-invariant mode
    assert len({tuple(s.ids) for s in alone.samples}) > 1
    other = rollouts(policy).draw([(7, prompts(3)[2])])[0]
    assert [s.ids for s in other.samples] != [s.ids for s in alone.samples]


@pytest.mark.parametrize(
    ("options", "changes", "why"),
    [
        ({}, {}, ""),
        ({"invariant": "off"}, {}, ""),
        ({"router_replay": True}, {}, "does not tell the experts"),
        ({"topk": "racing"}, {}, "nothing is the same twice"),
        ({"dtype": "bfloat16"}, {}, "needs weights in float32"),
        ({}, {"n_group": 2}, "written for routing without groups"),
    ],
)
def test_answers_are_batch_invariant_where_that_can_be_had(
    options: dict[str, Any], changes: dict[str, Any], why: str
) -> None:
    found = rollouts(model(**changes), **options)
    assert found.engine.config.invariant == (not why and options.get("invariant") != "off")
    assert bool(found.varies) == bool(why)
    assert why in found.varies
    if why:  # insisted on, it is refused
        with pytest.raises(ConfigError, match="invariant"):
            rollouts(model(**changes), **{**options, "invariant": "on"})


def test_pushed_weights_arrive_whole_under_their_version(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = model()
    found = rollouts(policy, drafts=1)
    (first,) = found.draw(numbered(1))
    assert {v for s in first.samples for v in s.versions} == {"0"}
    with torch.no_grad():
        for p in policy.parameters():
            p.add_(0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())))
    found.push(policy, 7)
    served = dict(found.engine.model.named_parameters())
    assert any("mtp" in name or f"layers.{policy.config.num_hidden_layers}." in name for name in served)
    for name, p in policy.named_parameters():
        assert torch.equal(served[name], p), name
        assert served[name] is not p
    (second,) = found.draw(numbered(1))
    assert {v for s in second.samples for v in s.versions} == {"7"}
    assert [s.ids for s in second.samples] != [s.ids for s in first.samples]
    assert all(len(s.versions) == len(s.ids) for s in second.samples)

    update = found.engine.update_weights

    def lossy(how: WeightUpdate, received: dict[str, Tensor]) -> None:
        update(how, {name: t for name, t in received.items() if name != "lm_head.weight"})

    monkeypatch.setattr(found.engine, "update_weights", lossy)
    with torch.no_grad():
        policy.lm_head.weight.add_(1e-6)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is not what was sent as version 8"):
        found.push(policy, 8)


def test_an_engine_in_bfloat16_has_the_rounded_weights_and_the_trainer_sees_how_far_it_is() -> None:
    policy = model()
    found = rollouts(policy, dtype="bfloat16", running=3)
    with torch.no_grad():
        policy.lm_head.weight.mul_(1.01)
    found.push(policy, 1)
    served = dict(found.engine.model.named_parameters())
    for name, p in policy.named_parameters():
        assert p.dtype == torch.float32
        assert torch.equal(served[name], p.to(served[name].dtype)), name
    assert served["lm_head.weight"].dtype == torch.bfloat16
    trainer, engine = both(found, policy, found.draw(numbered(3)))
    apart = (trainer - engine).abs()
    assert 1e-4 < apart.mean() < 0.05


def test_an_answer_on_which_the_engine_failed_is_not_learned_from(monkeypatch: pytest.MonkeyPatch) -> None:
    found = rollouts(model())
    step = found.engine.step
    failed = Finish("error", message="not finite")
    monkeypatch.setattr(found.engine, "step", lambda: [replace(d, finish=d.finish and failed) for d in step()])
    with pytest.raises(UserError, match=f"the engine failed on prompt '{prompts(1)[0].id}': not finite"):
        found.draw(numbered(1))


# ------------------------------------------------------------------------------------------------- verdicts
def group(*rewards: float | None) -> Group:
    samples = [
        Sample(ids=[5], finish="stop", reward=r, verdict=Verdict(None, "timeout") if r is None else judged(r >= 1))
        for r in rewards
    ]
    return Group(0, prompts(1)[0], [1, 2], samples)


@pytest.mark.parametrize(
    ("rewards", "state", "copies"),
    [
        ((1.0, 0.0, 0.0, 1.0), State.TRAINED, {0: 1, 1: 1, 2: 1, 3: 1}),
        ((1.0, None, 0.0, 0.0), State.TRAINED, {0: 2, 2: 1, 3: 1}),  # three of four: the first stands in
        ((1.0, None, 0.0, None), State.GROUP_DROPPED, {}),  # half is not more than half
        ((None, None, None, None), State.GROUP_DROPPED, {}),
        ((0.0, 0.0, 0.0, None), State.ZERO_VARIANCE, {}),  # a missing verdict is no 0, nor a difference
        ((1.0, 1.0, 1.0, 1.0), State.ZERO_VARIANCE, {}),
    ],
)
def test_what_becomes_of_a_group(rewards: tuple[float | None, ...], state: State, copies: dict[int, int]) -> None:
    made = group(*rewards)
    settle(made, "std")
    assert (made.state, made.copies) == (state, copies)
    assert len(made.learned) == (4 if copies else 0)


def test_advantages_are_those_of_the_valid_answers_once() -> None:
    made = group(1.0, None, 0.0, 0.0)
    settle(made, "std")
    std = math.sqrt(2) / 3  # of 1, 0, 0
    assert made.advantages == pytest.approx({0: 2 / 3 / std, 2: -1 / 3 / std, 3: -1 / 3 / std}, rel=1e-4)
    assert made.record()["no_verdict"] == {"timeout": 1}
    assert "error" not in made.record()
    made.samples[1].verdict = no_verdict("expected: no number: 'abc'")
    assert made.record()["error"] == "expected: no number: 'abc'"
    assert made.record()["rewards"] == [1.0, None, 0.0, 0.0]


def test_a_hung_and_a_dead_verifier_give_no_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "support"))
    with VerifierPool(workers=1, timeout_s=0.3) as pool:
        found = rollouts(model(), pool, group=2)
        groups = found.draw([(0, prompts(1, "verifiers:hang")[0]), (1, prompts(1, "verifiers:die")[0])])
        found.judge(groups)
    assert [g.rewards for g in groups] == [[None, None]] * 2
    assert [s.verdict.cause for g in groups for s in g.samples if s.verdict] == ["timeout"] * 2 + ["crash"] * 2
    shown = figures(groups)
    assert shown["no_verdict"] == 4
    assert "reward" not in shown


def scripted(found: Rollouts, script: list[tuple[float, ...]], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rewards of prompt i are script[i]; returns the list that the numbers of what is drawn are added to."""
    drawn: list[int] = []

    def draw(wanted: list[tuple[int, Prompt]]) -> list[Group]:
        drawn.extend(number for number, _ in wanted)
        return [Group(n, p, [1], [Sample(ids=[5]) for _ in script[n]]) for n, p in wanted]

    def judge(groups: list[Group]) -> None:
        for g in groups:
            for sample, reward in zip(g.samples, script[g.number], strict=True):
                sample.reward, sample.verdict = reward, judged(reward >= 1)

    monkeypatch.setattr(found, "draw", draw)
    monkeypatch.setattr(found, "judge", judge)
    return drawn


def test_groups_without_differences_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    found = rollouts(model(), prompts=3, rounds=3)
    script = [(1.0, 1.0), (1.0, 0.0), (0.0, 0.0), (0.0, 1.0), (0.0, 0.0), (1.0, 0.0), (1.0, 0.0)]
    drawn = scripted(found, script, monkeypatch)
    every = prompts(20)
    groups = found.collect(lambda first, count: every[first : first + count], 0)
    assert drawn == [0, 1, 2, 3, 4, 5]  # three, then two in place of two, then one
    assert [g.state is State.TRAINED for g in groups] == [False, True, False, True, False, True]
    shown = figures(groups)
    assert (shown["zero_std/count_1"], shown["zero_std/count_0"]) == (1, 2)
    assert shown["frac_reward_zero_std"] == 0.5
    assert shown["reward"] == pytest.approx(5 / 12)


def test_sampling_ends_after_its_rounds_and_dropping_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    every, script = prompts(20), [(0.0, 0.0)] * 20
    for settings, count in (({"rounds": 4}, 12), ({"zero_variance": "drop"}, 3)):
        found = rollouts(model(), prompts=3, **settings)
        drawn = scripted(found, script, monkeypatch)
        groups = found.collect(lambda first, n: every[first : first + n], 0)
        assert drawn == list(range(count))
        assert {g.state for g in groups} == {State.ZERO_VARIANCE}


# ------------------------------------------------------------------------------------------------- refusals
def test_prompts_without_room_for_an_answer_are_named() -> None:
    found = rollouts(model(max_position_embeddings=64), max_new_tokens=30)
    long = prompts_from_rows([{"id": "far", "prompt": "x" * 99, "answer": 1, "verifier": "short", "domain": "a"}])
    assert 5 < found.refuse_long(prompts(2)) < 34
    with pytest.raises(DataError, match=r"1 prompts are longer than 34 tokens, 'far' with"):
        found.refuse_long([*prompts(2), *long])
    found = rollouts(model(max_position_embeddings=64), max_new_tokens=64)
    with pytest.raises(ConfigError, match=r"rollout\.max_new_tokens=64: must be less than the model's context of 64"):
        found.refuse_long(prompts(2))


@pytest.mark.parametrize(
    ("field", "value"), [("group", 0), ("temperature", 0.0), ("overlong_margin", 2000), ("rounds", 0)]
)
def test_settings_out_of_range_are_refused(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=field):
        RolloutConfig(**{field: value})


class AlwaysRight:
    """A pool whose verdict is known."""

    def check_all(self, tasks: list[Any]) -> list[Verdict]:
        return [judged(True) for _ in tasks]


def test_answers_near_the_limit_lose_reward() -> None:
    found = rollouts(model(), AlwaysRight(), max_new_tokens=10, overlong_margin=4)  # type: ignore[arg-type]
    made = Group(0, prompts(1)[0], [1], [Sample(ids=[5] * n) for n in (6, 7, 9, 10)])
    found.judge([made])
    assert made.rewards == [1.0, 0.75, 0.25, 0.0]


def test_pushes_that_change_nothing_change_no_answer_and_no_draft() -> None:
    """Ten times the same weights: the draft block goes along unharmed, and drafts count as often as before."""
    policy = model()
    found = rollouts(policy, drafts=2, max_new_tokens=12)
    seen = []
    for version in range(11):
        groups = found.draw(numbered(2))
        told = [(s.ids, s.checks, s.accepted) for g in groups for s in g.samples]
        assert {v for g in groups for s in g.samples for v in s.versions} == {str(version)}
        seen.append((told, figures(groups)["spec_accept_length"]))
        found.push(policy, version + 1)
    assert all(one == seen[0] for one in seen)
    assert sum(accepted for _, _, accepted in seen[0][0]) > 0


def test_a_thousand_answers_leave_nothing_behind() -> None:
    """What an engine, its requests and the groups held of an answer goes with it: a long run's memory is flat."""
    drawn = rollouts(model(), group=25, max_new_tokens=1)

    def held() -> int:
        gc.collect()
        return sum(type(o) in (Sample, Group, Request, TokenInfo) for o in gc.get_objects())

    drawn.draw(numbered(2))
    before = held()
    for first in range(0, 40, 10):
        groups = drawn.draw([(first + n, p) for n, p in numbered(10)])
        assert sum(len(s.ids) for g in groups for s in g.samples) == 250
    del groups
    assert held() == before
