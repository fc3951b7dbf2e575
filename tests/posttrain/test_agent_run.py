"""`glm5 rl agent` as a function, with engine, gateway and orchestrator: exact to the token, resumed after a kill."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from glm5.agents.service import Policy, Result, Rollout, TaskService, judged
from glm5.cli.main import main
from glm5.model.glm5 import GLM5
from glm5.model.weights import save_model
from glm5.posttrain.agent import LEDGER, AgentLearner, IntakeConfig
from glm5.posttrain.agent_run import AgentConfig, Field, Sampling, agent, load_tasks, resolve
from glm5.posttrain.learner import LearnConfig
from glm5.posttrain.losses import LossConfig
from glm5.posttrain.outcome import State
from glm5.posttrain.record import Record, retokenised
from glm5.posttrain.rollout.options import RolloutOptions
from glm5.posttrain.rows import pack
from glm5.posttrain.store import Store
from glm5.serve.config import EngineConfig
from glm5.train.schedule import LearningRate
from glm5.utils.errors import ConfigError, UserError
from glm5.utils.runlog import read_metrics
from support.scripted import chat_tokenizer
from support.tiny import tiny_model

T = chat_tokenizer()
STEPS = 3


class Even(TaskService):
    """Two turns; rewarded if more letters than not of what is said are of the alphabet's first half."""

    name = "even"
    timeout_s = 120.0
    concurrency = 12

    async def rollout(self, asked: Rollout, policy: Policy) -> Result:
        history: list[dict[str, Any]] = [{"role": "user", "content": f"the answer {asked.index}"}]
        said = ""
        for _ in range(2):
            told = await policy.chat(history, max_tokens=10, thinking={"type": "disabled"})
            history += [told, {"role": "user", "content": "value"}]
            said += told["content"] or ""
        if asked.member == 3 and asked.index == 1:
            raise RuntimeError("the environment is broken")
        return judged(float(sum(ord(letter) % 2 for letter in said) * 2 > len(said)))


def saved(path: Path) -> str:
    save_model(tiny_model(0, vocab_size=T.vocab_size, eos_token_id=T.stop_ids), path, tokenizer=T)
    return str(path)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return saved(tmp_path_factory.mktemp("base"))


def config(checkpoint: str, run: Path, **changes: Any) -> AgentConfig:
    return AgentConfig(
        **{
            **dict(
                checkpoint=checkpoint,
                run=str(run),
                engine=EngineConfig(pages=120, context=512, drafts=1, overlap=False),
                rollout=RolloutOptions(group=4, concurrency=12, retries=0, look_s=0.05),
                intake=IntakeConfig(groups=2, max_staleness=2),
                learn=LearnConfig(steps=STEPS, lr=LearningRate(3e-3, 3e-3), save_every=1, row_tokens=128),
                device="cpu",
                eval_rollouts=3,
            ),
            **changes,
        }
    )


class Killed(BaseException):
    """As a kill."""


def apart(record: Record, models: dict[int, GLM5]) -> float:
    """The mean distance between the engine's log-probability of a token and that of the weights that drew it."""
    rows = pack([record.trajectory(0)], len(record.ids), vocab_size=T.vocab_size)
    versions = [v for v, d in zip(record.versions, record.drawn, strict=True) if d]
    engine_A = rows.logprobs_BT[rows.mask_BT]
    with torch.no_grad():
        own = {v: rows.logprobs(models[v]).logprobs_N for v in set(versions)}
    return sum(abs(float(own[v][i] - engine_A[i])) for i, v in enumerate(versions)) / len(versions)


def test_a_run_is_exact_to_the_token_and_goes_on_after_a_kill(
    tmp_path: Path, checkpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    models: dict[int, GLM5] = {}
    push = Field.push

    def pushed(self: Field, model: GLM5, version: int) -> None:
        models[version] = copy.deepcopy(model).eval()
        push(self, model, version)

    monkeypatch.setattr(Field, "push", pushed)
    monkeypatch.setenv("GLM5_API_KEY", "a key")  # the gateway's, too
    given = config(checkpoint, tmp_path / "run")

    def die(learner: AgentLearner) -> None:
        if learner.finished_steps == 1:
            raise Killed

    with pytest.raises(Killed):
        agent(given, lambda _: None, services=[Even()], on_step=die)
    with Store(tmp_path / "run" / LEDGER, read_only=True) as store:
        before = {s.id: (s.state, s.step) for s in store.samples() if s.state is not None}
        assert {step for _, step in before.values()} >= {1}
    found = agent(given, lambda _: None, services=[Even()])
    assert found.steps == STEPS
    assert found.held_out.keys() == {"before", "after"}
    assert (found.model / "model.safetensors").exists()
    with Store(tmp_path / "run" / LEDGER, read_only=True) as store:
        after = {s.id: (s.state, s.step) for s in store.samples()}
        assert all(after[id] == was for id, was in before.items()), "what was final stays"
        counts = store.counts()
        assert sum(counts.by_status.values()) == counts.started
        assert {s.step for s in store.samples(status=State.TRAINED)} == set(range(1, STEPS + 1))
        assert counts.by_status[State.ENVIRONMENT_FAILED] <= 1
        records = [r for s in store.samples() for r in store.records(s.id)]
    assert len(records) > 20
    exact = [apart(record, models) for record in records]
    # A near tie among positions or experts may fall either way in one of many, which are drawn anew in each run.
    assert sum(distance < 1e-4 for distance in exact) >= 0.9 * len(exact)
    # The same trajectories from their text: other ids, and log-probabilities that belong to other tokens.
    again = [retokenised(record, T) for record in records]
    other = [one for one, record in zip(again, records, strict=True) if list(one.ids) != list(record.ids)]
    assert len(other) > len(records) / 2, "an untrained model does not draw what its text is encoded to"
    assert sum(apart(one, models) for one in other) / len(other) > 0.1
    lines = read_metrics(tmp_path / "run")
    assert [line["step"] for line in lines] == list(range(STEPS + 1))
    assert lines[-1]["rollouts"]["tasks"]["even"]["there"] == 1
    assert {"engine/prefix_hit_rate", "engine/idle", "engine/routable", "held_out/even"} <= lines[-1].keys()


def test_a_desk_that_others_reach_wants_a_key_at_once(
    tmp_path: Path, checkpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_ = config(checkpoint, tmp_path, desk="10.0.0.7:9100")
    monkeypatch.delenv("GLM5_API_KEY", raising=False)
    with pytest.raises(UserError, match="no key is asked for there"):
        resolve(open_)
    monkeypatch.setenv("GLM5_API_KEY", "a key")
    assert resolve(open_)[0].desk == "10.0.0.7:9100"


def test_the_command_says_what_it_cannot_do(
    tmp_path: Path, checkpoint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["rl", "agent", checkpoint, "--run", str(tmp_path / "run")]) == 2
    assert "must name a task service" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="follows from intake and learn, and is 8"):
        resolve(config(checkpoint, tmp_path, tasks=("x:Y",), rollout=RolloutOptions(group=4, samples_per_version=9)))
    with pytest.raises(ConfigError, match=r"loss\.kl_weight=0\.1: must be 0"):  # at once, not at the first update
        config(checkpoint, tmp_path, loss=LossConfig(objective="double_sided", kl_weight=0.1))
    with pytest.raises(ConfigError, match=r"rollout\.group=1: must be at least 2"):
        resolve(config(checkpoint, tmp_path, tasks=("x:Y",), rollout=RolloutOptions(group=1)))
    for wrong in ("sums", "examples/services/sums.py:Nothing", "no.such:Thing", "examples/services/none.py:Sums"):
        with pytest.raises(ConfigError, match="tasks"):
            load_tasks([wrong])
    (sums,) = load_tasks([str(Path(__file__).parents[2] / "examples" / "services" / "sums.py") + ":Sums"])
    assert sums.name == "sums"
    with pytest.raises(ConfigError, match="greedy answers teach nothing"):
        Sampling(temperature=0.0)
