"""The sampler: each rule against a plain formula, one text whatever the batch and the drafts, and where answers end."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import llguidance
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from glm5.serve import sampler as sampler_module
from glm5.serve.answer import SamplerState
from glm5.serve.grammar import GrammarCompiler
from glm5.serve.request import Constraint, Finish, Request, SamplingParams, TokenInfo
from glm5.serve.sampler import Chosen, Sampler
from glm5.text import Tokenizer
from glm5.utils.errors import UserError

V, PADDED = 50, 56
EOS = (0, 1)


def logits_of(seed: int, rows: int = 1, scale: float = 2.0) -> Tensor:
    return scale * torch.randn(rows, PADDED, generator=torch.Generator().manual_seed(seed))


def state_of(
    sampler: Sampler, prompt: Sequence[int] = (5, 6, 7), limit: int = 100, index: int = 0, **params: Any
) -> Any:
    return sampler.state(Request(prompt, SamplingParams(**params)), index, limit)


# ------------------------------------------------------------------------------------------------ a toy engine
class Toy:
    """A language model of two ids of context, and a drafter that is nearly as good."""

    def __init__(self, width: int = PADDED, error: float = 0.7, scale: float = 2.0) -> None:
        self.width, self.error, self.scale = width, error, scale

    def row(self, ids: Sequence[int], draft: bool = False) -> Tensor:
        make = torch.Generator().manual_seed(hash(tuple(ids[-2:])) % 2**31)
        row = self.scale * torch.randn(self.width, generator=make)
        return row + self.error * torch.randn(self.width, generator=make) if draft else row


def generate(
    sampler: Sampler,
    requests: Sequence[Request],
    toy: Toy,
    drafts: int = 0,
    limit: int = 40,
    together: int = 100,
    shuffle: int | None = None,
) -> list[tuple[tuple[int, ...], tuple[TokenInfo, ...], Finish | None, int]]:
    """Ids, figures, finish and trim of every answer. `together` answers share a step, in an order that varies."""
    states = [sampler.state(request, index, limit) for request in requests for index in range(request.params.n)]
    ids: list[list[int]] = [[] for _ in states]
    info: list[list[TokenInfo]] = [[] for _ in states]
    trims = [0] * len(states)
    order = random.Random(shuffle)  # noqa: S311
    while alive := [i for i, state in enumerate(states) if state.finish is None]:
        if shuffle is not None:
            order.shuffle(alive)
        for group in (alive[i : i + together] for i in range(0, len(alive), together)):
            of_group = [states[i] for i in group]
            ahead: list[list[int]] = [[] for _ in group]
            texts = [[*states[i].request.input_ids, *ids[i]] for i in group]
            for _ in range(drafts):
                rows = torch.stack([toy.row([*t, *a], draft=True) for t, a in zip(texts, ahead, strict=True)])
                for a, id in zip(ahead, sampler.draft(rows, of_group, ahead), strict=True):
                    a.append(id)
            blocks = [[*t, *a[:j]] for t, a in zip(texts, ahead, strict=True) for j in range(drafts + 1)]
            chosen = sampler.choose(torch.stack([toy.row(block) for block in blocks]), of_group, ahead)
            for i, a, one in zip(group, ahead, chosen, strict=True):
                assert list(one.ids[: one.accepted]) == a[: one.accepted]
                ids[i] += one.ids
                info[i] += one.info
                trims[i] = one.trim
                assert states[i].count == len(ids[i])
    return [(tuple(a), tuple(b), s.finish, t) for a, b, s, t in zip(ids, info, states, trims, strict=True)]


MIXED = [
    SamplingParams(temperature=0, n=2),
    SamplingParams(seed=1, n=3),
    SamplingParams(seed=1, temperature=0.3, top_p=0.9, logprobs=3, kept_set=True),
    SamplingParams(seed=2, top_k=7, min_p=0.05, frequency_penalty=0.8, presence_penalty=-0.4, logprobs=0),
    SamplingParams(temperature=0, repetition_penalty=1.4, logprobs=2),
    SamplingParams(seed=3, logit_bias={4: 3.0, 9: -100.0}, min_new_tokens=12, stop_token_ids=(7, 8)),
    SamplingParams(temperature=0, kept_set=True, ignore_eos=True, stop_token_ids=(11,)),
    SamplingParams(seed=-5, top_k=1, repetition_penalty=0.8),
]


def requests_of(params: Sequence[SamplingParams], prompts: Sequence[Sequence[int]] = ((5, 6), (9,))) -> list[Request]:
    return [Request(prompts[i % len(prompts)], p) for i, p in enumerate(params)]


# ------------------------------------------------------------------------------------------------ the formulas
def test_penalties_bias_and_temperature_by_the_formula() -> None:
    sampler = Sampler(V, EOS)
    p = dict(
        temperature=0.7,
        frequency_penalty=0.3,
        presence_penalty=0.5,
        repetition_penalty=1.3,
        logit_bias={3: 2.0, 20: -1.0},
    )
    prompt, answer = [5, 6, 5, 20], []
    state = state_of(sampler, prompt, seed=4, logprobs=V, ignore_eos=True, max_new_tokens=60, **p)
    for step in range(40):
        logits = logits_of(step)
        (chosen,) = sampler.choose(logits, [state])
        x = logits[0, :V].double().numpy().copy()
        counts = Counter(answer)
        for id in range(V):
            if id in counts or id in prompt:
                x[id] = x[id] / 1.3 if x[id] > 0 else x[id] * 1.3
            x[id] -= 0.3 * counts[id] + 0.5 * (id in counts)
        x[3] += 2
        x[20] -= 1
        expected = x / 0.7 - np.log(np.exp(x / 0.7).sum())
        (id,), (info,) = chosen.ids, chosen.info
        assert info.logprob == pytest.approx(expected[id], abs=1e-5)
        assert [i for i, _ in info.top] == np.argsort(-expected).tolist()
        assert [value for _, value in info.top] == pytest.approx(np.sort(expected)[::-1], abs=1e-5)
        answer.append(id)
    assert max(Counter(answer).values()) > 1  # so that what is of a count differs from what is of an occurrence


def test_greedy_takes_the_lowest_of_equals_and_no_padding() -> None:
    sampler = Sampler(V, EOS)
    logits = torch.zeros(1, PADDED)
    logits[0, [10, 30]] = 1.0
    logits[0, V:] = 9.0
    for p in (dict(), dict(logprobs=1)):
        assert sampler.choose(logits, [state_of(sampler, temperature=0, **p)])[0].ids == (10,)
    draws = [sampler.choose(logits, [state_of(sampler, seed=seed)])[0].ids[0] for seed in range(200)]
    assert max(draws) < V
    assert len(set(draws)) > 20


def test_greedy_figures_are_of_the_undivided_logits() -> None:
    sampler, logits = Sampler(V, EOS), logits_of(3)
    (chosen,) = sampler.choose(logits, [state_of(sampler, temperature=0, logprobs=2, kept_set=True)])
    expected = logits[0, :V].double().log_softmax(-1)
    assert chosen.info[0].logprob == pytest.approx(float(expected.max()), abs=1e-5)
    assert chosen.info[0].kept == chosen.ids
    assert chosen.info[0].kept_logprob == chosen.info[0].logprob


def test_the_kept_set_is_what_could_be_drawn() -> None:
    sampler, logits = Sampler(V, EOS), logits_of(8)
    order = logits[0, :V].argsort(descending=True).tolist()
    kept = {}
    for seed in range(60):
        (one,) = sampler.choose(logits, [state_of(sampler, seed=seed, top_k=5, kept_set=True)])
        kept[one.info[0].kept] = kept.get(one.info[0].kept, set()) | set(one.ids)
    ((ids, drawn),) = kept.items()
    assert sorted(ids) == sorted(order[:5])
    assert drawn <= set(ids)
    assert len(drawn) > 2
    (one,) = sampler.choose(logits, [state_of(sampler, seed=1, temperature=0.7, top_k=5, kept_set=True)])
    of_kept = (logits[0, :V].double() / 0.7)[order[:5]].log_softmax(-1)  # the distribution that was drawn from
    assert one.info[0].logprob - one.info[0].kept_logprob == pytest.approx(
        float(of_kept[order.index(one.ids[0])]), abs=1e-5
    )
    (one,) = sampler.choose(logits, [state_of(sampler, seed=1, kept_set=True)])
    assert (one.info[0].kept, one.info[0].kept_logprob) == (None, 0.0)
    (one,) = sampler.choose(logits, [state_of(sampler, seed=1, top_k=5)])
    assert one.info == ()


def test_figures_of_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler_module, "ROWS_AT_ONCE", 3)
    logits, ids = logits_of(1, rows=8), [4, 9, 0, 49, 3, 3, 7, 30]
    expected = logits[:, :V].double().log_softmax(-1)
    found = Sampler(V, EOS).prompt_info(logits, ids, 2)
    assert [one.logprob for one in found] == pytest.approx(
        [float(expected[t, id]) for t, id in enumerate(ids)], abs=1e-5
    )
    assert [one.top[0][0] for one in found] == expected.argmax(-1).tolist()
    assert all(len(one.top) == 2 for one in found)


def test_tiny_and_huge_temperatures() -> None:
    sampler, logits = Sampler(V, EOS), logits_of(2)
    best = int(logits[0, :V].argmax())
    assert {sampler.choose(logits, [state_of(sampler, seed=s, temperature=1e-40)])[0].ids for s in range(20)} == {
        (best,)
    }
    assert len({sampler.choose(logits, [state_of(sampler, seed=s, temperature=100)])[0].ids for s in range(60)}) > 30


# ------------------------------------------------------------------------------------------------ same seed, same text
def test_one_text_whatever_the_batch_and_the_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler, toy = Sampler(V, EOS), Toy()
    requests = requests_of(MIXED)
    together = generate(sampler, requests, toy)
    assert {one[2].type for one in together if one[2]} == {"stop", "length"}
    assert together == generate(sampler, requests, toy, together=1)
    assert together == generate(sampler, requests, toy, together=3, shuffle=1)
    for drafts in (1, 3):
        assert together == generate(sampler, requests, toy, drafts=drafts)
        assert together == generate(sampler, requests, toy, drafts=drafts, together=4, shuffle=drafts)
    monkeypatch.setattr(sampler_module, "ROWS_AT_ONCE", 5)
    assert together == generate(sampler, requests, toy, drafts=2)


def test_answers_and_seeds_have_streams_of_their_own() -> None:
    sampler, toy = Sampler(V, ()), Toy()
    texts = generate(sampler, [Request([5, 6], SamplingParams(seed=seed, n=4)) for seed in (0, 1)], toy)
    assert len({ids for ids, *_ in texts}) == 8
    unseeded = [generate(sampler, [Request([5, 6])], toy)[0][0] for _ in range(2)]
    assert unseeded[0] != unseeded[1]


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 9), st.floats(0, 3))
def test_a_row_is_bitwise_the_same_alone_and_with_strangers(seed: int, rows: int, temperature: float) -> None:
    sampler, logits = Sampler(V, EOS), logits_of(seed, rows, scale=4)
    p = SamplingParams(temperature=temperature, top_p=0.8, seed=seed, logprobs=5, kept_set=True)
    others = [MIXED[i % len(MIXED)] for i in range(rows - 1)]
    where = seed % rows
    all_params = [*others[:where], p, *others[where:]]
    many = sampler.choose(logits, [sampler.state(Request([3], one), 0, 9) for one in all_params])
    (alone,) = sampler.choose(logits[where : where + 1], [sampler.state(Request([3], p), 0, 9)])
    assert many[where] == alone


def test_bf16_logits_are_read_as_they_are() -> None:
    sampler, logits = Sampler(V, EOS), logits_of(5).bfloat16()
    for p in (dict(temperature=0), dict(seed=3, logprobs=1)):
        one, two = (sampler.choose(x, [state_of(sampler, **p)]) for x in (logits, logits.float()))
        assert one == two


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="rows in a batch go untested on CUDA: no device")
def test_a_row_is_bitwise_the_same_in_any_batch_on_a_gpu() -> None:
    vocab, rows = 154_856, 64
    sampler = Sampler(vocab, EOS)
    make = torch.Generator("cuda").manual_seed(0)
    logits = 3 * torch.randn(rows, 154_880, generator=make, device="cuda")
    params = [MIXED[i % len(MIXED)] for i in range(rows)]
    many = sampler.choose(logits, [sampler.state(Request([3], p), 0, 9) for p in params])
    for row in range(rows):
        (alone,) = sampler.choose(logits[row : row + 1], [sampler.state(Request([3], params[row]), 0, 9)])
        assert alone == many[row]


# ------------------------------------------------------------------------------------------------ drafts
def test_drafts_are_right_as_often_as_theory_says() -> None:
    """Over all contexts: sum over i of 1 / (sum over j of max(p_j / p_i, q_j / q_i)), and the text follows p."""
    sampler, p_counts = Sampler(V, ()), Counter()
    make = torch.Generator().manual_seed(9)
    trunk = torch.randn(1, PADDED, generator=make)
    draft = trunk + 0.8 * torch.randn(1, PADDED, generator=make)
    p, q = trunk[0, :V].softmax(-1).double(), draft[0, :V].softmax(-1).double()
    exact = float((1 / torch.maximum(p[:, None] / p[None], q[:, None] / q[None]).sum(0)).sum())
    n = 3000
    states = [state_of(sampler, seed=seed) for seed in range(n)]
    drafts = [[id] for id in sampler.draft(draft.expand(n, PADDED), states)]
    chosen = sampler.choose(trunk.expand(2 * n, PADDED), states, drafts)
    accepted = sum(one.accepted for one in chosen)
    assert abs(accepted / n - exact) < 4 * math.sqrt(exact * (1 - exact) / n)
    distance = float((p - q).abs().sum()) / 2
    assert (1 - distance) / (1 + distance) <= exact <= 1 - distance
    for position in (0, 1):
        p_counts = Counter(one.ids[position] for one in chosen if len(one.ids) > position)
        total = sum(p_counts.values())
        chi = sum((p_counts[id] - total * float(p[id])) ** 2 / (total * float(p[id])) for id in range(V))
        assert chi < 100  # 49 degrees of freedom: once in 20,000


def test_drafts_of_a_perfect_drafter_are_all_right() -> None:
    """It sees what the trunk sees, so all else must be equal too: noise, penalties and masks of a draft's position."""
    sampler, toy = Sampler(V, ()), Toy(error=0.0)
    for params in MIXED:
        state = state_of(sampler, [5, 6], **{**vars(params), "n": 1, "stop_token_ids": ()})
        ids = [5, 6]
        for _ in range(5):
            ahead: list[int] = []
            for _ in range(4):
                ahead += sampler.draft(toy.row([*ids, *ahead], draft=True)[None], [state], [ahead])
            rows = torch.stack([toy.row([*ids, *ahead[:j]]) for j in range(5)])
            (one,) = sampler.choose(rows, [state], [ahead])
            assert one.accepted == 4
            ids += one.ids


def test_the_ids_of_a_block_end_at_the_first_wrong_draft() -> None:
    sampler = Sampler(V, EOS)
    logits = torch.zeros(4, PADDED)
    for row, id in enumerate((10, 11, 12, 13)):
        logits[row, id] = 5.0
    cases: list[tuple[list[int], Chosen]] = [
        ([10, 11, 12], Chosen((10, 11, 12, 13), accepted=3)),
        ([10, 9, 12], Chosen((10, 11), accepted=1)),
        ([9, 11, 12], Chosen((10,))),
    ]
    for drafts, expected in cases:
        assert sampler.choose(logits, [state_of(sampler, temperature=0)], [drafts]) == [expected]


# ------------------------------------------------------------------------------------------------ where answers end
def spelled(ids: Sequence[int]) -> Tensor:
    logits = torch.zeros(len(ids), PADDED)
    logits[torch.arange(len(ids)), torch.tensor(ids)] = 9.0
    return logits


@pytest.mark.parametrize("extra", [{}, {"logprobs": 0}], ids=["plain", "figures"])
def test_stop_ids_and_length_inside_a_block(extra: dict[str, Any]) -> None:
    sampler = Sampler(V, EOS)

    def end(ids: list[int], limit: int = 100, **params: Any) -> tuple[tuple[int, ...], int, Finish | None]:
        state = state_of(sampler, limit=limit, temperature=0, **params, **extra)
        (one,) = sampler.choose(spelled(ids), [state], [ids[:-1]])
        assert len(one.info) == (len(one.ids) if extra else 0)
        return one.ids, one.accepted, one.finish

    assert end([10, 1, 12, 13]) == ((10, 1), 2, Finish("stop", 1))
    assert end([10, 1, 12, 13], ignore_eos=True) == ((10, 1, 12, 13), 3, None)
    assert end([10, 11, 12, 13], stop_token_ids=(13,)) == ((10, 11, 12, 13), 3, Finish("stop", 13))
    assert end([10, 11, 12, 13], limit=2) == ((10, 11), 2, Finish("length"))
    assert end([10, 1, 12, 13], limit=2) == ((10, 1), 2, Finish("stop", 1))


def test_no_stop_before_min_new_tokens() -> None:
    sampler = Sampler(V, EOS)
    want = [1, 1, 10, 1]
    state = state_of(sampler, temperature=0, min_new_tokens=3)
    logits = spelled(want)
    logits[:2, 20] = 5.0
    (one,) = sampler.choose(logits, [state], [[20, 20, 10]])
    assert (one.ids, one.finish) == ((20, 20, 10, 1), Finish("stop", 1))


@pytest.mark.parametrize(
    "extra", [{"temperature": 0}, {"temperature": 0, "logprobs": 1}, {"seed": 1}, {"seed": 1, "top_k": 1, "top_p": 0.5}]
)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf], ids=["nan", "inf", "nothing"])
def test_a_bad_row_ends_its_answer_alone(extra: dict[str, Any], bad: float) -> None:
    sampler, logits = Sampler(V, EOS), logits_of(4, rows=6)
    fine = sampler.choose(logits, [state_of(sampler, **extra) for _ in range(3)], [[2]] * 3)
    logits[2, 7 if bad != -math.inf else slice(None)] = bad
    drafts = [[2], [2], [2]]
    states = [state_of(sampler, **extra) for _ in range(3)]
    one, two, three = sampler.choose(logits, states, drafts)
    assert (one, three) == (fine[0], fine[2])
    assert two.ids == two.info == ()
    assert two.finish is not None
    assert (two.finish.type, two.finish.message) == ("error", sampler_module.NOT_FINITE)
    assert states[1].finish == two.finish


# ------------------------------------------------------------------------------------------------ text
@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(['{"key": [1, 2.5]} <b>get_weather</b> é 0123456789 abc the end\n'] * 3, 320)


@pytest.fixture(scope="module")
def speaker(tokenizer: Tokenizer) -> Sampler:
    return Sampler(tokenizer.vocab_size, tokenizer.stop_ids, tokenizer)


def say(sampler: Sampler, state: SamplerState, wishes: Sequence[int], drafts: int = 0) -> tuple[list[int], int]:
    """Let the model wish for these ids, one after the other, however often it takes: ids and trim.

    Where the wish is forbidden, the next likeliest id is taken, and the wish remains.
    """
    assert sampler.tokenizer is not None
    width, ids, left, trim = sampler.vocab_size + 3, [], list(wishes), 0
    while state.finish is None and left:
        block = left[: drafts + 1]
        logits = torch.zeros(len(block), width)
        logits[torch.arange(len(block)), torch.tensor(block)] = 9.0
        (one,) = sampler.choose(logits, [state], [block[:-1]])
        ids += one.ids
        trim = one.trim
        for id in one.ids:
            if left and id == left[0]:
                left.pop(0)
    return ids, trim


@pytest.mark.parametrize("drafts", [0, 2, 5])
def test_a_stop_string_across_tokens(tokenizer: Tokenizer, speaker: Sampler, drafts: int) -> None:
    wishes = [*tokenizer.encode("abc\n"), *tokenizer.encode("the"), *tokenizer.encode(" é 01")]
    for keep, text in ((False, "abc"), (True, "abc\nthe ")):
        state = state_of(speaker, temperature=0, stop=("zzz", "\nthe "), no_stop_trim=keep)
        ids, trim = say(speaker, state, wishes, drafts)
        assert state.finish == Finish("stop", "\nthe ")
        said = tokenizer.decode(ids)
        assert said[: len(said) - trim] == text
    state = state_of(speaker, temperature=0, stop=("\nthe ",), min_new_tokens=len(wishes))
    assert say(speaker, state, wishes, drafts)[0] == wishes
    assert state.finish is None


def test_the_stop_id_comes_before_the_string(tokenizer: Tokenizer, speaker: Sampler) -> None:
    state = state_of(speaker, temperature=0, stop=("<|user|>",))
    say(speaker, state, [tokenizer.user_id])
    assert state.finish == Finish("stop", tokenizer.user_id)


@pytest.mark.parametrize("drafts", [0, 3])
def test_a_thinking_budget_closes_the_block(tokenizer: Tokenizer, speaker: Sampler, drafts: int) -> None:
    wishes = tokenizer.encode("abc the end 0123456789")
    prompt = [tokenizer.assistant_id, tokenizer.think_id]
    for budget in (0, 1, 4):
        state = state_of(speaker, prompt, temperature=0, thinking_budget=budget)
        ids, _ = say(speaker, state, wishes, drafts)
        assert ids.index(tokenizer.end_think_id) == budget
        assert ids.count(tokenizer.end_think_id) == 1
        assert [id for id in ids if id != tokenizer.end_think_id] == wishes
    # Where the prompt has closed it, or a later turn has begun, there is nothing to close, until the answer thinks.
    for prompt in ([tokenizer.think_id, tokenizer.end_think_id], [tokenizer.think_id, tokenizer.user_id], [30]):
        state = state_of(speaker, prompt, temperature=0, thinking_budget=1)
        assert say(speaker, state, wishes, drafts)[0] == wishes
    state = state_of(speaker, prompt, temperature=0, thinking_budget=1)
    ids, _ = say(speaker, state, [tokenizer.think_id, *wishes], drafts)
    assert ids == [tokenizer.think_id, wishes[0], tokenizer.end_think_id, *wishes[1:]]
    # A call ends the thinking: its arguments are not cut.
    state = state_of(speaker, [tokenizer.think_id], temperature=0, thinking_budget=2)
    call = [wishes[0], tokenizer.tool_call_id, *wishes]
    assert say(speaker, state, call, drafts)[0] == call


@pytest.mark.parametrize("drafts", [0, 1, 2, 4, 8])
def test_a_form_begins_after_thinking_inside_a_block_too(tokenizer: Tokenizer, speaker: Sampler, drafts: int) -> None:
    thought, brace = tokenizer.encode("abc {"), tokenizer.encode("{")
    wishes = [
        *thought,
        tokenizer.end_think_id,
        *brace,
        *tokenizer.encode('"a"'),
        *tokenizer.encode(":1"),
        *tokenizer.encode("}"),
    ]
    schema = json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
    state = state_of(
        speaker, [tokenizer.think_id], temperature=0, constraint=Constraint("json_schema", schema), logprobs=0
    )
    ids, _ = say(speaker, state, wishes, drafts)
    assert ids == wishes
    assert state.finish == Finish("stop")


def test_a_form_holds_from_the_first_id_where_nothing_is_thought(tokenizer: Tokenizer, speaker: Sampler) -> None:
    digits = Constraint("regex", "[0-9]{3}")
    for prompt, constraint in (
        ([tokenizer.end_think_id], digits),
        ([tokenizer.think_id], replace(digits, after_thinking=False)),
    ):
        state = state_of(speaker, prompt, temperature=0, constraint=constraint)
        ids, _ = say(speaker, state, tokenizer.encode("abc " * 9))
        assert len(ids) <= 3
        assert tokenizer.decode(ids).isdigit()
        assert len(tokenizer.decode(ids)) == 3
        assert state.finish == Finish("stop")


def test_an_answer_that_owes_a_form_cannot_stop_before_it(tokenizer: Tokenizer, speaker: Sampler) -> None:
    state = state_of(speaker, [tokenizer.think_id], temperature=0, constraint=Constraint("regex", "[0-9]+"))
    stop, call = tokenizer.user_id, tokenizer.tool_call_id
    for wish in (stop, call):  # not in thinking, not before the first digit
        (one,) = speaker.choose(one_wish(speaker, wish), [state])
        assert one.ids[0] not in (*tokenizer.stop_ids, call)
    say(speaker, state, [tokenizer.end_think_id])
    (one,) = speaker.choose(one_wish(speaker, stop), [state])
    assert tokenizer.decode(one.ids).isdigit()
    (one,) = speaker.choose(one_wish(speaker, stop), [state])
    assert one.finish == Finish("stop", stop)


def test_min_new_tokens_hold_under_a_form_that_can_go_on(tokenizer: Tokenizer, speaker: Sampler) -> None:
    stop = tokenizer.user_id
    for pattern, length in (("[0-9]*", 4), ("[0-9]{2}", 2)):
        form = Constraint("regex", pattern)
        state = state_of(speaker, [30], temperature=0, constraint=form, min_new_tokens=4)
        logits = one_wish(speaker, stop)
        logits[0, tokenizer.encode("7")[0]] = 5.0
        ids: list[int] = []
        while state.finish is None:
            ids += speaker.choose(logits, [state])[0].ids
        assert tokenizer.decode(id for id in ids if id != stop) == "7" * length


def test_a_stop_id_that_is_text_ends_a_form_only_when_complete(tokenizer: Tokenizer, speaker: Sampler) -> None:
    (one,) = tokenizer.encode("1")
    form = Constraint("regex", "[0-9]{2,4}")
    state = state_of(speaker, [30], temperature=0, constraint=form, stop_token_ids=(one,))
    ids, _ = say(speaker, state, [one, *tokenizer.encode("2"), one])
    assert tokenizer.decode(ids)[-1] == "1"
    assert "1" not in tokenizer.decode(ids)[:2]
    assert state.finish == Finish("stop", one)


def one_wish(sampler: Sampler, id: int) -> Tensor:
    logits = torch.zeros(1, sampler.vocab_size)
    logits[0, id] = 9.0
    return logits


TOOLS = json.dumps(
    [
        {
            "type": "function",
            "function": {
                "name": "get_weather",
                "parameters": {"properties": {"n": {"type": "integer"}, "s": {"type": "string"}}, "required": ["n"]},
            },
        }
    ]
)
FORMS = [
    Constraint("json_schema", '{"type": "object", "properties": {"a": {"enum": [1, "x"]}}, "required": ["a"]}'),
    Constraint("regex", r"\d{2,5}(abc)?"),
    Constraint("ebnf", 'root ::= "(" root? ")"'),
    Constraint("tools", TOOLS),
    Constraint("tools", TOOLS, max_calls=1),
]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.kind)
def test_one_text_under_a_form_whatever_the_drafts(tokenizer: Tokenizer, speaker: Sampler, form: Constraint) -> None:
    toy = Toy(speaker.vocab_size + 3, scale=1.0)
    # The walk would seldom leave free text by itself.
    closing = {tokenizer.special[name]: 3.0 for name in ("</arg_value>", "</think>", "</tool_call>")}
    params = [
        SamplingParams(seed=1, n=3, constraint=form, logit_bias=closing, logprobs=1),
        SamplingParams(temperature=0, constraint=form, logit_bias=closing, frequency_penalty=0.5),
        SamplingParams(seed=2, constraint=form, top_p=0.7, thinking_budget=3, logit_bias=closing),
        SamplingParams(seed=3, stop=("e", "ab")),
    ]
    requests = [Request(p, q) for q in params for p in ([tokenizer.think_id], [tokenizer.end_think_id])]
    plain = generate(speaker, requests, toy, limit=60)
    assert any(finish is not None and finish.type == "stop" for *_, finish, _ in plain)
    assert plain == generate(speaker, requests, toy, limit=60, together=1)
    for drafts in (1, 3):
        assert plain == generate(speaker, requests, toy, limit=60, drafts=drafts, shuffle=drafts)


@pytest.mark.parametrize("extra", [{"temperature": 0}, {"seed": 1, "top_k": 1, "top_p": 0.5, "logprobs": 1}])
def test_a_form_that_becomes_too_much_ends_the_answer_alone(tokenizer: Tokenizer, extra: dict[str, Any]) -> None:
    sampler = Sampler(tokenizer.vocab_size, tokenizer.stop_ids, tokenizer)
    sampler._compiler = GrammarCompiler(tokenizer)
    sampler._compiler._limits = llguidance.LLParserLimits(step_max_items=20, verbose_errors=False)
    form = Constraint("ebnf", 'root ::= (root "a" | "a" root | "a")')
    states = [state_of(sampler, constraint=form, **extra), state_of(sampler, **extra)]
    rows = one_wish(sampler, tokenizer.encode("a")[0]).repeat(2, 1) * 3
    for _ in range(30):
        if states[0].finish is not None:
            break
        chosen = sampler.choose(rows, states)
    assert states[0].finish is not None
    assert states[0].finish.type == "error"
    assert states[0].finish.message.startswith(f"ebnf: {sampler_module.NOTHING_LEFT}")
    assert states[0].finish.refused
    assert "limit" in states[0].finish.message
    assert chosen[1].finish is None
    assert tokenizer.decode(chosen[1].ids) == "a"


def test_a_model_with_fewer_ids_than_the_tokenizer_keeps_to_its_own(tokenizer: Tokenizer) -> None:
    size = tokenizer.vocab_size - 20
    sampler = Sampler(size, tokenizer.stop_ids, tokenizer)
    logits = torch.randn(1, size, generator=torch.Generator().manual_seed(0))
    states = [state_of(sampler, seed=seed, constraint=Constraint("regex", "(a|b|é)+")) for seed in range(9)]
    for one in sampler.choose(logits.expand(9, size), states):
        assert tokenizer.decode_bytes(one.ids)[:1] in (b"a", b"b", "é".encode()[:1])


def test_what_needs_a_tokenizer_says_so() -> None:
    for p in (dict(stop=("a",)), dict(constraint=Constraint("json")), dict(thinking_budget=3)):
        with pytest.raises(UserError, match="with a tokenizer"):
            state_of(Sampler(V, EOS), **p)


def test_a_bad_form_is_refused_before_anything_else(speaker: Sampler) -> None:
    with pytest.raises(UserError, match="regex: "):
        speaker.check(SamplingParams(constraint=Constraint("regex", "(")))
