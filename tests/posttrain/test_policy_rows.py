"""Rollouts in rows: every figure at its query, ratios of exactly 1 for the same weights, and one gradient however the
batch is cut, packed and spread."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from glm5.model.glm5 import GLM5
from glm5.model.sampling import Sampling, kept
from glm5.posttrain import losses
from glm5.posttrain.logprobs import Kept, action_logprobs
from glm5.posttrain.losses import BatchCounts, LossConfig, policy_loss
from glm5.posttrain.rows import PolicyRows, Trajectory, micro_batches, pack
from glm5.serve.config import EngineConfig
from glm5.serve.engine import Engine
from glm5.serve.request import Request, SamplingParams
from glm5.utils.errors import ConfigError, DataError
from support.conversations import tokenizer
from support.engines import drained
from support.training import VOCAB, tiny


@pytest.fixture(scope="module")
def model() -> GLM5:
    return tiny().double().eval()


def made(lengths: Sequence[int] = (9, 20, 5, 14, 7, 11), seed: int = 0) -> list[Trajectory]:
    """Trajectories of these lengths with answers and observations by turns."""
    rng = random.Random(seed)  # noqa: S311
    found = []
    for number, n in enumerate(lengths):
        drawn = [i >= 2 and (i // 3) % 2 == 0 for i in range(n)]
        ids = [rng.randrange(3, VOCAB) for _ in range(n)]
        logprobs = [-4 + 0.2 * rng.random() if d else math.nan for d in drawn]
        found.append(Trajectory(ids, drawn, logprobs, number, rng.uniform(-1, 1)))
    return found


def fill(model: GLM5, trajectories: Iterable[Trajectory], noise: float = 0.0) -> list[Trajectory]:
    """The same with the model's own log-probabilities, each computed alone, and some noise."""
    g = torch.Generator().manual_seed(1)
    found = []
    for t in trajectories:
        rows = pack([t], len(t.ids))
        with torch.no_grad():
            own = rows.logprobs(model).logprobs_N
        own = own + noise * torch.randn(own.shape, generator=g, dtype=own.dtype)
        values, at = [0.0] * len(t.ids), [i for i, d in enumerate(t.drawn) if d]
        for i, value in zip(at, own.tolist(), strict=True):
            values[i] = value
        found.append(replace(t, logprobs=values))
    return found


# ------------------------------------------------------------------------------------------------ where things stand
def test_figures_stand_at_the_query_before_their_token() -> None:
    first = Trajectory([5, 6, 7, 8], [False, False, True, True], [0, 0, -0.7, -0.8], 3, 2.0, 0.5)
    second = Trajectory([9, 10, 11], [False, True, False], [0, -0.1, 0], 4, [0.0, -1.5, 0.0])
    rows = pack([first, second], 7)
    assert rows.input_BT.tolist() == [[5, 6, 7, 8, 9, 10, 11]]
    assert rows.target_BT.tolist() == [[6, 7, 8, 0, 10, 11, 0]]
    assert rows.mask_BT.tolist() == [[False, True, True, False, True, False, False]]
    assert rows.first_BT.tolist() == [[0, 0, 0, 0, 4, 4, 4]]
    assert rows.rollout_BT.tolist() == [[3, 3, 3, -1, 4, 4, -1]]
    torch.testing.assert_close(rows.logprobs_BT, torch.tensor([[0, -0.7, -0.8, 0, -0.1, 0, 0]]))
    assert rows.advantages_BT.tolist() == [[2.0, 2.0, 2.0, 0, -1.5, 0, 0]]
    assert rows.temperature_BT.tolist() == [[0.5, 0.5, 0.5, 1, 1, 1, 1]]


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        (dict(drawn=[False, True]), "drawn has 2 entries for 3 ids"),
        (dict(logprobs=[0.0]), "logprobs has 1"),
        (dict(advantages=[1.0]), "advantages has 1"),
        (dict(kept=[None]), "kept has 1"),
        (dict(drawn=[True, True, True]), "nothing comes before"),
        (dict(temperature=0.0), "temperature=0.0: must be above 0"),
    ],
)
def test_trajectories_that_do_not_fit_together(changes: dict, match: str) -> None:
    whole = Trajectory([1, 2, 3], [False, True, True], [0, -1, -1], 0)
    with pytest.raises((DataError, ConfigError), match=match):
        replace(whole, **changes)


def test_a_trajectory_is_never_cut() -> None:
    with pytest.raises(DataError, match="trajectory 1 has 9 tokens"):
        pack(made((5, 9)), 7)
    assert pack(made((8,)), 7).mask_BT.shape == (1, 7)


# ------------------------------------------------------------------------------------------------ ratios of 1
def test_the_same_weights_give_a_ratio_of_exactly_one(model: GLM5) -> None:
    """Row by row, ragged, at temperatures of their own: what the same pass gave before is what it gives now."""
    trajectories = [replace(t, temperature=0.7 + 0.2 * t.rollout) for t in made()]
    rows = pack(trajectories, 32)
    before = rows.logprobs(model).logprobs_N.detach()
    now = rows.logprobs(model).logprobs_N
    assert (now.detach() - before).exp().tolist() == [1.0] * int(rows.mask_BT.sum())
    with torch.no_grad():  # other operators run without gradients: equal up to rounding
        torch.testing.assert_close(rows.logprobs(model).logprobs_N, before, rtol=0, atol=1e-6)


def test_packed_and_alone_give_the_same_logprobs(model: GLM5) -> None:
    alone = fill(model, made())
    rows = pack(alone, 32)
    assert len(rows) < len(alone)
    found = rows.logprobs(model).logprobs_N
    torch.testing.assert_close(found, rows.logprobs_BT[rows.mask_BT].double(), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=0.7),
        Sampling(temperature=0.7, top_p=0.8),
        Sampling(temperature=1.3, top_k=5),
        Sampling(temperature=1.0, min_p=0.3, top_p=0.95),
    ],
)
def test_draws_from_truncated_distributions_are_replayed(sampling: Sampling) -> None:
    """Against the sampler's own distribution: T, truncation and padding repeated give a ratio of 1, per token."""
    g = torch.Generator().manual_seed(0)
    hidden, head = torch.randn(40, 16, generator=g), torch.randn(50, 16, generator=g)
    sampling = replace(sampling, vocab_size=44)  # six rows of the head are padding
    probs = sampling.probs(hidden @ head.T)
    targets = torch.multinomial(probs, 1, generator=g).squeeze(1)
    rollout = probs.gather(1, targets[:, None]).squeeze(1).log()
    sets = [row.nonzero().squeeze(1).tolist() for row in probs]
    found = action_logprobs(
        hidden,
        head,
        targets,
        temperature_N=torch.full((40,), sampling.temperature),
        kept=Kept.of(sets),
        vocab_size=44,
        chunk=7,
    ).logprobs_N
    torch.testing.assert_close(found, rollout, rtol=0, atol=2e-6)
    plain = action_logprobs(hidden, head, targets).logprobs_N
    assert float((plain - rollout).abs().max()) > 0.05  # what a trainer that repeats nothing would find


def test_other_weights_keep_the_rollouts_set() -> None:
    """The set is the engine's, even where other weights would keep other ids; both then are over the same ids."""
    g = torch.Generator().manual_seed(2)
    hidden, head = torch.randn(30, 8, generator=g), torch.randn(20, 8, generator=g)
    probs = (hidden @ head.T).softmax(-1)
    full = (torch.zeros(30, dtype=torch.long), torch.full((30,), 0.8, dtype=torch.double), torch.zeros(30))
    keep = kept(probs, *full)
    sets = Kept.of([row.nonzero().squeeze(1).tolist() for row in keep])
    other = head + 0.3 * torch.randn(head.shape, generator=g)
    every = [
        action_logprobs(hidden, other, torch.full((30,), i), kept=sets.select(torch.arange(30))).logprobs_N
        if bool(keep[:, i].all())
        else None
        for i in range(20)
    ]
    mine = (hidden @ other.T).masked_fill(~keep, float("-inf")).log_softmax(-1)
    for i, found in enumerate(every):
        if found is not None:
            torch.testing.assert_close(found, mine[:, i])
    drawn = mine.argmax(-1)
    torch.testing.assert_close(
        action_logprobs(hidden, other, drawn, kept=sets).logprobs_N, mine.gather(1, drawn[:, None]).squeeze(1)
    )


def test_a_shifted_kept_set_is_noticed() -> None:
    hidden, head = torch.randn(3, 4), torch.randn(6, 4)
    sets = Kept.of([[0, 1], [2], [3, 4]])
    with pytest.raises(DataError, match="action 1, 3, is not in its kept set"):
        action_logprobs(hidden, head, torch.tensor([1, 3, 3]), kept=sets)
    with pytest.raises(DataError, match="outside the vocabulary of 5"):
        action_logprobs(hidden, head, torch.tensor([1, 3, 5]), vocab_size=5)


@pytest.mark.parametrize("entropy", [False, True])
def test_plain_draws_give_what_the_general_way_gives(entropy: bool) -> None:
    """At temperature 1 and with all ids, values and gradients against those with a kept set that holds every id."""
    g = torch.Generator().manual_seed(6)
    weights = torch.randn(2, 9, generator=g, dtype=torch.float64)
    targets = torch.randint(7, (9,), generator=g)
    found = []
    for kept_set in (None, Kept.of([list(range(7))] * 9)):
        hidden = torch.randn(9, 4, generator=g.manual_seed(7), dtype=torch.float64).requires_grad_()
        head = torch.randn(8, 4, generator=g, dtype=torch.float64).requires_grad_()
        out = action_logprobs(hidden, head, targets, kept=kept_set, vocab_size=7, with_entropy=True, chunk=4)
        assert out.entropy_N is not None
        loss = out.logprobs_N @ weights[0] + (out.entropy_N @ weights[1] if entropy else 0.0)
        found.append((out.logprobs_N, out.entropy_N, *torch.autograd.grad(loss, (hidden, head))))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)
    assert float(found[0][3][7].abs().sum()) == 0  # a row of padding has no gradient


def test_gradients_of_logprobs_and_entropy() -> None:
    g = torch.Generator().manual_seed(4)
    hidden = torch.randn(6, 4, generator=g, dtype=torch.float64, requires_grad=True)
    head = torch.randn(7, 4, generator=g, dtype=torch.float64, requires_grad=True)
    sets = Kept.of([[0, 2, 3], None, [1, 4], None, [5], [0, 1, 2, 3, 4, 5]])
    targets = torch.tensor([2, 6, 4, 0, 5, 1])
    temperature = torch.tensor([0.7, 1.0, 1.3, 0.5, 1.0, 2.0], dtype=torch.float64)

    def both(h: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        found = action_logprobs(h, w, targets, temperature_N=temperature, kept=sets, with_entropy=True, chunk=4)
        assert found.entropy_N is not None
        return found.logprobs_N, found.entropy_N

    assert torch.autograd.gradcheck(both, (hidden, head))
    logits = (hidden @ head.T / temperature[:, None]).masked_fill(~sets.mask(0, 6, 7), float("-inf"))
    probs = logits.softmax(-1)
    logprobs, entropy = both(hidden, head)
    torch.testing.assert_close(logprobs, probs.gather(1, targets[:, None]).squeeze(1).log())
    torch.testing.assert_close(entropy, torch.special.entr(probs).sum(-1))


@pytest.mark.parametrize("sampling", [dict(temperature=0.7), dict(temperature=0.8, top_p=0.7), dict(top_k=4)])
def test_the_engines_rollouts_have_a_ratio_of_one(sampling: dict[str, float]) -> None:
    """Tokens, log-probabilities and kept sets as the engine gives them, against a pass of the trainer: packed, and at
    rounding's distance (the engine decodes from a cache, by other operators)."""
    config = tiny().config.replace(vocab_size=384, initializer_range=0.1)  # 44 ids more than the tokenizer knows
    model = GLM5(config, seed=1).eval()
    engine = Engine(model, EngineConfig(pages=64), tokenizer())
    params = SamplingParams(max_new_tokens=14, logprobs=0, kept_set=True, seed=3, ignore_eos=True, n=3, **sampling)  # type: ignore[arg-type]
    prompts = [[5, 9, 11], [7, 8, 30, 31, 32, 33]]
    for i, prompt in enumerate(prompts):
        engine.add(Request(prompt, params, rid=str(i)))
    found = []
    for number, ((rid, _), answer) in enumerate(drained(engine).items()):
        given = prompts[int(rid)], answer.ids, answer.info
        found.append(Trajectory.sampled(*given, number, temperature=params.temperature))
    rows = pack(found, SEQ_LEN, vocab_size=tokenizer().vocab_size)
    assert int(rows.mask_BT.sum()) == 6 * 14
    ratio = (rows.logprobs(model).logprobs_N - rows.logprobs_BT[rows.mask_BT]).exp()
    torch.testing.assert_close(ratio, torch.ones_like(ratio), rtol=0, atol=1e-4)
    plain = replace(rows, kept=None, vocab_size=None).logprobs(model).logprobs_N  # of a trainer that repeats neither
    assert float((plain.detach() - rows.logprobs_BT[rows.mask_BT]).abs().max()) > 0.05


# ------------------------------------------------------------------------------------------------ one gradient
CONFIGS = {
    "glm5_reasoning": losses.glm5_reasoning(),
    "glm5_agentic": losses.glm5_agentic(),
    "dapo": losses.dapo(),
    "gspo": LossConfig(objective="sequence_clip", clip_low=0.3, clip_high=0.3),
    "grpo": LossConfig(entropy_weight=0.01),
}
SEQ_LEN = 32


def gradient(
    model: GLM5, config: LossConfig, rows: PolicyRows, rollouts: int, size: int, ranks: int = 1
) -> dict[str, Tensor]:
    """Of a batch read in micro-batches of `size` rows on each of `ranks`, whose gradients are summed."""
    counts = rows.counts(rollouts)
    total = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    log_s = None
    if config.objective == "sequence_clip":
        with torch.no_grad():
            a = rows.actions(rows.logprobs(model))
        old = a.rollout_logprobs.double()
        log_s = losses.sequence_log_ratio(a.logprobs, old, a.sequence, a.mask, counts.actions_S)
    for plan in micro_batches(len(rows), size, ranks):
        model.zero_grad()
        for numbers in plan:
            part = rows.take(numbers)
            found = part.logprobs(model, with_entropy=config.entropy_weight > 0)
            batch = part.actions(found, log_s=log_s)
            batch = replace(batch, old_logprobs=batch.rollout_logprobs.double())
            policy_loss(config, batch, counts).loss.backward()
        for name, p in model.named_parameters():
            total[name] += 0 if p.grad is None else p.grad
    return total


def check(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    """Equal to the rounding of the router, which computes in fp32 whatever the model's dtype."""
    assert max(float(t.abs().max()) for t in a.values()) > 1e-2
    for name, t in a.items():
        torch.testing.assert_close(b[name], t, rtol=1e-5, atol=1e-8, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("name", CONFIGS)
def test_one_gradient_however_the_batch_is_cut(model: GLM5, name: str) -> None:
    config = CONFIGS[name]
    trajectories = fill(model, made(), noise=0.2)
    alone = pack(trajectories, SEQ_LEN, packed=False)
    expected = gradient(model, config, alone, 6, size=6)
    for size, ranks in ((1, 1), (2, 1), (4, 1), (2, 2), (1, 2)):  # of 6 rows: also with empty rows and unequal ranks
        check(expected, gradient(model, config, alone, 6, size, ranks))
    packed = pack(trajectories, SEQ_LEN)
    assert 1 < len(packed) < 6
    for size, ranks in ((1, 1), (2, 1), (4, 1), (1, 2)):
        check(expected, gradient(model, config, packed, 6, size, ranks))


@pytest.mark.parametrize("name", CONFIGS)
def test_a_rollout_in_three_rows_weighs_as_one(model: GLM5, name: str) -> None:
    """The same answer tokens as one trajectory, and as three that each hold a third of them."""
    whole, other = fill(model, made((20, 9)), noise=0.2)
    parts = [
        replace(whole, drawn=[d and lo <= i < hi for i, d in enumerate(whole.drawn)])
        for lo, hi in ((0, 8), (8, 14), (14, 20))
    ]
    assert all(any(p.drawn) for p in parts)
    one = gradient(model, CONFIGS[name], pack([whole, other], SEQ_LEN, packed=False), 2, size=2)
    three = pack([*parts, other], SEQ_LEN, packed=False)
    for size in (1, 4):
        check(one, gradient(model, CONFIGS[name], three, 2, size))


def test_ragged_batch_and_singles_agree(model: GLM5) -> None:
    """Prompts of unequal length beside each other: the sum of each alone, at the whole batch's divisors."""
    trajectories = fill(model, made((4, 19, 11)), noise=0.2)
    rows = pack(trajectories, SEQ_LEN, packed=False)
    counts = rows.counts(3)
    config = losses.glm5_reasoning()
    whole = policy_loss(config, rows.actions(rows.logprobs(model)), counts).loss.item()
    singles = 0.0
    for t in trajectories:
        row = pack([t], len(t.ids))
        singles += policy_loss(config, row.actions(row.logprobs(model)), counts).loss.item()
    assert whole == pytest.approx(singles, rel=1e-9)


def test_ranks_make_equally_many_micro_batches_of_equal_size() -> None:
    for rows in (1, 2, 3, 7, 8):
        for size in (1, 2, 4, 50):
            for ranks in (1, 2, 3):
                plans = micro_batches(rows, size, ranks)
                (steps,) = {len(plan) for plan in plans}
                assert steps == math.ceil(rows / (size * ranks))
                sizes = {len(numbers) for plan in plans for numbers in plan}
                assert max(sizes) <= size
                read = [n for plan in plans for numbers in plan for n in numbers]
                assert sorted(n for n in read if n >= 0) == list(range(rows))
                if ranks == 1:
                    assert min(read) == 0  # nobody waits, so nothing is filled up
                else:
                    assert len(sizes) == 1
                    assert read.count(-1) < steps * ranks
    assert micro_batches(5, 4) == [[[0, 1, 2], [3, 4]]]
    assert micro_batches(0, 4, 2) == [[], []]
    with pytest.raises(ConfigError, match="at least 1"):
        micro_batches(3, 0)


def test_an_empty_row_gives_zero_gradients_everywhere(model: GLM5) -> None:
    """What a rank with too few rows does: the same pass and the same collective calls, with gradients of exactly 0."""
    rows = pack(made((9, 6)), SEQ_LEN).take([-1])
    model.zero_grad()
    found = policy_loss(losses.glm5_reasoning(), rows.actions(rows.logprobs(model)), BatchCounts(torch.tensor([3, 2])))
    found.loss.backward()
    assert found.moving.item() == 0
    assert model.lm_head.weight.grad is not None
    assert all(float(p.grad.abs().sum()) == 0 for p in model.parameters() if p.grad is not None)


def test_kept_sets_follow_their_rows() -> None:
    t = Trajectory([1, 2, 3, 4], [False, True, False, True], [0, -1, 0, -1], 0, kept=[None, (2, 9), (8,), (4, 7)])
    u = Trajectory([5, 6], [False, True], [0, -1], 1, kept=[None, (6, 1, 0)])
    rows = pack([t, u], 4, packed=False).take([1, -1, 0])
    assert rows.kept is not None
    sets = [rows.kept.ids[a:b].tolist() for a, b in zip(rows.kept.offsets, rows.kept.offsets[1:], strict=False)]
    assert sets[0] == [6, 1, 0]
    assert sets[8:12] == [[2, 9], [], [4, 7], []]  # not what stood at a token that was not drawn
