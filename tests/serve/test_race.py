"""The race: exponential, independent noise, draws that follow p, and coupled draws that agree as often as they can."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from glm5.model.noise import exponentials, noise_key
from glm5.serve.race import figures, race
from glm5.serve.request import SamplingParams

CPU = torch.device("cpu")


def noise(rows: int, width: int, seed: int = 0) -> Tensor:
    return exponentials([noise_key(seed, 0, position) for position in range(rows)], width, CPU)


def test_a_key_names_seed_answer_and_position() -> None:
    keys = {noise_key(*name) for name in [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (-1, 0, 0), (2**63 - 1, 0, 0)]}
    assert len(keys) == 6
    assert noise_key(7, 1, 2) == noise_key(7, 1, 2)
    # Known bits: a saved seed must give its text again after an upgrade, and on another machine.
    assert noise_key(0, 0, 0) == (112113195, 673204141)


def mixed(h: int) -> int:
    """MurmurHash3's 32-bit finalizer, in whole numbers."""
    h = (h ^ h >> 16) * 0x85EBCA6B % 2**32
    h = (h ^ h >> 13) * 0xC2B2AE35 % 2**32
    return h ^ h >> 16


def test_noise_is_the_hash_that_it_says_it_is() -> None:
    assert mixed(1) == 0x514E28B7  # a published value
    for key in [(112113195, 673204141), (-5, 2**31 - 1), (0, -(2**31))]:
        noise = exponentials([key], 50_000, CPU)[0]
        for column in (0, 1, 49_999, int(noise.argmin()), int(noise.argmax())):
            value = float(noise[column])
            h = mixed((mixed(column ^ key[0] % 2**32) + key[1]) % 2**32)
            uniform = (h % 2**31 + 0.5) / 2**31
            assert value == pytest.approx(-math.log1p(-uniform), rel=1e-3)


def test_noise_is_exponential() -> None:
    e = noise(400, 2500).double()
    n = e.numel()
    assert 0 < float(e.min()) < 20 / n
    assert float(e.max()) < 17.5
    assert abs(float(e.mean()) - 1) < 5 / math.sqrt(n)
    assert abs(float(e.var()) - 1) < 5 * math.sqrt(8 / n)
    # Kolmogorov and Smirnov's distance; 1.95 / sqrt(n) is passed once in a thousand.
    uniform = (-(-e.flatten()).expm1()).sort().values
    assert float((uniform - torch.arange(n) / n).abs().max()) < 1.95 / math.sqrt(n)


@pytest.mark.parametrize("step", [1, 2, 64])
def test_noise_of_neighbours_is_independent(step: int) -> None:
    e = noise(600, 2000).double() - 1
    for a, b in ((e[:, step:], e[:, :-step]), (e[step:], e[:-step])):
        n = a.numel()
        assert abs(float((a * b).mean())) < 5 / math.sqrt(n)
    # Positions that differ in one bit, answers and seeds too.
    for other in (noise(600, 2000, seed=1), exponentials([noise_key(0, 1, p) for p in range(600)], 2000, CPU)):
        assert abs(float((e * (other.double() - 1)).mean())) < 5 / math.sqrt(e.numel())


def chi_square(counts: Tensor, p: Tensor) -> float:
    """In standard deviations from what p gives (Wilson and Hilferty's cube root)."""
    seen = p > 0
    assert float(counts[~seen].sum()) == 0
    expected = p[seen].double() / p.sum() * counts.sum()
    free = int(seen.sum()) - 1
    value = float(((counts[seen] - expected) ** 2 / expected).sum())
    return ((value / free) ** (1 / 3) - (1 - 2 / (9 * free))) / math.sqrt(2 / (9 * free))


@pytest.mark.parametrize(
    "params",
    [SamplingParams(), SamplingParams(top_k=9), SamplingParams(top_p=0.7), SamplingParams(min_p=0.2)],
    ids=["all", "top-k", "top-p", "min-p"],
)
def test_draws_follow_what_truncation_left(params: SamplingParams) -> None:
    draws, width = 20_000, 40
    p = torch.randn(width, generator=torch.Generator().manual_seed(1)).mul(1.5).softmax(-1)
    keys = [noise_key(5, 0, position) for position in range(draws)]
    ids, kept = race(p.expand(draws, width), [params] * draws, keys)
    if kept is None:
        assert params == SamplingParams()
    else:
        assert 1 < int(kept[0].sum()) < width
        p = p * kept[0]
    assert abs(chi_square(ids.bincount(minlength=width), p)) < 4


def test_rare_ids_are_as_rare_as_they_should_be() -> None:
    # 20,000 ids of probability 2.5e-6 together have 5 %: the noise near 0 must be fine enough for each of them.
    width, draws = 20_001, 1200
    p = torch.full((width,), 0.05 / (width - 1))
    p[0] = 0.95
    hits, different = 0, set()
    for start in range(0, draws, 300):
        keys = [noise_key(3, 0, position) for position in range(start, start + 300)]
        ids, _ = race(p.expand(300, width), [SamplingParams()] * 300, keys)
        hits += int((ids > 0).sum())
        different |= set(ids[ids > 0].tolist())
    assert abs(hits - 60) < 4 * math.sqrt(57)
    assert len(different) > hits - 4


def test_coupled_draws_agree_as_theory_says() -> None:
    draws, width = 20_000, 24
    make = torch.Generator().manual_seed(2)
    keys = [noise_key(11, 0, position) for position in range(draws)]
    for distance in (0.3, 1.0, 3.0):
        logits = torch.randn(width, generator=make)
        p = logits.softmax(-1)
        q = (logits + distance * torch.randn(width, generator=make)).softmax(-1)
        a, _ = race(p.expand(draws, width), [SamplingParams()] * draws, keys)
        b, _ = race(q.expand(draws, width), [SamplingParams()] * draws, keys)
        agree = float((a == b).double().mean())
        # Both choose i if E_j > E_i max(p_j / p_i, q_j / q_i) for every other j.
        ratio = torch.maximum(p[:, None] / p[None], q[:, None] / q[None]).double()  # [j, i]
        exact = float((1 / ratio.sum(0)).sum())
        assert abs(agree - exact) < 4 * math.sqrt(exact * (1 - exact) / draws)
        d = float((p - q).abs().sum()) / 2
        assert (1 - d) / (1 + d) <= exact <= 1 - d
        assert abs(chi_square(b.bincount(minlength=width), q)) < 4


def test_figures_leave_out_what_cannot_occur() -> None:
    logprobs = torch.tensor([[0.2, 0.5, 0.3, 0.0], [0.0, 0.0, 1.0, 0.0]]).log()
    one, two = figures(logprobs, torch.tensor([2, 2]), [2, 3])
    assert one.logprob == pytest.approx(math.log(0.3))
    assert [id for id, _ in one.top] == [1, 2]
    assert [value for _, value in one.top] == pytest.approx([math.log(0.5), math.log(0.3)])
    assert (two.logprob, two.top) == (0.0, ((2, 0.0),))
