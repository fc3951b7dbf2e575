"""Layouts that are proposed: all that fit and none twice, ranked by what they cost, which is added up by hand here."""

from __future__ import annotations

import json

import pytest

from glm5.cli.ledger import main
from glm5.ledger import compute
from glm5.ledger.devices import device
from glm5.ledger.params import layer_tensors
from glm5.ledger.plan import Work, plan
from glm5.ledger.propose import BEYOND, WITHIN, Proposal, mesh_of, propose
from glm5.model.presets import glm5, mini
from glm5.parallel.mesh import Mesh
from glm5.utils.errors import UserError

WORK = Work(batch=16, context=4096, training=True)
H200 = device("h200")


@pytest.fixture(scope="module")
def found() -> dict[str, Proposal]:
    return {mesh_of(p.layout): p for p in propose(mini(), WORK, H200, 8)}


def test_they_fit_and_are_ranked_and_are_meshes(found: dict[str, Proposal]) -> None:
    assert {"dp=8", "dp=8,ep=8", "dp=4,tp=2", "pp=8", "cp=8", "dp=2,cp=2,pp=2"} <= found.keys()
    seconds = [round(p.seconds, 6) for p in found.values()]
    assert seconds == sorted(seconds)
    for name, p in found.items():
        assert Mesh.parse(name).size == 8
        assert p.plan.fits
        assert p.plan.worst.total == plan(mini(), p.layout, WORK, H200, search=False).worst.total


def test_what_one_costs(found: dict[str, Proposal]) -> None:
    config, tokens = mini(), 16 * 4096
    whole = compute.training_flops(config, 4096, mtp_depths=3)
    again = compute.forward_flops(config, 4096)  # every layer once more
    for p in found.values():
        assert p.compute == pytest.approx(16 * (whole + again) / 8 / 989e12, rel=1e-3)
    assert found["dp=8"].wire.keys() == {"dp"}
    assert found["dp=8"].idle == 0
    # Parameters twice in bf16 and gradients once in fp32, of which 7 in 8 come from others.
    layers = [t for i in range(config.num_cache_layers) for t in layer_tensors(config, i)]
    numel = sum(t.numel for t in layers) + 2 * config.vocab_size * config.hidden_size + config.hidden_size
    assert found["dp=8"].wire["dp"] == pytest.approx(8 * numel * 7 / 8 / WITHIN, rel=1e-3)
    # Two sums a layer of forward, recomputed and backward passes; three MTP depths are three layers.
    states = 2 * tokens / 4 * config.hidden_size
    assert found["dp=4,tp=2"].wire["tp"] == pytest.approx(12 * states * (config.num_hidden_layers + 3) / 2 / WITHIN)
    # Stages wait for (p - 1) of (m + p - 1) turns.
    assert found["pp=8"].idle == pytest.approx(7 / 23)
    assert found["pp=8"].seconds == pytest.approx((found["pp=8"].compute + sum(found["pp=8"].wire.values())) * 23 / 16)


def test_beyond_a_host_links_are_slower() -> None:
    near = {mesh_of(p.layout): p for p in propose(mini(), WORK, H200, 8)}["dp=8"]
    far = {mesh_of(p.layout): p for p in propose(mini(), WORK, H200, 16)}["dp=16"]
    assert far.wire["dp"] / near.wire["dp"] == pytest.approx((15 / 16) / (7 / 8) * WITHIN / BEYOND)


def test_what_cannot_be_proposed() -> None:
    with pytest.raises(UserError, match=r"nothing fits on 2 x h200: .* takes least"):
        propose(glm5(), WORK, H200, 2)
    with pytest.raises(UserError, match="no layout of 7 devices"):
        propose(mini(), WORK, H200, 7)
    with pytest.raises(UserError, match="for training"):
        propose(mini(), Work(), H200, 8)
    with pytest.raises(UserError, match="rate of cpu:64 is not listed"):
        propose(mini(), WORK, device("cpu:64"), 8)
    with pytest.raises(UserError, match="Leave those out"):
        main("--config mini --fit h200 --training --devices 8 --tp 2".split())


def test_the_command_prints_the_best_first(capsys: pytest.CaptureFixture[str]) -> None:
    argv = "--config mini --fit h200 --training --devices 4 --batch 8 --context 4096".split()
    assert main(argv) == 0
    text = capsys.readouterr().out
    assert main([*argv, "--json"]) == 0
    proposals = json.loads(capsys.readouterr().out)["proposals"]
    assert f"{len(proposals)} layouts fit" in text
    first = text.splitlines()[3].split()
    assert first[0] == proposals[0]["mesh"]
    assert float(first[1]) == pytest.approx(proposals[0]["bytes"] / 1e9, abs=0.05)
